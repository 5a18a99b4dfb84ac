"""Joules per inference out of a foreign log, as tables: the levels, the stretches they come from, the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.importers.log_energy import DeviceFigures, Level
from joulelab.report.grid import Grid, make_grid
from joulelab.report.log_tables import millijoules
from joulelab.report.wording import NOTHING


def log_inference_grids(rows: Sequence[DeviceFigures]) -> list[Grid]:
    found = [(row.energy.device, row.inference) for row in rows if row.inference is not None]
    arithmetic = [
        (
            device,
            f"{one.busy.power_w:.2f}",
            f"{one.idle.power_w:.2f}",
            f"{one.net_w:.2f}",
            f"{1000 * one.latency_s:g}",
            millijoules(one.net_j),
            millijoules(one.gross_j),
        )
        for device, one in found
    ]
    stretches = [
        cells
        for device, one in found
        for kind, level in (("busy", one.busy), ("idle", one.idle))
        for cells in _stretch_cells(device, kind, level)
    ]
    titles = "Device!|Busy W>|Idle W>|Net W>|Latency ms>|Net mJ>|Gross mJ>"
    note = "Net: (busy - idle) x latency. Gross: busy x latency. The latency is yours; the log knows only watts."
    below = [device for device, one in found if one.net_w <= 0]
    if below:
        note += f" {', '.join(below)}: busy is not above idle, so its net joules mean nothing."
    return [
        make_grid("Joules per inference", titles, arithmetic, note),
        make_grid("Stretches they come from", "Device!|Level!|From s>|To s>|Mean W>|Readings>|Told by", stretches),
    ]


def _stretch_cells(device: str, kind: str, level: Level) -> list[tuple[str, ...]]:
    if not level.stretches:
        return [(device, kind, NOTHING, NOTHING, f"{level.power_w:.2f}", str(level.samples or NOTHING), level.source)]
    return [
        (device, kind, f"{s.from_s:g}", f"{s.to_s:g}", f"{s.mean_w:.2f}", str(s.samples), level.source)
        for s in level.stretches
    ]
