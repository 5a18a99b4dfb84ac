"""The table model: text cells built once, rendered for the terminal, Markdown and LaTeX; the page renders HTML."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from joulelab.report.wording import NOTHING

Align = Literal["left", "right"]
_LONGEST_KEPT_WORD = 14
_GUTTER = 2  # characters between columns


class Cell(str):
    """The text of a cell that the page sorts by `value`, not by its text.

    `selected` names the entry of the page's views (`energy` or `ratio`) that replaces it when a reader selects another
    scope or number of students.
    """

    value: float | str | None
    selected: str

    def __new__(cls, text: str, value: float | str | None = None, selected: str = "") -> Cell:
        cell = super().__new__(cls, text)
        cell.value, cell.selected = value, selected
        return cell


@dataclass(frozen=True)
class Column:
    title: str
    align: Align = "left"
    whole: bool = False
    """Keep cells on one line if the terminal is wide enough: for numbers and ids."""
    key: str = ""
    """Name of a column that the page can sort by; all its cells are `Cell`s."""


@dataclass(frozen=True)
class Grid:
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def of_words(self) -> bool:
        """Few columns, mostly text: on a phone such a table folds, others scroll."""
        return len(self.columns) <= 4 and sum(column.align == "right" for column in self.columns) <= 1


def make_grid(caption: str, titles: str, rows: Sequence[Sequence[str]], note: str = "") -> Grid:
    """`titles` are separated by `|`; a final `>` marks right-aligned numbers, `!` cells to keep on one line."""
    columns = tuple(
        Column(title.rstrip(">!"), "right" if title.endswith(">") else "left", title.endswith((">", "!")))
        for title in titles.split("|")
    )
    return Grid(caption, columns, tuple(tuple(row) for row in rows), note)


def without_column(grid: Grid, title: str) -> Grid:
    """The grid without the columns whose title begins with `title`."""
    return _only(grid, [place for place, column in enumerate(grid.columns) if not column.title.startswith(title)])


def without_empty_columns(grid: Grid) -> Grid:
    """The grid without the columns in which every cell is empty or `-`; the first column stays."""
    places = range(1, len(grid.columns))
    filled = [place for place in places if any(row[place] not in ("", NOTHING) for row in grid.rows)]
    return _only(grid, [0, *filled]) if grid.rows else grid


def _only(grid: Grid, kept: Sequence[int]) -> Grid:
    rows = tuple(tuple(row[place] for place in kept) for row in grid.rows)
    return replace(grid, columns=tuple(grid.columns[place] for place in kept), rows=rows)


@dataclass(frozen=True)
class GridView:
    """A grid for the terminal; it folds to the width known when it is printed."""

    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.grid.caption:
            yield Text(self.grid.caption, style="bold")
        yield self._table(self._widths(options.max_width))
        if self.grid.note:
            yield Text(self.grid.note + "\n")

    def _table(self, widths: Sequence[int | None]) -> Table:
        """Cells are `Text`, so that a label in square brackets is not markup; none is truncated."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        for column, width in zip(self.grid.columns, widths, strict=True):
            table.add_column(Text(column.title), justify=column.align, overflow="fold", width=width)
        for row in self.grid.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _widths(self, width: int) -> list[int | None]:
        """Width of each column: no short word is broken, and the room that is left goes to the columns that need most
        lines. All None if short words must be broken, too: rich decides where."""
        kept, numbers = self._kept_whole(width), range(len(self.grid.columns))
        wanted = [self._longest(number, whole=True) for number in numbers]
        words = [min(self._longest(number, whole=False), _LONGEST_KEPT_WORD) for number in numbers]
        widths = [wanted[number] if number in kept else words[number] for number in numbers]
        room = width - sum(widths) - _GUTTER * len(widths)
        if room < 0:
            return [None for _ in widths]
        lines = self._lines  # of the cell that needs most
        growing = [number for number in numbers if widths[number] < wanted[number]]
        while growing:
            number = max(growing, key=lambda number: lines(number, widths[number]))
            wider = range(widths[number] + 1, min(widths[number] + room, wanted[number]) + 1)
            better = next((one for one in wider if lines(number, one) < lines(number, widths[number])), None)
            if better is None:
                growing.remove(number)
                continue
            widths[number], room = better, room - (better - widths[number])
        for number in sorted(numbers, key=lambda number: wanted[number] - widths[number]):
            more = min(wanted[number] - widths[number], room)
            widths[number], room = widths[number] + more, room - more
        return list(widths)

    def _kept_whole(self, width: int) -> list[int]:
        """Columns kept on one line at this width. If it is too small, the widest fold first, the first column last."""
        kept = [number for number, column in enumerate(self.grid.columns) if column.whole]
        while kept and self._width_needed(kept) > width:
            kept.remove(max(kept, key=lambda number: (number > 0, self._longest(number, whole=True))))
        return kept

    def _width_needed(self, kept: Sequence[int]) -> int:
        """A folding column needs its longest word, up to a limit."""
        numbers = range(len(self.grid.columns))
        foldable = [min(self._longest(n, whole=False), _LONGEST_KEPT_WORD) for n in numbers if n not in kept]
        return sum(self._longest(n, whole=True) for n in kept) + sum(foldable) + _GUTTER * len(numbers)

    def _lines(self, number: int, width: int) -> int:
        """Lines of the cell that needs most of them; the few longest cells are enough to know."""
        texts = sorted({row[number] for row in self.grid.rows} | {self.grid.columns[number].title}, key=len)[-8:]
        return max(len(textwrap.wrap(line, width)) for text in texts for line in text.splitlines() or [""])

    def _longest(self, number: int, whole: bool) -> int:
        texts = [self.grid.columns[number].title, *(row[number] for row in self.grid.rows)]
        pieces = [piece for text in texts for piece in (text.splitlines() if whole else text.split())]
        return max(map(cell_len, pieces), default=0)


def to_rich(grid: Grid) -> GridView:
    return GridView(grid)


def to_markdown(grid: Grid) -> str:
    rule = ["---:" if column.align == "right" else "---" for column in grid.columns]
    lines = [[column.title for column in grid.columns], rule, *grid.rows]
    table = "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)
    note = f"\n\n{_markdown_cell(grid.note)}" if grid.note else ""
    return f"**{_markdown_cell(grid.caption)}**\n\n{table}{note}\n"


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def render_text(renderable: RenderableType, width: int = 100) -> str:
    """Output of a terminal of this width without colors, for golden tests and log files."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


# The page's script (tables.js) has the same table.
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "→": r"$\to$",
    "µ": r"$\mu$",
    "✓": r"\checkmark{}",
    "≥": r"$\geq$",
    "<": "$<$",  # in OT1, LaTeX's default encoding, a plain < prints another character
    ">": "$>$",
}


def to_latex(grid: Grid) -> str:
    """A `tabular` with its caption as a comment; needs booktabs, and amssymb for check marks."""
    alignment = "".join("r" if column.align == "right" else "l" for column in grid.columns)
    head = _line([column.title for column in grid.columns])
    rows = [_line(row) for row in grid.rows]
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
    note = [f"% {_one_line(grid.note)}"] if grid.note else []
    return "\n".join([f"% {_one_line(grid.caption)}", *lines, r"\end{tabular}", *note]) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    text = " & ".join(latex_text(cell) for cell in cells)
    # after the \\ of the line before, a bracket would begin the argument of that command
    return ("{}" if text.startswith("[") else "") + text + r" \\"


def latex_text(text: str) -> str:
    return re.sub(r"[\\~^±→µ✓≥<>&%$#_{}]", lambda found: LATEX.get(found[0], f"\\{found[0]}"), _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())
