"""What a reader of a run's joules must know, in sentences: what was not measured, holes, cuts, estimates, warnings."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.figure_text import covered_percent
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.health import most_contended
from joulelab.meter.series import Trace
from joulelab.runs.attempt_data import AttemptData
from joulelab.runs.record import MEASURED_COMPONENTS, IdleBaseline, Note

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
