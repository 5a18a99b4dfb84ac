"""Who is told how a run goes: a person, and other tools. A run does not depend on what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from joulelab.runs.record import RunRecord


class Progress(Protocol):
    """Where a person watches: a terminal, a log, or nowhere."""

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def finish(self) -> None:
        """The stage is over; what comes next may be silent for a while."""

    def say(self, text: str) -> None: ...


class Silent:
    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def finish(self) -> None: ...

    def say(self, text: str) -> None: ...


class Trackers(Protocol):
    """Other tools that are told the metrics; whatever becomes of them, nothing is raised here."""

    def log(self, line: Mapping[str, Any]) -> None: ...

    def problems(self) -> list[str]:
        """What has gone wrong since the last time somebody asked."""

    def end(self, record: RunRecord) -> None: ...
