"""How much slower is a training loop with step and phase windows on?

The same loop runs in interleaved blocks, with our windows and without, in an order that cancels drift (ABBA). The ratio
of block times with its 95 % interval, the recorder running throughout. On a shared machine single blocks are thrown far
off by neighbours, so the fifth of the pairs at either end is trimmed (Yuen's interval on the logarithms).

    python benchmarks/loop_overhead.py --blocks 40 --steps 100
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter
from joulelab.stats import t_quantile
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.stats.meter import MeterStats
from joulelab.train.trainer import SimpleTrainer, Surroundings
from joulelab.zoo.objective import ObjectiveOutput


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
    def __call__(self, model: nn.Module, batch: Batch, phase: object) -> ObjectiveOutput:
        with phase("forward.student"):  # type: ignore[operator]
            loss = (model(batch.x) - batch.x).square().mean(dim=(1, 2)).sum()
        return ObjectiveOutput(loss, batch.samples)

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None: ...


def block_s(trainer: SimpleTrainer[Batch], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def trimmed_interval(values: list[float], share: float = 0.2) -> tuple[float, float, float]:
    """Trimmed mean with Yuen's 95 % interval: winsorised variance, Student's t over what is left."""
    ordered = sorted(values)
    cut = int(share * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    centre = statistics.fmean(kept)
    error = statistics.stdev(winsorised) / ((1 - 2 * share) * math.sqrt(len(ordered)))
    half = t_quantile(0.975, len(kept) - 1) * error
    return centre, centre - half, centre + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps per block")
    parser.add_argument("--width", type=int, default=256, help="of the model; 1024 keeps a large GPU busy")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).to(device)
    batch = Batch(torch.randn(32, 64, options.width, device=device))
    config = TrainingConfig(epochs=1.0, max_steps=10**8, learning_rate=1e-5)
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        quiet = nullcontext()
        plain = SimpleTrainer(
            model, SameBatch(batch), Reconstruct(), config, NoOpStats(), Surroundings(phase=lambda name: quiet)
        )
        metered = SimpleTrainer(
            model, SameBatch(batch), Reconstruct(), config, MeterStats(meter.phase), Surroundings(phase=meter.phase)
        )
        for trainer in (plain, metered):
            block_s(trainer, options.steps, device)
        logs, plain_s = [], 0.0
        for number in range(options.blocks):
            order = (plain, metered) if number % 2 == 0 else (metered, plain)
            times = {id(trainer): block_s(trainer, options.steps, device) for trainer in order}
            logs.append(math.log(times[id(metered)] / times[id(plain)]))
            plain_s += times[id(plain)]
        meter.stop()
    ratio, low, high = (math.exp(value) for value in trimmed_interval(logs))
    step_ms = 1000 * plain_s / options.blocks / options.steps
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}: {step_ms:.2f} ms a step; with windows {ratio:.4f}x [{low:.4f}, {high:.4f}] the time without")
    print(
        json.dumps(
            {"benchmark": "loop_overhead", "where": where, "step_ms": step_ms, "ratio": ratio, "ci95": [low, high]}
        )
    )


if __name__ == "__main__":
    main()
