"""Printing: results on stdout, at the terminal's width or PIPE_WIDTH in a pipe; progress of runs on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, RenderableType

from joulelab.units import duration_text

if TYPE_CHECKING:
    from rich.progress import Task

    from joulelab.report.tables.grid import Grid


PIPE_WIDTH = 140
# Wrapping cells takes a fraction of a millisecond per row, too long for tables with thousands of rows.
MOST_WRAPPED_ROWS = 500


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def print_result(*renderables: RenderableType) -> None:
    console = _console()
    for renderable in renderables:
        console.print(renderable)


def fits(grid: Grid) -> bool:
    """Whether all columns fit next to each other without breaking a word."""
    cells = zip(*([column.title for column in grid.columns], *grid.rows), strict=True)
    widths = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in cells]
    return sum(widths) + 2 * len(widths) <= _console().width


def print_records(grid: Grid) -> None:
    """Each row as one line per column, for rows that are too wide for a table."""
    names = max(cell_len(column.title) for column in grid.columns)
    room = max(20, _console().width - names - 4)
    print(grid.caption)
    for number, row in enumerate(grid.rows, 1):
        print(f"\nrow {number}")
        for column, text in zip(grid.columns, row, strict=True):
            lines = [text[start : start + room] for start in range(0, max(1, len(text)), room)]
            print(f"  {column.title.ljust(names)}  " + f"\n{' ' * (names + 4)}".join(lines))


def print_grid(grid: Grid) -> None:
    """A table; with very many rows in plain, unwrapped columns."""
    if len(grid.rows) <= MOST_WRAPPED_ROWS:
        from joulelab.report.tables.grid import to_rich

        print_result(to_rich(grid))
        return
    lines = [tuple(column.title for column in grid.columns), *(tuple(map(_one_line, row)) for row in grid.rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    right = [column.align == "right" for column in grid.columns]
    print(grid.caption)
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        print(
            "  ".join(cell.rjust(width) if at_right else cell.ljust(width) for cell, width, at_right in cells).rstrip()
        )
    if grid.note:
        print(grid.note)


def _one_line(cell: str) -> str:
    return cell.replace("\n", " ")


# Progress of a run, on stderr: bars on a terminal, plain lines in a log.


class PlainProgress:
    """One line per finished stage, for logs of batch jobs."""

    def __init__(self) -> None:
        self._stage = ""
        self._start_s = 0.0
        self._text = ""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def stage(self, name: str, total: int | None) -> None:
        if name == self._stage:
            return
        self.finish()
        self._stage, self._start_s, self._text = name, time.monotonic(), ""

    def advance(self, done: int, text: str = "") -> None:
        self._text = text or self._text

    def write(self, text: str) -> None:
        if self._text:  # without a text yet, the stage keeps its line for its end
            self.finish()
        print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._stage:
            duration = duration_text(time.monotonic() - self._start_s)
            tail = f"  {self._text}" if self._text else ""
            print(f"  {self._stage:<22} {duration:>10}{tail}", file=sys.stderr, flush=True)
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
        if not self._stage:  # the bar of this stage has been replaced by a line
            return
        if text:
            self._bars.update(self._task, completed=done, text=text)
        else:
            self._bars.update(self._task, completed=done)

    def write(self, text: str) -> None:
        if self._stage and self._live.fields["text"]:
            self.finish()
        self._bars.console.print(text, markup=False, highlight=False)

    def finish(self) -> None:
        """A finished bar becomes a line above the live one, so the screen reads as a log of stages."""
        if self._stage:
            task = self._live
            duration = duration_text(task.elapsed or 0.0)
            tail = f"  {task.fields['text']}" if task.fields["text"] else ""
            self._bars.remove_task(self._task)
            self._bars.console.print(f"  {self._stage:<22} {duration:>10}{tail}", markup=False, highlight=False)
            self._stage = ""

    @property
    def _live(self) -> Task:
        return next(task for task in self._bars.tasks if task.id == self._task)


def watching() -> PlainProgress | BarProgress:
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
