"""Common parts of all figures: a Vega-Lite spec with a text description, colors, scales and shared data.

Specs are plain dicts that fill the width of their box. Those of a comparison read the page's `runs`, `parts` and
`methods` and have four parameters: scope, number of students that share a teacher, PUE, and hidden methods. The page
sets the parameters; a figure in a file has the initial ones.
"""

from __future__ import annotations

import math
import resource
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from joulelab.errors import UsageError
from joulelab.meter.figures import LOWER_BOUND, EnergyFigure, amount_text, labeled_text
from joulelab.meter.series import Array
from joulelab.report.compare.comparison import Comparison
from joulelab.report.energy_sums import all_parts
from joulelab.runs.record import RunRecord, StageRecord
from joulelab.units import size_text

# Hues of Okabe and Ito (2008), distinguishable for color-blind readers, without black and yellow, which are invisible
# on a dark or a light page. Methods also differ in shape, so that no figure depends on color alone.
HUES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# Darker and paler shades for pages with many stages.
_DARK = ("#004A75", "#A06E00", "#00634A", "#8F3E00", "#8E4B72", "#2B7FB0")
_PALE = ("#8FC1DE", "#F0CD86", "#86CDB9", "#EBB58E", "#E5BFD5", "#B4DDF6")
STAGE_HUES = (*HUES, *_DARK, *_PALE)
GRAY = "#8A8F98"
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")

# The JavaScript engine in vl-convert reserves 64 GB of address space, of which it uses 0.1 GB, and aborts the process
# if it does not get them.
_ADDRESS_SPACE_BYTES = 68 * 2**30


def chart_converter() -> Any:
    """The module vl_convert, after a check that its engine can start; raises the soft limit where that is enough."""
    import vl_convert

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _ADDRESS_SPACE_BYTES:
        if hard != resource.RLIM_INFINITY and hard < _ADDRESS_SPACE_BYTES:
            raise UsageError(
                f"charts need {size_text(_ADDRESS_SPACE_BYTES)} of address space (not of memory); the limit of this "
                f"process is {size_text(soft)}",
                "raise it for this command: ulimit -v unlimited",
            )
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return vl_convert


def label_scales(labels: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Domain, colors and shapes; with more methods than hues the two cycles still give distinct pairs."""
    domain = list(dict.fromkeys(labels))
    colors = [HUES[i % len(HUES)] for i in range(len(domain))]
    return domain, colors, [SHAPES[i % len(SHAPES)] for i in range(len(domain))]


def stage_colors(records: Iterable[RunRecord]) -> dict[str, str]:
    """Stage or inherited part -> color, the same in every figure of a page; in the order of a legend, gray ones last.

    Idle baselines and the run's overhead are gray: they are not work of a stage.
    """
    known = list(records)
    stages = [stage for record in known for stage in record.stages]
    gray = dict.fromkeys(stage.name for stage in stages if stage.role == "idle" or is_overhead(stage))
    inherited = sorted({part.stage for record in known for part in all_parts(record)})
    names = [name for name in dict.fromkeys([*(stage.name for stage in stages), *inherited]) if name not in gray]
    hues = {name: STAGE_HUES[place % len(STAGE_HUES)] for place, name in enumerate(names)}
    return hues | dict.fromkeys(gray, GRAY)


def is_overhead(stage: StageRecord) -> bool:
    """The time of a run that belongs to no stage."""
    return (stage.role, stage.activity, stage.part_of) == ("setup", "startup", None)


def color_scale(used: Collection[str], colors: Mapping[str, str]) -> alt.Scale:
    """A scale with the stages that the figure shows."""
    shown = [stage for stage in colors if stage in used]
    return alt.Scale(domain=shown, range=[colors[stage] for stage in shown])


Spec = dict[str, Any]
Datasets = Mapping[str, Sequence[Mapping[str, Any]]]
_UNITS = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))


@dataclass(frozen=True)
class Figure:
    """A figure of the page: spec, text description, and the height reserved for it."""

    title: str
    spec: Spec
    description: str
    caption: str
    height: int
    name: str = ""
    """Name of its file."""
    log_axis: str = ""
    """The axis with a switch between linear and logarithmic: `x` or `y`."""

    @property
    def first_axis(self) -> str:
        """Initial scale of the switchable axis: `log` or `linear`."""
        return "log" if _is_log(self.spec, self.log_axis) else "linear"

    def complete(self, shared: Datasets) -> Spec:
        """The spec with the page's data, for a separate file."""
        return {**self.spec, "datasets": {**shared, **self.spec.get("datasets", {})}}


def _is_log(spec: Spec, axis: str) -> bool:
    scale = spec.get("encoding", {}).get(axis, {}).get("scale") or {}
    return scale.get("type") == "log" or any(_is_log(layer, axis) for layer in spec.get("layer", ()))


def finish(chart: Any, height: int, **data: Sequence[Mapping[str, Any]]) -> Spec:
    """The spec, as wide as its box; the height is fixed, so that the page does not jump while drawing.

    `data`: its own datasets by name, added after altair, which would check every value.
    """
    spec: Spec = chart.properties(
        width="container", height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    ).to_dict(validate=False)  # browser tests draw all specs; validation takes longer than building them
    # the page contains one version of the library; a schema version in the spec could only cause a warning
    spec.pop("$schema", None)
    return {**spec, "datasets": {name: list(rows) for name, rows in data.items()}} if data else spec


def moving(chart: Any) -> Any:
    """With the parameters that the page sets."""
    first = {"scope": "policy", "students": 1, "pue": 1.0, "hidden": []}
    return chart.add_params(*(alt.param(name=name, value=value) for name, value in first.items()))


def parts_chart(factor: float) -> Any:
    """The page's parts with their `energy` in the axis's unit, as the controls select it."""
    return (
        alt.Chart(alt.NamedData("parts"))
        .transform_filter("indexof(hidden, datum.method) < 0")
        .transform_calculate(
            joules="(scope == 'pue' ? datum.policy * pue : datum[scope]) / (datum.shared ? students : 1)"
        )
        .transform_filter("isValid(datum.joules)")
        .transform_calculate(energy=f"datum.joules / {factor!r}")
    )


def methods_chart(factor: float) -> Any:
    """The page's methods with `mean`, `low` and `high` of energy in the axis's unit, as the controls select it."""
    chart = (
        alt.Chart(alt.NamedData("methods"))
        .transform_filter("indexof(hidden, datum.method) < 0")
        .transform_filter("datum.scope == (scope == 'pue' ? 'policy' : scope) && datum.students == students")
        .transform_filter("isValid(datum.mean)")
    )
    names = ("mean", "low", "high")
    return chart.transform_calculate(
        **{name: f"datum.{name} * (scope == 'pue' ? pue : 1) / {factor!r}" for name in names}
    )


def with_bounds(chart: Any, base: Any, bounds: bool, **encoding: Any) -> Any:
    """The chart with a ≥ at the end of every bar or mark of `base` whose `lower_bound` is true."""
    if not bounds:
        return chart
    marks = base.transform_filter("datum.lower_bound").mark_text(text="≥", align="left", dx=6, fontSize=15)
    return alt.layer(chart, marks.encode(**encoding))


def value_scale(values: Sequence[float], top: float = math.inf) -> alt.Scale:
    """A scale with a margin around the values that does not go below 0 unless they do, nor above `top`.

    A margin in pixels (`padding`) would start the axis of a small loss at -0.1.
    """
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    least = max(0.0, low - margin) if low >= 0 else low - margin
    return alt.Scale(zero=False, nice=False, domain=[least, max(high, min(high + margin, top))])


def bounds_caption(bounds: bool) -> str:
    return f" {LOWER_BOUND}." if bounds else ""


def energy_unit(energies_j: Iterable[float]) -> tuple[float, str]:
    top = max(energies_j, default=0.0)
    return next(((factor, unit) for factor, unit in _UNITS if top >= factor), (1.0, "J"))


def energy_title(opening: str, unit: str, figures: Iterable[EnergyFigure]) -> str:
    """The title marks estimates."""
    methods = {figure.method for figure in figures if figure.energy_j is not None}
    word = ", estimated" if methods == {"estimated"} else ", partly estimated" if "estimated" in methods else ""
    return f"{opening} ({unit}{word})"


def comparison_unit(comparison: Comparison) -> tuple[float, str, list[EnergyFigure]]:
    """Factor and unit common to all figures of a comparison, and the energies they follow from."""
    figures = [run.joules.with_teacher for row in comparison.rows for run in row.runs]
    known = [figure for figure in figures if figure.energy_j]
    return *energy_unit([figure.energy_j or 0.0 for figure in known]), known


def folded(text: str, width: int = 18) -> str:
    """A label on several lines, for an axis."""
    return "\n".join(textwrap.wrap(text, width))


FOLDED_AXIS = {"labelExpr": "split(datum.label, '\\n')", "ticks": False}


def stages_of_run(record: RunRecord) -> Figure | None:
    """Energy by stage of a single run: one bar for each."""
    known = [stage for stage in record.stages if stage.best.energy_j is not None and not stage.outside_totals]
    if not known:
        return None
    figures = [stage.best for stage in known]
    factor, unit = energy_unit([figure.energy_j or 0.0 for figure in figures])
    values = [
        {
            "row": folded(stage.name),
            "stage": stage.name,
            "energy": float(f"{(stage.best.energy_j or 0.0) / factor:.5g}"),
            "joules": labeled_text(stage.best),
            "lower_bound": stage.best.is_lower_bound,
        }
        for stage in known
    ]
    scale = color_scale([stage.name for stage in known], stage_colors([record]))
    base = alt.Chart(alt.Data(values=values))
    y = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(**FOLDED_AXIS))
    x = alt.X("energy:Q", title=energy_title("Energy", unit, figures))
    bars = base.mark_bar(cornerRadius=1).encode(
        y=y,
        x=x,
        color=alt.Color("stage:N", scale=scale, legend=None),
        tooltip=["stage:N", "joules:N"],
    )
    bounds = any(figure.is_lower_bound for figure in figures)
    chart = with_bounds(bars, base, bounds, y=y, x=x)
    height = 34 * len(known) + 20
    described = [f"{stage.name} {amount_text(stage.best)}" for stage in known]
    return Figure(
        "Energy by stage",
        finish(chart, height),
        "Energy by stage: " + "; ".join(described),
        bounds_caption(bounds).strip(),
        height,
        name="stages",
    )


def thin(times: Array, values: Array, buckets: int = 400) -> tuple[Array, Array]:
    """Lowest and highest reading of each bucket of equal time, in order, so that peaks stay; short series unchanged."""
    if len(times) <= 2 * buckets:
        return times, values
    edges = np.linspace(float(times[0]), float(times[-1]), buckets + 1)
    cuts = np.searchsorted(times, edges[1:-1])
    kept: set[int] = {0, len(times) - 1}
    start = 0
    for stop in (*cuts, len(times)):
        if stop > start:
            bucket = values[start:stop]
            # Both extremes of a bucket: a mean would hide the peaks that a power trace is looked at
            # for, and every n-th value would show beats of the load with the sampling.
            kept |= {start + int(bucket.argmin()), start + int(bucket.argmax())}
        start = int(stop)
    order = np.array(sorted(kept))
    return times[order], values[order]
