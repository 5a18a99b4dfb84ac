"""The pipeline `infer`: prepare a model, then measure latency and energy in the same windows.

Preparation (loading weights, compiling, trying recipes) has a separate stage, so that a row's stage has inferences
only. Rows with the same input take turns in rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from joulelab.data.inputs import input_bill, keep_recorded_commits
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
from joulelab.train.devices import reset_peak_memory, resolve_device
from joulelab.train.stats.hooks import device_synchronizer
from joulelab.train.stats.step_energy import energy_reader

PREPARE = "model.prepare"
TRACKER = "inference"


def run_infer(run: RunContext) -> None:
    spec = cast(InferSpec, run.spec)
    keep_recorded_commits(run)
    if spec.weights_from is not None:  # break-even analysis needs the energy of the model's training
        input_bill(run, "model", spec.weights_from, "model", role=None)
    torch.set_num_threads(spec.usable_threads)
    if spec.generate:
        run_generation(run, spec)
        return
    pipeline = _InferencePipeline(run, spec)
    for cases in spec.groups():
        pipeline.measure([pipeline.prepare(case) for case in cases])
    pipeline.record_results()


@dataclass
class _Row:
    """One case: its prepared call and its measurements."""

    case: Case
    workload: InferenceWorkload
    call: Callable[[], Any]
    recipe: Recipe
    memory_bytes: int
    chosen_from: str = ""
    """Text on the trials that the recipe was chosen from."""
    rounds: list[Round] = field(default_factory=list)
    waited_s: float = 0.0
    stop_reason: StopReason = ""

    @property
    def item_windows(self) -> list[ItemWindow]:
        return [(found.window, found.calls * self.workload.items) for found in self.rounds]

    @property
    def items(self) -> int:
        return self.workload.items * sum(found.calls for found in self.rounds)

    @property
    def seconds(self) -> float:
        return sum(found.duration_s for found in self.rounds)


class _InferencePipeline:
    def __init__(self, run: RunContext, spec: InferSpec) -> None:
        self.run = run
        self.spec = spec
        self.device = resolve_device(spec.device, self.run)
        self.models = ModelCache(spec, self.device)
        self.rows: list[_Row] = []
        self._flops: dict[tuple[Any, ...], tuple[float | None, str]] = {}

    def prepare(self, case: Case) -> _Row:
        ready = self.run.stage(PREPARE, again=True, role="setup", activity="load")
        with ready, explain_out_of_memory(case, self.device):
            self.run.progress.write(f"preparing {case.stage.removeprefix('infer.')}")
            require_memory(case, self.device, lambda: self.models.workload(replace(case, batch_size=1)))
            workload = self.models.workload(case)
            if workload.item == "image":  # for a folder or hub id, known only after loading
                case = replace(case, tokens=0)
            self._count_flops(case, workload)
            before = allocated_bytes(self.device)
            with inference_context(case.dtype):
                recipe, chosen_from = self._recipe(case, workload)
                call = prepare_call(workload.model, workload.inputs, recipe, case.dtype, self.device)
                reset_peak_memory(self.device)
                call()
            self._wait()
            memory_bytes = row_memory_bytes(workload.model, self.device, before)
        return _Row(case, workload, call, recipe, memory_bytes, chosen_from)

    def _recipe(self, case: Case, workload: InferenceWorkload) -> tuple[Recipe, str]:
        if case.mode != "fastest":
            return RECIPES[case.mode], ""
        recipe, tried = autotune(
            workload.model,
            workload.inputs,
            case.dtype,
            self.device,
            lambda found: self.run.progress.write(f"tried {found}"),
            self.spec.tune,
        )
        values = {"chosen": recipe.describe(), "tried": [str(found) for found in tried]}
        self.run.meter.event("tracker", stage=case.stage, name="recipes", values=values)
        part = trial_scope(workload.model)
        return recipe, f", the fastest of {len(tried)} recipes tried" + (f" on {part}" if part else "")

    def _count_flops(self, case: Case, workload: InferenceWorkload) -> None:
        key = (case.batch_size, case.tokens, case.norm)
        if self._flops.get(key, (None, ""))[0] is None:
            self._flops[key] = forward_flops(workload)

    def measure(self, rows: list[_Row]) -> None:
        """Rows take turns, in reverse order every second round, so that drift affects all rows alike."""
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

    def record_results(self) -> None:
        """Compute the figures once the trace covers the last window."""
        read = energy_reader(self.run.meter, max(row.rounds[-1].end_ns for row in self.rows), self.device.type)
        for row in self.rows:
            energy, why_not = energy_per_item(row.item_windows, read)
            latency = Latency.of(row.rounds)
            flops, how = self._flops[(row.case.batch_size, row.case.tokens, row.case.norm)]
            mfu, no_mfu = model_flops_utilization(flops, how, row.items / row.seconds, row.case.dtype, self.device)
            values = row_values(row.case, row.workload.item, row.workload.items, latency, row.rounds, read)
            values |= {
                "waited_s": row.waited_s,
                "energy": None if energy is None else energy.model_dump(),
                "why_no_energy": why_not,
                "flops_per_item": flops,
                "mfu": mfu,
                "mfu_missing": no_mfu,
                "memory_bytes": row.memory_bytes,
                "recipe": row.recipe.describe(),
                "chosen_from": row.chosen_from,
                "threads": self.spec.usable_threads,
                "device": self.device.type,
                "stopped": stop_reason_text(row, self.spec),
                "notes": list(row.workload.notes),
                "state": machine_state(self.run.meter.trace_path, [found.window for found in row.rounds]),
            }
            self.run.meter.event("tracker", stage=row.case.stage, name=TRACKER, values=values)

    def _wait(self) -> None:
        device_synchronizer(self.device)()


def _released() -> None:
    raise AssertionError("this row is already measured and its model released")
