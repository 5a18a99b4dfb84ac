"""The record of a run: version, status, spec, stages, totals, results and error in one schema (`run.json`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

from pydantic import field_validator, model_validator

from joulelab.errors import JoulelabError
from joulelab.meter.figures import EnergyFigure, Frozen, missing, total
from joulelab.meter.grids import GridFactor
from joulelab.meter.health import CoreUse
from joulelab.runs.artifacts import UNMETERED, Ancestor
from joulelab.runs.carbon import Co2e

SCHEMA_VERSION = 2
METHOD_VERSION = 2
"""Grows whenever the same trace and marks give other figures or grades; 1 is the first release. `unpack --verify`
compares a record of an older version with its recomputation as `newer method: X to Y`."""
Status = Literal["queued", "running", "done", "failed", "truncated"]
Grade = Literal["A", "B", "C"]
StageRole = Literal["data", "teacher", "student", "evaluation", "inference", "setup", "idle"]
"""Whose work a stage is. `student` is also any model or program under study that has no teacher; `setup` is start-up,
imports, loading, compilation and warm-ups, which are in totals and in no comparison of methods."""
MEASURED_COMPONENTS = ("gpu", "cpu", "dram")
CPU_WORK = "cpu_work"
"""Like a total_energy_policy, of work on the CPU: what the processor and its memory used."""
NO_CODECARBON = missing("CodeCarbon did not run beside this run", "energy.codecarbon=true")


class StageKind(NamedTuple):
    """What the opener of a stage declares about it."""

    role: StageRole
    activity: str
    """`train`, `validate`, `evaluate`, `cache`, `generate`, `judge`, `infer`, `compile`, ..."""
    repeat: int | None = None
    """Number of this run of a measured program, from 1 on; None for everything else, warm-ups included."""
    part_of: str | None = None
    """The stage whose time this one was split from."""
    repeated: bool = False


_ROLES: dict[str, StageRole] = {"data": "data", "teacher": "teacher", "infer": "inference", "idle": "idle"}
_ROLES |= {"run": "setup", "prerun": "setup"}
_ACTIVITIES = {"sft": "train", "hint": "train", "logits": "cache", "sft-validate": "validate"}
_ACTIVITIES |= {"tasks-evaluate": "evaluate", "prepare": "load", "phases": "profile", "overhead": "startup"}
_SETUP_ACTIVITIES = ("load", "profile", "warmup")


def checked_role(role: str) -> StageRole:
    for known in get_args(StageRole):
        if role == known:
            return known  # type: ignore[no-any-return]  # get_args is untyped
    raise JoulelabError(f"role '{role}' of a stage is unknown", f"use one of {', '.join(get_args(StageRole))}")


def kind_by_name(name: str) -> StageKind:
    """For records of schema version 1, which declare nothing, and for stages opened without a role.

    No other place may read a role out of a name.
    """
    who, _, what = name.partition(".")
    if who == "program":
        what, _, number = what.partition(".")
        return StageKind("setup", what) if what == "warmup" else StageKind("student", what, int(number or 1))
    last = what.rpartition(".")[2]
    activity = "infer" if who == "infer" else _ACTIVITIES.get(last, last)
    role = _ROLES.get(who, "student")
    return StageKind("setup" if activity in _SETUP_ACTIVITIES and who != "data" else role, activity)


def kinds_of(ancestor: Ancestor) -> tuple[StageKind, ...]:
    """What the stages were in which an artifact was made; of unmetered work, whose it was.

    The role in which it is used replaces that in which it was made. Data that a teacher generated is the exception: it
    is teacher's work here as it is in a run that has it generated.
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
    """A stretch of one attempt during which the stage ran; a nested stage suspends the outer one."""

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
    """What each component took. `cpu_estimate` and `codecarbon` stand beside: never part of a measured total."""

    gpu: EnergyFigure
    cpu: EnergyFigure
    dram: EnergyFigure
    cpu_estimate: EnergyFigure
    codecarbon: EnergyFigure = NO_CODECARBON
    """What CodeCarbon says all components took, by its own methods and constants."""

    def under_policy(self, policy: str) -> EnergyFigure:
        """The figure that the policy calls the total; a policy with nothing to report falls back to nothing."""
        if policy == "codecarbon":
            return self.codecarbon
        components = policy_components(policy)
        figures: list[EnergyFigure] = [getattr(self, name) for name in components]
        measured = [figure for figure in figures if figure.measured]
        if measured:
            return total(measured)
        pairs = zip(components, figures, strict=True)
        reasons = [
            f"{name}: {figure.reason}" + (f" ({figure.fix})" if figure.fix else "")
            for name, figure in pairs
            if figure.reason and name != "dram"  # where there is no RAPL there is none for memory either
        ]
        return missing("; ".join(reasons) or "nothing was measured")

    def best(self, policy: str) -> EnergyFigure:
        """What a table shows: the measured total, else the estimate under its own label."""
        measured = self.under_policy(policy)
        return measured if measured.energy_j is not None or self.cpu_estimate.energy_j is None else self.cpu_estimate


def policy_components(policy: str) -> tuple[str, ...]:
    return {"gpu_only": ("gpu",), CPU_WORK: ("cpu", "dram")}.get(policy, MEASURED_COMPONENTS)


def work_policy(policy: str, device: str | None) -> str:
    """Which components did the work: a model on the CPU leaves the GPUs idle, and their energy is not its own.

    `gpu_only` and `codecarbon` were chosen by the user and stay.
    """
    return CPU_WORK if policy == "measured" and device == "cpu" else policy


def add_components(parts: list[EnergyByComponent], durations_s: list[float]) -> EnergyByComponent:
    names = EnergyByComponent.model_fields
    return EnergyByComponent(**{name: total([getattr(part, name) for part in parts], durations_s) for name in names})


def with_bounds_of(whole: EnergyByComponent, parts: Iterable[EnergyByComponent]) -> EnergyByComponent:
    """A whole is a lower bound where one of its parts is, also if that part is too short to show in its coverage."""
    listed = list(parts)
    marked = {}
    for name in EnergyByComponent.model_fields:
        figure: EnergyFigure = getattr(whole, name)
        bound = figure.lower_bound or any(getattr(part, name).is_lower_bound for part in listed)
        marked[name] = figure.model_copy(update={"lower_bound": bound})
    return EnergyByComponent(**marked)


def components_of(ancestor: Ancestor) -> EnergyByComponent:
    absent = missing("its bill does not name this component")
    names = EnergyByComponent.model_fields
    return EnergyByComponent(**{name: ancestor.energy.get(name, absent) for name in names})


class Note(Frozen):
    """Something a reader of the joules must know."""

    level: Literal["info", "warning"]
    text: str


class Check(Frozen):
    """One question put to a measurement, and the best grade it can have after the answer."""

    name: str
    ok: bool
    grade: Grade
    text: str


class Validity(Frozen):
    """How far a figure can be trusted: the worst of its checks, with all of them beside it."""

    grade: Grade | None = None
    """None while the run goes on, and in records older than grades."""
    checks: tuple[Check, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not an A, worst first."""
        return tuple(check.text for check in sorted(self.checks, key=lambda c: c.grade, reverse=True) if not check.ok)


class IdleBaseline(Frozen):
    """The machine doing nothing, and in which state: idle is not one number (clocks that have not dropped yet)."""

    stage: str
    before_load: bool = True
    attempt: int
    duration_s: float
    power_w: float
    spread_rel: float | None
    """Standard deviation of the power over pieces of the baseline, against its mean."""
    drift_rel: float | None
    """Second half against first half, minus 1."""
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
    """Number of this run of a measured program (`measure --repeat`), from 1 on."""
    part_of: str | None = None
    """The stage that this one was split from: setup inside it, or work of it that an interruption lost."""
    repeated: bool = False
    """Work that an interruption lost and that a later attempt did again."""
    number: int
    status: Status
    outside_totals: bool = False
    """Idle baselines are recorded and shown, and belong to no total."""
    segments: tuple[Segment, ...]
    duration_s: float
    energy: EnergyByComponent
    energy_j: float | None
    """Under the run's total_energy_policy; null where the policy has nothing to report."""
    best: EnergyFigure
    """What tables show and rates are computed from: the policy's figure, else the estimate under its own label."""
    above_idle_j: float | None
    """`energy_j` less the idle power over the covered time; null where no idle baseline was measured."""
    above_idle: EnergyFigure | None = None
    """The same as a figure with its interval; null in records older than that."""
    mean_power_w: float | None
    peak_power_w: float | None
    samples: int | None = None
    tokens: int | None = None
    j_per_sample: float | None = None
    j_per_token: float | None = None
    item_energy: EnergyFigure | None = None
    """What joules per item are computed from where it is not `best`: the CPU's energy of work that used no GPU."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    phases: dict[str, PhaseRecord] = {}
    co2e: Co2e | None = None
    """Of `best`; null unless energy.grid names a grid."""
    core_use: CoreUse | None = None
    """Who used the CPU cores meanwhile; null where nobody looked, as in older runs and very short stages."""
    validity: Validity = Validity()

    def energy_per(self, item: Literal["sample", "token"]) -> EnergyFigure | None:
        """Energy of one item with its uncertainty and method; None where no items were counted."""
        value = self.j_per_token if item == "token" else self.j_per_sample
        figure = self.item_energy or self.best
        if value is None or not figure.energy_j:
            return figure if figure.energy_j is None and (self.tokens if item == "token" else self.samples) else None
        return figure.scaled(value / figure.energy_j)

    @property
    def unused_gpu_w(self) -> float | None:
        """Mean power of the measured GPUs where the work of this stage did not use them."""
        return None if self.item_energy is None else self.energy.gpu.mean_power_w(self.duration_s)

    @property
    def is_method_work(self) -> bool:
        """Whether comparisons and prices per item count it: all but setup, repeated work and idle baselines."""
        return self.role not in ("setup", "idle") and not self.repeated

    @model_validator(mode="before")
    @classmethod
    def _declare_kind(cls, value: Any) -> Any:
        """Schema version 1 had no roles: its stages are read by their names."""
        if isinstance(value, dict) and "role" not in value and isinstance(value.get("name"), str):
            return {**value, **kind_by_name(value["name"])._asdict()}
        return value


class Totals(Frozen):
    policy: str
    energy_j: float | None
    """What this run's own stages took under the policy; null where nothing was measured."""
    figure: EnergyFigure
    best: EnergyFigure
    """The policy's figure, else the estimate under its own label."""
    gpu: EnergyFigure
    cpu: EnergyFigure
    dram: EnergyFigure
    cpu_estimate: EnergyFigure
    codecarbon: EnergyFigure = NO_CODECARBON
    duration_s: float
    idle_power_w: float | None
    above_idle_j: float | None
    above_idle: EnergyFigure | None = None
    idle: tuple[IdleBaseline, ...] = ()
    grid: GridFactor | None = None
    pue: float | None = None
    co2e: Co2e | None = None
    """Of `best`; null unless energy.grid names a grid."""

    @property
    def components(self) -> EnergyByComponent:
        return EnergyByComponent(**{name: getattr(self, name) for name in EnergyByComponent.model_fields})


class DeviceEnergy(Frozen):
    """One counted device of one host, over the attempt without its idle baselines."""

    device: str
    name: str
    component: str
    figure: EnergyFigure


class RankPace(Frozen):
    """How one process of several kept up in a stage: the one whose own work takes longest holds up all others."""

    rank: int
    stage: str
    steps: int
    step_s: float
    """Mean time of a step, waiting for the others included."""
    own_s: float
    """Mean time a step of input and forward passes, which wait for nobody."""


class Attempt(Frozen):
    """One start of the run on one host; several hosts share an attempt's number."""

    number: int
    host: str
    boot_id: str
    started_at: str
    duration_s: float
    closed: bool
    """Whether the recorder wrote its closing line; false after a kill of everything."""
    energy: EnergyByComponent
    billed_s: float = 0.0
    """Its length without idle baselines: what `energy` is of."""
    devices: tuple[DeviceEnergy, ...] = ()
    clock_offset_s: float = 0.0
    """This host's clock against that of the host with rank 0, by marks that both set together; times are corrected."""
    ranks: tuple[RankPace, ...] = ()
    """Where the run had several processes: those on this host."""


class Result(Frozen):
    """A quality figure; `successes` of `trials` where it is a proportion."""

    value: float
    trials: int | None = None
    successes: int | None = None
    lower_is_better: bool = False
    """True for a loss: less of it is more quality."""
    standard_error: float | None = None
    """Over the test items, where whoever computed the figure states one."""


class ErrorRecord(Frozen):
    kind: str
    message: str
    hint: str = ""
    traceback: str = ""


class ProcessMark(Frozen):
    """The process that works, or worked last, on a run."""

    host: str
    boot_id: str
    pid: int


class RunRecord(Frozen):
    schema_version: int = SCHEMA_VERSION
    method_version: int = 1
    """By which rules its figures were computed."""
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
    """What trackers of the training loop found, by stage and tracker; each says it in its own way."""
    made: tuple[str, ...] = ()
    """Keys of the artefacts this run made."""
    lineage: tuple[Ancestor, ...] = ()
    """Every artefact the run made or used and all their ancestors, each once."""
    validity: Validity = Validity()
    machine_profile: str | None = None
    """Which calibration of this machine (`joulelab doctor --calibrate`) was in force."""
    error: ErrorRecord | None = None
    store: str | None = None
    """Where it looks for artifacts of other runs; null: in the folder that contains it (no --run-dir)."""
    process: ProcessMark | None = None
    """Who began the latest attempt; null while it waits for one, and in older records."""

    @field_validator("validity", mode="before")
    @classmethod
    def _notes_alone(cls, value: object) -> object:
        """Records written before there were grades hold the bare notes."""
        return {"notes": value} if isinstance(value, list | tuple) else value

    def with_notes(self, notes: Iterable[Note]) -> RunRecord:
        """The same record with more that a reader must know."""
        validity = self.validity.model_copy(update={"notes": (*self.validity.notes, *notes)})
        return self.model_copy(update={"validity": validity})

    def stage(self, name: str) -> StageRecord | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def policy(self) -> str:
        return self.totals.policy if self.totals else "measured"

    @property
    def inherited(self) -> tuple[Ancestor, ...]:
        """Ancestors that other runs paid for, or that came from elsewhere."""
        return tuple(ancestor for ancestor in self.lineage if ancestor.key not in self.made)
