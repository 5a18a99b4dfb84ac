"""What a person watches while a run runs: bars on a terminal, plain lines in a log. Both on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from joulelab.units import duration_text

if TYPE_CHECKING:
    from rich.progress import Task


class PlainProgress:
    """A line when a stage begins and ends: what a batch job's log should hold."""

    def __init__(self) -> None:
        self._stage = ""
        self._begun_s = 0.0
        self._text = ""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def stage(self, name: str, total: int | None) -> None:
        if name == self._stage:
            return
        self.finish()
        self._stage, self._begun_s, self._text = name, time.monotonic(), ""

    def advance(self, done: int, text: str = "") -> None:
        self._text = text or self._text

    def say(self, text: str) -> None:
        if self._text:  # a stage of which nothing is known yet keeps its line for its end
            self.finish()
        print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._stage:
            took = duration_text(time.monotonic() - self._begun_s)
            tail = f"  {self._text}" if self._text else ""
            print(f"  {self._stage:<22} {took:>10}{tail}", file=sys.stderr, flush=True)
            self._stage = ""


class BarProgress:
    """One bar per stage; finished stages stay on the screen."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("  {task.description:<22}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
        )
        self._stage = ""
        self._task = self._bars.add_task("", visible=False, text="")

    def __enter__(self) -> BarProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()
        self._bars.stop()

    def stage(self, name: str, total: int | None) -> None:
        if name == self._stage:
            self._bars.update(self._task, total=total)
            return
        self.finish()
        self._stage = name
        self._task = self._bars.add_task(name, total=total, text="")

    def advance(self, done: int, text: str = "") -> None:
        if not self._stage:  # its bar has become a line
            return
        if text:
            self._bars.update(self._task, completed=done, text=text)
        else:
            self._bars.update(self._task, completed=done)

    def say(self, text: str) -> None:
        if self._stage and self._live.fields["text"]:
            self.finish()
        self._bars.console.print(text, markup=False, highlight=False)

    def finish(self) -> None:
        """A finished bar becomes a line above the live one, so the screen reads as a log of stages."""
        if self._stage:
            task = self._live
            took = duration_text(task.elapsed or 0.0)
            tail = f"  {task.fields['text']}" if task.fields["text"] else ""
            self._bars.remove_task(self._task)
            self._bars.console.print(f"  {self._stage:<22} {took:>10}{tail}", markup=False, highlight=False)
            self._stage = ""

    @property
    def _live(self) -> Task:
        return next(task for task in self._bars.tasks if task.id == self._task)


def watching() -> PlainProgress | BarProgress:
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
