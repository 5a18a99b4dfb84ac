"""Overhead of step and phase windows in a training loop.

One trainer runs in three arms: without windows, without them again, and with them. The arms take turns in blocks of a
step or a few, in a random order per round, so that drift and other processes affect all three alike. It is the same
trainer throughout: two trainers would have their optimizer states at different addresses, a difference that no number
of rounds averages out. The recorder runs all the time.

The result is the ratio of block times, with windows over without, and its 95 % interval. On a shared machine single
blocks are outliers, so a fifth of the rounds is trimmed at either end (Yuen's interval on the logarithms). The loop
against itself, from the same rounds, is the control: if its interval is wide or excludes 1, the machine is too noisy. A
ratio of CPU times is printed too, which excludes waiting.

    python benchmarks/loop_overhead.py --device cuda --blocks 300 --steps 20 --width 1024
    python benchmarks/loop_overhead.py --device cpu --pin --blocks 2000 --width 64
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter
from joulelab.stats import Interval, t_quantile
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import MeterStats, NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

PLAIN, AGAIN, METERED = "plain", "plain again", "metered"
LIMIT = 1.005
WARM_UP_ROUNDS = 5


@dataclass(frozen=True)
class Batch:
    x: Tensor

    samples = 32
    tokens = 32 * 64

    def to(self, device: torch.device) -> Batch:
        return self


class SameBatch:
    batches_per_epoch = 10**9

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def at(self, epoch: int, index: int) -> Batch:
        return self._batch


class Reconstruct:
    def __call__(self, model: nn.Module, batch: Batch, phase: PhaseMaker) -> ObjectiveOutput:
        with phase("forward.student"):
            loss = (model(batch.x) - batch.x).square().mean(dim=(1, 2)).sum()
        return ObjectiveOutput(loss, batch.samples)

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None: ...


class SwitchedLoop:
    """One trainer whose windows are switched on and off between its steps."""

    def __init__(self, width: int, device: torch.device, meter: Meter) -> None:
        quiet = nullcontext()
        off: tuple[NoOpStats, PhaseMaker] = (NoOpStats(), lambda name: quiet)
        self._arms = {PLAIN: off, AGAIN: off, METERED: (MeterStats(meter.phase), meter.phase)}
        self._phase: PhaseMaker = off[1]
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        batch = Batch(torch.randn(32, 64, width, device=device))
        config = TrainingConfig(epochs=1.0, max_steps=10**8, learning_rate=1e-5, prefetch=0)
        model = nn.TransformerEncoder(layer, 2).to(device)
        around = TrainerCallbacks(phase=self._switched_phase)
        self._trainer = SimpleTrainer(model, SameBatch(batch), Reconstruct(), config, off[0], around)
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def _switched_phase(self, name: str) -> AbstractContextManager[None]:
        return self._phase(name)

    def block_s(self, arm: str, steps: int) -> tuple[float, float]:
        """Wall and CPU seconds of so many steps in this arm."""
        self._trainer.stats, self._phase = self._arms[arm]
        self._wait()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._trainer.step()
        self._wait()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s


Round = dict[str, tuple[float, float]]


def take_rounds(loop: SwitchedLoop, blocks: int, steps: int) -> list[Round]:
    order, rng, rounds = [PLAIN, AGAIN, METERED], random.Random(0), []
    for _ in range(WARM_UP_ROUNDS + blocks):
        rng.shuffle(order)
        rounds.append({arm: loop.block_s(arm, steps) for arm in order})
    return rounds[WARM_UP_ROUNDS:]


@dataclass(frozen=True)
class Ratios:
    with_windows: Interval
    """Metered over the mean of the two arms without windows."""
    loop_against_itself: Interval

    @classmethod
    def of(cls, rounds: Sequence[Round], clock: int) -> Ratios:
        logs = [{arm: math.log(times[clock]) for arm, times in taken.items()} for taken in rounds]
        return cls(
            trimmed_ratio([log[METERED] - (log[PLAIN] + log[AGAIN]) / 2 for log in logs]),
            trimmed_ratio([log[AGAIN] - log[PLAIN] for log in logs]),
        )


def trimmed_ratio(logs: Sequence[float], share: float = 0.2) -> Interval:
    """Trimmed mean with Yuen's 95 % interval: winsorized variance, Student's t over what is left."""
    ordered = sorted(logs)
    cut = int(share * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    center = statistics.fmean(kept)
    error = statistics.stdev(winsorised) / ((1 - 2 * share) * math.sqrt(len(ordered)))
    half = t_quantile(0.975, len(kept) - 1) * error
    return Interval(*(math.exp(value) for value in (center, center - half, center + half)))


def pin_to_one_core() -> int:
    """This thread alone; the recorder is another process and keeps the other cores."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def words(ratio: Interval) -> str:
    return f"{ratio.value:.4f}x [{ratio.low:.4f}, {ratio.high:.4f}]"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found, help=f"here by default {found}")
    parser.add_argument("--blocks", type=int, default=400, help="rounds, each with a block of every arm")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps per block")
    parser.add_argument("--width", type=int, default=64, help="of the model; 1024 keeps a large GPU busy")
    parser.add_argument("--pin", action="store_true", help="one thread, held on one core")
    return parser.parse_args()


def tell(where: str, step_ms: float, rounds: Sequence[Round], requested: argparse.Namespace) -> None:
    wall, cpu, load = Ratios.of(rounds, clock=0), Ratios.of(rounds, clock=1), os.getloadavg()[0]
    verdict = "shown" if wall.with_windows.high <= LIMIT else "NOT shown"
    print(f"{where}, load {load:.1f}: {step_ms:.2f} ms a step")
    print(f"  with windows {words(wall.with_windows)} the time without; at most {LIMIT}x: {verdict}")
    print(f"  the loop against itself {words(wall.loop_against_itself)}")
    print(f"  CPU time: with windows {words(cpu.with_windows)}, against itself {words(cpu.loop_against_itself)}")
    how = {"where": where, "load_1min": load, "step_ms": step_ms, "blocks": requested.blocks, "steps": requested.steps}
    print(json.dumps({"benchmark": "loop_overhead", **how, "wall": asdict(wall), "cpu_time": asdict(cpu)}))


def main() -> None:
    requested = options()
    device = torch.device(requested.device)
    torch.manual_seed(0)
    if requested.pin:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        core = pin_to_one_core() if requested.pin else None
        rounds = take_rounds(SwitchedLoop(requested.width, device, meter), requested.blocks, requested.steps)
        meter.stop()
    threads = f"CPU, {torch.get_num_threads()} thread(s)" + (f" on core {core}" if core is not None else "")
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else threads
    tell(where, 1000 * statistics.median(taken[PLAIN][0] for taken in rounds) / requested.steps, rounds, requested)


if __name__ == "__main__":
    main()
