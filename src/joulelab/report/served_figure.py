"""Joules per item against time per item: what a model costs when it is used, at the speed it was used with.

Read from the stages in which a finished model ran on data: its evaluation, or an inference run.
"""

from __future__ import annotations

import altair as alt

from joulelab.meter.figure_text import labeled_text
from joulelab.report.comparison import Comparison
from joulelab.report.figures import Figure, bounds_caption, energy_unit, finish, moving, with_bounds
from joulelab.report.palette import label_scales
from joulelab.report.served import served
from joulelab.units import with_prefix

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def joules_against_time(comparison: Comparison) -> Figure | None:
    found = [(row.label, one) for row in comparison.rows for run in row.runs if (one := served(run))]
    items = {one.item for _, one in found}
    if len(found) < 2 or len(items) > 1:
        return None
    item = items.pop()
    factor, unit = energy_unit([one.j_per_item for _, one in found])
    slowest = max(one.s_per_item for _, one in found)
    time_factor, time_unit = next((step for step in _TIMES if slowest >= step[0]), _TIMES[-1])
    values = [
        {
            "method": label,
            "run": f"{label}, seed {one.run.seed}",
            "stage": one.stage.name,
            "time_per_item": float(f"{one.s_per_item / time_factor:.5g}"),
            "energy": float(f"{one.j_per_item / factor:.5g}"),
            "joules": labeled_text(one.energy),
            "time": with_prefix(one.s_per_item, "s"),
            "lower_bound": one.energy.is_lower_bound,
        }
        for label, one in found
    ]
    domain, colours, shapes = label_scales([row.label for row in comparison.rows])
    base = alt.Chart(alt.NamedData("uses")).transform_filter("indexof(hidden, datum.method) < 0")
    x = alt.X("time_per_item:Q", title=f"Time per {item} ({time_unit})", scale=alt.Scale(type="linear", zero=True))
    y = alt.Y("energy:Q", title=f"Energy per {item} ({unit})", scale=alt.Scale(zero=True))
    points = base.mark_point(filled=True, size=100, opacity=0.9).encode(
        x=x,
        y=y,
        color=alt.Color("method:N", title="Method", scale=alt.Scale(domain=domain, range=colours)),
        shape=alt.Shape("method:N", title="Method", scale=alt.Scale(domain=domain, range=shapes)),
        tooltip=["run:N", "stage:N", "time:N", "joules:N"],
    )
    bounds = any(one.energy.is_lower_bound for _, one in found)
    chart = with_bounds(points, base, bounds, x=x, y=y)
    described = [f"{label} {labeled_text(one.energy)} in {with_prefix(one.s_per_item, 's')}" for label, one in found]
    stages = " and ".join(dict.fromkeys(one.stage.name for _, one in found))
    return Figure(
        title=f"Joules against time per {item}",
        spec=finish(moving(chart), 280, uses=values),
        description=f"Energy against time per {item} in use: {'; '.join(described)}.",
        caption=f"Each run's model at work in {stages}, in batches; a single request takes longer."
        + bounds_caption(bounds),
        height=280,
        name="joules-against-time",
        log_axis="x",
    )
