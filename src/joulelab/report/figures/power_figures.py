"""Power over time: of a run with its stages, gaps and throttling, and of imported logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import altair as alt
import numpy as np
from numpy.typing import NDArray

from joulelab.clock import NS
from joulelab.meter.figures import labeled_text
from joulelab.meter.health import throttle_reasons_text
from joulelab.meter.importers.log_energy import HOLE_FACTOR
from joulelab.meter.importers.power_log import DeviceLog, PowerLog
from joulelab.meter.integrate import both_paths, power_curve
from joulelab.meter.series import Array, Trace, load_trace
from joulelab.meter.trace import SUFFIX, numbers_in, read_batches, read_lines
from joulelab.report.figures.chart_base import (
    Figure,
    chart_converter,
    color_scale,
    finish,
    is_overhead,
    label_scales,
    stage_colors,
    thin,
)
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import MEASURED_COMPONENTS, RunRecord
from joulelab.units import BYTES_PER_MB, duration_text, energy_text, power_text


@dataclass(frozen=True)
class AttemptTrace:
    """A trace on the run's time axis, on which attempts follow each other without pauses."""

    attempt: int
    host: str
    trace: Trace
    shift_s: float
    path: Path

    def seconds(self, mono_ns: float) -> float:
        return (mono_ns - self.trace.first_ns) / NS + self.shift_s

    def all_seconds(self, mono_ns: Array) -> Array:
        return (mono_ns - self.trace.first_ns) / NS + self.shift_s


def attempt_traces(paths: RunPaths) -> list[AttemptTrace]:
    placed: list[AttemptTrace] = []
    shift_s, end_s, previous = 0.0, 0.0, None
    for host, number, path in paths.traces():
        trace = load_trace(path)
        if number != previous:
            shift_s, previous = end_s, number
        placed.append(AttemptTrace(number, host, trace, shift_s, path))
        end_s = max(end_s, shift_s + (trace.last_ns - trace.first_ns) / NS)
    return placed


ThrottledSegment = tuple[int, int, str]
"""Begin and end (monotonic nanoseconds), and the throttle reason."""


def throttled(path: Path, interval_s: float) -> list[ThrottledSegment]:
    """Segments of throttling; readings at most three intervals apart are joined."""
    found = []
    for reason, moments in _moments(path).items():
        stamps = np.unique(np.concatenate(moments))
        breaks = np.flatnonzero(np.diff(stamps) > 3e9 * interval_s)
        starts, ends = stamps[[0, *(breaks + 1)]], stamps[[*breaks, -1]]
        last_ns = int(1e9 * interval_s)  # a reading holds until the next one
        found += [(int(start), int(end) + last_ns, reason) for start, end in zip(starts, ends, strict=True)]
    return found


def _moments(path: Path) -> dict[str, list[NDArray[np.int64]]]:
    """Throttle reason -> arrays of the times at which it was read."""
    found: dict[str, list[NDArray[np.int64]]] = {}
    if path.suffix != SUFFIX:
        for line in read_lines(path):
            if line.get("kind") == "gpu" and line.get("throttle_reasons"):
                for reason in throttle_reasons_text(line["throttle_reasons"]):
                    found.setdefault(reason, []).append(np.array([line["mono_ns"]], dtype=np.int64))
        return found
    for batch in read_batches(path, ["mono_ns", "throttle_reasons"]):
        times, bits = (numbers_in(column)[0] for column in batch.columns)
        for word in np.unique(bits[bits != 0]):
            for reason in throttle_reasons_text(int(word)):
                found.setdefault(reason, []).append(times[bits == word])
    return found


Event = dict[str, Any]
# Events closer than this share of the time axis are drawn as one.
INVISIBLE = 1 / 800
# Readings fail one by one; failures no further apart than this many readings are one gap.
_SAME_GAP = 3


def found_events(traces: Sequence[AttemptTrace], length_s: float) -> list[Event]:
    """Gaps and throttling with `t` and `until` on the run's time axis, and the number of failed readings."""
    found: list[Event] = []
    for placed in traces:
        found += _gaps(placed)
        if any(series.component == "gpu" for series in placed.trace.devices):
            for start, end, reason in throttled(placed.path, placed.trace.interval_s):
                where = {"t": placed.seconds(start), "until": placed.seconds(end)}
                found.append({**where, "what": "throttling", "why": reason, "times": 1})
    return _merged(found, length_s * INVISIBLE)


def _gaps(placed: AttemptTrace) -> list[Event]:
    """From the first failed reading to the next due one; repeated failures are one gap."""
    interval_s = placed.trace.interval_s
    found = []
    for gap in placed.trace.gaps:
        begin, end = placed.seconds(gap.mono_ns), placed.seconds(gap.mono_ns + interval_s * NS)
        found.append({"t": begin, "until": end, "what": "gap", "why": f"{gap.device}: {gap.reason}", "times": 1})
    return _merged(found, _SAME_GAP * interval_s)


def _merged(events: Sequence[Event], closer_than_s: float) -> list[Event]:
    merged: list[Event] = []
    for event in sorted(events, key=lambda event: (event["what"], event["why"], event["t"])):
        last = merged[-1] if merged else {}
        same = (last.get("what"), last.get("why")) == (event["what"], event["why"])
        if same and event["t"] - last["until"] < closer_than_s:
            last["until"], last["times"] = max(last["until"], event["until"]), last["times"] + event["times"]
        else:
            merged.append(dict(event))
    return merged


def gaps_without_readings(times_s: Array, events: Sequence[Event]) -> list[tuple[float, float]]:
    """The gaps in which this curve has no reading; a gap may be one of another device."""
    gaps = [(event["t"], event["until"]) for event in events if event["what"] == "gap"]
    return [(begin, end) for begin, end in gaps if not np.any((times_s > begin) & (times_s < end))]


def in_parts(curves: Sequence[Event], events: Sequence[Event]) -> None:
    """Number the parts of every curve between gaps, so that no line crosses a gap."""
    by_line: dict[tuple[str, int], list[Event]] = {}
    for point in curves:
        by_line.setdefault((point["line"], point["attempt"]), []).append(point)
    for points in by_line.values():
        empty = gaps_without_readings(np.array([point["t"] for point in points]), events)
        for point in points:
            point["part"] = sum(end <= point["t"] for _, end in empty)


def event_texts(events: Sequence[Event]) -> list[str]:
    texts = []
    gaps = [event for event in events if event["what"] == "gap"]
    if gaps:
        reasons = "; ".join(dict.fromkeys(event["why"] for event in gaps))
        length_s = sum(event["until"] - event["t"] for event in gaps)
        count = f"{len(gaps)} gap{'' if len(gaps) == 1 else 's'}"
        texts.append(f"Between dotted lines: {count} in the readings, {duration_text(length_s)} in total ({reasons}).")
    held = [event for event in events if event["what"] == "throttling"]
    if held:
        reasons = ", ".join(dict.fromkeys(event["why"] for event in held))
        held_s = sum(event["until"] - event["t"] for event in held)
        texts.append(f"The strip at the bottom marks {duration_text(held_s)} of GPU throttling ({reasons}).")
    return texts


def event_layers(data: dict[str, list[Event]], x: Any, height: int) -> list[Any]:
    """Gaps between two dotted vertical lines, throttling as a strip along the bottom."""
    layers: list[Any] = []
    tooltip = ["what:N", "why:N", alt.Tooltip("times:Q", title="readings failed")]
    if "gaps" in data:
        gaps = alt.Chart(alt.NamedData("gaps"))
        layers.append(gaps.mark_rect(color="#808080", opacity=0.3).encode(x=x, x2="until:Q", tooltip=tooltip))
        for edge in ("t", "until"):
            dotted = gaps.mark_rule(strokeDash=[1, 3], strokeWidth=1.5)
            layers.append(dotted.encode(x=alt.X(f"{edge}:Q"), tooltip=tooltip))
    if "throttling" in data:
        strip = alt.Chart(alt.NamedData("throttling")).mark_rect(color="#D55E00", opacity=0.9)
        places = {"y": alt.value(height - 6), "y2": alt.value(height)}
        layers.append(strip.encode(x=x, x2="until:Q", tooltip=["what:N", "why:N"], **places))
    return layers


HEIGHT = 280
# With more devices than this, only the sums are drawn.
_MOST_DEVICE_LINES = 16
# A sum holds a device's first and last reading for this many intervals: devices are read one after the other.
_HELD_INTERVALS = 3
_TIME_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))
_DASHES = {"gpu": [1, 0], "cpu": [6, 3], "dram": [2, 2], "cpu_estimate": [1, 0]}


def power_over_time(
    record: RunRecord, traces: Sequence[AttemptTrace], colors: Mapping[str, str] | None = None
) -> Figure | None:
    """Power by component; None if the trace has no power, as in a run killed at its start or without a sensor."""
    estimated = record.totals is not None and record.totals.best.method == "estimated"
    length_s = max((placed.seconds(placed.trace.last_ns) for placed in traces), default=0.0)
    events = found_events(traces, length_s)
    sums, devices = _curves(traces, ("cpu_estimate",) if estimated else MEASURED_COMPONENTS, events)
    if not sums:
        return None
    divisor, unit = next((by, unit) for above, by, unit in _TIME_UNITS if length_s >= above)
    bands = _bands(record, traces, length_s)
    # the record's idle power is the mean over hosts, which says nothing about a sum over them
    one_host = len({placed.host for placed in traces}) == 1
    idle_w = record.totals.idle_power_w if record.totals and not estimated and one_host else None
    one_line = len({point["line"] for point in sums}) == 1
    for curves in (sums, devices):
        in_parts(curves, events)
    data = {
        "curves": _in_unit(sums, divisor),
        "devices": _in_unit(devices, divisor),
        "bands": _in_unit(bands, divisor),
        "gaps": _in_unit([event for event in events if event["what"] == "gap"], divisor),
        "throttling": _in_unit([event for event in events if event["what"] == "throttling"], divisor),
    }
    data = {name: rows for name, rows in data.items() if rows}
    chart = _layers(data, idle_w if one_line else None, unit, estimated, colors or stage_colors([record]))
    peak_w = max(point["w"] for point in sums)
    lines = " and ".join(dict.fromkeys(point["line"] for point in sums))
    caption = _caption(record, estimated, None if one_line else idle_w, sums, devices)
    return Figure(
        title="Power over time",
        spec=finish(chart, HEIGHT, **data),
        description=f"Power of {record.label} over {duration_text(length_s)} ({lines}), "
        f"with a peak of {power_text(peak_w)}.",
        caption=" ".join([*caption, *event_texts(events), *_two_ways(traces)]),
        height=HEIGHT,
        name=f"power-{record.run_id}",
    )


def _caption(
    record: RunRecord, estimated: bool, idle_w: float | None, sums: Sequence[Event], devices: Sequence[Event]
) -> list[str]:
    parts = ["Bands are stages; between them is the run's overhead."]
    if any(point["devices"] > 1 for point in sums):
        thin_lines = "; thin lines are single devices" if devices else ""
        parts.append(f"Each line is the sum over all devices of a component{thin_lines}.")
    parts.append("Thinned to the lowest and highest reading of each time bucket, so peaks are kept.")
    if estimated:
        parts.append("Estimated from CPU time; idle power is unknown.")
    if idle_w is not None:
        parts.append(f"Idle power of all devices: {power_text(idle_w)}.")
    attempts = len({attempt.number for attempt in record.attempts})
    if attempts > 1:
        parts.append(f"{attempts} attempts, shown without the pauses between them.")
    return parts


def _two_ways(traces: Sequence[AttemptTrace]) -> list[str]:
    """Counter and integral of power over the whole trace: a large difference shows a broken sensor."""
    texts = []
    for component in MEASURED_COMPONENTS:
        # Device by device, from a copy: a series keeps its curves, which over a day are as large as all its readings.
        both = [
            both_paths(replace(p.trace, devices=(replace(series),)), component, [(p.trace.first_ns, p.trace.last_ns)])
            for p in traces
            for series in p.trace.devices
        ]
        sums = [(b.counter.energy_j, b.integrated.energy_j) for b in both if b and b.counter.energy_j]
        counter_j, integral_j = sum(c or 0.0 for c, _ in sums), sum(i or 0.0 for _, i in sums)
        if counter_j > 0 and integral_j > 0:
            texts.append(
                f"{component.upper()} over the whole trace: counter {energy_text(counter_j)}, integral of power "
                f"{energy_text(integral_j)} ({100 * (integral_j / counter_j - 1):+.1f} %)."
            )
    return texts


def _curves(
    traces: Sequence[AttemptTrace], components: Sequence[str], events: Sequence[Event]
) -> tuple[list[Event], list[Event]]:
    """Points of the power of every component, and of its devices where it has several."""
    sums: list[Event] = []
    devices: list[Event] = []
    counted = [
        (placed, series)
        for placed in traces
        for series in placed.trace.devices
        if series.component in components and series.counted
    ]
    names = {(placed.host, series.device): series.component for placed, series in counted}
    several_hosts = len({host for host, _ in names}) > 1
    for component in components:
        count = list(names.values()).count(component)
        title = component_title(component) + (f", {count} devices" if count > 1 else "")
        for attempt in dict.fromkeys(placed.attempt for placed, _ in counted):
            facts = {"line": title, "component": component, "devices": count, "attempt": attempt}
            curves: list[tuple[Array, Array, float]] = []
            for placed, series in counted:
                if (placed.attempt, series.component) != (attempt, component) or not len(power_curve(series)[0]):
                    continue
                times, watts = power_curve(series)
                curves.append((placed.all_seconds(times), watts, _HELD_INTERVALS * placed.trace.interval_s))
                if count > 1 and len(names) <= _MOST_DEVICE_LINES:
                    name = f"{placed.host} {series.device}" if several_hosts else series.device
                    devices += _line_points(*curves[-1][:2], {**facts, "line": name})
            if curves:
                sums += _line_points(*_summed(curves, events), facts)
    return sums, devices


def component_title(component: str) -> str:
    return "CPU" if component == "cpu_estimate" else component.upper()


def _summed(curves: Sequence[tuple[Array, Array, float]], events: Sequence[Event]) -> tuple[Array, Array]:
    """The sum at the times of the curve with most readings; nothing where one of the devices has a gap.

    Each curve is given as seconds, watts, and how long its first and last reading hold. Outside of that a device adds
    nothing: another node may start later or end earlier.
    """
    if len(curves) == 1:
        return curves[0][:2]
    densest = max((times for times, _, _ in curves), key=len)
    outside = [times[(times < densest[0]) | (times > densest[-1])] for times, _, _ in curves]
    grid = np.unique(np.concatenate([densest, *outside]))
    total, complete = np.zeros(len(grid)), np.ones(len(grid), dtype=bool)
    for times, watts, held_s in curves:
        inside = (grid >= times[0] - held_s) & (grid <= times[-1] + held_s)
        total += np.where(inside, np.interp(grid, times, watts), 0.0)
        for begin, end in gaps_without_readings(times, events):
            complete &= (grid <= begin) | (grid >= end)
    return grid[complete], total[complete]


def _line_points(times_s: Array, watts: Array, facts: Mapping[str, Any]) -> list[Event]:
    kept = zip(*thin(times_s, watts), strict=True)
    return [{**facts, "t": float(time_s), "w": round(float(watt), 2)} for time_s, watt in kept]


def _bands(record: RunRecord, traces: Sequence[AttemptTrace], length_s: float) -> list[dict[str, Any]]:
    """Segments of all stages except the overhead, which is between them."""
    by_attempt = {(placed.attempt, placed.host): placed for placed in traces}
    bands: list[dict[str, Any]] = []
    for stage in record.stages:
        facts = {
            "stage": stage.name,
            "duration": duration_text(stage.duration_s),
            "joules": labeled_text(stage.best),
        }
        merged: list[list[float]] = []
        for segment in stage.segments if not is_overhead(stage) else ():
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
    data: dict[str, list[dict[str, Any]]], idle_w: float | None, unit: str, estimated: bool, colors: Mapping[str, str]
) -> Any:
    x = alt.X("t:Q", title=f"Time since the start ({unit})", scale=alt.Scale(nice=False))
    y = alt.Y("w:Q", title=f"Power (W{', estimated' if estimated else ''})", scale=alt.Scale(zero=True))
    titles = {point["line"]: _DASHES[point["component"]] for point in data["curves"]}
    dash = alt.StrokeDash(
        "line:N", title="Power of", sort=None, scale=alt.Scale(domain=list(titles), range=list(titles.values()))
    )
    layers = [_band_layer(data["bands"], x, colors)] if "bands" in data else []
    detail = ["line:N", "attempt:N", "part:N"]
    if "devices" in data:
        single = alt.Chart(alt.NamedData("devices")).mark_line(strokeWidth=0.7, opacity=0.45)
        layers.append(single.encode(x=x, y=y, detail=detail))
    lines = alt.Chart(alt.NamedData("curves")).mark_line(strokeWidth=1.5)
    layers.append(lines.encode(x=x, y=y, detail=detail, strokeDash=dash if len(titles) > 1 else alt.Undefined))
    if idle_w is not None:
        layers += _idle_layers(idle_w, y)
    return alt.layer(*layers, *event_layers(data, x, HEIGHT))


def _band_layer(bands: list[dict[str, Any]], x: Any, colors: Mapping[str, str]) -> Any:
    scale = color_scale({band["stage"] for band in bands}, colors)
    chart = alt.Chart(alt.NamedData("bands")).mark_rect(opacity=0.32)
    color = alt.Color("stage:N", title="Stage", scale=scale)
    return chart.encode(x=x, x2="until:Q", color=color, tooltip=["stage:N", "duration:N", "joules:N"])


def _idle_layers(idle_w: float, y: Any) -> list[Any]:
    base = alt.Chart(alt.Data(values=[{"w": round(idle_w, 2), "text": f"idle {power_text(idle_w)}"}]))
    text = base.mark_text(align="left", baseline="bottom", dx=4, dy=-2, fontSize=12)
    return [base.mark_rule(strokeDash=[6, 4]).encode(y=y), text.encode(y=y, x=alt.value(0), text="text:N")]


Axis = Literal["elapsed", "wall"]
WIDTH, PANEL_HEIGHT = 760, 260
PNG_SCALE = 2
_GIB = 1024**3


@dataclass(frozen=True)
class Panel:
    """One figure: the file's name, the column it shows, its axis title, and the factor to the axis's unit."""

    file: str
    column: str
    title: str
    factor: float = 1.0
    top: float | None = None


PANELS = (
    Panel("power", "power_watts", "Power (W)"),
    Panel("gpu_utilization", "gpu_utilization_percent", "GPU utilization (%)", top=100),
    Panel("gpu_memory", "memory_used_MB", "GPU memory in use (GiB)", factor=BYTES_PER_MB / _GIB),
    Panel("cpu_utilization", "cpu_utilization_percent", "CPU utilization (%)", top=100),
)


def draw(log: PowerLog, folder: Path, formats: Sequence[str], axis: Axis, title: str) -> tuple[list[Path], list[str]]:
    """Write one file per panel and format; returns the files and the names of panels without data."""
    folder.mkdir(parents=True, exist_ok=True)
    files, empty = [], []
    for panel in PANELS:
        chart = _chart(log, panel, axis, title)
        if chart is None:
            empty.append(panel.file)
            continue
        for form in formats:
            path = folder / f"{panel.file}.{form}"
            _save(chart, path)
            files.append(path)
    return files, empty


def _save(chart: Any, path: Path) -> None:
    spec = chart.to_dict()
    if path.suffix == ".svg":
        path.write_text(chart_converter().vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_bytes(chart_converter().vegalite_to_png(spec, scale=PNG_SCALE))


def _chart(log: PowerLog, panel: Panel, axis: Axis, title: str) -> Any:
    points = [point for device in log.devices for point in _points(log, device, panel, axis)]
    if not points:
        return None
    domain, colors, _ = label_scales(point["device"] for point in points)
    legend = alt.Legend(title=None, orient="top", labelLimit=400) if len(domain) > 1 else None
    x = _wall_axis(points) if axis == "wall" else _elapsed_axis()
    scale = alt.Scale(domain=[0, panel.top]) if panel.top and _highest(points) <= panel.top else alt.Scale(zero=True)
    return (
        alt.Chart(alt.Data(values=points), title=title)
        .mark_line(strokeWidth=1.4, clip=True)
        .encode(
            x=x,
            y=alt.Y("v:Q", title=panel.title, scale=scale),
            color=alt.Color("device:N", scale=alt.Scale(domain=domain, range=colors), legend=legend),
            detail="segment:N",
        )
        .properties(width=WIDTH, height=PANEL_HEIGHT)
    )


def _elapsed_axis() -> Any:
    return alt.X("t:Q", title="Time since the first reading (s)", scale=alt.Scale(nice=False))


def _wall_axis(points: Sequence[dict[str, Any]]) -> Any:
    first, last = (ends(point["t"] for point in points) for ends in (min, max))
    one_day = first[:10] == last[:10]
    labels = alt.Axis(format="%H:%M:%S" if one_day else "%m-%d %H:%M", labelOverlap=True)
    days = first[:10] if one_day else f"{first[:10]} to {last[:10]}"
    return alt.X("t:T", title=f"Time of day (UTC), {days}", scale=alt.Scale(type="utc"), axis=labels)


def _highest(points: Sequence[dict[str, Any]]) -> float:
    return max(float(point["v"]) for point in points)


def _points(log: PowerLog, device: DeviceLog, panel: Panel, axis: Axis) -> list[dict[str, Any]]:
    """Thinned with peaks kept, and interrupted at gaps."""
    if panel.column == "power_watts":
        if not device.source.counted:
            return []
        times, values = device.power()
    else:
        times, values = device.series(panel.column)
    if not len(times):
        return []
    import numpy as np

    steps = np.diff(times)
    holes = steps > HOLE_FACTOR * float(np.median(steps)) if len(steps) else np.array([], dtype=bool)
    segments = np.concatenate([[0], np.cumsum(holes)])
    name = _label(device)
    points = []
    for segment in range(int(segments[-1]) + 1):
        inside = segments == segment
        for time, value in zip(*thin(times[inside], values[inside]), strict=True):
            points.append(
                {
                    "t": _x(float(time), log, axis),
                    "v": round(float(value) * panel.factor, 4),
                    "device": name,
                    "segment": f"{name} {segment}",
                }
            )
    return points


def _label(device: DeviceLog) -> str:
    source = device.source
    if source.component == "cpu_estimate":
        return "CPU (estimated)"
    if source.component != "gpu":
        return source.device
    index = "" if source.index is None else f" {source.index}"
    name = source.name if source.name and source.name != f"GPU{index}" else ""
    return " ".join(filter(None, [f"GPU{index}", name]))


def _x(seconds: float, log: PowerLog, axis: Axis) -> float | str:
    if axis == "wall":
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return round(seconds - log.first_s, 3)
