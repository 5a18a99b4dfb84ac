"""Computes the record of a run from its traces and marks, without side effects.

A killed run is assembled by its first reader. Stage energies are counter differences over the stage's segments, so that
stages and overhead add up to the total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, ErrorComponent, amount_text, missing
from joulelab.meter.grids import GridFactor, Price, co2e, cost, parse_grid, parse_price
from joulelab.meter.health import most_contended
from joulelab.meter.integrate import device_energy, peak_power_w
from joulelab.meter.marks import PhaseAggregate
from joulelab.meter.series import Trace
from joulelab.runs.artifacts import Ancestor, ancestry_of
from joulelab.runs.attempt_data import SOURCE as CODECARBON
from joulelab.runs.attempt_data import (
    STARTUP,
    STEP,
    AttemptData,
    AttemptEvents,
    IdlePower,
    Window,
    idle_baselines,
    idle_power,
    leading,
    load_attempts,
    read_events,
    repeated_name,
    seconds,
    wall_seconds,
)
from joulelab.runs.environment import read_snapshot
from joulelab.runs.paths import RunPaths, read_json
from joulelab.runs.record import (
    MEASURED_COMPONENTS,
    METHOD_VERSION,
    SCHEMA_VERSION,
    Attempt,
    DeviceEnergy,
    EnergyByComponent,
    ErrorRecord,
    IdleBaseline,
    Note,
    PhaseRecord,
    RankPace,
    Result,
    RunRecord,
    Segment,
    StageKind,
    StageRecord,
    Status,
    Totals,
    Validity,
    add_components,
    all_lower_bounds,
    components_of,
    kind_by_name,
    with_bounds_of,
    work_policy,
)
from joulelab.runs.validity import gather, grade, notes_on

# Phases that do not wait for other ranks; backward pass and optimizer step wait for their gradients.
OWN_WORK = ("input", "forward")


def attempt_record(attempt: AttemptData, every_rank: bool = True) -> Attempt:
    """One host's part of an attempt. `every_rank=False` reads one process per host: of thousands, all take too long."""
    return Attempt(
        number=attempt.number,
        host=attempt.host,
        boot_id=attempt.trace.header.get("boot_id", ""),
        started_at=attempt.started_at(attempt.begin_ns),
        duration_s=(attempt.end_ns - attempt.begin_ns) / NS,
        closed=attempt.trace.ended,
        energy=attempt.energy(attempt.billed_windows),
        billed_s=seconds(attempt.billed_windows),
        devices=tuple(_devices(attempt)),
        clock_offset_s=attempt.clock_offset_s,
        ranks=tuple(_ranks(attempt, every_rank)),
    )


def _devices(attempt: AttemptData) -> list[DeviceEnergy]:
    return [
        DeviceEnergy(
            device=series.device,
            name=series.name,
            component=series.component,
            figure=device_energy(series, attempt.billed_windows),
        )
        for series in attempt.trace.devices
        if series.counted
    ]


def _ranks(attempt: AttemptData, every_rank: bool) -> list[RankPace]:
    """Empty if the run had a single process."""
    if attempt.rank == 0 and len(attempt.event_files) < 2:
        return []
    paces: list[RankPace] = []
    for rank, path in attempt.event_files if every_rank else attempt.event_files[:1]:
        events = attempt.events if rank == attempt.rank else read_events(path)
        paces += rank_paces(rank, events)
    return paces


def rank_paces(rank: int, events: AttemptEvents) -> list[RankPace]:
    """Step times of every stage that has steps."""
    return [
        RankPace(
            rank=rank,
            stage=stage,
            steps=steps.count,
            step_s=steps.sum_s / steps.count,
            own_s=sum(events.phases[stage, p].sum_s for p in OWN_WORK if (stage, p) in events.phases) / steps.count,
        )
        for (stage, phase), steps in sorted(events.phases.items())
        if phase == STEP and steps.count
    ]


OVERHEAD = "run.overhead"
"""The stage of time that belongs to no other stage."""
_OVERHEAD_KIND = StageKind("setup", STARTUP)
# With more hosts only one process of each is read: the event files of all take longer than all traces.
MANY_HOSTS = 64

Parts = list[tuple[AttemptData, list[Window]]]


@dataclass(frozen=True)
class _Frame:
    """What all stages of the run share."""

    policy: str
    status: Status
    idle: tuple[IdleBaseline, ...]
    idle_power: IdlePower | None
    grid: GridFactor | None
    pue: float | None
    price: Price | None
    environment: dict[str, Any]


def assemble(
    paths: RunPaths,
    status: Status,
    error: ErrorRecord | None = None,
    resolve_energy: Callable[[Ancestor], Ancestor] = lambda ancestor: ancestor,
    attempts: list[AttemptData] | None = None,
) -> RunRecord:
    """The full record from the files in the folder; identity and spec come from the record written at the start.

    `resolve_energy` gives an artifact of another run the energy that the record of that run states. `attempts` are
    loaded from the folder unless given, as for the rules of an earlier version.
    """
    opened = RunRecord.model_validate(read_json(paths.record))
    attempts = load_attempts(paths, status == "running") if attempts is None else attempts
    frame = _frame(paths, opened.spec.get("energy", {}), attempts, status)
    stages = _stage_records(attempts, frame)
    leads = leading(attempts)
    made, lineage = _lineage(opened.run_id, leads, stages, resolve_energy)
    totals = _totals(attempts, frame, stages)
    return opened.model_copy(
        update={
            "schema_version": SCHEMA_VERSION,
            "method_version": METHOD_VERSION,
            "status": status,
            "attempts": tuple(attempt_record(attempt, len(attempts) <= MANY_HOSTS) for attempt in attempts),
            "stages": stages,
            "totals": totals,
            "results": _results(leads, lineage, frame.policy),
            "findings": _findings(leads),
            "made": made,
            "lineage": lineage,
            "validity": _run_validity(attempts, stages, totals, frame),
            "machine_profile": frame.environment.get("machine_profile"),
            "error": error,
        }
    )


def _results(attempts: list[AttemptData], lineage: tuple[Ancestor, ...], policy: str) -> dict[str, Result]:
    results: dict[str, Result] = {}
    figures = {ancestor.key: components_of(ancestor).best(policy) for ancestor in lineage}
    for attempt in attempts:
        results |= {name: Result.model_validate(result) for name, result in attempt.events.results.items()}
        for name, (keys, per) in attempt.events.joules.items():
            known = [figures[key] for key in keys if key in figures and figures[key].energy_j is not None]
            # a result has no method, so it must not add estimates to measurements
            same_method = len({figure.measured for figure in known}) == 1
            if per and same_method and len(known) == len(keys):
                energy_j = sum(figure.energy_j or 0.0 for figure in known)
                results[name] = Result(value=energy_j / per, lower_is_better=True)
    return results


def _findings(attempts: list[AttemptData]) -> dict[str, dict[str, dict[str, Any]]]:
    """Findings of a later attempt replace those of an earlier one."""
    findings: dict[str, dict[str, dict[str, Any]]] = {}
    for attempt in attempts:
        for stage, by_tracker in attempt.events.findings.items():
            findings.setdefault(stage, {}).update(by_tracker)
    return findings


def _frame(paths: RunPaths, energy: dict[str, Any], attempts: list[AttemptData], status: Status) -> _Frame:
    policy = energy.get("total_energy_policy", "measured")
    idle = idle_baselines(attempts, policy)
    return _Frame(
        policy=policy,
        status=status,
        idle=idle,
        idle_power=idle_power(idle),
        grid=parse_grid(str(energy.get("grid", "none"))),
        pue=energy.get("pue"),
        price=parse_price(str(energy.get("price", "none"))),
        environment=read_snapshot(paths),
    )


def _node_note(totals: Totals) -> list[Note]:
    """The node's own meter next to the sum of components. The difference is fans, power supplies, disks, other jobs and
    components without a sensor."""
    if totals.node.energy_j is None:
        return []
    text = f"node meter ({', '.join(totals.node.sources)}): {amount_text(totals.node)} for the whole node, not added"
    return [Note(level="info", text=f"{text}; components of this run: {amount_text(totals.best)}")]


def _run_validity(
    attempts: list[AttemptData], stages: tuple[StageRecord, ...], totals: Totals | None, frame: _Frame
) -> Validity:
    if totals is None:
        return Validity()
    running = frame.status == "running"
    notes = [*notes_on(attempts, frame.policy, frame.idle, running), *_node_note(totals)]
    if running:
        return Validity(notes=tuple(notes))  # a grade is final, and the measurement is not
    parts = [(attempt, attempt.billed_windows) for attempt in attempts]
    evidence = gather(None, parts, totals.best, frame.policy, frame.idle, frame.environment)
    repeats = [stage.best.energy_j for stage in stages if stage.repeat is not None and stage.status == "done"]
    evidence = replace(evidence, repeats_j=tuple(joules for joules in repeats if joules is not None))
    return grade(evidence, notes)


def _stage_records(attempts: list[AttemptData], frame: _Frame) -> tuple[StageRecord, ...]:
    windows_by_stage: dict[str, Parts] = {}
    for attempt in attempts:
        for stage, windows in attempt.windows.items():
            windows_by_stage.setdefault(stage, []).append((attempt, windows))
    # An attempt that lost all its work on a stage has no time in it: that energy is in the repeated stage, not missing.
    windows_by_stage = {
        stage: [part for part in parts if part[1]] or parts for stage, parts in windows_by_stage.items()
    }
    overhead = [(attempt, attempt.overhead_windows) for attempt in attempts]
    # By attempt first: monotonic stamps of different boots or hosts cannot be compared.
    rows = sorted(windows_by_stage.items(), key=lambda row: (row[1][0][0].number, row[1][0][1][:1]))
    if any(windows for _, windows in overhead):
        rows.append((OVERHEAD, overhead))
    return tuple(_stage_record(name, number, parts, frame) for number, (name, parts) in enumerate(rows, 1))


def _stage_record(name: str, number: int, parts: Parts, frame: _Frame) -> StageRecord:
    durations, duration_s = [seconds(windows) for _, windows in parts], wall_seconds(parts)
    energy = add_components([attempt.energy(windows) for attempt, windows in parts], durations)
    unmetered = any(name in attempt.events.unmetered for attempt, _ in parts)
    if unmetered:  # a server did a part of the work where no meter was
        energy = all_lower_bounds(energy)
    figure, best = energy.under_policy(frame.policy), energy.best(frame.policy)
    peaks = peaks_w(parts, best)
    kind = _kind(name, parts)
    samples, tokens = (_count(parts, name, kind, what) for what in ("samples", "tokens"))
    rated = kind.role != "setup"
    metered = rated and not unmetered
    item_energy = _item_energy(energy, kind, parts, frame.policy) if metered and (samples or tokens) else None
    work_j = (item_energy or best).energy_j
    mean_w = best.mean_power_w(duration_s)
    above_idle = _above_idle(figure, frame.idle_power, sum(durations))
    return StageRecord(
        name=name,
        **kind._asdict(),
        number=number,
        status=_stage_status(name, kind, parts, frame.status),
        outside_totals=kind.role == "idle",
        segments=_segments(parts),
        duration_s=duration_s,
        energy=energy,
        best=best,
        energy_j=figure.energy_j,
        above_idle_j=above_idle and above_idle.energy_j,
        above_idle=above_idle,
        mean_power_w=mean_w,
        # the samples of the curve may straddle a short stage; its peak is then at least its mean
        peak_power_w=max((peak for peak in (*peaks, mean_w) if peak is not None), default=None),
        samples=samples,
        tokens=tokens,
        j_per_sample=_divide(work_j, samples if metered else None),
        j_per_token=_divide(work_j, tokens if metered else None),
        item_energy=item_energy,
        samples_per_s=_divide(samples if rated else None, duration_s),
        tokens_per_s=_divide(tokens if rated else None, duration_s),
        phases=_phases(parts, name),
        co2e=co2e(best, frame.grid, frame.pue),
        core_use=most_contended([attempt.core_use(windows) for attempt, windows in parts]),
        validity=_stage_validity(name, parts, best, frame),
    )


def _kind(name: str, parts: Parts) -> StageKind:
    """As declared by the latest attempt."""
    if name == OVERHEAD:
        return _OVERHEAD_KIND
    declared = [kind for attempt, _ in parts if (kind := attempt.events.kinds.get(name))]
    return declared[-1] if declared else kind_by_name(name)


def _item_energy(energy: EnergyByComponent, kind: StageKind, parts: Parts, policy: str) -> EnergyFigure | None:
    """CPU energy of work on the CPU while GPUs were measured too; None if all measured energy belongs to the work.

    The models of a run may be on the CPU while a teacher's server uses the GPU; its utilization shows that.
    """
    device = next((attempt.events.device for attempt, _ in reversed(parts) if attempt.events.device), None)
    device_policy = work_policy(policy, device)
    if device_policy == policy or energy.gpu.energy_j is None:
        return None
    readings = [state.utilization_percent for attempt, windows in parts for state in attempt.health.during(windows)]
    if kind.role != "inference" and any(readings):
        return None
    return energy.best(device_policy)


def _stage_validity(name: str, parts: Parts, best: EnergyFigure, frame: _Frame) -> Validity:
    if frame.status == "running":
        return Validity()
    return grade(gather(name, parts, best, frame.policy, frame.idle, frame.environment))


def _segments(parts: Parts) -> tuple[Segment, ...]:
    return tuple(
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
    )


def _stage_status(name: str, kind: StageKind, parts: Parts, run_status: Status) -> Status:
    last = leading([attempt for attempt, _ in parts])[-1]
    if name == OVERHEAD:
        return run_status
    if kind.part_of is not None:
        return "truncated" if kind.repeated else "done"
    status = last.events.statuses.get(name)
    if status in ("done", "failed", "truncated"):
        return status  # type: ignore[return-value]  # narrowed by the test above
    return "running" if run_status == "running" else "truncated"


def peaks_w(parts: Parts, best: EnergyFigure) -> list[float]:
    """One per attempt. Hosts work simultaneously, so the sum of their peaks is an upper bound."""
    by_attempt: dict[int, float] = {}
    for attempt, windows in parts:
        peak_w = _peak_w(attempt.trace, best, windows)
        if peak_w is not None:
            by_attempt[attempt.number] = by_attempt.get(attempt.number, 0.0) + peak_w
    return list(by_attempt.values())


def _count(parts: Parts, stage: str, kind: StageKind, what: str) -> int | None:
    """Items processed in the stage's own time; for a setup stage, those counted in the time split from another."""
    attempts = leading([attempt for attempt, _ in parts])
    if kind.role == "setup" and kind.part_of is not None:
        return _counted_as_setup(attempts, kind.part_of, what) or None
    known = [count for attempt in attempts if (count := attempt.events.counts.get(stage, {}).get(what)) is not None]
    if not known:
        return None
    # counts are cumulative over attempts; work that was lost is counted again by a later attempt
    lost = any(repeated_name(stage) in attempt.windows for attempt in attempts)
    return (known[-1] if lost else max(known)) - _counted_as_setup(attempts, stage, what)


def _counted_as_setup(attempts: list[AttemptData], stage: str, what: str) -> int:
    openings = [opening for attempt in attempts for opening in attempt.events.openings.get(stage, [])]
    return sum(opening.setup_counts.get(what, 0) for opening in openings)


def _peak_w(trace: Trace, best: EnergyFigure, windows: list[Window]) -> float | None:
    if best.sources == (CODECARBON,):
        return None  # CodeCarbon reports energy, not power
    components = ("cpu_estimate",) if best.method == "estimated" else MEASURED_COMPONENTS
    peaks = [peak_power_w(trace, component, windows) for component in components]
    return sum(peak for peak in peaks if peak is not None) if any(peak is not None for peak in peaks) else None


def _phases(parts: Parts, stage: str) -> dict[str, PhaseRecord]:
    merged: dict[str, PhaseAggregate] = {}
    for attempt in leading([attempt for attempt, _ in parts]):
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


def _above_idle(figure: EnergyFigure, idle: IdlePower | None, duration_s: float) -> EnergyFigure | None:
    """The figure minus idle power times the covered time."""
    if figure.energy_j is None or idle is None:
        return None
    # Idle power is subtracted only for time in which energy was seen; otherwise a gap would count
    # as negative energy.
    covered_s = figure.coverage * duration_s
    # Shared: all stages subtract the same idle power, so its error adds up over stages and cancels
    # in their difference.
    error = ErrorComponent(name="idle", joules=(idle.half_width_w * covered_s,), shared=True)
    above = figure.model_copy(update={"energy_j": figure.energy_j - idle.power_w * covered_s})
    return above.with_errors(error)


def _totals(attempts: list[AttemptData], frame: _Frame, stages: tuple[StageRecord, ...]) -> Totals | None:
    if not attempts:
        return None
    parts = [(attempt, attempt.billed_windows) for attempt in attempts]
    durations = [seconds(windows) for _, windows in parts]
    energy = add_components([attempt.energy(windows) for attempt, windows in parts], durations)
    # The total is computed from its own windows and not as the sum of the stages: the edges between
    # adjacent stages cancel in it, so that its interval is smaller than that of the sum.
    energy = with_bounds_of(energy, [stage.energy for stage in stages if not stage.outside_totals])
    figure, best = energy.under_policy(frame.policy), energy.best(frame.policy)
    above_idle = _above_idle(figure, frame.idle_power, sum(durations))
    return Totals(
        policy=frame.policy,
        energy_j=figure.energy_j,
        figure=figure,
        best=best,
        **{name: getattr(energy, name) for name in EnergyByComponent.model_fields},
        duration_s=wall_seconds(parts),
        idle_power_w=frame.idle_power and frame.idle_power.power_w,
        above_idle_j=above_idle and above_idle.energy_j,
        above_idle=above_idle,
        idle=frame.idle,
        grid=frame.grid,
        pue=frame.pue,
        co2e=co2e(best, frame.grid, frame.pue),
        price=frame.price,
        cost=cost(best, frame.price),
    )


def _lineage(
    run_id: str,
    attempts: list[AttemptData],
    stages: tuple[StageRecord, ...],
    resolve_energy: Callable[[Ancestor], Ancestor],
) -> tuple[tuple[str, ...], tuple[Ancestor, ...]]:
    """Artifacts made and used, with all ancestors; those made by this run have the energy of the final record."""
    bills = [bill for attempt in attempts for bill in attempt.events.bills.values()]
    if not bills:
        return (), ()
    made = dict.fromkeys(bill.key for bill in bills if bill.artifact.made_by == run_id)
    by_key = {ancestor.key: ancestor for ancestor in ancestry_of(bills)}
    for key in made:
        # Setup and repeated work that were split from a stage belong to the artifact as well.
        own = [stage for stage in stages if (stage.part_of or stage.name) in by_key[key].stages]
        kinds = [_kind_of(name, stages) for name in by_key[key].stages]
        known = {"roles": tuple(k.role for k in kinds), "activities": tuple(k.activity for k in kinds)}
        by_key[key] = by_key[key].model_copy(update={**known, **ancestor_energy(own)})
    return tuple(made), tuple(one if one.key in made else resolve_energy(one) for one in by_key.values())


def _kind_of(name: str, stages: tuple[StageRecord, ...]) -> StageKind:
    stage = next((stage for stage in stages if stage.name == name), None)
    return stage.kind if stage else kind_by_name(name)


def ancestor_energy(stages: list[StageRecord]) -> dict[str, dict[str, EnergyFigure]]:
    """Fields of an artifact's bill: its whole energy and, if it differs, the parts that comparisons include or not."""
    work = [stage for stage in stages if stage.is_method_work]
    setup = [stage for stage in stages if stage.role == "setup"]
    repeated = [stage for stage in stages if stage.repeated]
    if not work or len(work) == len(stages):
        return {"energy": stage_energy(stages), "work": {}, "setup": {}, "repeated": {}}
    return {
        "energy": stage_energy(stages),
        "work": stage_energy(work),
        "setup": stage_energy(setup) if setup else {},
        "repeated": stage_energy(repeated) if repeated else {},
    }


def stage_energy(stages: list[StageRecord]) -> dict[str, EnergyFigure]:
    """Energy of the stages that made an artifact, by component."""
    if not stages:
        return {"all": missing("none of its stages was recorded")}
    summed = add_components([stage.energy for stage in stages], [stage.duration_s for stage in stages])
    figures: dict[str, EnergyFigure] = {name: getattr(summed, name) for name in EnergyByComponent.model_fields}
    for name in ("machine", "node"):  # only on request or where the node has a meter; other bills do not mention it
        if figures[name].energy_j is None:
            del figures[name]
    return figures
