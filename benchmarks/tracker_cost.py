"""Time overhead of each tracker of the training loop.

One trainer, one model; short blocks of steps with one tracker after the other, in a new random order every round, each
compared with the mean of the two `no-op` blocks of its round. The ratio of times per step with its 95 % interval, the
fifth of the rounds at either end trimmed (Yuen's interval on the logarithms). The difference of the two `no-op` blocks
is the resolution of this machine. The meter's recorder and its marks run throughout, as they do in a run.

`energy` isolates the phases of a step once per training. That is excluded from the blocks, done once at the end, and
reported separately in seconds and joules. `torch-profiler` is compared while it profiles, which in a training is a
handful of steps.

    python benchmarks/tracker_cost.py --width 1024 --layers 12 --batch 512
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from loop_overhead import Batch, Reconstruct, SameBatch, trimmed_ratio
from torch import nn

from joulelab.errors import DependencyMissing
from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import (
    MeterStats,
    NoOpStats,
    StatsList,
    TrackerContext,
    TrainerStats,
    device_synchronizer,
    load_tracker,
)
from joulelab.train.stats.phase_energy import EnergyStats
from joulelab.train.stats.torch_profiler import TorchProfilerStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks

NO_OP, AGAIN, BOTH, PROFILER = "no-op", "no-op again", "simple,energy", "torch-profiler"
OTHERS = ("simple", "energy", "averaged-energy", "no-op-sync", "codecarbon", PROFILER)
NEVER = 10**9
PROFILED_STEPS = 5
# It shows plainly, and takes seconds to end each time.
PROFILER_ROUNDS = 5


class UnreadProfiler(TorchProfilerStats):
    """Its recording is what is timed; summing a recording up takes seconds and happens after the training."""

    def _keep(self, profiler: Any) -> None: ...


class Lab:
    """The trainer, and trackers to put into it."""

    def __init__(self, trainer: SimpleTrainer[Batch], meter: Meter) -> None:
        self.trainer = trainer
        self.meter = meter
        self._wait = device_synchronizer(trainer.device)

    def attached(self, members: list[TrainerStats], **tracker_context: Any) -> StatsList:
        stats = StatsList([MeterStats(self.meter.phase), *members])
        stats.attach(TrackerContext(self.trainer, self.trainer.device, meter=self.meter, **tracker_context))
        stats.start_train()
        return stats

    def by_name(self, names: str) -> StatsList | None:
        try:
            return self.attached([self._member(name) for name in names.split(",")])
        except DependencyMissing as missing:
            print(f"{names}: left out, {missing.message}")
            return None

    def _member(self, name: str) -> TrainerStats:
        if name == "energy":
            return EnergyStats(warmup_steps=NEVER)  # its hooks alone
        return NoOpStats() if name == AGAIN else load_tracker(name)

    def step_s(self, stats: TrainerStats, steps: int) -> float:
        self.trainer.stats = stats
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.trainer.step()
        self._wait()
        return (time.perf_counter() - begin) / steps

    def profiled_step_s(self) -> float:
        stats = self.attached([UnreadProfiler(wait=0, warmup=1, active=10**6)])
        seconds = self.step_s(stats, PROFILED_STEPS)
        stats.stop_train()
        return seconds

    def take_apart(self) -> dict[str, Any]:
        """Cost of isolation as reported by `energy`."""
        found: dict[str, Any] = {}
        self.trainer.stats = self.attached([EnergyStats()], result=found.__setitem__)
        for _ in range(EnergyStats().warmup_steps):
            self.trainer.step()
        self.trainer.stats.stop_train()
        self.trainer.stats.log_stats()
        isolated: dict[str, Any] = found["energy"]["isolated"]
        return {name: isolated[name] for name in ("duration_s", "energy_j", "problem")}


def compare(lab: Lab, options: argparse.Namespace) -> tuple[float, dict[str, list[float]]]:
    """Seconds of a step with `no-op`, and by tracker the logarithms of its ratio to it in the same round."""
    stats = {name: made for name in (NO_OP, AGAIN, BOTH, *OTHERS) if (made := lab.by_name(name)) is not None}
    lab.step_s(stats[NO_OP], 10)
    steps = max(1, round(options.block_s / lab.step_s(stats[NO_OP], 10)))
    logs: dict[str, list[float]] = {name: [] for name in stats if name != NO_OP}
    plain_s, order = 0.0, random.Random(0)
    for number in range(options.rounds):
        taken = [name for name in stats if number < rounds_of(name, options)]
        order.shuffle(taken)
        times = {name: lab.profiled_step_s() if name == PROFILER else lab.step_s(stats[name], steps) for name in taken}
        plain_s += times[NO_OP]
        for name in times.keys() - {NO_OP}:
            plain = times[NO_OP] if name == AGAIN else math.sqrt(times[NO_OP] * times[AGAIN])
            logs[name].append(math.log(times[name] / plain))
    return plain_s / options.rounds, logs


def rounds_of(name: str, options: argparse.Namespace) -> int:
    if name in (NO_OP, AGAIN, BOTH):
        return int(options.rounds)
    return min(PROFILER_ROUNDS, options.rounds_of_others) if name == PROFILER else int(options.rounds_of_others)


def make_trainer(options: argparse.Namespace, meter: Meter) -> SimpleTrainer[Batch]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for one another on a busy machine would hide everything else
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(options.width, 8, 4 * options.width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, options.layers).to(device)
    batch = Batch(torch.randn(options.batch, 64, options.width, device=device))
    settings: dict[str, Any] = {"precision": "bf16" if device.type == "cuda" else "fp32", "max_steps": NEVER}
    config = TrainingConfig(learning_rate=1e-5, prefetch=0, **settings)
    return SimpleTrainer(
        model, SameBatch(batch), Reconstruct(), config, NoOpStats(), TrainerCallbacks(phase=meter.phase)
    )


def tell(where: str, step_s: float, logs: dict[str, list[float]], once: dict[str, Any]) -> None:
    print(f"\n{where}: {1000 * step_s:.2f} ms a step with `no-op`")
    print(f"{'tracker':<18}{'ratio':>9}{'95 % interval':>20}{'us a step':>12}{'rounds':>8}")
    rows = {}
    for name, values in logs.items():
        ratio = trimmed_ratio(values)
        extra_us = 1e6 * step_s * (ratio.value - 1)
        rows[name] = {**asdict(ratio), "extra_us": extra_us, "rounds": len(values)}
        interval = f"[{ratio.low:.4f}, {ratio.high:.4f}]"
        print(f"{name:<18}{ratio.value:>9.4f}{interval:>20}{extra_us:>12.1f}{len(values):>8}")
    if once["duration_s"] is None:
        print(f"`energy` took no step apart: {once['problem']}")
    else:
        joules = "joules unknown" if once["energy_j"] is None else f"{once['energy_j']:.0f} J"
        print(f"`energy` takes a step apart once in a training: {once['duration_s']:.1f} s, {joules} here")
    line = {"benchmark": "tracker_cost", "where": where, "step_ms": 1e3 * step_s, "trackers": rows, "once": once}
    print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of no-op, no-op again and simple,energy")
    parser.add_argument("--rounds-of-others", type=int, default=20, help="rounds in which all others take part")
    parser.add_argument("--block-s", type=float, default=0.3, help="seconds of each block")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--batch", type=int, default=32, help="rows of 64 positions; too few and a large GPU waits for the host"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        lab = Lab(make_trainer(options, meter), meter)
        step_s, logs = compare(lab, options)
        once = lab.take_apart()
        lab.trainer.close()
        meter.stop()
    gpu = lab.trainer.device.type == "cuda"
    where = torch.cuda.get_device_name(0) if gpu else f"CPU, {torch.get_num_threads()} threads"
    tell(where, step_s, logs, once)


if __name__ == "__main__":
    main()
