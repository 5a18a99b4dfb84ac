"""How far a measurement can be trusted: a grade from A to C, the worst of several checks, each with its reason.

    A   from a counter, over windows long compared with its refresh period, fully covered, with a stable idle baseline
        and no other process on the device
    B   usable, with a caveat
    C   do not quote it as a measurement

Every check is a pure function of `Evidence`, which `gather` collects from the run folder. `notes_on` writes the remarks
that a reader of the figures needs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from joulelab.errors import InvalidMeasurement
from joulelab.meter.figures import COVERED, EnergyFigure, coverage_text, covered_percent
from joulelab.meter.health import CoreUse, most_contended, throttle_shares
from joulelab.meter.integrate import both_paths
from joulelab.meter.sensors.nvml import POWER_LIMIT
from joulelab.meter.series import DeviceSeries, Trace
from joulelab.runs.attempt_data import SOURCE as CODECARBON
from joulelab.runs.attempt_data import AttemptData, Window, seconds
from joulelab.runs.record import (
    MEASURED_COMPONENTS,
    Check,
    Grade,
    IdleBaseline,
    Note,
    RunRecord,
    Validity,
    policy_components,
)
from joulelab.units import energy_text, plural

# A simulated 100 ms latch on square waves: 1 s windows (10 refreshes) err by 3.5 % at p95, 10 s windows by a tenth.
LONG_WINDOW_REFRESHES = 50
SHORT_WINDOW_REFRESHES = 10
GOOD_INTERVAL_REL, FAIR_INTERVAL_REL = 0.03, 0.10
GOOD_COVERAGE, FAIR_COVERAGE = 0.98, 0.90
# Counter and 20 ms samples of an H200 agree within 1 % on steady loads.
# Power that is polled less often misses changes: on an H200 it was off by up to 6 % (average power) and 72 % (instant
# power) at one reading per second (docs/results.md).
SLOW_POLLING_S = 0.5
GOOD_AGREEMENT_REL, FAIR_AGREEMENT_REL = 0.03, 0.10
GOOD_SPREAD_REL, FAIR_SPREAD_REL = 0.03, 0.10
# A GPU that throttles for a moment at start-up does not make a throttled run.
THROTTLED_SHARE = 0.02

Answer = tuple[Grade, str]


@dataclass(frozen=True)
class Evidence:
    """Input of the checks, for one stage or for the run."""

    figure: EnergyFigure
    window_s: float
    """Total length of all windows."""
    windows: int = 1
    """Number of windows; each has two edges that fall between two refreshes of the sensor."""
    refresh_s: float | None = None
    """The longest refresh period among the sensors of the figure."""
    paths_j: tuple[float, float] | None = None
    """Energy by counter alone and by integrated power alone; None if there is only one of them."""
    idle: tuple[IdleBaseline, ...] | None = ()
    """None if not applicable, as for an idle baseline itself."""
    other_processes: tuple[str, ...] = ()
    """Warnings about other processes on the device."""
    sensor_warnings: tuple[str, ...] = ()
    throttled: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 1
    interrupted: int = 0
    shared: tuple[str, ...] = ()
    """Devices whose energy includes other jobs."""
    unmeasured: tuple[str, ...] = ()
    """Components of the policy's total that exist on this machine but were not measured."""
    repeats_j: tuple[float, ...] = ()
    core_use: CoreUse | None = None
    """CPU use of this run and of other processes; None if not recorded."""
    imported: str = ""
    """Kind of the log that the readings come from, if joulelab did not record them."""
    stated: bool = False
    """Whether a component is a total that another program stated, without readings."""


def grade(evidence: Evidence, notes: Sequence[Note] = ()) -> Validity:
    checks = []
    for name, check in CHECKS.items():
        answer = check(evidence)
        if answer is not None:
            checks.append(Check(name=name, ok=answer[0] == "A", grade=answer[0], text=answer[1]))
    return Validity(grade=max(check.grade for check in checks), checks=tuple(checks), notes=tuple(notes))


def with_answer(validity: Validity, name: str, answer: Answer | None) -> Validity:
    """The same checks with a new result for one of them, and the resulting grade."""
    if answer is None or validity.grade is None:
        return validity
    new = Check(name=name, ok=answer[0] == "A", grade=answer[0], text=answer[1])
    checks = tuple(new if check.name == name else check for check in validity.checks)
    return validity.model_copy(update={"checks": checks, "grade": max(check.grade for check in checks)})


def check_source(evidence: Evidence) -> Answer:
    figure = evidence.figure
    if figure.energy_j is None:
        return "C", "missing: neither measured nor estimated"
    if figure.sources == (CODECARBON,):
        return "C", "reported by CodeCarbon: partly sensors, partly its constants"
    if figure.method == "estimated":
        return "C", "estimated by a model, not measured"
    if figure.method == "integrated":
        return "B", "no energy counter: power was integrated"
    return "A", "read from an energy counter"


def check_window(evidence: Evidence) -> Answer | None:
    if not evidence.figure.measured or not evidence.refresh_s:
        return None
    # errors at the edges are independent, so n windows have sqrt(n) times the error of one, not n times
    refreshes = evidence.window_s / math.sqrt(max(1, evidence.windows)) / evidence.refresh_s
    number = "" if evidence.windows == 1 else f" in {evidence.windows} windows"
    text = f"{evidence.window_s:.3g} s{number}, equivalent to {refreshes:.0f} sensor refreshes"
    return _step(-refreshes, -LONG_WINDOW_REFRESHES, -SHORT_WINDOW_REFRESHES, text, "too few")


def check_interval(evidence: Evidence) -> Answer | None:
    figure = evidence.figure
    if not figure.measured or not figure.energy_j or figure.half_width_j is None:
        return None
    if figure.is_lower_bound:
        covered = f" ({coverage_text(figure.coverage)})" if figure.coverage < COVERED else ""
        return ("B" if figure.coverage >= FAIR_COVERAGE else "C"), f"a lower bound has no interval{covered}"
    relative = figure.half_width_j / abs(figure.energy_j)
    text = f"random 95 % interval ±{100 * relative:.1f} %"
    return _step(relative, GOOD_INTERVAL_REL, FAIR_INTERVAL_REL, text, "wide")


def check_coverage(evidence: Evidence) -> Answer | None:
    if evidence.figure.energy_j is None:
        return None
    coverage = evidence.figure.coverage
    text = f"the sensor covered {covered_percent(coverage)} of the time"
    return _step(-coverage, -GOOD_COVERAGE, -FAIR_COVERAGE, text, "too little")


def check_agreement(evidence: Evidence) -> Answer | None:
    if evidence.paths_j is None:
        return None
    counter_j, integral_j = evidence.paths_j
    difference = integral_j / counter_j - 1
    text = f"counter {energy_text(counter_j)}, integrated power {energy_text(integral_j)}: {100 * difference:+.1f} %"
    return _step(abs(difference), GOOD_AGREEMENT_REL, FAIR_AGREEMENT_REL, text, "they disagree")


def check_idle(evidence: Evidence) -> Answer | None:
    if evidence.idle is None or not evidence.figure.measured:
        return None
    if not evidence.idle:
        return "B", "no idle baseline, so above-idle energy is unknown (energy.idle_before_s=10)"
    unstable = [baseline.stage for baseline in evidence.idle if not baseline.stable]
    if unstable:
        return "B", f"the idle baseline was not stable ({', '.join(dict.fromkeys(unstable))})"
    return "A", f"stable idle baseline ({plural(len(evidence.idle), 'segment')})"


def check_other_processes(evidence: Evidence) -> Answer | None:
    if evidence.other_processes:
        return "B", f"other processes on the device: {'; '.join(evidence.other_processes)}"
    if not any(source.startswith("gpu:") for source in evidence.figure.sources):
        return None  # only GPUs report their processes
    return "A", "no other process was observed on the device"


def check_cores(evidence: Evidence) -> Answer | None:
    """CPU contention does not change a GPU's energy, but it changes times and the energy billed to CPUs. Without any
    energy figure a note reports the effect on times. How many cores, only the note states: over the whole run it is
    another figure than over the worst stage."""
    if evidence.core_use is None or not evidence.core_use.contended or evidence.figure.energy_j is None:
        return None
    if evidence.figure.method == "estimated":
        return "C", "CPU contention: timings and CPU estimates are unreliable"
    if any(source.startswith("rapl:") for source in evidence.figure.sources):
        return "B", "CPU contention: timings are unreliable, and CPU energy includes other processes"
    return "A", "CPU contention: timings are unreliable"


def check_shared(evidence: Evidence) -> Answer | None:
    if evidence.shared:
        return "C", f"the energy includes other jobs: {', '.join(evidence.shared)}"
    return None


def check_sensors(evidence: Evidence) -> Answer | None:
    return ("B", "; ".join(evidence.sensor_warnings)) if evidence.sensor_warnings else None


def check_throttling(evidence: Evidence) -> Answer | None:
    """Reaching the power limit is normal operation; throttling for heat or power supply is not."""
    throttled = {reason: share for reason, share in evidence.throttled.items() if share > THROTTLED_SHARE}
    listed = ", ".join(f"{reason} {100 * share:.0f} % of the time" for reason, share in throttled.items())
    if any(reason != POWER_LIMIT for reason in throttled):
        return "B", f"the GPU was throttled: {listed}"
    return ("A", f"the GPU ran at its power limit: {listed}") if throttled else None


def check_attempts(evidence: Evidence) -> Answer | None:
    if evidence.interrupted:
        attempts = plural(evidence.attempts, "attempt")
        return "B", f"{evidence.interrupted} of {attempts} interrupted; energy at the end is unknown"
    return None


def check_completeness(evidence: Evidence) -> Answer | None:
    if evidence.unmeasured and evidence.figure.measured:
        return "B", f"the total excludes unmeasured components: {', '.join(evidence.unmeasured)}"
    return None


def check_imported(evidence: Evidence) -> Answer | None:
    """Readings of another program are usable with that caveat; a total without its readings cannot be recomputed."""
    if not evidence.imported:
        return None
    if evidence.stated:
        return "C", f"imported total ({evidence.imported}) without readings: its interval is unknown"
    if evidence.figure.method == "integrated" and (evidence.refresh_s or 0.0) > SLOW_POLLING_S:
        return "C", (
            f"imported readings ({evidence.imported}), one every {evidence.refresh_s:.3g} s: changes in between are in "
            "neither the energy nor its interval"
        )
    return "B", f"imported readings ({evidence.imported}): not recorded by this meter"


def check_repeats(evidence: Evidence) -> Answer | None:
    """Only for repeated programs: a single run has no spread."""
    values = evidence.repeats_j
    if len(values) < 2:
        return None
    spread = statistics.stdev(values) / abs(statistics.fmean(values)) if any(values) else 0.0
    text = f"standard deviation over {len(values)} repeats is {100 * spread:.1f} %"
    return _step(spread, GOOD_SPREAD_REL, FAIR_SPREAD_REL, text, "large")


def _step(value: float, good: float, fair: float, text: str, otherwise: str) -> Answer:
    """A up to `good`, B up to `fair`, C beyond; smaller is better."""
    if value <= good:
        return "A", text
    return ("B" if value <= fair else "C"), f"{text}: {otherwise}"


CHECKS: dict[str, Callable[[Evidence], Answer | None]] = {
    "source": check_source,
    "window": check_window,
    "interval": check_interval,
    "coverage": check_coverage,
    "agreement": check_agreement,
    "idle": check_idle,
    "completeness": check_completeness,
    "other processes": check_other_processes,
    "cores": check_cores,
    "shared device": check_shared,
    "sensors": check_sensors,
    "throttling": check_throttling,
    "attempts": check_attempts,
    "imported": check_imported,
    "repeats": check_repeats,
}


def enforce(record: RunRecord) -> None:
    """After a run: raise (exit code 4) if it does not meet `energy.require` or `energy.require_grade`."""
    energy = record.spec.get("energy", {})
    measured = record.totals is not None and record.totals.figure.measured
    if energy.get("require", "nothing") == "measured" and not measured:
        reason = record.totals.figure.reason if record.totals else "the run recorded nothing"
        raise InvalidMeasurement(
            f"{record.run_id}: measured energy is required, but nothing was measured ({reason})",
            "`joulelab doctor` shows which sensors work and how to fix the others",
        )
    required, actual = energy.get("require_grade", "none"), record.validity.grade or "C"
    if required != "none" and actual > required:
        raise InvalidMeasurement(
            f"{record.run_id}: grade {actual}, but {required} is required: {'; '.join(record.validity.reasons)}",
            f"the run itself is kept: joulelab show {record.run_id}",
        )


# The NVML sensor's warning about other processes contains this word; other warnings concern the sensor itself.
_PROCESS_MARK = "process"

Parts = Sequence[tuple[AttemptData, list[Window]]]


def gather(
    stage: str | None,
    parts: Parts,
    figure: EnergyFigure,
    policy: str,
    idle: tuple[IdleBaseline, ...],
    environment: dict[str, Any],
) -> Evidence:
    """Evidence of one stage, or of the whole run for `stage=None`."""
    windows = [window for _, segments in parts for window in segments]
    warnings = [text for attempt, segments in parts for text in attempt.health.warnings_during(segments)]
    devices = [series for attempt, _ in parts for series in attempt.trace.devices if series.device in figure.sources]
    states = [state for attempt, segments in parts for state in attempt.health.during(segments)]
    attempts = {(attempt.number, attempt.host): attempt for attempt, _ in parts}
    return Evidence(
        figure=figure,
        window_s=seconds(windows),
        windows=len(windows),
        refresh_s=max((series.refresh_s for series in devices), default=None),
        paths_j=_two_paths(parts, figure, policy),
        idle=None if any(stage in attempt.idle_stages for attempt, _ in parts) else idle,
        other_processes=_unique(text for text in warnings if _PROCESS_MARK in text),
        sensor_warnings=_unique(text for text in warnings if _PROCESS_MARK not in text),
        throttled=throttle_shares(states),
        attempts=len(attempts),
        interrupted=sum(not attempt.trace.ended for attempt in attempts.values()),
        shared=_unique(_shared_text(series) for series in devices if _is_shared(series)),
        unmeasured=_unmeasured(parts, policy, environment),
        core_use=most_contended([attempt.core_use(segments) for attempt, segments in parts]),
        imported=next((str(kind) for attempt, _ in parts if (kind := _import_format(attempt.trace))), ""),
        stated=any(series.reported for series in devices) or figure.sources == (CODECARBON,),
    )


def _import_format(trace: Trace) -> str | None:
    imported = trace.header.get("imported")
    return imported.get("format") if isinstance(imported, dict) else None


def _two_paths(parts: Parts, figure: EnergyFigure, policy: str) -> tuple[float, float] | None:
    """Counter and integral of the component where they disagree most: a good sensor must not hide a broken one."""
    if not figure.measured:
        return None
    both: list[tuple[float, float]] = []
    for component in policy_components(policy):
        pairs = [both_paths(attempt.trace, component, windows) for attempt, windows in parts]
        counter_j = sum(pair.counter.energy_j or 0.0 for pair in pairs if pair)
        integral_j = sum(pair.integrated.energy_j or 0.0 for pair in pairs if pair)
        if counter_j and integral_j:
            both.append((counter_j, integral_j))
    return max(both, key=lambda pair: abs(pair[1] / pair[0] - 1), default=None)


def _is_shared(series: DeviceSeries) -> bool:
    return bool(series.facts.get("shared") or series.facts.get("node_wide"))


def _shared_text(series: DeviceSeries) -> str:
    return f"{series.name} " + ("covers the whole node" if series.facts.get("node_wide") else "is shared")


def _unmeasured(parts: Parts, policy: str, environment: dict[str, Any]) -> tuple[str, ...]:
    """A CPU always exists, a GPU if the environment lists one; DRAM is often part of the package counter."""
    if policy in ("codecarbon", "machine") or not parts:
        return ()
    present = [
        name for name in policy_components(policy) if name == "cpu" or (name == "gpu" and environment.get("gpus"))
    ]
    energies = [attempt.energy(windows) for attempt, windows in parts]
    return tuple(name for name in present if not any(getattr(energy, name).measured for energy in energies))


def _unique(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


ENOUGH_COVERAGE = 0.98
# A larger difference between idle before and after means two states of the machine.
SAME_IDLE_REL = 0.10


def notes_on(
    attempts: Sequence[AttemptData], policy: str, idle: Sequence[IdleBaseline], running: bool = False
) -> list[Note]:
    """Remarks on the figures. `running`: the last attempt is still running, so its open trace was not interrupted."""
    notes: dict[str, Note] = {}
    current = max((attempt.number for attempt in attempts), default=0) if running else 0
    for attempt in attempts:
        notes |= _energy_notes(attempt, policy)
        notes |= _trace_notes(attempt, current)
        for text in attempt.events.warnings:
            notes[text] = Note(level="warning", text=text)
        for text in attempt.events.notes:
            notes[text] = Note(level="info", text=text)
    notes |= _contention_notes(attempts)
    numbers, hosts = {attempt.number for attempt in attempts}, {attempt.host for attempt in attempts}
    if len(numbers) > 1:
        notes["attempts"] = Note(level="info", text=f"energy of {_all(len(numbers), 'attempts')} is counted")
    if len(hosts) > 1:
        notes["hosts"] = Note(level="info", text=f"energy of {_all(len(hosts), 'hosts')} is counted, each host once")
    for host in dict.fromkeys(baseline.host for baseline in idle):
        changed = _idle_change([baseline for baseline in idle if baseline.host == host])
        if changed:
            notes[f"idle {host}"] = Note(level="info", text=changed)
    return list(notes.values())


def _energy_notes(attempt: AttemptData, policy: str) -> dict[str, Note]:
    notes: dict[str, Note] = {}
    energy = attempt.energy(attempt.billed_windows)
    for component in MEASURED_COMPONENTS:
        figure: EnergyFigure = getattr(energy, component)
        if figure.energy_j is None and component != "dram":
            fix = f" ({figure.fix})" if figure.fix else ""
            notes[component] = Note(level="info", text=f"{component} not measured: {figure.reason}{fix}")
        elif figure.energy_j is not None and figure.coverage < ENOUGH_COVERAGE:
            text = f"{component}: the sensor covers {covered_percent(figure.coverage)} of the run"
            notes[component] = Note(level="warning", text=text)
    if policy == "codecarbon":
        notes["codecarbon"] = Note(level="warning", text=_codecarbon_text(energy.codecarbon))
    if policy == "machine":
        notes |= _machine_notes(attempt.trace)
    if energy.under_policy(policy).energy_j is None and energy.cpu_estimate.energy_j is not None:
        notes |= _estimate_notes(attempt.trace)
    return notes


def interruption_text(attempt: int) -> str:
    return f"attempt {attempt} was interrupted; its energy ends with the last reading"


def _trace_notes(attempt: AttemptData, current: int) -> dict[str, Note]:
    notes: dict[str, Note] = {}
    for gap in attempt.trace.gaps:
        notes[f"gap {gap.device}"] = Note(level="warning", text=f"{gap.device}: readings failed ({gap.reason})")
    if not attempt.trace.ended and attempt.number != current:
        notes[f"cut {attempt.number}"] = Note(level="warning", text=interruption_text(attempt.number))
    if attempt.events.marks_lost:
        text = f"{attempt.events.marks_lost} phase marks were lost because they came faster than they could be read"
        notes["marks"] = Note(level="warning", text=text)
    for _, text in attempt.health.warnings:
        notes[text] = Note(level="warning", text=text)
    return notes


def _contention_notes(attempts: Sequence[AttemptData]) -> dict[str, Note]:
    """One note for all attempts and hosts, with the worst of them."""
    contended = [
        (stage, use)
        for attempt in attempts
        for stage, windows in attempt.windows.items()
        if stage not in attempt.idle_stages and (use := attempt.core_use(windows)) is not None and use.contended
    ]
    worst = most_contended([use for _, use in contended])
    if worst is None:
        return {}
    stages = list(dict.fromkeys(stage for stage, _ in contended))
    text = (
        f"CPU contention: {worst.text} during {_stages_text(stages)}. Timings and CPU estimates are "
        "unreliable; rerun on an idle machine."
    )
    return {"cores": Note(level="warning", text=text)}


def _stages_text(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} and other stages"


def _idle_change(idle: Sequence[IdleBaseline]) -> str | None:
    if len(idle) < 2:
        return None
    low, high = min(idle, key=lambda b: b.power_w), max(idle, key=lambda b: b.power_w)
    if low.power_w <= 0 or high.power_w / low.power_w - 1 <= SAME_IDLE_REL:
        return None
    two_states = f"idle power was {_idle_text(low)} and {_idle_text(high)}: two states of the machine"
    if all(baseline.before_load == low.before_load for baseline in idle):
        return two_states
    return f"{two_states}; above-idle energy subtracts the power before the load"


def _idle_text(baseline: IdleBaseline) -> str:
    clock = f" at {baseline.sm_clock_MHz:.0f} MHz" if baseline.sm_clock_MHz is not None else ""
    return f"{baseline.power_w:.0f} W{clock} ({baseline.stage})"


def _codecarbon_text(figure: EnergyFigure) -> str:
    if figure.energy_j is None:
        return f"policy `codecarbon` has no figure: {figure.reason}"
    return (
        f"energy is {figure.reason}, not from this meter: components without a sensor, and RAM always, are ESTIMATED "
        "by CodeCarbon's constants"
    )


def _estimate_notes(trace: Trace) -> dict[str, Note]:
    """A warning of a line or two; where its constants come from is a note, which `-v` and the page print."""
    device = next(series for series in trace.devices if series.component == "cpu_estimate")
    rated = f"{device.facts['w_per_thread']:.1f} W per hardware thread"
    warning = (
        f"energy is ESTIMATED, not measured: CPU time x {rated}, ±{100 * device.gain_error_rel:.0f} %; "
        "this error cancels in ratios on the same machine"
    )
    source = f"{rated}: {device.name}, {device.facts['source']}"
    return {"estimate": Note(level="warning", text=warning), "estimate source": Note(level="info", text=source)}


def _machine_notes(trace: Trace) -> dict[str, Note]:
    model = next((series for series in trace.devices if "base_w" in series.facts), None)
    if model is None:
        text = "policy `machine` has no figure: this run did not record the CPU time of all processes"
        return {"machine": Note(level="warning", text=text)}
    facts = model.facts
    warning = (
        "energy is ESTIMATED for the whole machine, all processes included: sensors where they work, else CPU time x "
        f"{facts['w_per_thread']:.1f} W per hardware thread; {facts['base_w']:.1f} W idle; "
        f"{facts['memory_w']:.1f} W memory"
    )
    source = (
        f"constants of the machine's estimate: CPU time ±{100 * model.gain_error_rel:.0f} %; idle power "
        f"±{100 * facts['base_error_rel']:.0f} % ({facts['base_source']}); memory "
        f"±{100 * facts['memory_error_rel']:.0f} % ({facts['memory_source']})"
    )
    return {"machine": Note(level="warning", text=warning), "machine source": Note(level="info", text=source)}


def _all(count: int, nouns: str) -> str:
    return f"both {nouns}" if count == 2 else f"all {count} {nouns}"
