"""The pipeline `train`, as a story of stages: a model of the zoo is made ready, trained, and looked at.

What it costs to make the model and to look at held-out data is billed apart, so that `model.train` is training alone.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from joulelab.data import sources
from joulelab.data.inputs import input_bill
from joulelab.runs.bills import Bill
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.train.devices import device_of
from joulelab.train.held_out import held_out_loss
from joulelab.train.ranks import Ranks, joined
from joulelab.train.session import Assignment, train_in_run
from joulelab.train.zoo_config import PUBLISHED, TrainSpec
from joulelab.train.zoo_results import (
    Speed,
    numbers_of,
    peak_memory_bytes,
    read_speed,
    share_of_peak,
    start_memory_peak,
)
from joulelab.zoo.paper_cost import PaperCost, paper_cost
from joulelab.zoo.registry import is_file
from joulelab.zoo.request import SYNTHETIC
from joulelab.zoo.saving import load_weights, save_weights
from joulelab.zoo.workload import Workload, count_parameters, prepare

PREPARE, TRAIN, EVALUATE = "model.prepare", "model.train", "model.evaluate"


def run_train(run: RunContext) -> None:
    with joined() as ranks:
        lab = _Lab(run, cast(TrainSpec, run.spec), ranks)
        if lab.spec.save_model:
            lab.final_model()
        else:
            lab.train()
        lab.evaluate()
        lab.tell()


class _Lab:
    """One run's stages."""

    def __init__(self, run: RunContext, spec: TrainSpec, ranks: Ranks) -> None:
        self.run = run
        self.spec = spec
        self.ranks = ranks
        self.device = device_of(spec.device, self.run)

    @cached_property
    def workload(self) -> Workload:
        """Model, data and objective, on the device; and what the model should cost, on paper."""
        with self.run.stage(PREPARE, role="setup", activity="load"):
            self.cost: PaperCost = paper_cost(self.spec.request)
            workload = prepare(self.spec.request)
            for module in (workload.model, *workload.objective.modules().values()):
                module.to(self.device)
        for note in workload.notes:
            self.run.progress.say(note)
        return workload

    def train(self) -> None:
        """The one place where the loop is entered."""
        workload = self.workload
        start_memory_peak(self.device)
        looks = workload.validation is not None and self.spec.evaluate_batches > 0
        train_in_run(
            self.run,
            Assignment(
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
        from joulelab.train.shards import whole_weights  # seconds to import

        return whole_weights(self.workload.model)

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
        mfu, why_not = self._mfu(speed, numbers_of(model, self.spec.training.precision))
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
        return share_of_peak(self.cost, speed, name, numbers, self.ranks.world)

    def _parents(self) -> list[Bill]:
        """Bills of the weights to start from and of the dataset."""
        request = self.spec.request
        weights = request.size.hub_id if request.weights == PUBLISHED else request.weights
        dataset = "" if request.dataset == SYNTHETIC else request.dataset
        bills = [input_bill(self.run, "model", weights, "model", role="student")] if weights else []
        return bills + ([input_bill(self.run, "dataset", dataset, "dataset", role="data")] if dataset else [])
