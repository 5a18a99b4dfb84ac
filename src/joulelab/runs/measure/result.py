"""Result of `joulelab measure`: the program's energy, or the mean over repeats with its interval, and caveats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from joulelab.meter.figures import EnergyFigure, Frozen, covered_percent
from joulelab.meter.series import Gap, Trace, load_trace
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Note, Result, RunRecord, StageRecord, Status
from joulelab.stats import mean_t

RUN, WARMUP = "program.run", "program.warmup"
LARGE_SPREAD = 0.05
# On an H200 (100 ms refresh) the energy of one burst varied by 20 % at 100 ms, by 4 % at 500 ms, by little from 1 s on.
REFRESHES_FOR_A_WINDOW = 10
NEXT_READING_NS = 1_000_000_000


class Repetition(Frozen):
    stage: str
    status: Status
    duration_s: float
    energy: EnergyFigure


class RepeatSummary(Frozen):
    """Over the successful repeats. `low_j` and `high_j` are Student's 95 % interval of the mean."""

    count: int
    mean_j: float
    low_j: float
    high_j: float
    spread_rel: float
    """Standard deviation divided by the mean."""
    mean_s: float
    method: str


class MeasureResult(Frozen):
    run_id: str
    folder: str
    name: str
    command: tuple[str, ...]
    status: Status
    exit_code: int
    error: str | None
    """How it ended, if it failed."""
    energy_j: float | None
    """Measured energy (mean over repeats if there are several); null if no sensor measured it."""
    duration_s: float | None
    energy: EnergyFigure | None
    """Measured, else the estimate, labeled as such; with repeats, the mean and its t interval."""
    total_energy_j: float | None = None
    """Energy of the whole run, including warm-ups and overhead."""
    repetitions: tuple[Repetition, ...] = ()
    summary: RepeatSummary | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def stage_name(kind: str, number: int, of: int) -> str:
    """`program.run` for a single run, `program.run.3` for the third of several; warm-ups are always numbered."""
    return kind if kind == RUN and of == 1 else f"{kind}.{number}"


@dataclass(frozen=True)
class RepeatMean:
    """Mean energy of a measured program over its repeats; `energy` has Student's 95 % interval."""

    count: int
    energy: EnergyFigure
    duration_s: float


def repeat_mean(*records: RunRecord) -> RepeatMean | None:
    """Over all repeats in these records of one program.

    None if there is only one, or if the repeats were measured by different methods.
    """
    stages = [stage for record in records for stage in repetitions(record)]
    summary = summarize_repeats(stages)
    figure = _mean_figure(stages, summary)
    return None if summary is None or figure is None else RepeatMean(summary.count, figure, summary.mean_s)


def repetitions(record: RunRecord) -> list[StageRecord]:
    return [stage for stage in record.stages if stage.repeat is not None]


def summarize_repeats(stages: list[StageRecord]) -> RepeatSummary | None:
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
    )


def caveats(stages: list[StageRecord], summary: RepeatSummary | None, trace: Trace | None) -> list[str]:
    """Warnings about the reliability of the figures."""
    warnings = []
    if summary is not None and summary.spread_rel > LARGE_SPREAD:
        warnings.append(
            f"the standard deviation over repeats is {100 * summary.spread_rel:.1f} %; "
            "add --warmup, use more --repeat, or stop other work on the machine"
        )
    with_energy = [stage for stage in stages if stage.best.energy_j is not None]
    refresh_s = _refresh_s(trace, with_energy[0].best) if trace is not None and with_energy else 0.0
    shortest_s = min((stage.duration_s for stage in with_energy), default=math.inf)
    if shortest_s < REFRESHES_FOR_A_WINDOW * refresh_s:
        warnings.append(
            f"{shortest_s:.2g} s is short for a sensor that refreshes every {refresh_s:.2g} s; "
            f"the program should run for at least {REFRESHES_FOR_A_WINDOW * refresh_s:.2g} s"
        )
    else:
        wide = [stage for stage in with_energy if _relative_half_width(stage.best) > LARGE_SPREAD]
        warnings += [f"the random interval is wider than 5 % of the energy: {_why_wide(wide, trace)}"] if wide else []
    return warnings


def _relative_half_width(figure: EnergyFigure) -> float:
    return (figure.half_width_j or 0.0) / abs(figure.energy_j) if figure.energy_j else 0.0


def _why_wide(stages: list[StageRecord], trace: Trace | None) -> str:
    """The cause of a wide interval and the remedy: measuring longer reduces only the sampling error."""
    gaps = trace.gaps if trace is not None else ()
    faults = [
        gap.reason for stage in stages for gap in gaps if _concerns(gap, stage.best.sources) and _during(gap, stage)
    ]
    if faults:
        return f"{'; '.join(dict.fromkeys(faults))}; repeat the measurement"
    causes = [error for stage in stages for error in stage.best.error_components]
    if max(causes, key=lambda error: error.half_width_j).name == "missing time":
        covered = min(stage.best.coverage for stage in stages)
        return f"the sensor was read during only {covered_percent(covered)} of the time; repeat the measurement"
    return "the program is short compared with the sampling interval; measure longer, or set a smaller --interval"


def _concerns(gap: Gap, sources: tuple[str, ...]) -> bool:
    """A sensor with several domains fails as a whole: `rapl` for `rapl:package-0`."""
    return any(source == gap.device or source.startswith(f"{gap.device}:") for source in sources)


def _during(gap: Gap, stage: StageRecord) -> bool:
    """A fault is detected at the next reading, which may come after the stage."""
    return any(part.start_ns <= gap.mono_ns <= part.end_ns + NEXT_READING_NS for part in stage.segments)


def _refresh_s(trace: Trace, figure: EnergyFigure) -> float:
    return max((series.refresh_s for series in trace.devices if series.device in figure.sources), default=0.0)


def conclude(record: RunRecord, paths: RunPaths) -> RunRecord:
    """The record with the mean over repeats among its results and the caveats among its notes."""
    stages = repetitions(record)
    summary = summarize_repeats(stages)
    traces = paths.traces()
    texts = caveats(stages, summary, load_trace(traces[-1][2]) if traces else None)
    results = dict(record.results)
    if summary is not None:
        results |= {
            "program.run.mean_j": Result(value=summary.mean_j),
            "program.run.mean_low_j": Result(value=summary.low_j),
            "program.run.mean_high_j": Result(value=summary.high_j),
            "program.run.spread_percent": Result(value=100 * summary.spread_rel),
        }
    notes = tuple(Note(level="warning", text=text) for text in texts)
    return record.with_notes(notes).model_copy(update={"results": results})


def result_of(record: RunRecord, folder: Path, exit_code: int) -> MeasureResult:
    stages = repetitions(record)
    summary = summarize_repeats(stages)
    successful = [stage for stage in stages if stage.status == "done"] or stages
    measured = [stage.energy_j for stage in successful if stage.energy_j is not None]
    return MeasureResult(
        run_id=record.run_id,
        folder=str(folder),
        name=record.name,
        command=tuple(record.spec.get("command", ())),
        status=record.status,
        exit_code=exit_code,
        error=record.error.message if record.error else None,
        energy_j=sum(measured) / len(measured) if measured else None,
        duration_s=sum(stage.duration_s for stage in successful) / len(successful) if successful else None,
        energy=_mean_figure(stages, summary),
        total_energy_j=record.totals.best.energy_j if record.totals else None,
        repetitions=tuple(
            Repetition(stage=stage.name, status=stage.status, duration_s=stage.duration_s, energy=stage.best)
            for stage in stages
        ),
        summary=summary,
        warnings=tuple(note.text for note in record.validity.notes if note.level == "warning"),
        notes=tuple(note.text for note in record.validity.notes if note.level == "info"),
    )


def _mean_figure(stages: list[StageRecord], summary: RepeatSummary | None) -> EnergyFigure | None:
    if not stages:
        return None
    stages = [stage for stage in stages if stage.status == "done"] or stages
    if summary is None:
        return stages[-1].best
    mean = stages[-1].best.with_interval(summary.mean_j, (summary.high_j - summary.low_j) / 2, "repeats")
    figures = [stage.best for stage in stages if stage.best.energy_j is not None]
    incomplete = {
        "coverage": sum(figure.coverage for figure in figures) / len(figures),
        "lower_bound": any(figure.is_lower_bound for figure in figures),
        "cpu_contention": any(figure.cpu_contention for figure in figures),
    }
    return mean.model_copy(update=incomplete)
