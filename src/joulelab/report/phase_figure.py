"""Where a step's time or joules went, by phase, one bar for each method whose runs looked at phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import altair as alt

from joulelab.report.compare_rows import training_stage
from joulelab.report.comparison import Comparison, Row
from joulelab.report.figures import FOLDED_AXIS, Figure, finish, folded, moving
from joulelab.report.palette import HUES
from joulelab.report.training_table import phase_joules, phase_times
from joulelab.runs.record import RunRecord

_PHASES = ("input", "forward", "backward", "optimiser_step")
_ROW_HEIGHT = 44


def phase_figures(comparison: Comparison) -> tuple[Figure, ...]:
    found = (
        _figure(comparison, "A step's joules by phase", "J per step", _joules, 1.0, "phases-joules"),
        _figure(comparison, "A step's time by phase", "ms per step", _seconds, 1000.0, "phases-time"),
    )
    return tuple(figure for figure in found if figure)


def _stage_name(record: RunRecord) -> str:
    stage = training_stage(record)
    return stage.name if stage else ""


def _joules(record: RunRecord) -> dict[str, float]:
    return {name: float(row["energy_j"]) for name, row in phase_joules(record, _stage_name(record)).items()}


def _seconds(record: RunRecord) -> dict[str, float]:
    """By a tracker's look where there was one; else by the phases that the loop marks in every run."""
    found = phase_times(record, _stage_name(record))
    if found:
        return found
    stage = training_stage(record)
    phases = stage.phases if stage else {}
    steps = phases["optimiser_step"].count if "optimiser_step" in phases else 0
    return {name: phases[name].sum_s / steps for name in _PHASES if name in phases} if steps else {}


def _figure(
    comparison: Comparison,
    title: str,
    axis: str,
    of: Callable[[RunRecord], dict[str, float]],
    factor: float,
    name: str,
) -> Figure | None:
    values = []
    for row in comparison.rows:
        for place, (phase, value) in enumerate(_means(row, of).items()):
            told = phase.replace("_", " ")
            values.append(
                {"row": folded(row.label), "method": row.label, "phase": told, "value": factor * value, "place": place}
            )
    if not values:
        return None
    used = {value["phase"] for value in values}
    pairs = [
        (name, hue) for phase, hue in zip(_PHASES, HUES, strict=False) if (name := phase.replace("_", " ")) in used
    ]
    scale = alt.Scale(domain=[name for name, _ in pairs], range=[hue for _, hue in pairs])
    chart = (
        alt.Chart(alt.Data(values=values))
        .transform_filter("indexof(hidden, datum.method) < 0")
        .mark_bar(cornerRadius=1)
        .encode(
            y=alt.Y("row:N", title=None, sort=None, axis=alt.Axis(**FOLDED_AXIS)),
            x=alt.X("value:Q", title=axis, stack="zero"),
            color=alt.Color("phase:N", title="Phase", scale=scale),
            order=alt.Order("place:Q"),
            tooltip=["method:N", "phase:N", alt.Tooltip("value:Q", title=axis, format=".3g")],
        )
    )
    height = _ROW_HEIGHT * len({value["row"] for value in values}) + 20
    described = "; ".join(f"{value['method']} {value['phase']} {value['value']:.3g}" for value in values)
    caption = "Mean over a method's runs; the forward pass of a live teacher is part of the forward pass."
    return Figure(title, finish(moving(chart), height), f"{title}: {described}.", caption, height, name=name)


def _means(row: Row, of: Callable[[RunRecord], dict[str, float]]) -> dict[str, float]:
    found: Sequence[dict[str, float]] = [values for run in row.runs if (values := of(run.record))]
    return {
        phase: sum(values[phase] for values in told) / len(told)
        for phase in _PHASES
        if (told := [values for values in found if phase in values])
    }
