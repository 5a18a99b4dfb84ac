"""What a person watches with `--live`: a table that stays in place on a terminal, plain lines elsewhere. On stderr."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.live import Live

from joulelab.meter.figure_text import amount_text, method_text
from joulelab.meter.monitor.tally import DeviceTally, Tally, sparkline
from joulelab.report.grid import Grid, make_grid, to_rich
from joulelab.units import duration_text, power_text

TITLES = "Device!|Power>|Energy so far>|Method!|GPU use>|Memory>|Temperature>|Power over time!"


def live_grid(tally: Tally, elapsed_s: float) -> Grid:
    rows = [_row(joules) for joules in tally.devices.values() if joules.device.counted]
    return make_grid(f"joulelab monitor, {duration_text(elapsed_s)}", TITLES, rows, _host_text(tally))


def _row(joules: DeviceTally) -> tuple[str, ...]:
    latest = joules.latest
    gpu = joules.device.component == "gpu"
    index = joules.device.facts.get("gpu_index", "")
    name = f"GPU {index} {joules.device.name}" if gpu else joules.device.device
    return (
        name,
        power_text(joules.power_w) if joules.power_w is not None else "-",
        amount_text(joules.figure),
        method_text(joules.figure),
        _with_unit(latest.get("gpu_utilization_percent"), "%"),
        _with_unit(latest.get("memory_used_MB"), "MiB"),
        _with_unit(latest.get("temperature_C"), "°C"),
        sparkline(joules.history_w),
    )


def _with_unit(value: Any, unit: str) -> str:
    return "-" if value is None else f"{value:,.0f} {unit}"


def _host_text(tally: Tally) -> str:
    parts = [f"CPU {_with_unit(tally.host.get('cpu_utilization_percent'), '%')}"]
    if tally.process is not None:
        cpu = _with_unit(tally.process["cpu_utilization_percent"], "%")
        rss = _with_unit(tally.process["memory_rss_MB"], "MiB")
        parts.append(f"process {tally.process['pid']} with children: CPU {cpu}, memory {rss}")
    if tally.errors:
        parts.append("errors: " + ", ".join(f"{sensor} {count}" for sensor, count in tally.errors.items()))
    return "; ".join(parts)


class PlainView:
    """A line per device and tick: what a job's log or a pipe should hold."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, tally: Tally) -> None:
        for joules in tally.devices.values():
            if joules.device.counted:
                name, power, energy, method, use, memory, *_ = _row(joules)
                text = f"{name}: {power}, {energy} so far, {method}"
                print(text if use == "-" else f"{text}, use {use}, memory {memory}", file=sys.stderr)
        print(_host_text(tally), file=sys.stderr, flush=True)


class ScreenView:
    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._begun_s: float | None = None

    def __enter__(self) -> ScreenView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, tally: Tally) -> None:
        self._begun_s = self._begun_s or tally.wall_s
        self._live.update(to_rich(live_grid(tally, tally.wall_s - self._begun_s)), refresh=True)
