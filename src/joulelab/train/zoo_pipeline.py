"""The pipeline `train`, as a story of stages: a model of the zoo is made ready, trained, and looked at.

What it costs to make the model and to look at held-out data is billed apart, so that `model.train` is training alone.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from joulelab.clock import NS
from joulelab.data import sources
from joulelab.data.inputs import input_bill
from joulelab.meter.trace import read_lines
from joulelab.runs.artifacts import Bill
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.train.devices import peak_flops, resolve_device
from joulelab.train.optim import autocast
from joulelab.train.parallel import Ranks, process_group
from joulelab.train.training_session import TrainingJob, train_in_run
from joulelab.train.zoo_config import PUBLISHED, TrainSpec
from joulelab.zoo.cost import ModelCost, model_cost
from joulelab.zoo.objective import Workload, count_parameters, prepare
from joulelab.zoo.pretrained import load_weights, save_weights
from joulelab.zoo.registry import SYNTHETIC, is_file

# What a training is summed up by, beside its time and joules: speed, first loss, share of the GPU's peak, memory.


@dataclass(frozen=True)
class Speed:
    first_loss: float | None
    items_per_s: float | None
    """Median over the stretches between two lines of metrics: compiling, evaluating and saving fall out of it."""


def read_speed(metrics: Path, stage: str) -> Speed:
    lines = [line for line in read_lines(metrics) if line.get("stage") == stage and "loss" in line]
    return Speed(float(lines[0]["loss"]) if lines else None, _typical_rate(lines))


def _typical_rate(lines: Sequence[dict[str, Any]]) -> float | None:
    stretches = [(a, b) for a, b in pairwise(lines) if a["attempt"] == b["attempt"] and b["mono_ns"] > a["mono_ns"]]
    rates = [(b["samples"] - a["samples"]) * NS / (b["mono_ns"] - a["mono_ns"]) for a, b in stretches]
    return statistics.median(rates) if rates else None


def model_flops_utilization(
    cost: ModelCost, speed: Speed, gpu_name: str, precision: str, gpus: int
) -> tuple[float | None, str]:
    """Model FLOPs utilisation: FLOPs on paper per second over the data sheet's peak; or why it is not known."""
    peak = peak_flops(gpu_name, precision)
    if peak is None:
        return None, f"no peak of the {gpu_name} in {precision} is known here (train/devices.py)"
    if cost.training_flops is None:
        return None, f"FLOPs not counted: {cost.how}"
    if speed.items_per_s is None:
        return None, "too few steps to tell a speed"
    return cost.training_flops * speed.items_per_s / (gpus * peak), ""


def matmul_precision(model: nn.Module, precision: str) -> str:
    """What its matrix products are computed in: weights kept in half precision need no autocast to be."""
    kept = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    largest = max(model.parameters(), key=lambda parameter: parameter.numel())
    return kept.get(largest.dtype, precision)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Of tensors on a GPU since `start_memory_peak`; on a CPU the most the whole process has ever held."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the kernel tells KiB


# The loss on held-out batches: the training's own objective, without gradients and without a trace in the training.


Tick = Callable[[Any], None]


@torch.no_grad()
def held_out_loss(workload: Workload, batches: int, device: torch.device, precision: str, tick: Tick) -> float:
    """Mean over the first `batches` held-out batches; `tick` sees each of them."""
    source = workload.validation
    assert source is not None
    loss_sum, count = torch.zeros((), device=device), 0
    with _evaluation_mode(workload, device), autocast(precision, device):
        for index in range(min(batches, source.batches_per_epoch)):
            batch = source.at(0, index).to(device)
            output = workload.objective(workload.model, batch, lambda name: nullcontext())
            loss_sum, count = loss_sum + output.loss_sum.float(), count + output.count
            tick(batch)
    return float(loss_sum) / max(1, count)


def _evaluation_mode(workload: Workload, device: torch.device) -> ExitStack:
    """Dropout off, and afterwards modes and random numbers as before: looking must not change what is trained."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
    for module in (workload.model, *workload.objective.modules().values()):
        stack.callback(module.train, module.training)
        module.eval()
    return stack


PREPARE, TRAIN, EVALUATE = "model.prepare", "model.train", "model.evaluate"


def run_train(run: RunContext) -> None:
    with process_group() as ranks:
        lab = _TrainPipeline(run, cast(TrainSpec, run.spec), ranks)
        if lab.spec.save_model:
            lab.final_model()
        else:
            lab.train()
        lab.evaluate()
        lab.tell()


class _TrainPipeline:
    """One run's stages."""

    def __init__(self, run: RunContext, spec: TrainSpec, ranks: Ranks) -> None:
        self.run = run
        self.spec = spec
        self.ranks = ranks
        self.device = resolve_device(spec.device, self.run)

    @cached_property
    def workload(self) -> Workload:
        """Model, data and objective, on the device; and what the model should cost, on paper."""
        with self.run.stage(PREPARE, role="setup", activity="load"):
            self.cost: ModelCost = model_cost(self.spec.request)
            workload = prepare(self.spec.request)
            for module in (workload.model, *workload.objective.modules().values()):
                module.to(self.device)
        for note in workload.notes:
            self.run.progress.say(note)
        return workload

    def train(self) -> None:
        """The one place where the loop is entered."""
        workload = self.workload
        reset_peak_memory(self.device)
        looks = workload.validation is not None and self.spec.evaluate_batches > 0
        train_in_run(
            self.run,
            TrainingJob(
                stage=TRAIN,
                role="student",
                model=workload.model,
                batches=workload.batches,
                objective=workload.objective,
                config=self.spec.training,
                seed=self.spec.seed,
                evaluate=(lambda moment: self._held_out()) if looks else None,
                evaluate_stage=EVALUATE,
                ranks=self.ranks,
            ),
        )
        self.run.result("model.peak_memory_bytes", Result(value=float(peak_memory_bytes(self.device))))

    def final_model(self) -> None:
        """Train and keep the weights, or take those an earlier attempt of this run has kept."""

        def make(folder: Path) -> None:
            self.train()
            weights = self._whole_weights()
            if self.ranks.is_first:
                save_weights(self.workload.model, folder, weights)

        settings = self.spec.model_dump(mode="json", exclude={"energy", "label", "about", "name"})
        code = sources.content_hash(Path(self.spec.model)) if is_file(self.spec.model) else ""
        made = self.run.artifact(
            "final_model",
            kind="trained-model",
            inputs={**settings, "model_file": code},
            parents=self._parents(),
            make=make,
            reuse=False,  # its joules are what the run is for
        )
        if "workload" not in self.__dict__:
            load_weights(self.workload.model, made.folder)

    def _whole_weights(self) -> dict[str, Tensor] | None:
        if self.ranks.world == 1:
            return None
        from joulelab.train.sharding_fsdp import gather_weights  # seconds to import

        return gather_weights(self.workload.model)

    def evaluate(self) -> None:
        if self.workload.validation is None or self.spec.evaluate_batches == 0:
            return
        total = self.spec.evaluate_batches
        with self.run.stage(EVALUATE, total, again=True, role="student", activity="evaluate"):
            loss = self._held_out()
        self.run.result(f"{EVALUATE}.loss", Result(value=loss))

    def _held_out(self) -> float:
        """Inside a stage that somebody else has opened."""
        spec = self.spec
        done = 0

        def tick(batch: Any) -> None:
            nonlocal done
            done += 1
            self.run.progress.advance(done)  # whoever asked to stop waits these few batches: the loop can then save

        return held_out_loss(self.workload, spec.evaluate_batches, self.device, spec.training.precision, tick)

    def tell(self) -> None:
        """What the record keeps beside time and joules."""
        model = self.workload.model
        cost, speed = self.cost, read_speed(self.run.paths.metrics, TRAIN)
        found = {
            "model.parameters": count_parameters(model),
            "model.forward_flops_per_item": cost.forward_flops,
            "model.training_flops_per_item": cost.training_flops,
            f"{TRAIN}.first_loss": speed.first_loss,
            f"{TRAIN}.items_per_s": speed.items_per_s,
        }
        mfu, why_not = self._mfu(speed, matmul_precision(model, self.spec.training.precision))
        for name, value in {**found, f"{TRAIN}.mfu": mfu}.items():
            if value is not None:
                self.run.result(name, Result(value=float(value)))
        values = {"item": self.spec.entry.item, "flops_counted_on": cost.how, "mfu_missing": why_not}
        values["notes"] = "; ".join(self.workload.notes)
        self.run.meter.event("tracker", stage=TRAIN, name="model", values=values)

    def _mfu(self, speed: Speed, numbers: str) -> tuple[float | None, str]:
        if self.device.type != "cuda":
            return None, "no peak is known for a CPU"
        name = torch.cuda.get_device_name(self.device)
        return model_flops_utilization(self.cost, speed, name, numbers, self.ranks.world)

    def _parents(self) -> list[Bill]:
        """Bills of the weights to start from and of the dataset."""
        request = self.spec.request
        weights = request.size.hub_id if request.weights == PUBLISHED else request.weights
        dataset = "" if request.dataset == SYNTHETIC else request.dataset
        bills = [input_bill(self.run, "model", weights, "model", role="student")] if weights else []
        return bills + ([input_bill(self.run, "dataset", dataset, "dataset", role="data")] if dataset else [])
