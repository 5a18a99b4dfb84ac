"""The record of a run: version, status, spec, stages, totals, results and error in one schema (`run.json`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from pydantic import field_validator, model_validator

from joulelab.errors import JoulelabError
from joulelab.meter.figures import EnergyFigure, Frozen, missing, total
from joulelab.meter.grids import Co2e, Cost, GridFactor, Price
from joulelab.meter.grids import co2e as co2e_of
from joulelab.meter.grids import cost as cost_of
from joulelab.meter.health import CoreUse
from joulelab.runs.artifacts import UNMETERED, Ancestor
from joulelab.runs.phases import RENAMED_PHASES
from joulelab.stats import mean_t
from joulelab.units import J_PER_KWH

SCHEMA_VERSION = 2
METHOD_VERSION = 2
"""Increased when the same trace and marks give different figures or grades; 1 is the first release. `unpack --verify`
shows a recomputed record of an older version as `newer method: X to Y`."""
Status = Literal["queued", "running", "done", "failed", "truncated"]
Grade = Literal["A", "B", "C"]
StageRole = Literal["data", "teacher", "student", "evaluation", "inference", "setup", "idle"]
"""Whose work a stage is. `student` also stands for any model or program under study without a teacher; `setup` is
start-up, imports, loading, compilation and warm-up, which totals include and comparisons of methods exclude."""
MEASURED_COMPONENTS = ("gpu", "cpu", "dram")
CPU_WORK = "cpu_work"
"""Used like a total_energy_policy for work on the CPU: energy of the processor and its memory."""
NO_CODECARBON = missing("CodeCarbon was not enabled for this run", "energy.codecarbon=true")
NO_NODE = missing("the node has no power meter that can be read")
NO_MACHINE = missing("the whole machine was not estimated", "joulelab measure --scope machine")


class StageKind(NamedTuple):
    """What a stage declares about itself when it is opened."""

    role: StageRole
    activity: str
    """`train`, `validate`, `evaluate`, `cache`, `generate`, `judge`, `infer`, `compile`, ..."""
    repeat: int | None = None
    """Number of this run of a measured program, from 1; None for everything else, including warm-ups."""
    part_of: str | None = None
    """The stage that this one was split from."""
    repeated: bool = False

    @property
    def is_for_one_student(self) -> bool:
        """A teacher's work that no other student can use: it scores what one student writes, or is that student's own
        start (self-distillation)."""
        return (self.role, self.activity) == ("teacher", "score")


# Names of stages in records of schema version 1.
_ROLES: dict[str, StageRole] = {"data": "data", "teacher": "teacher", "infer": "inference", "idle": "idle"}
_ROLES |= {"run": "setup", "prerun": "setup"}
_ACTIVITIES = {"sft": "train", "hint": "train", "logits": "cache", "sft-validate": "validate"}
_ACTIVITIES |= {"tasks-evaluate": "evaluate", "prepare": "load", "phases": "profile", "overhead": "startup"}
_SETUP_ACTIVITIES = ("load", "profile", "warmup")


# Phases, keys of findings and checks in records and events of earlier versions -> their current names.
_RENAMED = {"optimiser_step": "optimizer_step", "sm_utilisation_percent": "sm_utilization_percent"}
_RENAMED_CHECKS = {"neighbours": "other processes"}


def current_spelling(value: Any) -> Any:
    """Names in findings, phases and events of earlier versions under their current spelling, at any depth."""
    if isinstance(value, str):
        for old, new in _RENAMED.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {current_spelling(key): current_spelling(entry) for key, entry in value.items()}
    return [current_spelling(entry) for entry in value] if isinstance(value, list | tuple) else value


def current_phase(stage: str, phase: str) -> str:
    """Windows of measured programs have the names that their users chose, which do not change."""
    return phase if stage.partition(".")[0] == "program" else current_spelling(phase)


def checked_role(role: str) -> StageRole:
    for known in get_args(StageRole):
        if role == known:
            return known  # type: ignore[no-any-return]  # get_args is untyped
    raise JoulelabError(f"unknown stage role '{role}'", f"use one of {', '.join(get_args(StageRole))}")


def kind_by_name(name: str) -> StageKind:
    """The kind of a stage that declares none: in records of schema version 1, and of stages opened without a role.

    This is the only place that derives a role from a name.
    """
    prefix, _, rest = name.partition(".")
    if prefix == "program":
        activity, _, number = rest.partition(".")
        if activity == "warmup":
            return StageKind("setup", activity)
        return StageKind("student", activity, int(number or 1))
    last = rest.rpartition(".")[2]
    activity = "infer" if prefix == "infer" else _ACTIVITIES.get(last, last)
    role = _ROLES.get(prefix, "student")
    return StageKind("setup" if activity in _SETUP_ACTIVITIES and prefix != "data" else role, activity)


def kinds_of(ancestor: Ancestor) -> tuple[StageKind, ...]:
    """Kinds of the stages that made an artifact; for unmetered work, the kind of that work.

    The role in which an artifact is used replaces the one in which it was made. The exception is data that a teacher
    generated: it is the teacher's work, whether this run or an earlier one generated it.
    """
    if ancestor.roles:
        declared = zip(ancestor.roles, ancestor.activities, strict=True)
        made = [StageKind(checked_role(role), activity) for role, activity in declared]
    else:
        made = [kind_by_name(name) for name in ((ancestor.name,) if ancestor.kind == UNMETERED else ancestor.stages)]
    generated = ancestor.used_as == "data" and any(kind.role == "teacher" for kind in made)
    if ancestor.used_as is None or generated:
        return tuple(made)
    return tuple(kind._replace(role=checked_role(ancestor.used_as)) for kind in made)


class Segment(Frozen):
    """A time interval of one attempt in which the stage ran; a nested stage suspends the outer one."""

    attempt: int
    host: str
    started_at: str
    duration_s: float
    start_ns: int
    end_ns: int


class PhaseRecord(Frozen):
    count: int
    sum_s: float
    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float


class EnergyByComponent(Frozen):
    """Energy by component. `cpu_estimate`, `codecarbon` and `machine` are separate, never part of a measured total."""

    gpu: EnergyFigure
    cpu: EnergyFigure
    dram: EnergyFigure
    cpu_estimate: EnergyFigure
    codecarbon: EnergyFigure = NO_CODECARBON
    """Energy of all components as reported by CodeCarbon, by its own methods and constants."""
    machine: EnergyFigure = NO_MACHINE
    """Estimate for the whole machine: sensors, CPU time of all processes, and constants for everything else."""
    node: EnergyFigure = NO_NODE
    """Energy by the node's own meter (IPMI, Redfish, Cray, a module's input): all components, all jobs of the node."""

    def under_policy(self, policy: str) -> EnergyFigure:
        """The figure that the policy defines as the total; missing if nothing was measured under it."""
        if policy in ("codecarbon", "machine"):
            return self.codecarbon if policy == "codecarbon" else self.machine
        components = policy_components(policy)
        figures: list[EnergyFigure] = [getattr(self, name) for name in components]
        measured = [figure for figure in figures if figure.measured]
        if measured:
            return total(measured)
        pairs = zip(components, figures, strict=True)
        reasons = [
            f"{name}: {figure.reason}" + (f" ({figure.fix})" if figure.fix else "")
            for name, figure in pairs
            if figure.reason and name != "dram"  # without RAPL both are missing for the same reason
        ]
        return missing("; ".join(reasons) or "nothing was measured")

    def best(self, policy: str) -> EnergyFigure:
        """The figure that tables show: the measured total, else the estimate, labeled as such."""
        measured = self.under_policy(policy)
        return measured if measured.energy_j is not None or self.cpu_estimate.energy_j is None else self.cpu_estimate


def policy_components(policy: str) -> tuple[str, ...]:
    return {"gpu_only": ("gpu",), CPU_WORK: ("cpu", "dram")}.get(policy, MEASURED_COMPONENTS)


def work_policy(policy: str, device: str | None) -> str:
    """The components that did the work: a model on the CPU leaves the GPUs idle, and their energy is not the model's.

    `gpu_only` and `codecarbon` are explicit choices of the user and are kept.
    """
    return CPU_WORK if policy == "measured" and device == "cpu" else policy


def add_components(parts: list[EnergyByComponent], durations_s: list[float]) -> EnergyByComponent:
    names = EnergyByComponent.model_fields
    return EnergyByComponent(**{name: total([getattr(part, name) for part in parts], durations_s) for name in names})


def with_bounds_of(whole: EnergyByComponent, parts: Iterable[EnergyByComponent]) -> EnergyByComponent:
    """A sum is a lower bound if one of its parts is, even if that part is too short to change the coverage."""
    listed = list(parts)
    marked = {}
    for name in EnergyByComponent.model_fields:
        figure: EnergyFigure = getattr(whole, name)
        bound = figure.lower_bound or any(getattr(part, name).is_lower_bound for part in listed)
        marked[name] = figure.model_copy(update={"lower_bound": bound})
    return EnergyByComponent(**marked)


def all_lower_bounds(energy: EnergyByComponent) -> EnergyByComponent:
    """Every figure that is known, as a lower bound."""
    figures: dict[str, EnergyFigure] = {name: getattr(energy, name) for name in EnergyByComponent.model_fields}
    known = {name: figure for name, figure in figures.items() if figure.energy_j is not None}
    return energy.model_copy(
        update={name: figure.model_copy(update={"lower_bound": True}) for name, figure in known.items()}
    )


def components_of(ancestor: Ancestor) -> EnergyByComponent:
    absent = missing("its bill does not have this component")
    names = EnergyByComponent.model_fields
    return EnergyByComponent(**{name: ancestor.energy.get(name, absent) for name in names})


class Note(Frozen):
    """A remark on the energy figures."""

    level: Literal["info", "warning"]
    text: str


class Check(Frozen):
    """One validity check of a measurement, and the best grade that its outcome allows."""

    name: str
    ok: bool
    grade: Grade
    text: str

    @field_validator("name", mode="before")
    @classmethod
    def _migrate_name(cls, value: Any) -> Any:
        return _RENAMED_CHECKS.get(value, value)


class Validity(Frozen):
    """How far a figure can be trusted: the worst grade of its checks."""

    grade: Grade | None = None
    """None while the run is running, and in records older than grades."""
    checks: tuple[Check, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the grade is not A, worst first."""
        return tuple(check.text for check in sorted(self.checks, key=lambda c: c.grade, reverse=True) if not check.ok)


class IdleBaseline(Frozen):
    """An idle baseline and the state of the machine, which idle power depends on (clocks may not have dropped)."""

    stage: str
    before_load: bool = True
    attempt: int
    duration_s: float
    power_w: float
    spread_rel: float | None
    """Standard deviation of the power over segments of the baseline, divided by its mean."""
    drift_rel: float | None
    """Mean power of the second half divided by that of the first half, minus 1."""
    stable: bool
    sm_clock_MHz: float | None = None  # noqa: N815 (as in the trace)
    temperature_C: float | None = None  # noqa: N815
    gpu_utilization_percent: float | None = None
    host: str = ""


class StageRecord(Frozen):
    name: str
    role: StageRole
    activity: str
    repeat: int | None = None
    """Number of this run of a measured program (`measure --repeat`), from 1."""
    part_of: str | None = None
    """The stage that this one was split from: setup of that stage, or work on it that was lost in an interruption."""
    repeated: bool = False
    """Work that was lost in an interruption and repeated by a later attempt."""
    number: int
    status: Status
    outside_totals: bool = False
    """True for idle baselines, which are recorded and shown but not included in any total."""
    segments: tuple[Segment, ...]
    duration_s: float
    energy: EnergyByComponent
    energy_j: float | None
    """Under the run's total_energy_policy; null if nothing was measured under it."""
    best: EnergyFigure
    """What tables show and rates are computed from: the policy's figure, else the estimate, labeled as such."""
    above_idle_j: float | None
    """`energy_j` minus idle power times the covered time; null without an idle baseline."""
    above_idle: EnergyFigure | None = None
    """The same with its interval; null in older records."""
    mean_power_w: float | None
    peak_power_w: float | None
    samples: int | None = None
    tokens: int | None = None
    j_per_sample: float | None = None
    j_per_token: float | None = None
    item_energy: EnergyFigure | None = None
    """Used for energy per item instead of `best`: the CPU's energy, for work that used no GPU."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    phases: dict[str, PhaseRecord] = {}
    co2e: Co2e | None = None
    """CO2e of `best`; null unless energy.grid names a grid."""
    core_use: CoreUse | None = None
    """CPU cores used by this run and by other processes; null if not recorded, as in older runs and short stages."""
    validity: Validity = Validity()

    def energy_per(self, item: Literal["sample", "token"]) -> EnergyFigure | None:
        """Energy of one item with its uncertainty and method; None if no items were counted."""
        value = self.j_per_token if item == "token" else self.j_per_sample
        figure = self.item_energy or self.best
        if value is None or not figure.energy_j:
            return figure if figure.energy_j is None and (self.tokens if item == "token" else self.samples) else None
        return figure.scaled(value / figure.energy_j)

    @property
    def unused_gpu_w(self) -> float | None:
        """Mean power of the measured GPUs if the work of this stage did not use them."""
        return None if self.item_energy is None else self.energy.gpu.mean_power_w(self.duration_s)

    @property
    def kind(self) -> StageKind:
        return StageKind(self.role, self.activity)

    @property
    def is_method_work(self) -> bool:
        """Whether comparisons and energy per item include it: all but setup, repeated work and idle baselines."""
        return self.role not in ("setup", "idle") and not self.repeated

    @model_validator(mode="before")
    @classmethod
    def _migrate(cls, value: Any) -> Any:
        """Migrates schema version 1, which had no roles, and British names of phases."""
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return value
        if isinstance(phases := value.get("phases"), dict):
            value = {**value, "phases": {current_phase(name, phase): times for phase, times in phases.items()}}
        return value if "role" in value else {**value, **kind_by_name(name)._asdict()}


class Totals(Frozen):
    policy: str
    energy_j: float | None
    """Energy of this run's own stages under the policy; null if nothing was measured."""
    figure: EnergyFigure
    best: EnergyFigure
    """The policy's figure, else the estimate, labeled as such."""
    gpu: EnergyFigure
    cpu: EnergyFigure
    dram: EnergyFigure
    cpu_estimate: EnergyFigure
    codecarbon: EnergyFigure = NO_CODECARBON
    machine: EnergyFigure = NO_MACHINE
    node: EnergyFigure = NO_NODE
    duration_s: float
    idle_power_w: float | None
    above_idle_j: float | None
    above_idle: EnergyFigure | None = None
    idle: tuple[IdleBaseline, ...] = ()
    grid: GridFactor | None = None
    pue: float | None = None
    co2e: Co2e | None = None
    """CO2e of `best`; null unless energy.grid names a grid."""
    price: Price | None = None
    cost: Cost | None = None
    """Cost of `best`; null unless energy.price is set."""

    @property
    def components(self) -> EnergyByComponent:
        return EnergyByComponent(**{name: getattr(self, name) for name in EnergyByComponent.model_fields})


class DeviceEnergy(Frozen):
    """One counted device of one host, over the attempt excluding idle baselines."""

    device: str
    name: str
    component: str
    figure: EnergyFigure


class RankPace(Frozen):
    """Step times of one rank in a stage; the rank with the longest own work delays all others."""

    rank: int
    stage: str
    steps: int
    step_s: float
    """Mean time per step, including waiting for other ranks."""
    own_s: float
    """Mean time per step of input and forward pass, which do not wait for other ranks."""


class Attempt(Frozen):
    """One attempt of the run on one host; hosts that work together share the attempt's number."""

    number: int
    host: str
    boot_id: str
    started_at: str
    duration_s: float
    closed: bool
    """Whether the recorder wrote its closing line; false if it was killed."""
    energy: EnergyByComponent
    billed_s: float = 0.0
    """Duration of `energy`: the attempt without idle baselines."""
    devices: tuple[DeviceEnergy, ...] = ()
    clock_offset_s: float = 0.0
    """Offset of this host's clock to that of rank 0, from marks set simultaneously; times are corrected for it."""
    ranks: tuple[RankPace, ...] = ()
    """Ranks on this host, if the run had several."""


class Result(Frozen):
    """A quality metric; `successes` out of `trials` if it is a proportion."""

    value: float
    trials: int | None = None
    successes: int | None = None
    lower_is_better: bool = False
    """True for a loss."""
    standard_error: float | None = None
    """Over the test items, if the evaluator reports one."""


class ErrorRecord(Frozen):
    kind: str
    message: str
    hint: str = ""
    traceback: str = ""


class ProcessMark(Frozen):
    """The process that works on a run, or did so last."""

    host: str
    boot_id: str
    pid: int


class RunRecord(Frozen):
    schema_version: int = SCHEMA_VERSION
    method_version: int = 1
    """Version of the rules by which its figures were computed."""
    run_id: str
    name: str
    label: str
    status: Status
    group: str | None = None
    created_at: str
    spec: dict[str, Any]
    attempts: tuple[Attempt, ...] = ()
    stages: tuple[StageRecord, ...] = ()
    totals: Totals | None = None
    results: dict[str, Result] = {}
    findings: dict[str, dict[str, dict[str, Any]]] = {}
    """Findings of training loop trackers, by stage and tracker; the format depends on the tracker."""
    made: tuple[str, ...] = ()
    """Keys of the artifacts that this run made."""
    lineage: tuple[Ancestor, ...] = ()
    """Every artifact that the run made or used, and all their ancestors, each once."""
    validity: Validity = Validity()
    machine_profile: str | None = None
    """Calibration of this machine (`joulelab doctor --calibrate`) that was used."""
    error: ErrorRecord | None = None
    store: str | None = None
    """Where it searches for artifacts of other runs; null: in the parent of its folder (no --run-dir)."""
    process: ProcessMark | None = None
    """Process of the latest attempt; null before the first one, and in older records."""

    @field_validator("spec")
    @classmethod
    def _types_that_readers_rely_on(cls, spec: dict[str, Any]) -> dict[str, Any]:
        kinds = {"seed": int, "pipeline": str, "name": str, "label": str, "about": str, "energy": dict}
        for name, kind in kinds.items():
            if spec.get(name) is not None and not isinstance(spec[name], kind):
                raise ValueError(f"{name} is {spec[name]!r}")
        return spec

    @field_validator("results", mode="before")
    @classmethod
    def _without_null(cls, results: Any) -> Any:
        """Earlier versions wrote null for a result that was no number."""
        if not isinstance(results, dict):
            return results
        return {
            name: result
            for name, result in results.items()
            if not isinstance(result, dict) or result.get("value") is not None
        }

    @field_validator("findings", mode="before")
    @classmethod
    def _migrate_findings(cls, value: Any) -> Any:
        return current_spelling(value)

    @field_validator("validity", mode="before")
    @classmethod
    def _migrate_notes(cls, value: object) -> object:
        """Migrates records older than grades, which have the notes alone."""
        return {"notes": value} if isinstance(value, list | tuple) else value

    def with_notes(self, notes: Iterable[Note]) -> RunRecord:
        """The record with additional notes."""
        validity = self.validity.model_copy(update={"notes": (*self.validity.notes, *notes)})
        return self.model_copy(update={"validity": validity})

    def stage(self, name: str) -> StageRecord | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def trains_student(self) -> bool:
        """Whether its model is a student, also if it was interrupted before the student's first stage."""
        if any(stage.role == "student" for stage in self.stages):
            return True
        return self.status != "done" and bool(self.spec.get("student")) and self.spec.get("until") in (None, "train")

    @property
    def part_of_work(self) -> str:
        """`shard 2/8` or `until=logits` of a run that made a part of the data or the teacher's outputs for other runs;
        empty for runs with a model: a student, or with until=teacher the teacher."""
        if shard := self.spec.get("shard"):
            return f"shard {shard}"
        until = self.spec.get("until")
        with_model = (None, "teacher", "train", *RENAMED_PHASES)
        return "" if until in with_model else f"until={until}"

    @property
    def policy(self) -> str:
        return self.totals.policy if self.totals else "measured"

    @property
    def inherited(self) -> tuple[Ancestor, ...]:
        """Ancestors whose energy other runs recorded, or that were made elsewhere."""
        return tuple(ancestor for ancestor in self.lineage if ancestor.key not in self.made)

    @property
    def repetitions(self) -> list[StageRecord]:
        """The measured runs of a program, without warm-ups; empty for other runs."""
        return [stage for stage in self.stages if stage.repeat is not None]

    @property
    def best_energy(self) -> EnergyFigure:
        """The energy that all commands print for this run: measured, else estimated and labeled as such.

        Of a measured program the program's own (mean over repeats), of other runs the sum of their stages.
        """
        if (program := program_energy(self)) is not None:
            return program.energy
        return self.totals.best if self.totals else missing("nothing was recorded")

    @property
    def best_co2e(self) -> Co2e | None:
        """CO2e of `best_energy`; None unless energy.grid names a grid."""
        return co2e_of(self.best_energy, self.totals.grid, self.totals.pue) if self.totals else None

    @property
    def best_cost(self) -> Cost | None:
        """Cost of `best_energy`; None unless energy.price is set."""
        return cost_of(self.best_energy, self.totals.price) if self.totals else None

    @property
    def best_duration_s(self) -> float:
        """Seconds that `best_energy` covers."""
        if (program := program_energy(self)) is not None:
            return program.duration_s
        return self.totals.duration_s if self.totals else 0.0


class RepeatSummary(Frozen):
    """Over the successful repeats. `low_j` and `high_j` are Student's 95 % interval of the mean, which is random; the
    scale error `gain_error_rel` is common to all repeats and comes in addition."""

    count: int
    mean_j: float
    low_j: float
    high_j: float
    spread_rel: float
    """Standard deviation divided by the mean."""
    mean_s: float
    method: str
    gain_error_rel: float | None = None


def summarize_repeats(stages: Sequence[StageRecord]) -> RepeatSummary | None:
    """None if fewer than two succeeded, or if they were measured by different methods."""
    done = [stage for stage in stages if stage.status == "done" and stage.best.energy_j is not None]
    if len(done) < 2 or len({stage.best.method for stage in done}) > 1:
        return None
    energies = [stage.best.energy_j or 0.0 for stage in done]
    mean = mean_t(energies)
    deviation = math.sqrt(sum((value - mean.value) ** 2 for value in energies) / (len(energies) - 1))
    return RepeatSummary(
        count=len(done),
        mean_j=mean.value,
        low_j=mean.low,
        high_j=mean.high,
        spread_rel=deviation / mean.value if mean.value else 0.0,
        mean_s=sum(stage.duration_s for stage in done) / len(done),
        method=done[0].best.method,
        gain_error_rel=done[0].best.gain_error_rel,
    )


@dataclass(frozen=True)
class ProgramEnergy:
    """Energy of one run of a measured program or block of code: the mean over its repeats, without warm-ups."""

    count: int
    """Number of repeats in the mean; 1 if the program ran once."""
    energy: EnergyFigure
    """With several repeats it has Student's 95 % interval of their mean."""
    duration_s: float
    spread_rel: float = 0.0
    """Standard deviation over the repeats, divided by the mean."""


def program_energy(*records: RunRecord) -> ProgramEnergy | None:
    """Over all repeats in these records of one program; None if they measure no program."""
    stages = [stage for record in records for stage in record.repetitions]
    if not stages:
        return None
    summary = summarize_repeats(stages)
    counted = [stage for stage in stages if stage.status == "done"] or stages
    last = counted[-1]
    if summary is None:
        return ProgramEnergy(1, last.best, last.duration_s)
    mean = last.best.with_interval(summary.mean_j, (summary.high_j - summary.low_j) / 2, "repeats")
    figures = [stage.best for stage in counted if stage.best.energy_j is not None]
    incomplete = {
        "coverage": sum(figure.coverage for figure in figures) / len(figures),
        "lower_bound": any(figure.is_lower_bound for figure in figures),
        "cpu_contention": any(figure.cpu_contention for figure in figures),
    }
    return ProgramEnergy(summary.count, mean.model_copy(update=incomplete), summary.mean_s, summary.spread_rel)


def repeat_mean(*records: RunRecord) -> ProgramEnergy | None:
    """The same if the program was repeated; None if it ran once."""
    found = program_energy(*records)
    return found if found is not None and found.count > 1 else None


# `experiment_summary.json`: totals and stages as one flat mapping, for scripts that want a number without a schema.


def flat_summary(record: RunRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "run_id": record.run_id,
        "name": record.name,
        "label": record.label,
        "status": record.status,
        "seed": record.spec.get("seed"),
        "attempts": len(record.attempts),
    }
    if record.totals:
        flat |= {
            "total_energy_policy": record.totals.policy,
            "energy_j": record.best_energy.energy_j,
            "method": record.best_energy.method,
            **_errors("", record.best_energy),
            "total_energy_j": record.totals.best.energy_j,
            "total_energy_kwh": _kwh(record.totals.best.energy_j),
            "shown_energy_j": record.totals.best.energy_j,
            "shown_energy_method": record.totals.best.method,
            **_errors("shown_energy_", record.totals.best),
            "duration_s": record.totals.duration_s,
            "idle_power_w": record.totals.idle_power_w,
            "above_idle_j": record.totals.above_idle_j,
            "above_idle_half_width_j": record.totals.above_idle and record.totals.above_idle.half_width_j,
            "grade": record.validity.grade,
            **_grams("total", record.totals.co2e),
            **_cost(record.totals.cost),
        }
        if record.totals.codecarbon.energy_j is not None:
            flat["codecarbon_energy_j"] = record.totals.codecarbon.energy_j
    if (program := program_energy(record)) is not None:
        flat |= {"program_energy_j": program.energy.energy_j, "program_duration_s": program.duration_s}
        if program.count > 1:
            flat |= {"repeats": program.count, "energy_per_repeat_j": program.energy.energy_j}
    for stage in record.stages:
        flat |= {
            f"{stage.name}.energy_j": stage.best.energy_j,
            f"{stage.name}.energy_kwh": _kwh(stage.best.energy_j),
            f"{stage.name}.method": stage.best.method,
            **_errors(f"{stage.name}.", stage.best),
            f"{stage.name}.duration_s": stage.duration_s,
            f"{stage.name}.mean_power_w": stage.mean_power_w,
            f"{stage.name}.peak_power_w": stage.peak_power_w,
            f"{stage.name}.samples": stage.samples,
            f"{stage.name}.tokens": stage.tokens,
            f"{stage.name}.tokens_per_s": stage.tokens_per_s,
            f"{stage.name}.above_idle_j": stage.above_idle_j,
            f"{stage.name}.above_idle_half_width_j": stage.above_idle and stage.above_idle.half_width_j,
            f"{stage.name}.grade": stage.validity.grade,
            **_grams(stage.name, stage.co2e),
        }
    flat |= {name: result.value for name, result in record.results.items()}
    return flat


def _errors(prefix: str, figure: EnergyFigure) -> dict[str, Any]:
    """Random half-width and gain error separately: which one matters depends on the comparison."""
    return {
        f"{prefix}half_width_j": figure.half_width_j,
        f"{prefix}gain_error_rel": figure.gain_error_rel,
        f"{prefix}coverage": figure.coverage,
        f"{prefix}lower_bound": figure.is_lower_bound,
    }


def _grams(prefix: str, emissions: Co2e | None) -> dict[str, Any]:
    """No keys at all without a grid: a null would read as a failed computation."""
    if emissions is None:
        return {}
    separator = "." if prefix != "total" else "_"
    return {
        f"{prefix}{separator}{name}": value
        for name, value in emissions.model_dump().items()
        if value is not None and name != "method"
    }


def _cost(found: Cost | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {"total_cost_low": found.low, "total_cost_high": found.high, "total_cost_currency": found.currency}


def _kwh(energy_j: float | None) -> float | None:
    return None if energy_j is None else energy_j / J_PER_KWH
