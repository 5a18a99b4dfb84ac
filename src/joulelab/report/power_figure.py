"""Power over time with the stages as bands behind it: the figure that shows whether a run's joules are believable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from joulelab.clock import NS
from joulelab.meter.integrate import power_curve
from joulelab.meter.series import Trace, load_trace
from joulelab.report.figures import Figure, finish
from joulelab.report.palette import stage_scale
from joulelab.report.thinning import thin
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import MEASURED_COMPONENTS, RunRecord
from joulelab.units import duration_text, energy_text, power_text

HEIGHT = 260
# Bands of one stage closer than this share of the time axis cannot be told apart, and are drawn as one.
_INVISIBLE = 1 / 800
_TIME_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))


@dataclass(frozen=True)
class AttemptTrace:
    """A trace on the run's own time axis, where attempts follow each other without the pause between them."""

    attempt: int
    host: str
    trace: Trace
    shift_s: float

    def seconds(self, mono_ns: float) -> float:
        return (mono_ns - self.trace.first_ns) / NS + self.shift_s


def attempt_traces(paths: RunPaths) -> list[AttemptTrace]:
    placed: list[AttemptTrace] = []
    shift_s, end_s, previous = 0.0, 0.0, None
    for host, number, path in paths.traces():
        trace = load_trace(path)
        if number != previous:
            shift_s, previous = end_s, number
        placed.append(AttemptTrace(number, host, trace, shift_s))
        end_s = max(end_s, shift_s + (trace.last_ns - trace.first_ns) / NS)
    return placed


def power_over_time(record: RunRecord, folder: Path, stages: Sequence[str]) -> Figure | None:
    """None where the trace holds no power: a run killed at once, or one without any sensor."""
    traces = attempt_traces(RunPaths(folder))
    estimated = record.totals is not None and record.totals.best.method == "estimated"
    curves = _curves(traces, ("cpu_estimate",) if estimated else MEASURED_COMPONENTS)
    if not curves:
        return None
    length_s = max(point["t"] for point in curves)
    divisor, unit = next((by, unit) for above, by, unit in _TIME_UNITS if length_s >= above)
    bands = _bands(record, traces, length_s)
    idle_w = record.totals.idle_power_w if record.totals and not estimated else None
    one_device = len({point["device"] for point in curves}) == 1
    chart = _layers(
        _in_unit(curves, divisor), _in_unit(bands, divisor), idle_w if one_device else None, unit, estimated, stages
    )
    peak_w = max(point["w"] for point in curves)
    return Figure(
        title="Power over time",
        spec=finish(chart, HEIGHT),
        description=f"Power of {record.label} over {duration_text(length_s)}, with a peak of {power_text(peak_w)}.",
        caption=_caption(len(record.attempts), estimated, idle_w, one_device),
        height=HEIGHT,
    )


def _caption(attempts: int, estimated: bool, idle_w: float | None, one_device: bool) -> str:
    parts = ["Bands are stages; between them is the run's overhead."]
    parts.append("Thinned to the lowest and highest reading of each stretch, so peaks stay.")
    if estimated:
        parts.append("Estimated from CPU time; idle power is unknown.")
    if idle_w is not None and not one_device:
        parts.append(f"All devices together drew {power_text(idle_w)} when idle.")
    if attempts > 1:
        parts.append(f"{attempts} attempts follow each other without the pause between them.")
    return " ".join(parts)


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
            "joules": energy_text(stage.best.energy_j),
        }
        merged: list[list[float]] = []
        for segment in stage.segments if stage.name != "run.overhead" else ():
            placed = by_attempt.get((segment.attempt, segment.host))
            if placed is None:
                continue
            begin, end = placed.seconds(segment.start_ns), placed.seconds(segment.end_ns)
            if merged and begin - merged[-1][1] < length_s * _INVISIBLE:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        bands += [{**facts, "t": begin, "until": end} for begin, end in merged]
    return bands


def _in_unit(points: Sequence[dict[str, Any]], divisor: float) -> list[dict[str, Any]]:
    return [{**p, **{key: round(p[key] / divisor, 4) for key in ("t", "until") if key in p}} for p in points]


def _layers(
    curves: list[dict[str, Any]],
    bands: list[dict[str, Any]],
    idle_w: float | None,
    unit: str,
    estimated: bool,
    stages: Sequence[str],
) -> Any:
    x = alt.X("t:Q", title=f"Time since the start ({unit})", scale=alt.Scale(nice=False))
    y = alt.Y("w:Q", title=f"Power (W{', estimated' if estimated else ''})", scale=alt.Scale(zero=True))
    several = len({point["device"] for point in curves}) > 1
    dash = alt.StrokeDash("device:N", title="Device") if several else alt.Undefined
    lines = alt.Chart(alt.Data(values=curves)).mark_line(strokeWidth=1.4, interpolate="linear")
    layers = [_band_layer(bands, x, stages)] if bands else []
    layers.append(lines.encode(x=x, y=y, detail=["device:N", "attempt:N"], strokeDash=dash))
    if idle_w is not None:
        layers += _idle_layers(idle_w, y)
    return alt.layer(*layers)


def _band_layer(bands: list[dict[str, Any]], x: Any, stages: Sequence[str]) -> Any:
    used = {band["stage"] for band in bands}
    domain, colours = stage_scale([*stages, *(band["stage"] for band in bands)])
    pairs = [(stage, colour) for stage, colour in zip(domain, colours, strict=True) if stage in used]
    scale = alt.Scale(domain=[stage for stage, _ in pairs], range=[colour for _, colour in pairs])
    chart = alt.Chart(alt.Data(values=bands)).mark_rect(opacity=0.32)
    color = alt.Color("stage:N", title="Stage", scale=scale)
    return chart.encode(x=x, x2="until:Q", color=color, tooltip=["stage:N", "took:N", "joules:N"])


def _idle_layers(idle_w: float, y: Any) -> list[Any]:
    base = alt.Chart(alt.Data(values=[{"w": round(idle_w, 2), "text": f"idle {power_text(idle_w)}"}]))
    text = base.mark_text(align="left", baseline="bottom", dx=4, dy=-2, fontSize=12)
    return [base.mark_rule(strokeDash=[6, 4]).encode(y=y), text.encode(y=y, x=alt.value(0), text="text:N")]
