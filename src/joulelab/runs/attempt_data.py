"""One attempt of a run, read from its folder: trace, marks, device health, windows of its stages, idle baselines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from joulelab import clock
from joulelab.clock import NS, iso
from joulelab.meter.figures import CODECARBON, EnergyFigure, missing, total
from joulelab.meter.health import CoreUse, GpuState, Health, load_health
from joulelab.meter.integrate import COMPONENTS, component_energy, machine_energy, node_energy, without
from joulelab.meter.marks import PhaseAggregate, PhaseBook, RingReader, remove_ring
from joulelab.meter.series import Trace, load_trace
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.artifacts import Bill
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import (
    NO_CODECARBON,
    EnergyByComponent,
    IdleBaseline,
    StageKind,
    current_phase,
    current_spelling,
    kind_by_name,
)

Window = tuple[int, int]
STARTUP = "startup"
"""Activity of imports and device initialization. They belong to no stage and therefore to `run.overhead`."""


def setup_name(stage: str) -> str:
    return f"{stage}.setup"


def overlap(one: Window, other: Window) -> Window | None:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else None


@dataclass
class Opening:
    """One opening of a stage that is not nested in another one."""

    begin_ns: int
    end_ns: int | None = None
    resumed: bool = False
    """Whether it continued the work of earlier attempts instead of starting over."""
    resumed_at: int | None = None
    """Checkpoint (step) that it resumed from; None: all earlier work was kept."""
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    """(step, time) of each point that a later attempt can resume from."""
    setup_counts: dict[str, int] = field(default_factory=dict)
    """Items counted in setup time."""
    artifact: bool = False
    """Whether its artifact was finished, so that no later attempt repeats it."""


@dataclass
class AttemptEvents:
    """The event file of one process of an attempt; segments still open have no end."""

    begin_ns: int = 0
    end_ns: int | None = None
    end_status: str | None = None
    """How the attempt ended; None if it was killed, and on worker ranks."""
    method_version: int = 1
    """Method version of the joulelab that recorded the attempt."""
    environment: dict[str, str] = field(default_factory=dict)
    """Digests of the environment snapshot; empty in the first release, and on worker ranks."""
    windows: dict[str, list[Window]] = field(default_factory=dict)
    open_stages: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, StageKind] = field(default_factory=dict)
    openings: dict[str, list[Opening]] = field(default_factory=dict)
    """Openings of stages that are not nested in another one."""
    setups: list[tuple[str, str, Window]] = field(default_factory=list)
    """(stage, activity, window) of setup inside a stage."""
    statuses: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    unmetered: set[str] = field(default_factory=set)
    """Stages with work that was done where no meter was: they have no energy per item."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    joules: dict[str, tuple[list[str], int]] = field(default_factory=dict)
    """Results that are the energy of artifacts: name -> (keys, divisor)."""
    findings: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Findings of training loop trackers, by stage and tracker."""
    bills: dict[tuple[str, str | None], Bill] = field(default_factory=dict)
    """Bills of artifacts made or used, by key and role of use: two inputs may have the same name."""
    device: str | None = None
    """Device of the models (`cpu`, `cuda`); None if not declared."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    phases: dict[tuple[str, str], PhaseAggregate] = field(default_factory=dict)
    marks_lost: int = 0

    def closed_windows(self, last_ns: int) -> dict[str, list[Window]]:
        """Segments by stage; those still open end with the trace.

        Setup inside a stage is split from it: start-up belongs to no stage, the rest to a separate setup stage.
        """
        windows = {stage: list(pairs) for stage, pairs in self.windows.items()}
        for stage, begin_ns in self.open_stages.items():
            windows.setdefault(stage, [])
            if last_ns > begin_ns:
                windows[stage].append((begin_ns, last_ns))
        for stage, activity, window in self.setups:
            inside = [common for segment in windows.get(stage, []) if (common := overlap(segment, window))]
            windows[stage] = [rest for segment in windows.get(stage, []) for rest in without(segment, inside)]
            if activity != STARTUP and inside:
                windows.setdefault(setup_name(stage), []).extend(inside)
        return windows


def read_events(path: Path) -> AttemptEvents:
    events = AttemptEvents()
    names: dict[tuple[str, int], str] = {}
    book = PhaseBook()
    marks_read = 0
    for line in read_lines(path):
        kind = line["kind"]
        if kind == "run":
            if line["edge"] == "begin":
                events.begin_ns = line["mono_ns"]
                events.method_version = line.get("method_version", 1)
                events.environment = line.get("environment", {})
            else:
                events.end_ns, events.end_status = line["mono_ns"], line.get("status")
        elif kind == "stage":
            _take_edge(events, line)
        elif kind == "stage_closed":
            events.statuses[line["stage"]] = line["status"]
            for opening in events.openings.get(line["stage"], [])[-1:]:
                opening.end_ns = opening.end_ns or line["mono_ns"]
        elif kind == "setup":
            stage, activity = line["stage"], line["activity"]
            events.setups.append((stage, activity, (line["begin_ns"], line["end_ns"])))
            known = events.kinds.get(setup_name(stage))
            if activity != STARTUP and (known is None or activity == "compile"):
                events.kinds[setup_name(stage)] = StageKind("setup", activity, part_of=stage)
        elif kind == "setup_counts":
            for opening in events.openings.get(line["stage"], [])[-1:]:
                opening.setup_counts.update(line["counts"])
        elif kind == "unmetered":
            events.unmetered.add(line["stage"])
        elif kind in ("checkpoint", "resumed"):
            _take_position(events, line)
        elif kind == "progress":
            events.counts.setdefault(line["stage"], {}).update(line["counts"])
        elif kind == "result":
            if math.isfinite(line["result"]["value"]):  # earlier versions wrote those of diverged models too
                events.results[line["name"]] = line["result"]
        elif kind == "joules":
            events.joules[line["name"]] = (line["of"], line["per"])
        elif kind == "tracker":
            events.findings.setdefault(line["stage"], {})[line["name"]] = current_spelling(line["values"])
        elif kind in ("artifact", "artefact"):  # the second in events of earlier versions
            bill = Bill.model_validate(line["bill"])
            events.bills[bill.key, bill.artifact.used_as] = bill
            for stage in bill.artifact.stages:
                for opening in events.openings.get(stage, []):
                    opening.artifact = True
        elif kind == "device":
            events.device = line["device"]
        elif kind == "warning":
            events.warnings.append(line["text"])
        elif kind == "note":
            events.notes.append(line["text"])
        elif kind == "name":
            names[line["of"], line["number"]] = line["name"]
        elif kind == "phases":
            book.add_line(line)
            marks_read, events.marks_lost = line["marks_read"], line["marks_lost"]
    _take_undrained(book, path, marks_read)
    for (stage, phase), aggregate in book.rows.items():
        of_stage = names.get(("stage", stage), "")
        events.phases[of_stage, current_phase(of_stage, names.get(("phase", phase), f"phase {phase}"))] = aggregate
    return events


def _take_edge(events: AttemptEvents, line: dict[str, Any]) -> None:
    stage, mono_ns = line["stage"], line["mono_ns"]
    if line["edge"] == "begin":
        events.open_stages[stage] = mono_ns
        if "role" in line:
            events.kinds[stage] = StageKind(line["role"], line["activity"], line.get("repeat"))
            if line.get("opened"):
                events.openings.setdefault(stage, []).append(Opening(mono_ns))
        else:  # an attempt older than roles
            events.kinds.setdefault(stage, kind_by_name(stage))
    elif stage in events.open_stages:
        events.windows.setdefault(stage, []).append((events.open_stages.pop(stage), mono_ns))


def _take_position(events: AttemptEvents, line: dict[str, Any]) -> None:
    if opened := events.openings.get(line["stage"]):
        if line["kind"] == "resumed":
            opened[-1].resumed, opened[-1].resumed_at = True, line["at"]
        else:
            opened[-1].checkpoints.append((line["at"], line["mono_ns"]))


def _take_undrained(book: PhaseBook, path: Path, marks_read: int) -> None:
    """A remaining ring was not fully drained: recorder and program were killed together."""
    ring = path.with_suffix(".ring")
    if ring.exists():
        book.add_marks(RingReader(ring, marks_read).drain())


def drain_ring(path: Path) -> None:
    """Move the marks that a killed recorder left in its ring into the event file and delete the ring."""
    ring = path.with_suffix(".ring")
    if not ring.exists():
        remove_ring(ring)  # a link to a temporary file that is gone
        return
    drained = [line for line in read_lines(path) if line["kind"] == "phases"]
    reader = RingReader(ring, drained[-1]["marks_read"] if drained else 0)
    book = PhaseBook()
    book.add_marks(reader.drain())
    if book.rows or reader.lost:
        file = LineFile(path)
        lost = reader.lost + (drained[-1]["marks_lost"] if drained else 0)
        file.append({**clock.now().fields(), **book.to_line(reader.read, lost)}, sync=True)
        file.close()
    remove_ring(ring)


# CodeCarbon readings: cumulative energy every few seconds (`codecarbon/readings.<host>.<attempt>.jsonl`, written by
# `trackers/codecarbon.py`). The energy of a stage is the difference at its edges, interpolated linearly between two
# readings. CodeCarbon uses GPU counters where available, and constants for RAM and often for the CPU.

FOLDER = "codecarbon"
SOURCE = CODECARBON
OWN_FIGURE = "CodeCarbon's own figure"


def readings_path(run_folder: Path, host: str, attempt: int) -> Path:
    return run_folder / FOLDER / f"readings.{host}.{attempt}.jsonl"


@dataclass(frozen=True)
class CodecarbonReadings:
    """Cumulative energy at monotonic times; `problem` is the reason if there is none."""

    stamps_ns: tuple[int, ...] = ()
    energy_j: tuple[float, ...] = ()
    version: str = ""
    problem: str | None = None

    def energy(self, windows: Sequence[Window]) -> EnergyFigure:
        if not windows:
            return missing("the stage never ran")
        if len(self.stamps_ns) < 2:
            return missing(f"CodeCarbon reported nothing: {self.problem}") if self.problem else NO_CODECARBON
        durations = [(end - start) / NS for start, end in windows]
        return total([self._window(window) for window in windows], durations)

    def _window(self, window: Window) -> EnergyFigure:
        start, end = max(window[0], self.stamps_ns[0]), min(window[1], self.stamps_ns[-1])
        if end <= start:
            return missing("CodeCarbon has no reading in this window")
        stamps = np.array(self.stamps_ns, dtype=float)
        at_edges = np.interp([start, end], stamps, self.energy_j)
        # An edge is between two readings: in the worst case all energy of that interval is on one side of it. Where
        # both edges are readings, as in an imported total, the rest of its error is not known.
        on_readings = start in self.stamps_ns and end in self.stamps_ns
        largest_step_j = float(np.max(np.diff(self.energy_j)))
        return EnergyFigure(
            energy_j=float(at_edges[1] - at_edges[0]),
            method="estimated",
            coverage=min(1.0, (end - start) / max(window[1] - window[0], 1)),
            half_width_j=None if on_readings else largest_step_j / 2,
            sources=(SOURCE,),
            reason=f"{OWN_FIGURE} ({self.version})" if self.version else OWN_FIGURE,
        )


def load_codecarbon(run_folder: Path, host: str, attempt: int) -> CodecarbonReadings:
    path = readings_path(run_folder, host, attempt)
    if not path.exists():
        return CodecarbonReadings()
    stamps, joules, version, problem = [], [], "", "no reading was written"
    for line in read_lines(path):
        if line.get("kind") == "codecarbon":
            stamps.append(int(line["mono_ns"]))
            joules.append(float(line["energy_j"]))
        elif line.get("kind") == "problem":
            problem = str(line["text"])
        version = str(line.get("codecarbon_version", version))
    return CodecarbonReadings(tuple(stamps), tuple(joules), version, problem)


STEP = "step"
"""The phase of one training step; ranks are synchronized at its end."""


@dataclass(frozen=True, eq=False)
class AttemptData:
    number: int
    host: str
    trace: Trace
    trace_path: Path
    events: AttemptEvents
    begin_ns: int
    end_ns: int
    windows: dict[str, list[Window]]
    codecarbon: CodecarbonReadings
    rank: int = 0
    """Rank of the process whose marks these are: the lowest on the host."""
    event_files: tuple[tuple[int, Path], ...] = ()
    """(rank, file) of all processes on the host."""
    clock_offset_s: float = 0.0
    """Wall time of this host minus that of the host of rank 0."""

    def energy(self, windows: list[Window]) -> EnergyByComponent:
        figures = {name: component_energy(self.trace, name, windows) for name in COMPONENTS}
        estimate = figures["cpu_estimate"]
        if estimate.energy_j is not None and (use := self.core_use(windows)) is not None:
            figures["cpu_estimate"] = estimate.model_copy(update={"cpu_contention": use.contended})
        machine = machine_energy(self.trace, windows)
        node = node_energy(self.trace, windows)
        return EnergyByComponent(**figures, codecarbon=self.codecarbon.energy(windows), machine=machine, node=node)

    def core_use(self, windows: list[Window]) -> CoreUse | None:
        return self.health.core_use_during(windows)

    def started_at(self, mono_ns: int) -> str:
        return iso(mono_ns / NS + self.trace.offset_s - self.clock_offset_s)

    @cached_property
    def health(self) -> Health:
        return load_health(self.trace_path)

    @property
    def idle_stages(self) -> list[str]:
        kinds = self.events.kinds
        return [stage for stage in self.windows if stage in kinds and kinds[stage].role == "idle"]

    @property
    def idle_windows(self) -> list[Window]:
        return [window for stage in self.idle_stages for window in self.windows[stage]]

    @property
    def billed_windows(self) -> list[Window]:
        """The attempt without its idle baselines."""
        return without((self.begin_ns, self.end_ns), self.idle_windows)

    @property
    def overhead_windows(self) -> list[Window]:
        """Time in no stage."""
        staged = [window for windows in self.windows.values() for window in windows]
        return without((self.begin_ns, self.end_ns), staged)


def load_attempts(paths: RunPaths, running: bool = False) -> list[AttemptData]:
    """One entry per attempt and host, in order of attempts, the host of rank 0 first.

    `running`: an open attempt ends where all devices have reported, not with the last line of any of them. A reading
    that is still to come is no missing energy.
    """
    files = paths.event_files()
    attempts = [
        _load_attempt(paths, host, number, trace, files.get((host, number), []), running)
        for host, number, trace in paths.traces()
    ]
    ordered = sorted(attempts, key=lambda attempt: (attempt.number, attempt.rank, attempt.host))
    _split_repeated(ordered)
    return with_clock_offsets(ordered)


def repeated_name(stage: str) -> str:
    return f"{stage}.repeated"


def _split_repeated(attempts: Sequence[AttemptData]) -> None:
    """Move the time whose work was lost into separate stages, in the windows of each attempt.

    Lost is the work after the checkpoint from which the next attempt resumed, or all of it if the next attempt started
    over; a finished artifact is never lost. A stage nested in the lost time is lost with it.
    """
    numbers = sorted({attempt.number for attempt in attempts}, reverse=True)
    for stage in dict.fromkeys(stage for attempt in attempts for stage in attempt.events.openings):
        later: Opening | None = None
        for number in numbers:
            kept: Opening | None = None
            for attempt in reversed([one for one in attempts if one.number == number]):
                for opening in attempt.events.openings.get(stage, []):
                    end_ns = opening.end_ns or attempt.end_ns
                    lost_ns = _lost_from_ns(opening, later, end_ns)
                    _move_lost(attempt, (lost_ns, end_ns))
                    if lost_ns > opening.begin_ns:
                        kept = opening
                    else:
                        opening.setup_counts.clear()
            later = kept or later  # if nothing was kept, the same resume also decides about the attempts before


def _lost_from_ns(opening: Opening, later: Opening | None, end_ns: int) -> int:
    if later is None or opening.artifact:
        return end_ns
    if not later.resumed:
        return opening.begin_ns
    if later.resumed_at is None:
        return end_ns
    kept = [at_ns for at, at_ns in opening.checkpoints if at <= later.resumed_at]
    # The newest checkpoint of this attempt that is not newer than the step resumed from: work after
    # it was done again.
    return max(kept, default=opening.begin_ns)


def _move_lost(attempt: AttemptData, lost: Window) -> None:
    for stage, windows in list(attempt.windows.items()):
        kind = attempt.events.kinds.get(stage) or kind_by_name(stage)
        inside = [common for segment in windows if (common := overlap(segment, lost))]
        if kind.role in ("setup", "idle") or kind.repeated or not inside:
            continue
        attempt.windows[stage] = [rest for segment in windows for rest in without(segment, inside)]
        attempt.windows.setdefault(repeated_name(stage), []).extend(inside)
        attempt.events.kinds[repeated_name(stage)] = kind._replace(part_of=stage, repeated=True)


def leading(attempts: Sequence[AttemptData]) -> list[AttemptData]:
    """The host of rank 0 of each attempt: counts, results and warnings are the same on all ranks and count once."""
    first: dict[int, AttemptData] = {}
    for attempt in attempts:
        first.setdefault(attempt.number, attempt)
    return list(first.values())


def _load_attempt(
    paths: RunPaths, host: str, number: int, trace_path: Path, files: list[tuple[int, Path]], running: bool
) -> AttemptData:
    trace = load_trace(trace_path)
    rank, events = (files[0][0], read_events(files[0][1])) if files else (0, AttemptEvents())
    begin_ns = events.begin_ns or trace.first_ns
    open_end_ns = trace.reported_until_ns if running and not trace.ended else trace.last_ns
    end_ns = max(begin_ns, events.end_ns or open_end_ns)
    return AttemptData(
        number=number,
        host=host,
        trace=trace,
        trace_path=trace_path,
        events=events,
        begin_ns=begin_ns,
        end_ns=end_ns,
        windows=events.closed_windows(end_ns),
        codecarbon=load_codecarbon(paths.folder, host, number),
        rank=rank,
        event_files=tuple(files),
    )


def with_clock_offsets(attempts: Sequence[AttemptData]) -> list[AttemptData]:
    """Attempts with the clock offset of each host to the host of rank 0.

    Energy needs no common clock, since each host has its own marks; wall times do. Ranks end a training stage
    simultaneously, so the difference of these times is the clock offset.
    """
    corrected = []
    leads = {attempt.number: attempt for attempt in leading(attempts)}
    for attempt in attempts:
        lead = leads[attempt.number]
        # The median over stages: one rank may leave a stage late because it writes a file, which is
        # not a clock offset.
        offsets = [] if lead is attempt else _end_offsets_s(attempt, lead)
        corrected.append(replace(attempt, clock_offset_s=median(offsets)) if offsets else attempt)
    return corrected


def _end_offsets_s(attempt: AttemptData, lead: AttemptData) -> list[float]:
    return [
        (windows[-1][1] / NS + attempt.trace.offset_s) - (lead.windows[stage][-1][1] / NS + lead.trace.offset_s)
        for stage, windows in attempt.windows.items()
        if windows and lead.windows.get(stage) and (stage, STEP) in attempt.events.phases
    ]


def seconds(windows: list[Window]) -> float:
    return sum(end - start for start, end in windows) / NS


def wall_seconds(parts: Sequence[tuple[AttemptData, list[Window]]]) -> float:
    """Elapsed time: hosts work in parallel, attempts one after the other."""
    longest: dict[int, float] = {}
    for attempt, windows in parts:
        longest[attempt.number] = max(longest.get(attempt.number, 0.0), seconds(windows))
    return sum(longest.values())


# Idle baselines: power, stability and state of the idle machine. An H200 draws 126 W two seconds after a load, 123 W
# after ten, and 80 W once its clocks have dropped, so idle power is meaningless without its state and stability.

# Above these limits the machine was not idle: clocks dropping, another program, a GPU still cooling down.
STEADY_SPREAD_REL = 0.05
STEADY_DRIFT_REL = 0.05
SEGMENT_S = 1.0
_MAX_SEGMENTS = 20
MeanPower = Callable[[EnergyFigure, float], float | None]


def idle_baselines(
    attempts: Sequence[AttemptData], policy: str, mean_power_w: MeanPower = EnergyFigure.mean_power_w
) -> tuple[IdleBaseline, ...]:
    """Measured baselines only: an estimate from CPU time does not include idle power."""
    baselines = []
    for attempt in attempts:
        for stage in attempt.idle_stages:
            windows = attempt.windows[stage]
            segments = [[segment] for window in windows for segment in _split(window)]
            power_w, *segment_powers_w = (
                mean_power_w(attempt.energy(part).under_policy(policy), seconds(part)) for part in (windows, *segments)
            )
            if power_w is not None:
                known = [value for value in segment_powers_w if value is not None]
                baselines.append(_baseline(attempt, stage, windows, power_w, known))
    return tuple(baselines)


def _baseline(
    attempt: AttemptData, stage: str, windows: list[Window], power_w: float, segment_powers_w: list[float]
) -> IdleBaseline:
    spread, drift = spread_and_drift(segment_powers_w)
    states = attempt.health.during(windows)
    loads = [start for name, spans in attempt.windows.items() if name not in attempt.idle_stages for start, _ in spans]
    return IdleBaseline(
        stage=stage,
        before_load=windows[0][0] <= min(loads, default=windows[0][0]),
        attempt=attempt.number,
        duration_s=seconds(windows),
        power_w=power_w,
        spread_rel=spread,
        drift_rel=drift,
        stable=is_steady(spread, drift),
        sm_clock_MHz=_median(states, "sm_clock_mhz"),
        temperature_C=_median(states, "temperature_c"),
        gpu_utilization_percent=_median(states, "utilization_percent"),
        host=attempt.host,
    )


def _split(window: Window) -> list[Window]:
    """Segments of about a second, which is long compared with the refresh period of every sensor."""
    count = max(1, min(_MAX_SEGMENTS, int((window[1] - window[0]) / NS / SEGMENT_S)))
    edges = [window[0] + (window[1] - window[0]) * number // count for number in range(count + 1)]
    return list(pairwise(edges))


def spread_and_drift(powers_w: Sequence[float]) -> tuple[float | None, float | None]:
    """Standard deviation over mean, and second half over first half minus 1; None if there are too few segments."""
    if len(powers_w) < 2 or not any(powers_w):
        return None, None
    half = len(powers_w) // 2
    # A slow trend hides in the standard deviation of few segments; comparing halves finds a card
    # whose clocks are still dropping.
    first, second = statistics.fmean(powers_w[:half]), statistics.fmean(powers_w[-half:])
    spread = statistics.stdev(powers_w) / statistics.fmean(powers_w)
    return spread, second / first - 1 if first else None


def is_steady(spread_rel: float | None, drift_rel: float | None) -> bool:
    if spread_rel is None or drift_rel is None:
        return False
    return spread_rel <= STEADY_SPREAD_REL and abs(drift_rel) <= STEADY_DRIFT_REL


class IdlePower(NamedTuple):
    power_w: float
    half_width_w: float
    """95 %: spread of the baseline, and difference to a stable idle state after the load."""


def idle_power(baselines: Sequence[IdleBaseline]) -> IdlePower | None:
    """From the stable baselines before the load; while cooling down after it the machine draws more power.

    A stable baseline after the load is a second idle state (its clocks may differ). Which of the two the machine would
    have been in without the load is unknown, so their difference is part of the error.
    """
    before = [baseline for baseline in baselines if baseline.before_load]
    stable_after = [baseline for baseline in baselines if not baseline.before_load and baseline.stable]
    chosen = [baseline for baseline in before if baseline.stable] or before or stable_after or list(baselines)
    duration_s = sum(baseline.duration_s for baseline in chosen)
    if duration_s <= 0:
        return None
    power_w = sum(baseline.power_w * baseline.duration_s for baseline in chosen) / duration_s
    # A baseline too short for segments has no spread; 10 % is twice what counts as steady.
    spread_w = statistics.fmean((b.spread_rel if b.spread_rel is not None else 0.1) * b.power_w for b in chosen)
    # Standard error of the mean over segments. At most 20 count: idle power drifts slowly, so a
    # longer baseline has more segments but not more independent ones.
    segments = max(1, min(_MAX_SEGMENTS, int(duration_s / SEGMENT_S)))
    other_w = max((abs(baseline.power_w - power_w) for baseline in (*chosen, *stable_after)), default=0.0)
    # The difference of two idle states is a bound, not a standard deviation, and is added as a 95 %
    # half-width.
    return IdlePower(power_w, math.hypot(1.96 * spread_w / math.sqrt(segments), other_w))


def _median(states: Sequence[GpuState], name: str) -> float | None:
    values = [getattr(state, name) for state in states if getattr(state, name) is not None]
    return float(statistics.median(values)) if values else None
