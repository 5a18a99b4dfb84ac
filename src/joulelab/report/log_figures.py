"""Figures of a monitor's log or a run's trace: power, GPU use, GPU memory, CPU use over time, a line per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import altair as alt

from joulelab.meter.importers.log_energy import HOLE_FACTOR
from joulelab.meter.importers.power_log import DeviceLog, PowerLog
from joulelab.report.palette import label_scales
from joulelab.report.thinning import thin
from joulelab.units import BYTES_PER_MB

Axis = Literal["elapsed", "wall"]
WIDTH, HEIGHT = 760, 260
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
    Panel("gpu_utilization", "gpu_utilization_percent", "GPU utilisation (%)", top=100),
    Panel("gpu_memory", "memory_used_MB", "GPU memory in use (GiB)", factor=BYTES_PER_MB / _GIB),
    Panel("cpu_utilization", "cpu_utilization_percent", "CPU utilisation (%)", top=100),
)


def draw(log: PowerLog, folder: Path, formats: Sequence[str], axis: Axis, title: str) -> tuple[list[Path], list[str]]:
    """Write one file per panel and format; the files, and the names of panels the log has nothing for."""
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
    import vl_convert

    spec = chart.to_dict()
    if path.suffix == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SCALE))


def _chart(log: PowerLog, panel: Panel, axis: Axis, title: str) -> Any:
    points = [point for device in log.devices for point in _points(log, device, panel, axis)]
    if not points:
        return None
    domain, colours, _ = label_scales(point["device"] for point in points)
    legend = alt.Legend(title=None, orient="top", labelLimit=400) if len(domain) > 1 else None
    x = _wall_axis(points) if axis == "wall" else _elapsed_axis()
    scale = alt.Scale(domain=[0, panel.top]) if panel.top and _highest(points) <= panel.top else alt.Scale(zero=True)
    return (
        alt.Chart(alt.Data(values=points), title=title)
        .mark_line(strokeWidth=1.4, clip=True)
        .encode(
            x=x,
            y=alt.Y("v:Q", title=panel.title, scale=scale),
            color=alt.Color("device:N", scale=alt.Scale(domain=domain, range=colours), legend=legend),
            detail="stretch:N",
        )
        .properties(width=WIDTH, height=HEIGHT)
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
    """Thinned with its peaks kept, and broken at holes: a line across one would show what nobody read."""
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
    stretches = np.concatenate([[0], np.cumsum(holes)])
    name = _label(device)
    points = []
    for stretch in range(int(stretches[-1]) + 1):
        inside = stretches == stretch
        for time, value in zip(*thin(times[inside], values[inside]), strict=True):
            points.append(
                {
                    "t": _x(float(time), log, axis),
                    "v": round(float(value) * panel.factor, 4),
                    "device": name,
                    "stretch": f"{name} {stretch}",
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
