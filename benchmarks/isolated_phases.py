"""Accuracy of the energy per phase that the tracker `energy` isolates. Three checks.

1. Models of the zoo: isolated step against the energy per step of the undisturbed training after it.
2. A synthetic step of two kernels, a matrix product as the forward pass and a memory copy as the backward pass, whose
   energies are first measured alone, each for seconds: the split must be right within 5 %.
3. A step whose optimizer runs ten times: only that phase may increase.

    python benchmarks/isolated_phases.py --models bert resnet50

Needs a GPU with NVML; creates no run folder.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loop_overhead import Batch, Reconstruct, SameBatch
from torch import Tensor, nn

from joulelab.lookup import ZOO
from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import float32_matmul_precision
from joulelab.train.stats.hooks import MeterStats, NoOpStats, StatsList, TrackerContext, device_synchronizer
from joulelab.train.stats.isolated import LoopPlan
from joulelab.train.stats.phase_energy import EnergyStats
from joulelab.train.stats.step_energy import TimeSpan, energy_reader
from joulelab.train.trainer import SimpleTrainer, Trainer, TrainerCallbacks
from joulelab.zoo.objective import ObjectiveOutput, prepare
from joulelab.zoo.registry import WorkloadRequest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER = 10**9
TIMES = 10
KERNELS_WITHIN = 0.05


def train_measured(trainer: Trainer[Any], meter: Meter, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Warm up, isolate the phases, train undisturbed: the result of `energy`, and its text."""
    wait, found = device_synchronizer(DEVICE), dict[str, Any]()
    with float32_matmul_precision(trainer.config.precision):
        step_s = seconds_of(trainer.step, wait)
        warmup = math.ceil(options.warmup_s / step_s)
        stats = StatsList([MeterStats(meter.phase), EnergyStats(warmup, LoopPlan(rounds=options.rounds))])
        stats.attach(TrackerContext(trainer, DEVICE, meter=meter, result=found.__setitem__))
        trainer.stats = stats
        stats.start_train()
        for number in range(warmup + math.ceil(options.undisturbed_s / step_s)):
            trainer.step()
            if number % 20 == 19:
                trainer.log()
        stats.stop_train()
        text = stats.log_stats()
    trainer.close()
    return found["energy"], text


def seconds_of(work: Callable[[], object], wait: Callable[[], None], times: int = 5) -> float:
    for _ in range(times):
        work()
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - begin) / times


# 1. models of the zoo


def check_model(name: str, meter: Meter, options: argparse.Namespace) -> dict[str, Any]:
    workload = prepare(WorkloadRequest(ZOO.resolve(name), options.size, options.batch_size))
    settings: dict[str, Any] = {"precision": options.precision, "accumulate": options.accumulate, "max_steps": NEVER}
    config = TrainingConfig(epochs=None, learning_rate=1e-5, **settings)
    trainer: SimpleTrainer[Any] = SimpleTrainer(
        workload.model.to(DEVICE),
        workload.batches,
        workload.objective,
        config,
        NoOpStats(),
        TrainerCallbacks(phase=meter.phase),
    )
    trainer.trained.train()
    found, text = train_measured(trainer, meter, options)
    print(f"\n1. {name}, {options.precision}\n{text}")
    return {"isolated": brief(found, "isolated"), "direct": brief(found, "direct"), "agrees": agreement(found)}


def agreement(found: dict[str, Any]) -> bool | None:
    agrees: bool | None = found["isolated"]["agrees"]
    return agrees


def brief(found: dict[str, Any], way: str) -> dict[str, Any]:
    rows = {"step": found[way]["step"], **found[way]["phases"]}
    return {
        name: None if row is None else [round(row["energy_j"], 5), round(row["half_width_j"], 5)]
        for name, row in rows.items()
    }


# 2. two kernels


class TwoKernels(Trainer[Batch]):
    """The forward pass multiplies, the backward pass copies, the optimizer does nothing."""

    def set_up(self) -> torch.optim.Optimizer:
        self.last_of_step = True
        gpu = DEVICE.type == "cuda"
        side, copied = (4096, 1 << 28) if gpu else (512, 1 << 22)
        self.products, self.copies = (6, 24) if gpu else (2, 4)
        self.a, self.b = torch.randn(2, side, side, device=DEVICE).unbind()
        self.out = torch.empty_like(self.a)
        self.source, self.target = torch.randn(copied, device=DEVICE), torch.empty(copied, device=DEVICE)
        self.nothing = torch.zeros((), device=DEVICE)
        return torch.optim.SGD(self.trained.parameters(), lr=0.1)

    def multiply(self) -> None:
        for _ in range(self.products):
            torch.mm(self.a, self.b, out=self.out)

    def copy(self) -> None:
        for _ in range(self.copies):
            self.target.copy_(self.source)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        self.multiply()
        return ObjectiveOutput(self.nothing, 1)

    def backward(self, output: ObjectiveOutput) -> None:
        self.copy()

    def optimizer_step(self, count: int) -> None: ...


def check_kernels(meter: Meter, options: argparse.Namespace) -> dict[str, Any]:
    quiet = TrainerCallbacks(phase=meter.phase)
    config = TrainingConfig(max_steps=NEVER, prefetch=0)
    trainer = TwoKernels(
        nn.Linear(1, 1).to(DEVICE), SameBatch(small_batch()), Reconstruct(), config, NoOpStats(), quiet
    )
    with float32_matmul_precision(
        "fp32"
    ):  # below the power limit: at it, a kernel's energy would depend on what else is running
        alone = solo_energies({"forward": trainer.multiply, "backward": trainer.copy}, meter, options)
        found, text = train_measured(trainer, meter, options)
    print(f"\n2. two kernels: a step of {trainer.products} products and {trainer.copies} copies\n{text}")
    rows = {}
    for phase, (solo_j, half_j) in alone.items():
        row = found["isolated"]["phases"].get(phase)
        off = None if row is None or not solo_j else row["energy_j"] / solo_j - 1
        rows[phase] = {"alone_j": solo_j, "alone_half_width_j": half_j, "off": off}
        print(f"{phase}: alone {solo_j} J, isolated off by {'?' if off is None else f'{100 * off:+.2f} %'}")
    within = all(row["off"] is not None and abs(row["off"]) <= KERNELS_WITHIN for row in rows.values())
    return {"kernels": rows, "within": within, "isolated": brief(found, "isolated"), "agrees": agreement(found)}


def solo_energies(
    kernels: dict[str, Callable[[], None]], meter: Meter, options: argparse.Namespace
) -> dict[str, tuple[float | None, float | None]]:
    """Joules of one call of each, from windows in the order A B B A."""
    wait = device_synchronizer(DEVICE)
    windows: dict[str, list[TimeSpan]] = {name: [] for name in kernels}
    counts = {name: math.ceil(options.solo_s / seconds_of(work, wait)) for name, work in kernels.items()}
    for name in [*kernels, *reversed(kernels)]:
        for _ in range(counts[name] // 10):
            kernels[name]()
        wait()
        begin_ns = time.monotonic_ns()
        for _ in range(counts[name]):
            kernels[name]()
        wait()
        windows[name].append((begin_ns, time.monotonic_ns()))
    read = energy_reader(meter, time.monotonic_ns(), DEVICE.type)
    figures = {name: read(pairs) for name, pairs in windows.items()}
    return {
        name: (None, None)
        if figure.energy_j is None
        else (figure.energy_j / 2 / counts[name], (figure.half_width_j or 0.0) / 2 / counts[name])
        for name, figure in figures.items()
    }


# 3. ten optimizer steps


class ManyOptimiserSteps(SimpleTrainer[Batch]):
    def optimizer_step(self, count: int) -> None:
        for _ in range(TIMES - 1):
            self.optimizer.step()
        super().optimizer_step(count)


def check_optimizer(meter: Meter, options: argparse.Namespace) -> dict[str, Any]:
    kinds: dict[str, type[SimpleTrainer[Batch]]] = {"once": SimpleTrainer, f"{TIMES} times": ManyOptimiserSteps}
    found = []
    for name, kind in kinds.items():
        values, text = train_measured(_encoder(kind, meter), meter, options)
        found.append(values["isolated"]["phases"])
        print(f"\n3. the optimizer's step {name}\n{text}")
    once, many = found
    rows = {}
    for phase in once:
        change_j = many[phase]["energy_j"] - once[phase]["energy_j"]
        doubt_j = math.hypot(many[phase]["half_width_j"], once[phase]["half_width_j"])
        rows[phase] = {"change_j": change_j, "half_width_j": doubt_j, "changed": abs(change_j) > doubt_j}
        print(
            f"{phase:<16}{change_j:>+10.4f} J ± {doubt_j:.4f}: {'changed' if rows[phase]['changed'] else 'as before'}"
        )
    only = bool(rows) and all(row["changed"] == (phase == "optimizer_step") for phase, row in rows.items())
    return {"phases": rows, "only_the_optimizer": only}


def _encoder(kind: type[SimpleTrainer[Batch]], meter: Meter) -> SimpleTrainer[Batch]:
    torch.manual_seed(0)
    gpu = DEVICE.type == "cuda"
    width, layers = (1024, 12) if gpu else (64, 2)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, layers).to(DEVICE)
    settings: dict[str, Any] = {"precision": "bf16" if gpu else "fp32", "max_steps": NEVER}
    config = TrainingConfig(learning_rate=1e-5, **settings)
    batch = small_batch(width, rows=256 if gpu else 32)  # enough for the device to be what the host waits for
    return kind(model, SameBatch(batch), Reconstruct(), config, NoOpStats(), TrainerCallbacks(phase=meter.phase))


def small_batch(width: int = 8, rows: int = 32) -> Batch:
    x: Tensor = torch.randn(rows, 64, width, device=DEVICE)
    return Batch(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["bert", "resnet50"], help="of the zoo")
    parser.add_argument("--size", default="", help="of the models; empty: the published one")
    parser.add_argument("--batch-size", type=int, default=0, help="0: the size's own")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument("--warmup-s", type=float, default=15.0, help="seconds of training before phases are isolated")
    parser.add_argument("--undisturbed-s", type=float, default=20.0, help="of training after it")
    parser.add_argument("--solo-s", type=float, default=5.0, help="of each window of a kernel alone")
    parser.add_argument("--rounds", type=int, default=4, help="of the loops")
    parser.add_argument("--skip", nargs="*", default=[], choices=["models", "kernels", "optimizer"])
    options = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "isolated_phases", "where": "CPU"}
    if DEVICE.type == "cuda":
        line["where"] = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        if "kernels" not in options.skip:
            line["kernels"] = check_kernels(meter, options)
        if "optimizer" not in options.skip:
            line["optimizer"] = check_optimizer(meter, options)
        if "models" not in options.skip:
            line["models"] = {name: check_model(name, meter, options) for name in options.models}
        meter.stop()
    print(json.dumps(line))


if __name__ == "__main__":
    main()
