"""The monitor's log on disk: appended to, synced each tick, and not given up when the disk is full for a while."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from joulelab.errors import UsageError
from joulelab.meter.trace import LineFile


class LogFile:
    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self.lost = 0
        """Lines that could not be written since the last one that could."""
        self._failing = False
        try:
            self._lines = LineFile(path)
        except OSError as error:
            raise UsageError(
                f"cannot write the log {path}: {error.strerror or error}", "name a writable file with --log_path"
            ) from None

    def append(self, *lines: dict[str, Any]) -> None:
        try:
            self._lines.append(*lines, sync=True)
        except OSError as error:
            if not self._failing:
                self._say(f"error: {self.path}: {error.strerror or error}; going on, and trying again at each tick")
            self._failing = True
            self.lost += len(lines)
            return
        if self._failing:
            self._say(f"{self.path} can be written again; {self.lost} lines were lost")
            self._failing, self.lost = False, 0

    def close(self) -> None:
        self._lines.close()
