"""One run, told as tables: what it is, where its joules went, what it found and inherited, what to be careful about."""

from __future__ import annotations

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare import accuracy_interval
from joulelab.report.grid import Grid, make_grid
from joulelab.report.joules import ancestor_figure, method_words, run_joules
from joulelab.report.wording import NOTHING, accuracy, gain, joules, moment, rate
from joulelab.runs.record import RunRecord, StageRecord, Totals
from joulelab.units import duration_text, energy_text, percent_text, power_text


def run_grids(record: RunRecord) -> tuple[Grid, ...]:
    grids = [header_grid(record), stages_grid(record)]
    if record.results:
        grids.append(results_grid(record))
    if record.inherited:
        grids.append(inherited_grid(record))
    if record.validity:
        grids.append(notes_grid(record))
    if record.error:
        grids.append(error_grid(record))
    return tuple(grids)


def header_grid(record: RunRecord) -> Grid:
    rows = [
        ("label", record.label),
        ("status", record.status),
        ("started", moment(record.created_at)),
        ("attempts", _attempts_text(record)),
    ]
    if record.totals:
        rows += _total_rows(record.totals)
    else:
        rows.append(("energy", "missing: nothing was recorded"))
    return make_grid(f"Run {record.run_id}", "What!|Value", rows)


def _attempts_text(record: RunRecord) -> str:
    cut = sum(not attempt.closed for attempt in record.attempts)
    hosts = ", ".join(dict.fromkeys(attempt.host for attempt in record.attempts))
    return f"{len(record.attempts)}{f' ({cut} cut off)' if cut else ''}{f' on {hosts}' if hosts else ''}"


def _total_rows(totals: Totals) -> list[tuple[str, str]]:
    rows = [("time", duration_text(totals.duration_s)), (f"energy ({totals.policy})", figure_text(totals.figure))]
    if totals.cpu_estimate.energy_j is not None:
        rows.append(("estimate beside it", figure_text(totals.cpu_estimate)))
    if totals.idle_power_w is not None:
        rows.append(("idle power", power_text(totals.idle_power_w)))
    if totals.above_idle_j is not None:
        rows.append(("above idle", energy_text(totals.above_idle_j)))
    return rows


def figure_text(figure: EnergyFigure) -> str:
    """A figure with all that is known about it, in one line."""
    if figure.energy_j is None:
        fix = f" ({figure.fix})" if figure.fix else ""
        return f"missing: {figure.reason or 'no reason recorded'}{fix}"
    parts = [method_words(figure), f"covers {percent_text(figure.coverage)} of the time"]
    scale = gain([figure])
    if scale:
        parts.append(f"scale {scale}")
    return f"{joules(figure)} random; {', '.join(parts)}"


def stages_grid(record: RunRecord) -> Grid:
    rows = [_stage_cells(stage) for stage in record.stages]
    titles = "Stage!|Status!|Time>|Energy>|Method|±\nrandom>|Mean\nW>|Peak\nW>|samples\nper s>|J per\nsample>"
    idle = any(stage.outside_totals for stage in record.stages)
    return make_grid("Stages", titles, rows, "Idle baselines stand outside the totals." if idle else "")


def _stage_cells(stage: StageRecord) -> tuple[str, ...]:
    best = stage.best
    spread = NOTHING if best.energy_j is None or best.half_width_j is None else energy_text(best.half_width_j)
    return (
        stage.name,
        stage.status,
        duration_text(stage.duration_s),
        energy_text(best.energy_j),
        method_words(best),
        spread,
        rate(stage.mean_power_w, ""),
        rate(stage.peak_power_w, ""),
        rate(stage.samples_per_s, ""),
        rate(stage.j_per_sample, "J"),
    )


def results_grid(record: RunRecord) -> Grid:
    rows = []
    for name, result in record.results.items():
        proportion = result.trials is not None and result.successes is not None
        text = (
            accuracy(result.value, accuracy_interval(result.value, result.trials))
            if proportion
            else f"{result.value:.4g}"
        )
        of = f"{result.successes} of {result.trials}" if proportion else NOTHING
        rows.append((name, text, of))
    return make_grid("Results", "Result|Value [95 %]>|Count>", rows)


def inherited_grid(record: RunRecord) -> Grid:
    rows = []
    for ancestor in record.inherited:
        figure = ancestor_figure(ancestor, record.policy)
        stages = ", ".join(ancestor.stages) or NOTHING
        rows.append((ancestor.name, stages, ancestor.made_by, joules(figure), method_words(figure)))
    found = run_joules(record)
    note = (
        f"Own and inherited together: {joules(found.with_teacher)} ({method_words(found.with_teacher, found.mixed)})."
    )
    if found.unknown:
        note += f" Not in it, because unknown: {', '.join(found.unknown)}."
    return make_grid(
        "Inherited: what others' work in this run took", "Artefact!|Stages|Made by|Energy>|Method", rows, note
    )


def notes_grid(record: RunRecord) -> Grid:
    return make_grid("How far to trust it", "Level|Note", [(note.level, note.text) for note in record.validity])


def error_grid(record: RunRecord) -> Grid:
    error = record.error
    rows = [] if error is None else [(error.kind, error.message, error.hint or NOTHING)]
    return make_grid("Error", "Kind|Message|Way out", rows)
