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


def print_result(*renderables: RenderableType) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)
    for renderable in renderables:
        console.print(renderable)


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
