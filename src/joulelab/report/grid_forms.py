"""A table for papers and spreadsheets: LaTeX with booktabs, and CSV."""

from __future__ import annotations

import csv
import io
import re

from joulelab.report.grid import Grid

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "→": r"$\to$",
    "µ": r"$\mu$",
    "✓": r"\checkmark{}",
    "<": "$<$",  # in text it is another letter, unless a font encoding was chosen
    ">": "$>$",
}


def to_latex(grid: Grid) -> str:
    """A `tabular` with its caption as a comment; it needs booktabs, and amssymb where there are ticks."""
    alignment = "".join("r" if column.align == "right" else "l" for column in grid.columns)
    head = _line([column.title for column in grid.columns])
    rows = [_line(row) for row in grid.rows]
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
    note = [f"% {_one_line(grid.note)}"] if grid.note else []
    return "\n".join([f"% {_one_line(grid.caption)}", *lines, r"\end{tabular}", *note]) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return " & ".join(latex_text(cell) for cell in cells) + r" \\"


def latex_text(text: str) -> str:
    return re.sub(r"[\\~^±→µ✓<>&%$#_{}]", lambda found: _LATEX.get(found[0], f"\\{found[0]}"), _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def to_csv(grid: Grid) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_one_line(column.title) for column in grid.columns])
    writer.writerows([_one_line(cell) for cell in row] for row in grid.rows)
    return out.getvalue()
