"""CodeCarbon alongside the meter: its figures are recorded under its own name, and it never uses the network.

CodeCarbon runs as a thread of the measured program, as its users run it, and measures every few seconds. Each
measurement is also appended to `readings.<host>.<attempt>.jsonl` with our clock, so that its energy can be split by
stage and a killed run keeps it; CodeCarbon itself writes `emissions.csv` only at a clean end. A failure (not installed,
no reading) is recorded as a problem and never stops the run.

The offline tracker queries no location service, and with a fixed carbon intensity it needs no country. Its lock file is
disabled: a stale one would make the next run measure nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joulelab import clock, lookup
from joulelab.meter.config import EnergyConfig
from joulelab.meter.grids import parse_grid
from joulelab.meter.importers.emissions_csv import energies_j
from joulelab.meter.trace import LineFile, header
from joulelab.runs.attempt_data import FOLDER, readings_path

# CodeCarbon's default is 15 s, too coarse for short stages; below 1 s its own energy becomes visible.
SHORTEST_INTERVAL_S = 1.0


def check_installed(energy: EnergyConfig) -> None:
    """Before a run: refuse settings that need CodeCarbon if it is not installed."""
    if energy.uses_codecarbon:
        lookup.require_packages("energy.codecarbon", "codecarbon")


@contextlib.contextmanager
def track_run(run_folder: Path, host: str, attempt: int, energy: EnergyConfig) -> Iterator[None]:
    """Run CodeCarbon for the duration of the block; its failures do not affect the block."""
    file = LineFile(readings_path(run_folder, host, attempt))
    file.append(header(units={"energy_j": "J, cumulative, as reported by CodeCarbon"}))
    tracker = None
    try:
        tracker = _start(file, run_folder / FOLDER, energy)
    except Exception as error:
        _problem(file, f"it did not start ({type(error).__name__}: {error})")
    try:
        yield
    finally:
        if tracker is not None:
            try:
                tracker.stop()
            except Exception as error:
                _problem(file, f"it did not stop cleanly ({type(error).__name__}: {error})")
        file.close()


def _problem(file: LineFile, text: str) -> None:
    file.append({"kind": "problem", **clock.now().fields(), "text": text}, sync=True)


def offline_tracker(interval_s: float, **settings: Any) -> Any:
    """CodeCarbon's tracker as all of joulelab uses it: offline and without its lock."""
    codecarbon: Any = importlib.import_module("codecarbon")
    logging.getLogger("codecarbon").setLevel(logging.ERROR)  # it logs before it applies its own log level
    return codecarbon.OfflineEmissionsTracker(
        project_name="joulelab",
        measure_power_secs=interval_s,
        allow_multiple_runs=True,
        log_level="error",
        **settings,
    )


def _start(file: LineFile, folder: Path, energy: EnergyConfig) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    methods: Any = importlib.import_module("codecarbon.output_methods.base_output")
    tracker = offline_tracker(
        max(SHORTEST_INTERVAL_S, energy.sample_interval_s),
        api_call_interval=1,
        output_dir=str(folder),
        output_methods=[methods.OutputMethod.CSV],
        output_handlers=[_Readings(file)],
        **location(energy.grid),
    )
    tracker.start()
    return tracker


def location(grid: str) -> dict[str, Any]:
    """The user's country, else a fixed intensity, so that CodeCarbon never guesses a country."""
    factor = parse_grid(grid)
    if factor is not None and factor.code3 is not None:
        return {"country_iso_code": factor.code3}
    middle = 0.0 if factor is None else (factor.low_g_per_kwh + factor.high_g_per_kwh) / 2
    return {"force_carbon_intensity_g_co2e_kwh": middle}


class _Readings:
    """A CodeCarbon output handler; it receives the totals after every measurement."""

    def __init__(self, file: LineFile) -> None:
        self._file = file

    def live_out(self, total: Any, delta: Any) -> None:
        self.out(total, delta)

    def out(self, total: Any, delta: Any) -> None:
        line = {
            "kind": "codecarbon",
            **clock.now().fields(),
            **energies_j(lambda name: getattr(total, name)),
            "codecarbon_version": total.codecarbon_version,
        }
        self._file.append(line, sync=True)

    def task_out(self, data: Any, experiment_name: str) -> None: ...

    def exit(self) -> None: ...
