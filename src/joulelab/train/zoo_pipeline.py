"""The pipeline `train`: prepare a zoo model, train it, evaluate it, and record its speed.

Preparation and evaluation are billed to separate stages, so that `model.train` is training only.
"""

from __future__ import annotations

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
from joulelab.data.inputs import input_bill, keep_recorded_commits
from joulelab.meter.trace import read_lines
from joulelab.runs import environment
from joulelab.runs.artifacts import Bill
from joulelab.runs.attempt import record_settings
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.train.autotune import AUTO, Candidate, Trial, choose, compile_mode, planned_steps, time_in_training
from joulelab.train.devices import peak_flops, peak_memory_bytes, reset_peak_memory, resolve_device
from joulelab.train.optim import autocast
from joulelab.train.parallel import Ranks, process_group
from joulelab.train.trainer import load_trainer
from joulelab.train.training_session import TrainingJob, require_replayed, train_in_run
from joulelab.train.zoo_config import TrainSpec, ZooTraining
from joulelab.zoo.cost import ModelCost, model_cost
from joulelab.zoo.objective import Workload, count_parameters, prepare
from joulelab.zoo.pretrained import load_weights, save_weights
from joulelab.zoo.registry import PUBLISHED, SYNTHETIC, is_file


@dataclass(frozen=True)
class Speed:
    first_loss: float | None
    items_per_s: float | None
    """Median over the intervals between log lines, which is robust to compilation, evaluation and checkpoints."""


def read_speed(metrics: Path, stage: str) -> Speed:
    lines = [line for line in read_lines(metrics) if line.get("stage") == stage and "loss" in line]
    return Speed(float(lines[0]["loss"]) if lines else None, _typical_rate(lines))


def _typical_rate(lines: Sequence[dict[str, Any]]) -> float | None:
    intervals = [(a, b) for a, b in pairwise(lines) if a["attempt"] == b["attempt"] and b["mono_ns"] > a["mono_ns"]]
    rates = [(b["samples"] - a["samples"]) * NS / (b["mono_ns"] - a["mono_ns"]) for a, b in intervals]
    return statistics.median(rates) if rates else None


def model_flops_utilization(
    cost: ModelCost, speed: Speed, gpu_name: str, precision: str, gpus: int
) -> tuple[float | None, str]:
    """MFU (Chowdhery et al., 2022): the model's FLOPs per second over the peak of the GPUs; or None and the reason.

    The numerator counts the FLOPs that the model needs, without recomputed activations.
    """
    peak = peak_flops(gpu_name, precision)
    if peak is None:
        return None, f"the peak FLOP/s of {gpu_name} in {precision} is unknown (see train/devices.py)"
    if cost.training_flops is None:
        return None, f"FLOPs not counted: {cost.how}"
    if speed.items_per_s is None:
        return None, "too few steps to measure the speed"
    return cost.training_flops * speed.items_per_s / (gpus * peak), ""


def matmul_precision(model: nn.Module, precision: str) -> str:
    """Precision of the matrix products: that of the weights if they are 16-bit, else the setting."""
    kept = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    largest = max(model.parameters(), key=lambda parameter: parameter.numel())
    return kept.get(largest.dtype, precision)


Tick = Callable[[Any], None]


@torch.no_grad()
def held_out_loss(workload: Workload, batches: int, device: torch.device, precision: str, tick: Tick) -> float:
    """Mean loss of the training objective over the first `batches` held-out batches; `tick` is called with each."""
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
    """Evaluation mode. Module modes and random state are restored, so that evaluation does not change the training."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
    for module in (workload.model, *workload.objective.modules().values()):
        stack.callback(module.train, module.training)
        module.eval()
    return stack


AUTOTUNE, PREPARE, TRAIN, EVALUATE = "model.autotune", "model.prepare", "model.train", "model.evaluate"


def _is_tried(device: torch.device, ranks: Ranks) -> bool:
    return device.type == "cuda" and ranks.world == 1


def _no_trial(candidate: Candidate) -> Trial:
    raise AssertionError(f"{candidate} is not tried on this device")


def run_train(run: RunContext) -> None:
    if not run.includes("train"):
        return
    keep_recorded_commits(run)
    require_replayed(run, *cast(TrainSpec, run.spec).trainings)
    with process_group() as ranks:
        pipeline = _TrainPipeline(run, cast(TrainSpec, run.spec), ranks)
        if pipeline.spec.save_model:
            pipeline.final_model()
        else:
            pipeline.train()
        if run.includes("evaluate"):
            pipeline.evaluate()
            pipeline.record_results()


class _TrainPipeline:
    """The stages of one run."""

    def __init__(self, run: RunContext, spec: TrainSpec, ranks: Ranks) -> None:
        self.run = run
        self.spec = spec
        self.ranks = ranks
        self.device = resolve_device(spec.device, self.run)

    @cached_property
    def training(self) -> ZooTraining:
        """The settings without `auto`. A choice is written to the run's settings, so that a resumed attempt and a
        repetition use it without another trial."""
        config = self.spec.training
        if AUTO not in (config.precision, config.compile):
            return config
        if not environment.has_bf16_cores(self.spec.device):
            config = config.with_precision("fp32")
        if not _is_tried(self.device, self.ranks):
            choice = choose(config, self.device.type, self.ranks.world, None, _no_trial)
        else:
            workload = self.prepared
            with self.run.stage(AUTOTUNE, role="setup", activity="autotune"):
                steps, mode = planned_steps(config, workload), compile_mode(workload.model)
                trainer = load_trainer(self.spec.trainer)
                timing = time_in_training(workload, self.spec.seed, config, self.device, trainer, self.run.stop.check)
                choice = choose(config, self.device.type, self.ranks.world, steps, timing, mode)
        chosen = vars(choice.candidate)
        if choice.trials:
            self.run.note(
                f"auto: {choice.candidate}, {choice.reason} ({'; '.join(map(str, choice.trials))}); the trial is "
                f"billed to {AUTOTUNE}"
            )
        elif self.device.type == "cuda":
            self.run.note(f"auto: {choice.candidate} ({choice.reason})")
        concrete = config.model_copy(update=chosen)
        if self.ranks.is_first:
            record_settings(self.run.paths, self.spec.model_copy(update={"training": concrete}))
        return concrete

    @cached_property
    def prepared(self) -> Workload:
        """Model, data and objective in host memory; also computes the model's theoretical cost."""
        with self.run.stage(PREPARE, role="setup", activity="load"):
            self.cost: ModelCost = model_cost(self.spec.request)
            return prepare(self.spec.request)

    @cached_property
    def workload(self) -> Workload:
        """The same on the device."""
        workload = self.prepared
        with self.run.stage(PREPARE, again=True, role="setup", activity="load"):
            for module in (workload.model, *workload.objective.modules().values()):
                module.to(self.device)
        for note in workload.notes:
            self.run.note(note)
        return workload

    def train(self) -> None:
        config, workload = self.training, self.workload
        reset_peak_memory(self.device)
        evaluates = workload.validation is not None and self.spec.evaluate_batches > 0
        train_in_run(
            self.run,
            TrainingJob(
                stage=TRAIN,
                role="student",
                model=workload.model,
                batches=workload.batches,
                objective=workload.objective,
                config=config,
                seed=self.spec.seed,
                evaluate=(lambda point: self._held_out()) if evaluates else None,
                evaluate_stage=EVALUATE,
                ranks=self.ranks,
                trainer=load_trainer(self.spec.trainer),
            ),
        )
        self.run.result("model.peak_memory_bytes", Result(value=float(peak_memory_bytes(self.device))))

    def final_model(self) -> None:
        """Train and save the weights, or load those that an earlier attempt of this run saved."""

        def make(folder: Path) -> None:
            self.train()
            weights = self._whole_weights()
            self.ranks.on_first(lambda: save_weights(self.workload.model, folder, weights))

        unset = {name for name in ("validation_dataset", "text_column") if not getattr(self.spec, name)}
        spec = self.spec.model_copy(update={"training": self.training})
        settings = spec.model_dump(mode="json", exclude={"energy", "label", "about", "name", *unset})
        code = sources.content_hash(Path(self.spec.model)) if is_file(self.spec.model) else ""
        artifact = self.run.artifact(
            "final_model",
            kind="trained-model",
            inputs={**settings, "model_file": code},
            parents=self._parents(),
            make=make,
            reuse=False,  # measuring the training is the purpose of the run
        )
        if "workload" not in self.__dict__:
            load_weights(self.workload.model, artifact.folder)

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
        """Held-out loss; call it inside a stage."""
        spec = self.spec
        done = 0

        def tick(batch: Any) -> None:
            nonlocal done
            done += 1
            self.run.progress.advance(done)  # no stop check here: a few batches later the loop checks, and can save

        return held_out_loss(self.workload, spec.evaluate_batches, self.device, self.training.precision, tick)

    def record_results(self) -> None:
        """Parameters, FLOPs, loss, speed and MFU for the record."""
        model = self.workload.model
        found, stated = count_parameters(model), self.spec.request.size.parameters
        if found != stated and self.ranks.world == 1:  # a rank of FSDP has a shard of them
            self.run.warn(
                f"{self.spec.model} states parameters={stated:,} for this size, but the model has {found:,}: correct "
                "the size; memory and batch size were planned with the stated number"
            )
        cost, speed = self.cost, read_speed(self.run.paths.metrics, TRAIN)
        results = {
            "model.parameters": found,
            "model.forward_flops_per_item": cost.forward_flops,
            "model.training_flops_per_item": cost.training_flops,
            f"{TRAIN}.first_loss": speed.first_loss,
            f"{TRAIN}.items_per_s": speed.items_per_s,
        }
        mfu, mfu_missing = self._mfu(speed, matmul_precision(model, self.training.precision))
        for name, value in {**results, f"{TRAIN}.mfu": mfu}.items():
            if value is not None:
                self.run.result(name, Result(value=float(value)))
        values = {"item": self.spec.entry.item, "flops_counted_on": cost.how, "mfu_missing": mfu_missing}
        values["notes"] = "; ".join(self.workload.notes)
        self.run.meter.event("tracker", stage=TRAIN, name="model", values=values)

    def _mfu(self, speed: Speed, precision: str) -> tuple[float | None, str]:
        if self.device.type != "cuda":
            return None, "the peak FLOP/s of a CPU is unknown"
        name = torch.cuda.get_device_name(self.device)
        return model_flops_utilization(self.cost, speed, name, precision, self.ranks.world)

    def _parents(self) -> list[Bill]:
        """Bills of the initial weights and of the dataset."""
        request = self.spec.request
        weights = request.size.hub_id if request.weights == PUBLISHED else request.weights
        dataset = "" if request.dataset == SYNTHETIC else request.dataset
        bills = [input_bill(self.run, "model", weights, "model", role="student")] if weights else []
        return bills + ([input_bill(self.run, "dataset", dataset, "dataset", role="data")] if dataset else [])
