"""Files of trackers: beside those of an earlier attempt or another stage, never over them."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path


def fresh_path(folder: Path, stem: str, suffix: str) -> Path:
    """`phases.csv`, or `phases_2.csv` where that is taken; made at once, as ranks may ask at the same moment."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}_{number}{suffix}")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


class CsvFile:
    """A table that grows row by row. Rows reach the disk in blocks, or when `flush` asks for it."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(names)

    def add(self, row: Iterable[object]) -> None:
        self._writer.writerow(row)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class LossFile:
    """`losses.csv`: the step and the mean loss since the line before."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else CsvFile(fresh_path(folder, "losses", ".csv"), ("step", "loss"))
        self.step = 0

    def add(self, loss: float) -> None:
        if self._file is not None:
            self._file.add((self.step, loss))
            self._file.flush()  # these are few, and what a killed run is asked for first

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
