"""Power over time with the stages as bands behind it: the figure that shows whether a run's joules are believable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from joulelab.meter.figure_text import labeled_text
from joulelab.meter.integrate import both_paths, power_curve
from joulelab.report.attempt_traces import AttemptTrace
from joulelab.report.figures import Figure, finish
from joulelab.report.palette import stage_scale
from joulelab.report.power_events import INVISIBLE, event_layers, found_events, in_parts, told
from joulelab.report.thinning import thin
from joulelab.runs.record import MEASURED_COMPONENTS, RunRecord
from joulelab.units import duration_text, energy_text, power_text

HEIGHT = 280
# More lines than this cannot be told apart by their dashes.
_FEW_DEVICES = 4
_TIME_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))


def power_over_time(record: RunRecord, traces: Sequence[AttemptTrace], stages: Sequence[str]) -> Figure | None:
    """None where the trace holds no power: a run killed at once, or one without any sensor."""
    estimated = record.totals is not None and record.totals.best.method == "estimated"
    curves = _curves(traces, ("cpu_estimate",) if estimated else MEASURED_COMPONENTS)
    if not curves:
        return None
    length_s = max(point["t"] for point in curves)
    divisor, unit = next((by, unit) for above, by, unit in _TIME_UNITS if length_s >= above)
    bands = _bands(record, traces, length_s)
    idle_w = record.totals.idle_power_w if record.totals and not estimated else None
    one_device = len({point["device"] for point in curves}) == 1
    events = found_events(traces, length_s)
    in_parts(curves, events)
    data = {
        "curves": _in_unit(curves, divisor),
        "bands": _in_unit(bands, divisor),
        "gaps": _in_unit([event for event in events if event["what"] == "gap"], divisor),
        "throttling": _in_unit([event for event in events if event["what"] == "throttling"], divisor),
    }
    data = {name: rows for name, rows in data.items() if rows}
    chart = _layers(data, idle_w if one_device else None, unit, estimated, stages)
    peak_w = max(point["w"] for point in curves)
    return Figure(
        title="Power over time",
        spec=finish(chart, HEIGHT, **data),
        description=f"Power of {record.label} over {duration_text(length_s)}, with a peak of {power_text(peak_w)}.",
        caption=" ".join([*_caption(record, estimated, idle_w, one_device), *told(events), *_two_ways(traces)]),
        height=HEIGHT,
        name=f"power-{record.run_id}",
    )


def _caption(record: RunRecord, estimated: bool, idle_w: float | None, one_device: bool) -> list[str]:
    parts = ["Bands are stages; between them is the run's overhead."]
    parts.append("Thinned to the lowest and highest reading of each stretch, so peaks stay.")
    if estimated:
        parts.append("Estimated from CPU time; idle power is unknown.")
    if idle_w is not None and not one_device:
        parts.append(f"All devices together drew {power_text(idle_w)} when idle.")
    attempts = len({attempt.number for attempt in record.attempts})
    if attempts > 1:
        parts.append(f"{attempts} attempts follow each other without the pause between them.")
    return parts


def _two_ways(traces: Sequence[AttemptTrace]) -> list[str]:
    """Counter against integral, over the whole trace: how a broken sensor is noticed."""
    texts = []
    for component in MEASURED_COMPONENTS:
        both = [both_paths(p.trace, component, [(p.trace.first_ns, p.trace.last_ns)]) for p in traces]
        sums = [(b.counter.energy_j, b.integrated.energy_j) for b in both if b and b.counter.energy_j]
        counter_j, integral_j = sum(c or 0.0 for c, _ in sums), sum(i or 0.0 for _, i in sums)
        if counter_j > 0 and integral_j > 0:
            texts.append(
                f"{component.upper()} over the whole trace: counter {energy_text(counter_j)}, integral of power "
                f"{energy_text(integral_j)} ({100 * (integral_j / counter_j - 1):+.1f} %)."
            )
    return texts


def _curves(traces: Sequence[AttemptTrace], components: Sequence[str]) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for placed in traces:
        for series in placed.trace.devices:
            if series.component not in components or not series.counted:
                continue
            times, watts = thin(*power_curve(series))
            name = series.device if len({one.host for one in traces}) == 1 else f"{placed.host} {series.device}"
            points += [
                {
                    "t": placed.seconds(float(time)),
                    "w": round(float(watt), 2),
                    "device": name,
                    "attempt": placed.attempt,
                }
                for time, watt in zip(times, watts, strict=True)
            ]
    return points


def _bands(record: RunRecord, traces: Sequence[AttemptTrace], length_s: float) -> list[dict[str, Any]]:
    """Segments of all stages but the overhead, which is what lies between them."""
    by_attempt = {(placed.attempt, placed.host): placed for placed in traces}
    bands: list[dict[str, Any]] = []
    for stage in record.stages:
        facts = {
            "stage": stage.name,
            "took": duration_text(stage.duration_s),
            "joules": labeled_text(stage.best),
        }
        merged: list[list[float]] = []
        for segment in stage.segments if stage.name != "run.overhead" else ():
            placed = by_attempt.get((segment.attempt, segment.host))
            if placed is None:
                continue
            begin, end = placed.seconds(segment.start_ns), placed.seconds(segment.end_ns)
            if merged and begin - merged[-1][1] < length_s * INVISIBLE:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        bands += [{**facts, "t": begin, "until": end} for begin, end in merged]
    return bands


def _in_unit(points: Sequence[dict[str, Any]], divisor: float) -> list[dict[str, Any]]:
    return [{**p, **{key: round(p[key] / divisor, 4) for key in ("t", "until") if key in p}} for p in points]


def _layers(
    data: dict[str, list[dict[str, Any]]], idle_w: float | None, unit: str, estimated: bool, stages: Sequence[str]
) -> Any:
    x = alt.X("t:Q", title=f"Time since the start ({unit})", scale=alt.Scale(nice=False))
    y = alt.Y("w:Q", title=f"Power (W{', estimated' if estimated else ''})", scale=alt.Scale(zero=True))
    devices = len({point["device"] for point in data["curves"]})
    dash = alt.StrokeDash("device:N", title="Device") if 1 < devices <= _FEW_DEVICES else alt.Undefined
    thin_lines = {"strokeWidth": 0.8, "opacity": 0.6} if devices > _FEW_DEVICES else {"strokeWidth": 1.4}
    lines = alt.Chart(alt.NamedData("curves")).mark_line(interpolate="linear", **thin_lines)
    layers = [_band_layer(data["bands"], x, stages)] if "bands" in data else []
    layers.append(lines.encode(x=x, y=y, detail=["device:N", "attempt:N", "part:N"], strokeDash=dash))
    if idle_w is not None:
        layers += _idle_layers(idle_w, y)
    return alt.layer(*layers, *event_layers(data, x, HEIGHT))


def _band_layer(bands: list[dict[str, Any]], x: Any, stages: Sequence[str]) -> Any:
    used = {band["stage"] for band in bands}
    domain, colours = stage_scale([*stages, *(band["stage"] for band in bands)])
    pairs = [(stage, colour) for stage, colour in zip(domain, colours, strict=True) if stage in used]
    scale = alt.Scale(domain=[stage for stage, _ in pairs], range=[colour for _, colour in pairs])
    chart = alt.Chart(alt.NamedData("bands")).mark_rect(opacity=0.32)
    color = alt.Color("stage:N", title="Stage", scale=scale)
    return chart.encode(x=x, x2="until:Q", color=color, tooltip=["stage:N", "took:N", "joules:N"])


def _idle_layers(idle_w: float, y: Any) -> list[Any]:
    base = alt.Chart(alt.Data(values=[{"w": round(idle_w, 2), "text": f"idle {power_text(idle_w)}"}]))
    text = base.mark_text(align="left", baseline="bottom", dx=4, dy=-2, fontSize=12)
    return [base.mark_rule(strokeDash=[6, 4]).encode(y=y), text.encode(y=y, x=alt.value(0), text="text:N")]
