"""Inference runs of a comparison beside each other: joules of a whole run tell how long it ran, not what use costs."""

from __future__ import annotations

from joulelab.report.comparison import Comparison
from joulelab.report.grid import Grid, make_grid
from joulelab.report.inference_alike import length_text, rows_in_use
from joulelab.report.inference_notes import Named, crowd_notes, energy_notes
from joulelab.report.inference_rows import InferenceRow
from joulelab.report.inference_words import energy_cell
from joulelab.report.parts import run_name
from joulelab.report.wording import NOTHING
from joulelab.units import count_text, three_digits

_MOST_ROWS = 40


def use_grid(comparison: Comparison) -> Grid | None:
    """A line for every row of every inference run; nothing where there is none."""
    runs = [run for row in comparison.rows for run in row.runs]
    named: Named = [(run_name(run, runs), row) for run in runs for row in rows_in_use(run.record)]
    if not named:
        return None
    shown = named[:_MOST_ROWS]
    said = energy_notes([row for _, row in shown])
    notes = [*crowd_notes(shown), "Median of a call, and means over all calls.", *said]
    if len(named) > len(shown):
        notes.append(f"{len(named) - len(shown)} more rows are in the runs' own tables (`joulelab show RUN`).")
    titles = "Run!|How!|Median\nms>|Items\nper s>|Mean\nW>|Energy per item\ngross>|net>"
    return make_grid("In use", titles, [_cells(name, row) for name, row in shown], " ".join(notes))


def _cells(name: str, row: InferenceRow) -> tuple[str, ...]:
    energy, per_s = row.energy, row.items_per_s
    how = f"batch {row.values['batch_size']}{length_text(row.values)}, {row.name}"
    rate = three_digits(per_s) if per_s < 1000 else count_text(per_s)
    time = (name, how, f"{1000 * row.latency_s:.4g}", rate)
    if energy is None:
        return (*time, "missing", "missing", NOTHING)
    gross = f"{energy_cell(energy)} / {row.values['item']}"
    return (*time, three_digits(energy.power_w), gross, energy_cell(energy, net=True))
