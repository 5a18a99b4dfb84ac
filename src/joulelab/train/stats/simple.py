"""Where the time of a step goes: mean and quantiles of every phase, on the host's clock and on the device's.

On a GPU the two tell different things. The device's time is how long the work took; the host's is how long the program
was busy handing it over. A host time above the device's means that the device waits for the program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from joulelab.train.stats.durations import Durations
from joulelab.train.stats.files import CsvFile, LossFile, fresh_path
from joulelab.train.stats.hooks import PHASES, Bench, TrainerStats
from joulelab.train.stats.phase_clock import HostClock, PhaseClock, Timed, clock_for
from joulelab.train.stats.sync import waiter

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_COLUMNS = ("phase", "clock", "count", "mean_s", *(f"{name}_s" for name in QUANTILES), "max_s")


class SimpleStats(TrainerStats):
    def __init__(self) -> None:
        self._clock: PhaseClock = HostClock()
        self._times: dict[tuple[str, str], Durations] = {}
        self._losses = LossFile(None)
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._bench: Bench | None = None

    def attach(self, bench: Bench) -> None:
        self._bench = bench
        self._clock = clock_for(bench.device)
        self._losses = LossFile(self._folder())

    def start(self, phase: str) -> None:
        self._clock.start(phase)

    def stop(self, phase: str) -> None:
        self._clock.stop(phase)

    def log_loss(self, loss: float) -> None:
        self._first_loss = loss if self._first_loss is None else self._first_loss
        self._last_loss = loss
        self._losses.add(loss)

    def log_step(self, step: int) -> None:
        self._losses.step = step
        for timed in self._clock.harvest():
            self._take(timed)

    def _take(self, timed: Timed) -> None:
        self._row(timed.phase, "host").add(timed.host_s)
        if timed.device_s is not None:
            self._row(timed.phase, "device").add(timed.device_s)

    def _row(self, phase: str, clock: str) -> Durations:
        row = self._times.get((phase, clock))
        if row is None:
            row = self._times[phase, clock] = Durations()
        return row

    def log_stats(self) -> str:
        if self._bench is not None:
            waiter(self._bench.device)()  # training is over: the last events may be waited for
        self.log_step(self._losses.step)
        self._losses.close()
        rows = self._rows()
        if self._bench is not None:
            self._bench.result("simple", {"phases": rows, "untimed": self._clock.untimed})
        if (folder := self._folder()) is not None:
            _write(folder, rows)
        return self._table(rows)

    def _folder(self) -> Path | None:
        folder = self._bench.folder if self._bench else None
        return None if folder is None else folder / "simple"

    def _rows(self) -> list[dict[str, Any]]:
        """As the loop runs through them, the device's clock first."""
        order = sorted(self._times.items(), key=lambda item: (PHASES.index(item[0][0]), item[0][1]))
        return [_numbers(phase, clock, times) for (phase, clock), times in order]

    def _table(self, rows: list[dict[str, Any]]) -> str:
        heads = ("mean", *QUANTILES, "max")
        lines = [f"{'phase':<16}{'clock':<8}{'count':>9}" + "".join(f"{head + ' ms':>11}" for head in heads)]
        for row in rows:
            times = "".join(f"{1000 * row[f'{head}_s']:>11.2f}" for head in heads)
            lines.append(f"{row['phase']:<16}{row['clock']:<8}{row['count']:>9}{times}")
        if self._clock.untimed:
            lines.append(f"{self._clock.untimed} phases went untimed: the device was too far behind")
        if self._last_loss is not None:
            lines.append(f"loss {self._first_loss:.4f} at the first line, {self._last_loss:.4f} at the last")
        return "\n".join(lines)


def _numbers(phase: str, clock: str, times: Durations) -> dict[str, Any]:
    quantiles = dict(zip(QUANTILES, times.quantiles_s(*QUANTILES.values()), strict=True))
    numbers = {"mean": times.mean_s, **quantiles, "max": times.max_s}
    rounded = {f"{name}_s": round(value, 9) for name, value in numbers.items()}
    return {"phase": phase, "clock": clock, "count": times.count, **rounded}


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    table = CsvFile(fresh_path(folder, "phases", ".csv"), _COLUMNS)
    for row in rows:
        table.add(row[name] for name in _COLUMNS)
    table.close()
    text = json.dumps({"units": "seconds", "phases": rows}, indent=1)
    fresh_path(folder, "phases", ".json").write_text(text + "\n", encoding="utf-8")
