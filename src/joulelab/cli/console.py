"""Results go to stdout, at the terminal's width or, in a pipe, wide enough to keep a table whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from joulelab.report.grid import Grid

PIPE_WIDTH = 140
# Laying out folded cells takes a fraction of a millisecond a row; nobody reads ten thousand of them for their looks.
MOST_LAID_OUT = 500


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def print_result(*renderables: RenderableType) -> None:
    console = _console()
    for renderable in renderables:
        console.print(renderable)


def fits(grid: Grid) -> bool:
    """Whether every column has room for its title and for the words of its cells, side by side."""
    cells = zip(*([column.title for column in grid.columns], *grid.rows), strict=True)
    widths = [max(cell_len(word) for text in column for word in text.split() or [""]) for column in cells]
    return sum(widths) + 2 * len(widths) <= _console().width


def print_records(grid: Grid) -> None:
    """One line per column under a line per row, for rows that are too wide for a table."""
    names = max(cell_len(column.title) for column in grid.columns)
    room = max(20, _console().width - names - 4)
    print(grid.caption)
    for number, row in enumerate(grid.rows, 1):
        print(f"\nrow {number}")
        for column, text in zip(grid.columns, row, strict=True):
            lines = [text[start : start + room] for start in range(0, max(1, len(text)), room)]
            print(f"  {column.title.ljust(names)}  " + f"\n{' ' * (names + 4)}".join(lines))


def print_grid(grid: Grid) -> None:
    """A table; one with very many rows goes out in plain columns, unfolded, at once."""
    if len(grid.rows) <= MOST_LAID_OUT:
        from joulelab.report.grid import to_rich

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
