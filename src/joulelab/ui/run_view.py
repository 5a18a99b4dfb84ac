"""A run while it is running: its latest readings every second, and its report so far as often as that is cheap.

Readings come from the tail of the files (`joulelab watch`). The report so far is assembled from the whole trace, as
`joulelab show` does it, which takes longer the longer the run is; it is repeated less often then, to take a small share
of one core.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from joulelab.cluster.watch import LiveRun, RunWatcher, device_title
from joulelab.errors import JoulelabError
from joulelab.report.figures.chart_base import Figure, stages_of_run
from joulelab.report.figures.power_figures import attempt_traces, power_over_time
from joulelab.report.figures.training_figures import curve_points, loss_of_run
from joulelab.report.opening import Tile, run_tiles
from joulelab.report.page import figure_data
from joulelab.report.tables.grid import Grid, make_grid, without_empty_columns
from joulelab.report.tables.run_tables import run_remarks, summary_grids
from joulelab.report.wording import NOTHING
from joulelab.runs.paths import RunPaths
from joulelab.runs.store import load_record
from joulelab.units import duration_text, energy_text, percent_text, power_text

POLL_S = 1.0
REPORT_S = 2.0
# The report so far takes at most this share of one core.
_LOAD = 0.1
# Larger traces are read by a process that ends afterwards: the server's memory does not follow the length of a run.
LARGE_BYTES = 8_000_000
FIGURES = ("power", "loss", "stages")
"""Figures of a live page, in order; the page has room for each one before there is data."""


@dataclass(frozen=True)
class ReportSoFar:
    """What is computed from the whole trace."""

    tiles: tuple[Tile, ...] = ()
    remarks: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    at_s: float = 0.0
    """Monotonic time at which it was read."""
    problem: str = ""
    """Why it is older than it should be, or why there is none."""

    def specs(self) -> dict[str, Any]:
        return {
            name: {
                **figure_data(figure),
                "title": figure.title,
                "caption": figure.caption,
                "description": figure.description,
            }
            for name, figure in self.figures.items()
        }

    def age_text(self) -> str:
        if self.problem:
            return f"Energy, charts and stages could not be computed: {self.problem}"
        if not self.tiles:
            return "Computing energy and charts from the trace."
        age_s = time.monotonic() - self.at_s
        return f"Energy, charts and stages as of {duration_text(round(age_s))} ago." if age_s >= 5 else ""


def report_so_far(folder: Path) -> ReportSoFar:
    at_s = time.monotonic()
    record = load_record(folder)
    traces = attempt_traces(RunPaths(folder))
    figures = {
        "power": power_over_time(record, traces),
        "loss": loss_of_run(record, folder, curve_points(record, folder, traces)),
        "stages": stages_of_run(record),
    }
    return ReportSoFar(
        tiles=tuple(tile for tile in run_tiles(record) if tile.title != "Grade"),  # given when the run ends
        remarks=tuple(run_remarks(record)),
        grids=tuple(summary_grids(record)),
        figures={name: figure for name, figure in figures.items() if figure is not None},
        at_s=at_s,
    )


def report_in_child(folder: Path) -> ReportSoFar:
    """The same, computed in a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(report_so_far, folder).result()


class RunFeed:
    """One run for all pages that show it; nothing is read while no page asks."""

    def __init__(self, folder: Path, workers: ThreadPoolExecutor) -> None:
        self.folder = folder
        self._workers = workers
        self._watcher = RunWatcher(folder)
        self._lock = threading.Lock()
        self._live: LiveRun | None = None
        self._live_due_s = 0.0
        self._report: tuple[int, ReportSoFar] = (0, ReportSoFar())
        self._report_due_s = 0.0
        self._assembling: Future[None] | None = None

    def poll(self) -> tuple[LiveRun, int, ReportSoFar]:
        """The latest readings, and the latest report with its number."""
        with self._lock:
            now_s = time.monotonic()
            if self._live is None or now_s >= self._live_due_s:
                self._live, self._live_due_s = self._watcher.poll(), now_s + 0.9 * POLL_S
            busy = self._assembling is not None and not self._assembling.done()
            if not busy and now_s >= self._report_due_s and not self._live.over:
                self._assembling = self._workers.submit(self._assemble)
            return self._live, *self._report

    def _assemble(self) -> None:
        large = sum(path.stat().st_size for _, _, path in RunPaths(self.folder).traces()) > LARGE_BYTES
        # on a busy machine, waiting for a core is no work; what a child spends is known by its duration only
        clock_s = time.monotonic if large else time.thread_time
        began_s = clock_s()
        number, before = self._report
        try:
            self._report = (number + 1, report_in_child(self.folder) if large else report_so_far(self.folder))
        except Exception as error:  # the page states it; the readings go on
            text = error.message if isinstance(error, JoulelabError) else f"{type(error).__name__}: {error}"
            self._report = (number, replace(before, problem=text))
        finally:
            spent_s = clock_s() - began_s
            self._report_due_s = time.monotonic() + max(REPORT_S, spent_s / _LOAD)


def devices_grid(live: LiveRun) -> Grid:
    """GPUs first, host by host."""
    order = list(live.component_powers_w)
    devices = sorted(
        live.devices,
        key=lambda one: (order.index(one.component) if one.component in order else len(order), one.host),
    )
    rows = [
        (
            device_title(live, device),
            NOTHING if device.power_w is None else power_text(device.power_w),
            energy_text(device.energy_j),
            NOTHING if device.utilization_percent is None else percent_text(device.utilization_percent / 100, 0),
            NOTHING if device.temperature_c is None else f"{device.temperature_c:.0f} °C",
            NOTHING if device.sm_clock_mhz is None else f"{device.sm_clock_mhz:.0f} MHz",
            ", ".join(device.throttling) or NOTHING,
            device.full_name,
        )
        for device in devices
    ]
    note = "Energy since the start of this attempt, idle baselines included."
    if live.estimated:
        note += " Estimated from CPU time; not measured by a sensor."
    titles = "Device|Power>|Energy so far>|Utilization>|Temperature>|Clock>|Throttling|Name"
    return without_empty_columns(make_grid("Devices now", titles, rows, note))


def hosts_grid(live: LiveRun) -> Grid | None:
    """Power and energy by host; None for a single host."""
    if len(live.hosts) < 2:
        return None
    rows = []
    for host in live.hosts:
        own = [device for device in live.devices if device.host == host]
        power_w = [device.power_w for device in own if device.power_w is not None]
        energy = energy_text(sum(device.energy_j for device in own)) if own else NOTHING
        rows.append((host, power_text(sum(power_w)) if power_w else NOTHING, energy, str(len(own))))
    return make_grid("Hosts now", "Host|Power>|Energy so far>|Devices>", rows)
