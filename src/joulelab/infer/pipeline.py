"""The pipeline `infer`, as a story of stages: a model is made ready, then timed and metered in the same windows.

Making ready (drawing or loading weights, compiling, trying recipes) has a stage of its own, so that a row's stage
holds inferences and nothing else. Rows of one input take turns in rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from joulelab.data.inputs import input_bill
from joulelab.infer.config import Case, InferSpec
from joulelab.infer.decoding import run_generation
from joulelab.infer.energy import ItemWindow, energy_per_item
from joulelab.infer.recipes import RECIPES, Recipe, autotune, inference_context, prepare_call, trial_scope
from joulelab.infer.timing import (
    Latency,
    Round,
    StopReason,
    machine_state,
    model_flops_utilization,
    row_values,
    run_round,
    run_until_ci,
    stop_reason_text,
    synchronized_latency,
)
from joulelab.infer.workload import (
    InferenceWorkload,
    ModelCache,
    allocated_bytes,
    explain_out_of_memory,
    forward_flops,
    require_memory,
    row_memory_bytes,
)
from joulelab.runs.context import RunContext
from joulelab.train.devices import resolve_device
from joulelab.train.stats.step_energy import energy_reader
from joulelab.train.zoo_pipeline import reset_peak_memory

PREPARE = "model.prepare"
TRACKER = "inference"


def run_infer(run: RunContext) -> None:
    spec = cast(InferSpec, run.spec)
    if spec.weights_from is not None:  # break-even needs what the model took to train
        input_bill(run, "model", spec.weights_from, "model", role=None)
    torch.set_num_threads(spec.usable_threads)
    if spec.generate:
        run_generation(run, spec)
        return
    lab = _InferencePipeline(run, spec)
    for cases in spec.groups():
        lab.measure([lab.make_ready(case) for case in cases])
    lab.tell()


@dataclass
class _Row:
    """One case on its way from a model to figures."""

    case: Case
    subject: InferenceWorkload
    call: Callable[[], Any]
    recipe: Recipe
    memory_bytes: int
    chosen_from: str = ""
    """Words on what the recipe was chosen from."""
    rounds: list[Round] = field(default_factory=list)
    waited_s: float = 0.0
    ended: StopReason = ""

    @property
    def turns(self) -> list[ItemWindow]:
        return [(found.window, found.calls * self.subject.items) for found in self.rounds]

    @property
    def items(self) -> int:
        return self.subject.items * sum(found.calls for found in self.rounds)

    @property
    def seconds(self) -> float:
        return sum(found.duration_s for found in self.rounds)


class _InferencePipeline:
    def __init__(self, run: RunContext, spec: InferSpec) -> None:
        self.run = run
        self.spec = spec
        self.device = resolve_device(spec.device, self.run)
        self.shelf = ModelCache(spec, self.device)
        self.rows: list[_Row] = []
        self._flops: dict[tuple[Any, ...], tuple[float | None, str]] = {}

    def make_ready(self, case: Case) -> _Row:
        ready = self.run.stage(PREPARE, again=True, role="setup", activity="load")
        with ready, explain_out_of_memory(case, self.device):
            self.run.progress.say(f"making {case.stage.removeprefix('infer.')} ready")
            require_memory(case, self.device, lambda: self.shelf.subject(replace(case, batch_size=1)))
            subject = self.shelf.subject(case)
            if subject.item == "image":  # of a folder or hub id it shows only now that it is no model of text
                case = replace(case, tokens=0)
            self._count_flops(case, subject)
            before = allocated_bytes(self.device)
            with inference_context(case.dtype):
                recipe, chosen_from = self._recipe(case, subject)
                call = prepare_call(subject.model, subject.inputs, recipe, case.dtype, self.device)
                reset_peak_memory(self.device)
                call()
            self._wait()
            memory_bytes = row_memory_bytes(subject.model, self.device, before)
        return _Row(case, subject, call, recipe, memory_bytes, chosen_from)

    def _recipe(self, case: Case, subject: InferenceWorkload) -> tuple[Recipe, str]:
        if case.mode != "fastest":
            return RECIPES[case.mode], ""
        recipe, tried = autotune(
            subject.model,
            subject.inputs,
            case.dtype,
            self.device,
            lambda found: self.run.progress.say(f"tried {found}"),
            self.spec.tune,
        )
        values = {"chosen": recipe.described(), "tried": [str(found) for found in tried]}
        self.run.meter.event("tracker", stage=case.stage, name="recipes", values=values)
        part = trial_scope(subject.model)
        return recipe, f", the quickest of {len(tried)} recipes tried" + (f" on {part}" if part else "")

    def _count_flops(self, case: Case, subject: InferenceWorkload) -> None:
        key = (case.batch_size, case.tokens, case.norm)
        if self._flops.get(key, (None, ""))[0] is None:
            self._flops[key] = forward_flops(subject)

    def measure(self, rows: list[_Row]) -> None:
        """In turns, forwards and backwards, so that a drift of the card hits all rows alike."""
        seconds = self.spec.min_run_time_s / self.spec.rounds
        for number in range(self.spec.rounds):
            for row in rows if number % 2 == 0 else reversed(rows):
                self._round(row, seconds)
        run_until_ci(rows, self.run.meter, self.spec, self.device.type, self._round)
        for row in rows:
            with inference_context(row.case.dtype):
                row.waited_s = synchronized_latency(row.call, self.device)
            row.call = _released
        self.rows += rows

    def _round(self, row: _Row, seconds: float) -> None:
        device, dtype = self.device, row.case.dtype
        measured = self.run.stage(row.case.stage, again=True, role="inference", activity="infer")
        with measured as stage, inference_context(dtype), explain_out_of_memory(row.case, device):
            before = row.rounds[-1] if row.rounds else None
            row.rounds.append(run_round(row.call, seconds, self.spec.usable_threads, before))
            stage.count(samples=row.items)

    def tell(self) -> None:
        """The figures, once the trace covers the last window."""
        read = energy_reader(self.run.meter, max(row.rounds[-1].end_ns for row in self.rows), self.device.type)
        for row in self.rows:
            energy, why_not = energy_per_item(row.turns, read)
            latency = Latency.of(row.rounds)
            flops, how = self._flops[(row.case.batch_size, row.case.tokens, row.case.norm)]
            mfu, no_mfu = model_flops_utilization(flops, how, row.items / row.seconds, row.case.dtype, self.device)
            values = row_values(row.case, row.subject.item, row.subject.items, latency, row.rounds, read)
            values |= {
                "waited_s": row.waited_s,
                "energy": None if energy is None else energy.model_dump(),
                "why_no_energy": why_not,
                "flops_per_item": flops,
                "mfu": mfu,
                "mfu_missing": no_mfu,
                "memory_bytes": row.memory_bytes,
                "recipe": row.recipe.described(),
                "chosen_from": row.chosen_from,
                "threads": self.spec.usable_threads,
                "device": self.device.type,
                "stopped": stop_reason_text(row, self.spec),
                "notes": list(row.subject.notes),
                "state": machine_state(self.run.meter.trace_path, [found.window for found in row.rounds]),
            }
            self.run.meter.event("tracker", stage=row.case.stage, name=TRACKER, values=values)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _released() -> None:
    raise AssertionError("this row was measured already, and its model let go")
