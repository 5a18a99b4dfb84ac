"""How far a measurement can be trusted: a grade from A to C, the worst of a few checks, each with its reason.

    A   a counter over windows long against its refresh, all of it seen, at rest before or after, nobody else there
    B   usable, with something a reader must know
    C   do not quote it as a measurement

Every check is a pure function of `Evidence`, which `evidence.py` gathers from the run's folder.
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
GOOD_AGREEMENT_REL, FAIR_AGREEMENT_REL = 0.03, 0.10
GOOD_SPREAD_REL, FAIR_SPREAD_REL = 0.03, 0.10
# A card that is held back for a moment at start-up is not a throttled run.
THROTTLED_SHARE = 0.02

Answer = tuple[Grade, str]


@dataclass(frozen=True)
class Evidence:
    """All that the checks look at, for one stage or for the run."""

    figure: EnergyFigure
    window_s: float
    """Length of all windows together."""
    windows: int = 1
    """How many they are; each has two edges that lie somewhere between two refreshes."""
    refresh_s: float | None = None
    """The slowest refresh among the sensors behind the figure."""
    paths_j: tuple[float, float] | None = None
    """Joules by counter alone and by integrated power alone; None where there is only one of them."""
    idle: tuple[IdleBaseline, ...] | None = ()
    """None where the question makes no sense, as for an idle baseline itself."""
    neighbours: tuple[str, ...] = ()
    """Warnings of other processes on the device."""
    sensor_warnings: tuple[str, ...] = ()
    throttled: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 1
    cut_off: int = 0
    shared: tuple[str, ...] = ()
    """Devices whose joules are not this job's alone."""
    unmeasured: tuple[str, ...] = ()
    """Components of the policy's total that exist here and that nobody measured."""
    repeats_j: tuple[float, ...] = ()
    core_use: CoreUse | None = None
    """Who used the cores meanwhile; None where nobody looked."""


def grade(evidence: Evidence, notes: Sequence[Note] = ()) -> Validity:
    checks = []
    for name, check in CHECKS.items():
        answer = check(evidence)
        if answer is not None:
            checks.append(Check(name=name, ok=answer[0] == "A", grade=answer[0], text=answer[1]))
    return Validity(grade=max(check.grade for check in checks), checks=tuple(checks), notes=tuple(notes))


def with_answer(validity: Validity, name: str, answer: Answer | None) -> Validity:
    """The same checks with another answer to one of them, and the grade that follows."""
    if answer is None or validity.grade is None:
        return validity
    new = Check(name=name, ok=answer[0] == "A", grade=answer[0], text=answer[1])
    checks = tuple(new if check.name == name else check for check in validity.checks)
    return validity.model_copy(update={"checks": checks, "grade": max(check.grade for check in checks)})


def check_source(evidence: Evidence) -> Answer:
    figure = evidence.figure
    if figure.energy_j is None:
        return "C", "missing: no sensor measured it, and nothing estimated it"
    if figure.sources == (CODECARBON,):
        return "C", "CodeCarbon's own figure: partly sensors, partly its constants"
    if figure.method == "estimated":
        return "C", "estimated by a model, not measured"
    if figure.method == "integrated":
        return "B", "no energy counter: power was integrated"
    return "A", "read from an energy counter"


def check_window(evidence: Evidence) -> Answer | None:
    if not evidence.figure.measured or not evidence.refresh_s:
        return None
    # errors at the edges are independent, so n windows err by the root of n edges, not by n
    refreshes = evidence.window_s / math.sqrt(max(1, evidence.windows)) / evidence.refresh_s
    pieces = "" if evidence.windows == 1 else f" in {evidence.windows} windows"
    text = f"{evidence.window_s:.3g} s{pieces} count as {refreshes:.0f} refreshes of the sensor"
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
    seen = evidence.figure.coverage
    text = f"the sensor was seen working {covered_percent(seen)} of the time"
    return _step(-seen, -GOOD_COVERAGE, -FAIR_COVERAGE, text, "too little")


def check_agreement(evidence: Evidence) -> Answer | None:
    if evidence.paths_j is None:
        return None
    counter_j, integral_j = evidence.paths_j
    apart = integral_j / counter_j - 1
    text = f"counter {energy_text(counter_j)}, integrated power {energy_text(integral_j)}: {100 * apart:+.1f} %"
    return _step(abs(apart), GOOD_AGREEMENT_REL, FAIR_AGREEMENT_REL, text, "they disagree")


def check_idle(evidence: Evidence) -> Answer | None:
    if evidence.idle is None or not evidence.figure.measured:
        return None
    if not evidence.idle:
        return "B", "no idle baseline, so above-idle energy is unknown (energy.idle_before_s=10)"
    restless = [baseline.stage for baseline in evidence.idle if not baseline.stable]
    if restless:
        return "B", f"the idle baseline was not steady ({', '.join(dict.fromkeys(restless))})"
    return "A", f"idle baseline measured, steady ({plural(len(evidence.idle), 'segment')})"


def check_neighbours(evidence: Evidence) -> Answer | None:
    if evidence.neighbours:
        return "B", f"not alone on the device: {'; '.join(evidence.neighbours)}"
    if not any(source.startswith("gpu:") for source in evidence.figure.sources):
        return None  # nobody looks for neighbours on anything but GPUs
    return "A", "no other process was noticed on the device"


def check_cores(evidence: Evidence) -> Answer | None:
    """A GPU's joules are its own whoever uses the cores; the time it took, and all that CPUs are billed, are not. Where
    there are no joules a note tells of the times."""
    if evidence.core_use is None or not evidence.core_use.contended or evidence.figure.energy_j is None:
        return None
    words = evidence.core_use.text
    if evidence.figure.method == "estimated":
        return "C", f"{words}: times and CPU estimates are not comparable"
    if any(source.startswith("rapl:") for source in evidence.figure.sources):
        return "B", f"{words}: times are not comparable, and the processor's joules hold the others' work"
    return "A", f"{words}: times are not comparable"


def check_shared(evidence: Evidence) -> Answer | None:
    if evidence.shared:
        return "C", f"the joules are not this job's alone: {', '.join(evidence.shared)}"
    return None


def check_sensors(evidence: Evidence) -> Answer | None:
    return ("B", "; ".join(evidence.sensor_warnings)) if evidence.sensor_warnings else None


def check_throttling(evidence: Evidence) -> Answer | None:
    """At its power limit a card is as its maker meant it; heat and failing power are another matter."""
    held = {why: share for why, share in evidence.throttled.items() if share > THROTTLED_SHARE}
    words = ", ".join(f"{why} {100 * share:.0f} % of the time" for why, share in held.items())
    if any(why != POWER_LIMIT for why in held):
        return "B", f"the card was held back: {words}"
    return ("A", f"the card ran at its limit: {words}") if held else None


def check_attempts(evidence: Evidence) -> Answer | None:
    if evidence.cut_off:
        return (
            "B",
            f"{evidence.cut_off} of {plural(evidence.attempts, 'attempt')} interrupted; energy at the end is unknown",
        )
    return None


def check_completeness(evidence: Evidence) -> Answer | None:
    if evidence.unmeasured and evidence.figure.measured:
        return "B", f"the total leaves out what nobody measured: {', '.join(evidence.unmeasured)}"
    return None


def check_repeats(evidence: Evidence) -> Answer | None:
    """Only where something was repeated: a single run says nothing about spread."""
    values = evidence.repeats_j
    if len(values) < 2:
        return None
    spread = statistics.stdev(values) / abs(statistics.fmean(values)) if any(values) else 0.0
    text = f"{len(values)} repeats spread by {100 * spread:.1f} %"
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
    "neighbours": check_neighbours,
    "cores": check_cores,
    "shared device": check_shared,
    "sensors": check_sensors,
    "throttling": check_throttling,
    "attempts": check_attempts,
    "repeats": check_repeats,
}


def enforce(record: RunRecord) -> None:
    """After a run: what `energy.require` and `energy.require_grade` demanded of its measurement, or exit code 4."""
    energy = record.spec.get("energy", {})
    measured = record.totals is not None and record.totals.figure.measured
    if energy.get("require", "nothing") == "measured" and not measured:
        why = record.totals.figure.reason if record.totals else "the run recorded nothing"
        raise InvalidMeasurement(
            f"{record.run_id}: measured joules were required, and none were measured ({why})",
            "`joulelab doctor` says what this machine can measure and how to change that",
        )
    wanted, got = energy.get("require_grade", "none"), record.validity.grade or "C"
    if wanted != "none" and got > wanted:
        raise InvalidMeasurement(
            f"{record.run_id}: grade {got}, and {wanted} was required: {'; '.join(record.validity.reasons)}",
            f"the run itself is kept: joulelab show {record.run_id}",
        )


# What the checks of `validity.py` look at, gathered from a run's folder: traces, marks, vital signs, environment.


# How the NVML sensor words its warning of foreign processes; anything else is a matter of the sensor itself.
_NEIGHBOUR_MARK = "process"

Parts = Sequence[tuple[AttemptData, list[Window]]]


def gather(
    stage: str | None,
    parts: Parts,
    figure: EnergyFigure,
    policy: str,
    idle: tuple[IdleBaseline, ...],
    environment: dict[str, Any],
) -> Evidence:
    """Of one stage, or of the whole run for `stage=None`."""
    windows = [window for _, pieces in parts for window in pieces]
    warnings = [text for attempt, pieces in parts for text in attempt.health.warnings_during(pieces)]
    devices = [series for attempt, _ in parts for series in _devices_behind(attempt, figure)]
    states = [state for attempt, pieces in parts for state in attempt.health.during(pieces)]
    attempts = {(attempt.number, attempt.host): attempt for attempt, _ in parts}
    return Evidence(
        figure=figure,
        window_s=seconds(windows),
        windows=len(windows),
        refresh_s=max((series.refresh_s for series in devices), default=None),
        paths_j=_two_paths(parts, figure, policy),
        idle=None if any(stage in attempt.idle_stages for attempt, _ in parts) else idle,
        neighbours=_unique(text for text in warnings if _NEIGHBOUR_MARK in text),
        sensor_warnings=_unique(text for text in warnings if _NEIGHBOUR_MARK not in text),
        throttled=throttle_shares(states),
        attempts=len(attempts),
        cut_off=sum(not attempt.trace.ended for attempt in attempts.values()),
        shared=_unique(_shared_words(series) for series in devices if _is_shared(series)),
        unmeasured=_unmeasured(parts, policy, environment),
        core_use=most_contended([attempt.core_use(pieces) for attempt, pieces in parts]),
    )


def _devices_behind(attempt: AttemptData, figure: EnergyFigure) -> list[DeviceSeries]:
    return [series for series in attempt.trace.devices if series.device in figure.sources]


def _two_paths(parts: Parts, figure: EnergyFigure, policy: str) -> tuple[float, float] | None:
    """Counter and integral of the component where they disagree most: a sound sensor must not hide a broken one."""
    if not figure.measured:
        return None
    found: list[tuple[float, float]] = []
    for component in policy_components(policy):
        pairs = [both_paths(attempt.trace, component, windows) for attempt, windows in parts]
        counter_j = sum(pair.counter.energy_j or 0.0 for pair in pairs if pair)
        integral_j = sum(pair.integrated.energy_j or 0.0 for pair in pairs if pair)
        if counter_j and integral_j:
            found.append((counter_j, integral_j))
    return max(found, key=lambda pair: abs(pair[1] / pair[0] - 1), default=None)


def _is_shared(series: DeviceSeries) -> bool:
    return bool(series.facts.get("shared") or series.facts.get("node_wide"))


def _shared_words(series: DeviceSeries) -> str:
    how = "covers the whole node" if series.facts.get("node_wide") else "is shared with others"
    return f"{series.name} {how}"


def _unmeasured(parts: Parts, policy: str, environment: dict[str, Any]) -> tuple[str, ...]:
    """A CPU is always there, a GPU where the environment lists one; DRAM often lies inside the package's counter."""
    if policy == "codecarbon" or not parts:
        return ()
    present = [
        name for name in policy_components(policy) if name == "cpu" or (name == "gpu" and environment.get("gpus"))
    ]
    energies = [attempt.energy(windows) for attempt, windows in parts]
    return tuple(name for name in present if not any(getattr(energy, name).measured for energy in energies))


def _unique(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


# What a reader of a run's joules must know, in sentences: what was not measured, holes, cuts, estimates, warnings.


ENOUGH_COVERAGE = 0.98
# Idle before and after that differ by more were two states of the machine.
SAME_IDLE_REL = 0.10


def notes_on(
    attempts: Sequence[AttemptData], policy: str, idle: Sequence[IdleBaseline], running: bool = False
) -> list[Note]:
    """`running`: the last attempt goes on, so that an open trace of its is not one that was cut off."""
    notes: dict[str, Note] = {}
    going_on = max((attempt.number for attempt in attempts), default=0) if running else 0
    for attempt in attempts:
        notes |= _energy_notes(attempt, policy)
        notes |= _trace_notes(attempt, going_on)
        notes |= _crowd_notes(attempt)
        for text in attempt.events.warnings:
            notes[text] = Note(level="warning", text=text)
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
    if energy.under_policy(policy).energy_j is None and energy.cpu_estimate.energy_j is not None:
        notes["estimate"] = Note(level="warning", text=_estimate_text(attempt.trace))
    return notes


def _trace_notes(attempt: AttemptData, going_on: int) -> dict[str, Note]:
    notes: dict[str, Note] = {}
    for gap in attempt.trace.gaps:
        notes[f"gap {gap.device}"] = Note(level="warning", text=f"{gap.device}: readings failed ({gap.reason})")
    if not attempt.trace.ended and attempt.number != going_on:
        text = f"attempt {attempt.number} was cut off; its joules end with the last reading"
        notes[f"cut {attempt.number}"] = Note(level="warning", text=text)
    if attempt.events.marks_lost:
        text = f"{attempt.events.marks_lost} phase marks came faster than they could be read and were lost"
        notes["marks"] = Note(level="warning", text=text)
    for _, text in attempt.health.warnings:
        notes[text] = Note(level="warning", text=text)
    return notes


def _crowd_notes(attempt: AttemptData) -> dict[str, Note]:
    uses = {
        stage: attempt.core_use(windows)
        for stage, windows in attempt.windows.items()
        if stage not in attempt.idle_stages
    }
    crowded = {stage: use for stage, use in uses.items() if use is not None and use.contended}
    worst = most_contended(list(crowded.values()))
    if worst is None:
        return {}
    text = (
        f"{worst.text} during {', '.join(crowded)}: times and CPU estimates of that are not comparable with others; "
        "run it again while nothing else runs"
    )
    return {f"cores {attempt.host} {attempt.number}": Note(level="warning", text=text)}


def _idle_change(idle: Sequence[IdleBaseline]) -> str | None:
    if len(idle) < 2:
        return None
    low, high = min(idle, key=lambda b: b.power_w), max(idle, key=lambda b: b.power_w)
    if low.power_w <= 0 or high.power_w / low.power_w - 1 <= SAME_IDLE_REL:
        return None
    return (
        f"idle power was {_idle_words(low)} and {_idle_words(high)}: two states of the machine; "
        "above-idle energy uses their mean by time"
    )


def _idle_words(baseline: IdleBaseline) -> str:
    clock = f" at {baseline.sm_clock_MHz:.0f} MHz" if baseline.sm_clock_MHz is not None else ""
    return f"{baseline.power_w:.0f} W{clock} ({baseline.stage})"


def _codecarbon_text(figure: EnergyFigure) -> str:
    if figure.energy_j is None:
        return f"the policy `codecarbon` has nothing to report: {figure.reason}"
    return (
        f"joules are {figure.reason}, not this meter's: what it has no sensor for is ESTIMATED by its constants, "
        "RAM always"
    )


def _estimate_text(trace: Trace) -> str:
    device = next(series for series in trace.devices if series.component == "cpu_estimate")
    watts, source = device.facts["w_per_thread"], device.facts["source"]
    return (
        f"joules are ESTIMATED, not measured: CPU time x {watts:.1f} W per hardware thread "
        f"({device.name}: {source}), ±{100 * device.gain_error_rel:.0f} %; "
        "this scale error cancels in ratios on the same machine; memory, idle power and other devices are left out"
    )


def _all(count: int, nouns: str) -> str:
    return f"both {nouns}" if count == 2 else f"all {count} {nouns}"
