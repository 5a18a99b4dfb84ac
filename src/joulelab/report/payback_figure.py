"""Net energy per student against the number of students that share a teacher: break-even is where it reaches 0."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from joulelab.report.comparison import Comparison
from joulelab.report.figures import Figure, energy_title, energy_unit, finish, moving
from joulelab.report.palette import GREY, label_scales
from joulelab.report.payback import RowPayback, paybacks, student_parts
from joulelab.report.payback_words import payback_sentence
from joulelab.report.wording import listed

_MOST_STUDENTS = 1_000
_LARGEST = 1_000_000


def payback_curve(comparison: Comparison) -> Figure | None:
    """The curves are `spent / n - saved` of the table's own figures, so that a curve reaches 0 at the table's count."""
    answers = [one for one in paybacks(comparison) if one.each == "student" and one.found]
    drawn = [(one, one.found) for one in answers if one.found and one.costs and one.costs.reach_equal_quality]
    if not drawn:
        return None
    counts = [found.count for _, found in drawn if found.count]
    most = min(max([_MOST_STUDENTS, *(2 * count for count in counts)]), _LARGEST)
    steps = sorted({round(10 ** (k / 12)) for k in range(1 + math.ceil(12 * math.log10(most)))})
    factor, unit = energy_unit([max(abs(found.spent.value), abs(found.saved.value)) for _, found in drawn])
    curves = [
        {
            "method": one.label,
            "n": n,
            "net": (found.spent.value / n - found.saved.value) / factor,
            "breaks_even": found.pays_back,
        }
        for one, found in drawn
        for n in steps
    ]
    marks = [{"method": one.label, "n": found.count, "net": 0.0} for one, found in drawn if found.count]
    runs = [run for row in comparison.rows for run in row.runs]
    figures = [part.figure for run in runs for part in student_parts(run)]
    title = energy_title(f"Energy per student minus {comparison.baseline}", unit, figures)
    return Figure(
        title="Break-even",
        spec=finish(
            moving(_chart(comparison, {one.label for one, _ in drawn}, title)),
            300,
            # each with one that is not seen: a layer whose methods a reader hides has no extent to draw in
            curves=[{"method": "", "n": 1, "net": 0.0, "breaks_even": True}, *curves],
            marks=[{"method": "", "n": 1, "net": 0.0}, *marks],
        ),
        description="Energy per student relative to the baseline against the number of students that share a teacher. "
        + " ".join(payback_sentence(one) for one in answers),
        caption=_caption(comparison, answers),
        height=300,
        name="payback",
    )


def _caption(comparison: Comparison, answers: list[RowPayback]) -> str:
    even = [f"{one.label} ({one.answer})" for one in answers if one.found and one.found.pays_back]
    never = [one for one in answers if one.found and not one.found.pays_back]
    dashed = [one.label for one in never if one.costs and one.costs.reach_equal_quality]
    worse = [one.label for one in never if one.label not in dashed]
    parts = [
        f"Energy of the student stages at equal quality, minus that of {comparison.baseline}, plus the teacher's "
        "energy divided by the students that share it, as the runs count energy."
    ]
    if even:
        parts.append(f"Break-even where a solid curve reaches 0, marked by a point: {listed(even)}.")
    if dashed:
        parts.append(f"Dashed, does not break even: {listed(dashed)}.")
    if worse:
        parts.append(f"Not drawn, because its students never reach the baseline's quality: {listed(worse)}.")
    return " ".join([*parts, "The vertical line is the number of students chosen above."])


def _chart(comparison: Comparison, labels: set[str], title: str) -> Any:
    every, hues, _ = label_scales([row.label for row in comparison.rows])
    pairs = [(label, hue) for label, hue in zip(every, hues, strict=True) if label in labels]
    scale = alt.Scale(domain=[label for label, _ in pairs], range=[hue for _, hue in pairs])
    colour = alt.Color("method:N", title="Method", scale=scale)
    x = alt.X("n:Q", title="Students that share the teacher", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("net:Q", title=title)
    shown = "indexof(hidden, datum.method) < 0"
    lines = (
        alt.Chart(alt.NamedData("curves"))
        .transform_filter(shown)
        .mark_line(strokeWidth=2, interpolate="monotone")
        .encode(
            x=x,
            y=y,
            color=colour,
            strokeDash=alt.condition("datum.breaks_even", alt.value([1, 0]), alt.value([6, 4])),
            tooltip=["method:N", alt.Tooltip("n:Q", title="students"), alt.Tooltip("net:Q", format=".3g")],
        )
    )
    points = (
        alt.Chart(alt.NamedData("marks")).transform_filter(shown).mark_point(filled=True, size=90)
        .encode(
            x="n:Q",
            y="net:Q",
            color=colour,
            opacity=alt.condition("datum.method == ''", alt.value(0), alt.value(1)),
            tooltip=["method:N", alt.Tooltip("n:Q", format=".3g")],
        )
    )  # fmt: skip
    zero = alt.Chart(alt.Data(values=[{"net": 0}])).mark_rule(color=GREY).encode(y="net:Q")
    chosen = (
        alt.Chart(alt.Data(values=[{"most": _MOST_STUDENTS}]))
        .transform_calculate(n="min(students, datum.most)")
        .mark_rule(strokeDash=[2, 3])
        .encode(x="n:Q")
    )
    return alt.layer(zero, lines, points, chosen)
