"""Printing: how much of an answer is printed, results on stdout, progress of runs on stderr.

Every verb has `-v` and `-q` (`options.with_detail_options`). By default an answer is at most a screen: the result,
then tables cut to what fits. `-v` prints everything, `-q` the result line alone.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from joulelab.cli.options import detail
from joulelab.units import duration_text, plural

if TYPE_CHECKING:
    from joulelab.report.tables.grid import Grid


# Width in a pipe, unless COLUMNS is set.
PIPE_WIDTH = 140
SCREEN_LINES = 28
# A table cut to fewer rows than this is left out of a screen.
FEWEST_ROWS = 2
_SUM = "sum"
# The first table is the answer: a comparison of a few methods is never cut, also where rows are wrapped.
FEWEST_MAIN_ROWS = 8
# Hidden rows that are named.
_NAMED_ROWS = 4
# Wrapping cells takes a fraction of a millisecond per row, too long for tables with thousands of rows.
MOST_WRAPPED_ROWS = 500


def _console() -> Console:
    columns = os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdigit() and int(columns) >= 40 else PIPE_WIDTH
    return Console(width=None if sys.stdout.isatty() else piped, highlight=False, markup=False)


def wrapped(text: str, indent: int, stream: TextIO | None = None) -> str:
    """A line of stderr or another stream; on a terminal it is wrapped between words, in a log it stays one line that
    grep finds whole."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return text
    width = Console(file=stream).width
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def print_result(*renderables: RenderableType) -> None:
    console = _console()
    for renderable in renderables:
        console.print(renderable)


def print_answer(
    result: str,
    grids: Sequence[Grid] = (),
    remarks: Iterable[str] = (),
    *,
    full: Callable[[], Iterable[RenderableType]] | None = None,
    more: str = "",
    brief: Sequence[str] | None = None,
    newest_last: bool = False,
) -> None:
    """An answer at the detail that was asked for.

    `result` is the answer in a line or two and comes first. By default `grids` follow, cut to a screen, then `remarks`,
    each once. With -v `full` replaces all of it (default: the same, uncut); `more` names what it adds. With -q only
    `brief` is printed (default: the result). `newest_last`: tables are cut at their beginning.
    """
    texts = list(dict.fromkeys(text for text in remarks if text))
    if detail() == "quiet":
        for line in [result] if brief is None else brief:
            print(line)
        return
    console = _console()
    if detail() == "verbose" and full is not None:
        print_result(*full())
        return
    if result:
        # In a pipe or a file the result stays one line, so that it can be parsed.
        console.print(Text(result, style="bold"), soft_wrap=not console.is_terminal)
    if detail() == "verbose":
        for grid in grids:
            print_grid(grid)
        print_result(*map(Text, texts))
        return
    room = SCREEN_LINES - sum(_height(console, Text(text)) for text in [result, *texts] if text) - 1
    cut = _print_cut(console, grids, room, newest_last)
    for text in texts:
        console.print(Text(text))
    hidden = ", ".join(filter(None, [cut, more]))
    if hidden:
        console.print(Text(f"-v: {hidden}", style="dim"))


def _print_cut(console: Console, grids: Sequence[Grid], room: int, newest_last: bool) -> str:
    """Print the grids as far as they fit into `room` lines; returns what was left out."""
    from joulelab.report.tables.grid import to_rich

    left_out = []
    for number, grid in enumerate(grids):
        shown = grid
        height = _height(console, to_rich(shown))
        fewest = FEWEST_ROWS if number else FEWEST_MAIN_ROWS
        while height > room and len(shown.rows) > fewest:
            keep = max(fewest, len(shown.rows) - max(1, (height - room) // 2))
            shown = replace(grid, rows=grid.rows[-keep:] if newest_last else _first_rows(grid, keep))
            height = _height(console, to_rich(shown))
        if height > room and number:
            left_out.append(f"table {grid.caption!r}" if grid.caption else "another table")
            continue
        console.print(to_rich(shown))
        room -= height
        if len(shown.rows) < len(grid.rows):
            hidden = len(grid.rows) - len(shown.rows)
            end = len(grid.rows) - _has_sum(grid)
            missing = grid.rows[end - hidden : end]
            left_out.append(plural(hidden, "older row") if newest_last else _hidden_rows(grid, missing))
    return ", ".join(left_out)


def _first_rows(grid: Grid, count: int) -> tuple[tuple[str, ...], ...]:
    """A sum in the last row stays."""
    last = _has_sum(grid)
    return (*grid.rows[: count - last], *grid.rows[len(grid.rows) - last :])


def _has_sum(grid: Grid) -> bool:
    return grid.rows[-1][0].startswith(_SUM)


def _hidden_rows(grid: Grid, rows: Sequence[Sequence[str]]) -> str:
    """`1 more row (run.overhead 13.5 J)`: with those of the hidden stages, energies add up."""
    text = plural(len(rows), "more row")
    if len(grid.columns) < 2 or grid.columns[1].title != "Energy" or len(rows) > _NAMED_ROWS:
        return text
    return f"{text} ({', '.join(' '.join(row[:2]) for row in rows)})"


def _height(console: Console, renderable: RenderableType) -> int:
    return len(console.render_lines(renderable, pad=False))


def fits(grid: Grid) -> bool:
    """Whether all columns fit next to each other without breaking a word."""
    cells = zip(*([column.title for column in grid.columns], *grid.rows), strict=True)
    widths = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in cells]
    return sum(widths) + 2 * len(widths) <= _console().width


def print_lines(lines: Sequence[str], more: str = "") -> None:
    """Lines of a list, at most a screen of them; with -v all."""
    kept = list(lines) if detail() == "verbose" or len(lines) <= SCREEN_LINES else list(lines[: SCREEN_LINES - 1])
    for line in kept:
        print(line)
    cut = plural(len(lines) - len(kept), "more line") if len(kept) < len(lines) else ""
    hidden = ", ".join(filter(None, [cut, more]))
    if hidden and detail() != "verbose":
        print(f"-v: {hidden}")


def print_records(grid: Grid) -> None:
    """Each row as one line per column, for rows that are too wide for a table."""
    names = max(cell_len(column.title) for column in grid.columns)
    room = max(20, _console().width - names - 4)
    lines = [grid.caption]
    for number, row in enumerate(grid.rows, 1):
        lines += ["", f"row {number}"]
        for column, text in zip(grid.columns, row, strict=True):
            first, *others = [text[start : start + room] for start in range(0, max(1, len(text)), room)]
            lines += [f"  {column.title.ljust(names)}  {first}", *(" " * (names + 4) + other for other in others)]
    print_lines(lines)


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


# Progress of a run, on stderr: bars on a terminal, plain lines in a log, nothing with -q.


_FIRST_SEGMENTS = 4
_SHORTEST_SEGMENT_S = 0.01


class PlainProgress:
    """One line per finished stage, for logs of batch jobs; the segments of a stage in a row share a line. A stage that
    alternates with others has lines after its segments 1 to 4, 8, 16, 32, ..., with the time since its last line; a
    segment that another stage interrupts at once has none. Setup is stated separately, so that the time of a stage is
    that of its record.

    `stages=False` leaves out stages and messages other than warnings: a group has a line per member instead.
    """

    def __init__(self, stages: bool = True) -> None:
        self._stages = stages
        self._stage = ""
        self._running = False
        self._start_ns = 0
        self._seconds, self._setup_s = 0.0, 0.0
        self._setups: list[tuple[int, int]] = []
        self._text = ""
        self._segments: dict[str, int] = {}
        self._unshown_s: dict[str, tuple[float, float]] = {}
        self.written: set[str] = set()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()
        for name, (seconds, setup_s) in self._unshown_s.items():
            if name not in self._segments:
                self.line(_stage_line(name, seconds, setup_s, ""))

    def stage(self, name: str, total: int | None) -> None:
        if name != self._stage:
            self._end_line()
            self._stage, self._text = name, ""
            self._seconds, self._setup_s = self._unshown_s.pop(name, (0.0, 0.0))
        if not self._running:
            self._running, self._start_ns = True, time.monotonic_ns()

    def advance(self, done: int, text: str = "") -> None:
        self._text = text or self._text

    def write(self, text: str) -> None:
        if text in self.written or not (self._stages or text.startswith(("warning: ", "note: "))):
            return
        self.written.add(text)
        if self._text or not self._running:  # without a text yet, a running stage keeps its line for its end
            self._end_line()
        self.line(text)

    def line(self, text: str) -> None:
        with suppress(BrokenPipeError):  # a reader that has left must not end the run
            print(text, file=sys.stderr, flush=True)

    def setup(self, begin_ns: int, end_ns: int) -> None:
        self._setups.append((begin_ns, end_ns))

    def finish(self) -> None:
        if self._running:
            own_s, setup_s = _without_setup((self._start_ns, time.monotonic_ns()), self._setups)
            self._seconds += own_s
            self._setup_s += setup_s
            self._running, self._setups = False, []

    def _end_line(self) -> None:
        self.finish()
        if self._stage and self._stages and not self._text and self._seconds + self._setup_s < _SHORTEST_SEGMENT_S:
            self._unshown_s[self._stage] = self._seconds, self._setup_s
        elif self._stage and self._stages:
            number = self._segments[self._stage] = self._segments.get(self._stage, 0) + 1
            if number <= _FIRST_SEGMENTS or number & (number - 1) == 0:
                self.line(_stage_line(self._stage, self._seconds, self._setup_s, self._text))
            else:
                self._unshown_s[self._stage] = self._seconds, self._setup_s
        self._stage = ""


def _without_setup(segment: tuple[int, int], setups: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Seconds of the segment's own work, and of its setup."""
    from joulelab.clock import NS
    from joulelab.meter.integrate import without

    own_ns = sum(end_ns - begin_ns for begin_ns, end_ns in without(segment, setups))
    return own_ns / NS, (segment[1] - segment[0] - own_ns) / NS


# Shorter setup times are not printed.
_SHORTEST_SETUP_S = 0.1


def _stage_line(name: str, seconds: float, setup_s: float, text: str) -> str:
    setup = f"+ {duration_text(setup_s)} setup" if setup_s >= _SHORTEST_SETUP_S else ""
    more = "; ".join(filter(None, [setup, text]))
    return f"  {name:<22} {duration_text(seconds):>10}" + (f"  {more}" if more else "")


class QuietProgress(PlainProgress):
    """Nothing at all."""

    def line(self, text: str) -> None: ...


class BarProgress(PlainProgress):
    """The running stage as a bar below the lines of the finished ones."""

    def __init__(self, stages: bool = True) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(stages)
        self._bars = Progress(
            TextColumn("  {task.description:<22}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def __enter__(self) -> BarProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._bars.stop()

    def stage(self, name: str, total: int | None) -> None:
        super().stage(name, total)
        if self._task is None:
            self._task = self._bars.add_task(name, total=total, text="")
        else:
            self._bars.update(self._task, total=total)

    def advance(self, done: int, text: str = "") -> None:
        super().advance(done, text)
        if self._task is not None:
            self._bars.update(self._task, completed=done, text=self._text)

    def line(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def finish(self) -> None:
        super().finish()
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


def watching(stages: bool = True) -> PlainProgress:
    """The progress display; `stages=False`: with -v only, stages have lines."""
    if detail() == "quiet":
        return QuietProgress()
    shown = stages or detail() == "verbose"
    return BarProgress(shown) if sys.stderr.isatty() else PlainProgress(shown)
