"""`%%joulelab` measures a notebook cell and shows its energy as a small table with a power sparkline.

    %load_ext joulelab

    %%joulelab my-training --grid FR
    trainer.train()

The cell runs as without the magic: its variables, output and exceptions are its own, and it becomes a run in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.clock import NS
from joulelab.errors import DependencyMissing, JoulelabError
from joulelab.meter.figures import MACHINE_BASE, bound_mark, figure_text
from joulelab.meter.grids import co2e_text, cost_text
from joulelab.meter.integrate import power_curve
from joulelab.meter.series import Trace, load_trace
from joulelab.runs.measure.api import measure
from joulelab.runs.measure.result import answer_block, result_of, warnings_of
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.units import duration_text, kwh_text, power_text

try:
    from IPython.core.error import UsageError
    from IPython.core.magic_arguments import MagicArgumentParser
    from IPython.display import display
except ImportError as error:
    raise DependencyMissing(f"IPython cannot be imported ({error})", "pip install ipython") from None

WIDTH, HEIGHT, POINTS = 240, 40, 120
SCOPES = {"program": "measured", "machine": "machine"}


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext joulelab`."""
    shell.register_magic_function(partial(measure_cell, shell), magic_kind="cell", magic_name="joulelab")


def _parser() -> Any:
    parser = MagicArgumentParser(prog="%%joulelab", description="Measure the energy of this cell.")
    parser.add_argument("name", nargs="?", default="cell", help="Name of the run.")
    parser.add_argument("--grid", help="Report CO2e for this grid: FR, DE, US, EU, world, or g/kWh.")
    parser.add_argument("--price", help="Report the cost at this price per kWh: 0.30 or 0.30EUR.")
    parser.add_argument("--scope", choices=list(SCOPES), help="machine: estimate the whole machine.")
    parser.add_argument("--interval", type=float, help="Sampling interval in seconds (default: 0.5).")
    parser.add_argument("-o", "--out", metavar="VARIABLE", help="Store the measurement in this variable.")
    parser.add_argument("-h", "--help", action="store_true", help="Print this help; the cell does not run.")
    return parser


def measure_cell(shell: Any, line: str, cell: str) -> None:
    """Run the cell under the meter, then display its energy."""
    parser = _parser()
    given = parser.parse_argstring(line)
    if given.help:
        print(parser.format_help())
        return
    settings = {
        "grid": given.grid,
        "price": given.price,
        "total_energy_policy": SCOPES.get(given.scope or ""),
        "sample_interval_s": given.interval,
    }
    energy = {key: value for key, value in settings.items() if value is not None}
    try:
        measurement = measure(given.name, energy=energy).start()
    except JoulelabError as error:  # IPython prints this one without a traceback
        raise UsageError(f"{error.message} ({error.hint})" if error.hint else error.message) from None
    failure: BaseException | None = KeyboardInterrupt()  # if `run_cell` does not return
    try:
        result = shell.run_cell(cell)  # shows the cell's own exception
        failure = result.error_before_exec or result.error_in_exec
    finally:
        record = measurement.stop(failure)
    display(CellResult(record, measurement.folder))
    if given.out:
        shell.user_ns[given.out] = measurement


class CellResult:
    """The result of a cell: a table with a sparkline in a notebook, text in a terminal."""

    def __init__(self, record: RunRecord, folder: Path) -> None:
        self.record = record
        self.folder = folder

    def __repr__(self) -> str:
        return answer_block(self.record, self.folder)

    def _repr_html_(self) -> str:
        rows = [*_rows(self.record), ("run directory", str(self.folder))]
        cells = "".join(
            f'<tr><th style="text-align:left">{escape(title)}</th><td style="text-align:left">{escape(text)}</td></tr>'
            for title, text in rows
        )
        warnings = "".join(f"<li>{escape(text)}</li>" for text in warnings_of(self.record))
        listed = f"<ul>{warnings}</ul>" if warnings else ""
        return f"<div><table>{cells}</table>{sparkline(*power_points(self.record, self.folder))}{listed}</div>"


def _rows(record: RunRecord) -> list[tuple[str, str]]:
    energy = record.best_energy
    rows = [("energy", figure_text(energy))]
    if energy.energy_j is not None:
        result = result_of(record, Path(), 0)
        rows += [
            ("", bound_mark(energy) + kwh_text(energy.energy_j)),
            ("mean power", power_text(result.mean_power_w)),
        ]
        if result.co2e is not None:
            rows.append(("CO2e", co2e_text(result.co2e, energy.is_lower_bound)))
        if result.cost is not None:
            rows.append(("cost", cost_text(result.cost, energy.is_lower_bound)))
    rows.append(("duration", duration_text(record.best_duration_s)))
    if record.validity.grade:
        rows.append(("grade", record.validity.grade))
    if record.status != "done":
        rows.append(("status", f"{record.status}: {record.error.message}" if record.error else record.status))
    return rows


def power_points(record: RunRecord, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds and watts of the devices behind the printed energy, summed; empty for fewer than two readings."""
    paths = [path for _, _, path in RunPaths(folder).traces()]
    if not paths:
        return [], []
    trace = load_trace(paths[-1])
    curves = [power_curve(series) for series in trace.devices if series.device in record.best_energy.sources]
    curves = [(times, watts) for times, watts in curves if len(times) > 1]
    if not curves:
        return [], []
    begin, end = min(times[0] for times, _ in curves), max(times[-1] for times, _ in curves)
    at_ns = np.linspace(begin, end, POINTS)
    summed = np.sum([np.interp(at_ns, times, watts) for times, watts in curves], axis=0)
    if MACHINE_BASE in record.best_energy.sources:
        summed = summed + _constant_w(trace, record.best_energy.sources)
    return [float(x) for x in (at_ns - begin) / NS], [float(y) for y in summed]


def _constant_w(trace: Trace, sources: Sequence[str]) -> float:
    facts = next(series.facts for series in trace.devices if "base_w" in series.facts)
    return float(sum(facts[f"{name}_w"] for name in ("base", "memory") if f"constant:{name}" in sources))


def sparkline(seconds: Sequence[float], watts: Sequence[float]) -> str:
    """Power over time as inline SVG, from 0 to the highest power; empty without a curve."""
    if len(seconds) < 2 or not max(watts) > 0:
        return ""
    highest_w, last_s = max(watts), seconds[-1] or 1.0
    points = " ".join(
        f"{WIDTH * x / last_s:.1f},{HEIGHT - (HEIGHT - 2) * max(y, 0.0) / highest_w:.1f}"
        for x, y in zip(seconds, watts, strict=True)
    )
    label = f"power over {duration_text(last_s)}, highest {power_text(highest_w)}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg><div>{label}</div>'
    )
