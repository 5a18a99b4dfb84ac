"""Joules per student against the number of students that share the teacher: where the curves cross, it has paid."""

from __future__ import annotations

from typing import Any

import altair as alt

from joulelab.report.comparison import Comparison, Row
from joulelab.report.figures import Figure, energy_title, energy_unit, finish, moving
from joulelab.report.palette import label_scales
from joulelab.report.parts import Part
from joulelab.report.payback import paybacks, student_parts, taught_rows, teacher_parts
from joulelab.report.payback_words import payback_sentence

_MOST_STUDENTS = 1_000


def payback_curve(comparison: Comparison) -> Figure | None:
    baseline = comparison.row(comparison.baseline)
    taught = [row for row in taught_rows(comparison) if not row.unmetered]  # its curve would be too low
    if baseline is None or baseline.unmetered or not taught:
        return None
    figures = [part.figure for row in (baseline, *taught) for part in student_parts(row.runs[0])]
    factor, unit = energy_unit([row.with_teacher.energy_j or 0.0 for row in (baseline, *taught)])
    steps = sorted({round(10 ** (k / 12)) for k in range(37)})
    values = [
        {"method": row.label, "n": n, "own": _mean(row, student_parts), "lent": _mean(row, teacher_parts)}
        for row in (baseline, *taught)
        for n in steps
    ]
    chart = _curves(values, comparison, energy_title("Energy per student", unit, figures), factor)
    told = [one for one in paybacks(comparison) if one.each == "student"]
    return Figure(
        title="Payback",
        spec=finish(moving(chart), 300, curves=values),
        description="Joules per student against the number of students that share a teacher. "
        + " ".join(payback_sentence(one) for one in told),
        caption="Student stages and the teacher's joules divided by the students that share it. A method pays back "
        f"where its curve falls below {comparison.baseline}; the upright line is the number chosen above.",
        height=300,
        name="payback",
        log_axis="y",
    )


def _mean(row: Row, of: Any) -> dict[str, float]:
    parts: list[Part] = [part for run in row.runs for part in of(run)]
    scopes = ("policy", "gpu", "all")
    return {scope: sum(part.by_scope[scope] or 0.0 for part in parts) / len(row.runs) for scope in scopes}


def _curves(values: list[dict[str, Any]], comparison: Comparison, title: str, factor: float) -> Any:
    every, hues, _ = label_scales([row.label for row in comparison.rows])
    drawn = {value["method"] for value in values}
    pairs = [(label, hue) for label, hue in zip(every, hues, strict=True) if label in drawn]
    scale = alt.Scale(domain=[label for label, _ in pairs], range=[hue for _, hue in pairs])
    lines = (
        alt.Chart(alt.NamedData("curves"))
        .transform_filter("indexof(hidden, datum.method) < 0")
        .transform_calculate(which="scope == 'pue' ? 'policy' : scope", times="scope == 'pue' ? pue : 1")
        .transform_calculate(
            energy=f"datum.times * (datum.own[datum.which] + datum.lent[datum.which] / datum.n) / {factor!r}"
        )
        .mark_line(strokeWidth=2, interpolate="monotone")
        .encode(
            x=alt.X("n:Q", title="Students that share the teacher", scale=alt.Scale(type="log", nice=False)),
            y=alt.Y("energy:Q", title=title, scale=alt.Scale(type="linear", zero=True)),
            color=alt.Color("method:N", title="Method", scale=scale),
            tooltip=["method:N", alt.Tooltip("n:Q", title="students"), alt.Tooltip("energy:Q", format=".3g")],
        )
    )
    chosen = (
        alt.Chart(alt.Data(values=[{"most": _MOST_STUDENTS}]))
        .transform_calculate(n="min(students, datum.most)")
        .mark_rule(strokeDash=[2, 3])
        .encode(x="n:Q")
    )
    return alt.layer(lines, chosen)
