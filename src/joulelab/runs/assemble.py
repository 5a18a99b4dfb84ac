"""Trace x marks -> record. Pure reading: a run that was killed is assembled by whoever looks at it first.

Stage energies are counter differences over the stage's segments, so stages, overhead and total close on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from joulelab.clock import NS, iso
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.integrate import COMPONENTS, component_energy, peak_power_w
from joulelab.meter.phases import PhaseAggregate
from joulelab.meter.series import Trace, load_trace
from joulelab.runs.bills import Ancestor
from joulelab.runs.events import AttemptEvents, Window, read_events
from joulelab.runs.json_file import read_json
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import (
    MEASURED_COMPONENTS,
    Attempt,
    EnergyByComponent,
    ErrorRecord,
    Note,
    PhaseRecord,
    Result,
    RunRecord,
    Segment,
    StageRecord,
    Status,
    Totals,
    add_components,
)

OVERHEAD = "run.overhead"
IDLE_STAGES = ("idle.before", "idle.after")
ENOUGH_COVERAGE = 0.98


@dataclass(frozen=True)
class _AttemptData:
    number: int
    host: str
    trace: Trace
    events: AttemptEvents
    begin_ns: int
    end_ns: int
    windows: dict[str, list[Window]]

    def energy(self, windows: list[Window]) -> EnergyByComponent:
        return EnergyByComponent(**{name: component_energy(self.trace, name, windows) for name in COMPONENTS})

    def started_at(self, mono_ns: int) -> str:
        return iso(mono_ns / NS + self.trace.offset_s)


def assemble(paths: RunPaths, status: Status, error: ErrorRecord | None = None) -> RunRecord:
    """The full record from what lies in the folder; identity and spec come from the record written at the start."""
    opened = RunRecord.model_validate(read_json(paths.record))
    attempts = [_load_attempt(paths, host, number, trace) for host, number, trace in paths.traces()]
    policy = opened.spec.get("energy", {}).get("total_energy_policy", "measured")
    idle_w = _idle_power_w(attempts, policy)
    stages = _stage_records(attempts, policy, idle_w, status)
    made, lineage = _lineage(opened.run_id, attempts, stages)
    return opened.model_copy(
        update={
            "status": status,
            "attempts": tuple(_attempt_record(attempt) for attempt in attempts),
            "stages": stages,
            "totals": _totals(attempts, policy, idle_w),
            "results": {
                name: Result.model_validate(result)
                for attempt in attempts
                for name, result in attempt.events.results.items()
            },
            "made": made,
            "lineage": lineage,
            "validity": tuple(_notes(attempts, policy)),
            "error": error,
        }
    )


def _load_attempt(paths: RunPaths, host: str, number: int, trace_path: Path) -> _AttemptData:
    trace = load_trace(trace_path)
    events_path = paths.events(host, 0, number)
    events = read_events(events_path) if events_path.exists() else AttemptEvents()
    begin_ns = events.begin_ns or trace.first_ns
    end_ns = max(begin_ns, events.end_ns or trace.last_ns)
    windows = events.closed_windows(end_ns)
    return _AttemptData(number, host, trace, events, begin_ns, end_ns, windows)


def _without(whole: Window, holes: list[Window]) -> list[Window]:
    """What is left of a window when disjoint windows are cut out of it."""
    left, cursor = [], whole[0]
    for start, end in sorted(holes):
        if start > cursor:
            left.append((cursor, start))
        cursor = max(cursor, end)
    if cursor < whole[1]:
        left.append((cursor, whole[1]))
    return left


def _billed_windows(attempt: _AttemptData) -> list[Window]:
    """All of the attempt but its idle baselines."""
    idle = [window for stage in IDLE_STAGES for window in attempt.windows.get(stage, [])]
    return _without((attempt.begin_ns, attempt.end_ns), idle)


def _seconds(windows: list[Window]) -> float:
    return sum(end - start for start, end in windows) / NS


def _idle_power_w(attempts: list[_AttemptData], policy: str) -> float | None:
    """Mean measured idle power; an estimate from CPU time knows nothing about idle."""
    energy_j, duration_s = 0.0, 0.0
    for attempt in attempts:
        windows = [window for stage in IDLE_STAGES for window in attempt.windows.get(stage, [])]
        figure = attempt.energy(windows).under_policy(policy)
        if figure.energy_j is not None:
            energy_j += figure.energy_j
            duration_s += _seconds(windows)
    return energy_j / duration_s if duration_s else None


def _stage_records(
    attempts: list[_AttemptData], policy: str, idle_w: float | None, status: Status
) -> tuple[StageRecord, ...]:
    windows_by_stage: dict[str, list[tuple[_AttemptData, list[Window]]]] = {}
    for attempt in attempts:
        for stage, windows in attempt.windows.items():
            windows_by_stage.setdefault(stage, []).append((attempt, windows))
    overhead = []
    for attempt in attempts:
        staged = [window for windows in attempt.windows.values() for window in windows]
        overhead.append((attempt, _without((attempt.begin_ns, attempt.end_ns), staged)))
    rows = sorted(windows_by_stage.items(), key=lambda row: (row[1][0][0].number, row[1][0][1][:1]))
    if any(windows for _, windows in overhead):
        rows.append((OVERHEAD, overhead))
    return tuple(
        _stage_record(name, number, parts, policy, idle_w, status) for number, (name, parts) in enumerate(rows, 1)
    )


def _stage_record(
    name: str,
    number: int,
    parts: list[tuple[_AttemptData, list[Window]]],
    policy: str,
    idle_w: float | None,
    run_status: Status,
) -> StageRecord:
    durations = [_seconds(windows) for _, windows in parts]
    duration_s = sum(durations)
    energy = add_components([attempt.energy(windows) for attempt, windows in parts], durations)
    figure, best = energy.under_policy(policy), energy.best(policy)
    peaks = [_peak_w(attempt.trace, best, windows) for attempt, windows in parts]
    samples, tokens = _most(parts, name, "samples"), _most(parts, name, "tokens")
    return StageRecord(
        name=name,
        number=number,
        status=_stage_status(name, parts, run_status),
        outside_totals=name in IDLE_STAGES,
        segments=tuple(
            Segment(
                attempt=attempt.number,
                host=attempt.host,
                started_at=attempt.started_at(start),
                duration_s=(end - start) / NS,
                start_ns=start,
                end_ns=end,
            )
            for attempt, windows in parts
            for start, end in windows
        ),
        duration_s=duration_s,
        energy=energy,
        best=best,
        energy_j=figure.energy_j,
        above_idle_j=_above_idle(figure, idle_w, duration_s),
        mean_power_w=_divide(best.energy_j, duration_s),
        peak_power_w=max((peak for peak in peaks if peak is not None), default=None),
        samples=samples,
        tokens=tokens,
        j_per_sample=_divide(best.energy_j, samples),
        j_per_token=_divide(best.energy_j, tokens),
        samples_per_s=_divide(samples, duration_s),
        tokens_per_s=_divide(tokens, duration_s),
        phases=_phases(parts, name),
    )


def _stage_status(name: str, parts: list[tuple[_AttemptData, list[Window]]], run_status: Status) -> Status:
    last = parts[-1][0]
    if name == OVERHEAD:
        return run_status
    said = last.events.statuses.get(name)
    if said in ("done", "failed", "truncated"):
        return said  # type: ignore[return-value]  # narrowed by the test above
    return "running" if run_status == "running" else "truncated"


def _most(parts: list[tuple[_AttemptData, list[Window]]], stage: str, what: str) -> int | None:
    """Counts are cumulative over a stage, and work redone after a resume counts once: the largest is the count."""
    found = [attempt.events.counts.get(stage, {}).get(what) for attempt, _ in parts]
    return max((count for count in found if count is not None), default=None)


def _peak_w(trace: Trace, best: EnergyFigure, windows: list[Window]) -> float | None:
    components = ("cpu_estimate",) if best.method == "estimated" else MEASURED_COMPONENTS
    peaks = [peak_power_w(trace, component, windows) for component in components]
    return sum(peak for peak in peaks if peak is not None) if any(peak is not None for peak in peaks) else None


def _phases(parts: list[tuple[_AttemptData, list[Window]]], stage: str) -> dict[str, PhaseRecord]:
    merged: dict[str, PhaseAggregate] = {}
    for attempt, _ in parts:
        for (of_stage, phase), aggregate in attempt.events.phases.items():
            if of_stage == stage:
                merged.setdefault(phase, PhaseAggregate()).merge(aggregate)
    return {
        phase: PhaseRecord(
            count=row.count,
            sum_s=row.sum_s,
            mean_s=row.sum_s / row.count,
            p50_s=row.quantile_s(0.5),
            p95_s=row.quantile_s(0.95),
            max_s=row.max_s,
        )
        for phase, row in sorted(merged.items())
    }


def _divide(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _above_idle(figure: EnergyFigure, idle_w: float | None, duration_s: float) -> float | None:
    return figure.energy_j - idle_w * duration_s if figure.energy_j is not None and idle_w is not None else None


def _totals(attempts: list[_AttemptData], policy: str, idle_w: float | None) -> Totals | None:
    if not attempts:
        return None
    windows = [_billed_windows(attempt) for attempt in attempts]
    durations = [_seconds(pieces) for pieces in windows]
    energy = add_components([a.energy(pieces) for a, pieces in zip(attempts, windows, strict=True)], durations)
    figure = energy.under_policy(policy)
    return Totals(
        policy=policy,
        energy_j=figure.energy_j,
        figure=figure,
        best=energy.best(policy),
        gpu=energy.gpu,
        cpu=energy.cpu,
        dram=energy.dram,
        cpu_estimate=energy.cpu_estimate,
        duration_s=sum(durations),
        idle_power_w=idle_w,
        above_idle_j=_above_idle(figure, idle_w, sum(durations)),
    )


def _attempt_record(attempt: _AttemptData) -> Attempt:
    return Attempt(
        number=attempt.number,
        host=attempt.host,
        boot_id=attempt.trace.header.get("boot_id", ""),
        started_at=attempt.started_at(attempt.begin_ns),
        duration_s=(attempt.end_ns - attempt.begin_ns) / NS,
        closed=attempt.trace.ended,
        energy=attempt.energy(_billed_windows(attempt)),
    )


def _lineage(
    run_id: str, attempts: list[_AttemptData], stages: tuple[StageRecord, ...]
) -> tuple[tuple[str, ...], tuple[Ancestor, ...]]:
    """Artefacts made and used, with all ancestors; what this run made carries the joules of the final record."""
    energies = {stage.name: stage for stage in stages}
    made: dict[str, None] = {}
    by_key: dict[str, Ancestor] = {}
    for attempt in attempts:
        for bill in attempt.events.bills.values():
            if bill.artefact.made_by == run_id:
                made[bill.key] = None
            for ancestor in (*bill.ancestry, bill.artefact):
                by_key.setdefault(ancestor.key, ancestor)
    for key in made:
        own = [energies[name] for name in by_key[key].stages if name in energies]
        by_key[key] = by_key[key].model_copy(update={"energy": stage_energy(own)})
    return tuple(made), tuple(by_key.values())


def stage_energy(stages: list[StageRecord]) -> dict[str, EnergyFigure]:
    """The joules of the stages that made an artefact, by component."""
    if not stages:
        return {"all": missing("no stage of it was recorded")}
    summed = add_components([stage.energy for stage in stages], [stage.duration_s for stage in stages])
    return {name: getattr(summed, name) for name in EnergyByComponent.model_fields}


def _notes(attempts: list[_AttemptData], policy: str) -> list[Note]:
    notes: dict[str, Note] = {}
    for attempt in attempts:
        energy = attempt.energy(_billed_windows(attempt))
        for component in MEASURED_COMPONENTS:
            figure: EnergyFigure = getattr(energy, component)
            if figure.energy_j is None and component != "dram":
                fix = f" ({figure.fix})" if figure.fix else ""
                notes[component] = Note(level="info", text=f"{component} not measured: {figure.reason}{fix}")
            elif figure.energy_j is not None and figure.coverage < ENOUGH_COVERAGE:
                notes[component] = Note(
                    level="warning", text=f"{component}: the sensor covers {100 * figure.coverage:.1f} % of the run"
                )
        if energy.under_policy(policy).energy_j is None and energy.cpu_estimate.energy_j is not None:
            notes["estimate"] = Note(level="warning", text=_estimate_text(attempt.trace))
        for gap in attempt.trace.gaps:
            notes[f"gap {gap.device}"] = Note(level="warning", text=f"{gap.device}: readings failed ({gap.reason})")
        if not attempt.trace.ended:
            text = f"attempt {attempt.number} was cut off; its joules end with the last reading"
            notes[f"cut {attempt.number}"] = Note(level="warning", text=text)
        if attempt.events.marks_lost:
            text = f"{attempt.events.marks_lost} phase marks came faster than they could be read and were lost"
            notes["marks"] = Note(level="warning", text=text)
        for text in attempt.events.warnings:
            notes[text] = Note(level="warning", text=text)
    if len(attempts) > 1:
        notes["attempts"] = Note(level="info", text=f"the joules of all {len(attempts)} attempts are counted")
    return list(notes.values())


def _estimate_text(trace: Trace) -> str:
    device = next(series for series in trace.devices if series.component == "cpu_estimate")
    watts, source = device.facts["w_per_thread"], device.facts["source"]
    return (
        f"joules are ESTIMATED, not measured: CPU time x {watts:.1f} W per hardware thread "
        f"({device.name}: {source}); the scale may be off by ±{100 * device.gain_error_rel:.0f} %, "
        "which cancels in ratios on the same machine; memory, idle power and other devices are left out"
    )
