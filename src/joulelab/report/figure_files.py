"""Figures and tables as files for a paper: SVG, PNG and PDF with their text as text, LaTeX for the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from joulelab.errors import UsageError
from joulelab.report.figures import Figure, Spec
from joulelab.report.grid_forms import latex_text, to_latex
from joulelab.report.page_model import Page

WIDTH = 620
_CONFIG: Spec = {
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "background": "white",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12.5, "titleFontWeight": "normal", "labelLimit": 200},
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 240},
}


def _svg(spec: Spec) -> bytes:
    return str(vl_convert.vegalite_to_svg(spec)).encode()


def _png(spec: Spec) -> bytes:
    return bytes(vl_convert.vegalite_to_png(spec, scale=2.0))


def _pdf(spec: Spec) -> bytes:
    return bytes(vl_convert.vegalite_to_pdf(spec))


FORMATS: dict[str, Callable[[Spec], bytes]] = {"svg": _svg, "png": _png, "pdf": _pdf}


def write_files(page: Page, folder: Path, formats: Sequence[str], latex: bool = False) -> list[Path]:
    """Every figure of the page in every format asked for, and its tables as LaTeX; the files it wrote."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [
            _write(folder / f"{name}.{kind}", FORMATS[kind](standing_alone(figure, page)))
            for name, figure in figure_names(page).items()
            for kind in formats
        ]
        return written + (_write_latex(page, folder, "pdf" in formats) if latex else [])
    except OSError as error:
        raise UsageError(
            f"cannot write into {folder}: {error.strerror or error}", "--out names another place"
        ) from None


def figure_names(page: Page) -> dict[str, Figure]:
    """By the name of its file, which LaTeX and shells take as one word; a single run's power needs no id in it."""
    powers = [run.power for run in page.runs if run.power]
    names = {"-".join((figure.name or f"figure {place}").split()): figure for place, figure in enumerate(page.figures)}
    return names | ({"power": powers[0]} if len(powers) == 1 else {power.name: power for power in powers})


def standing_alone(figure: Figure, page: Page) -> dict[str, Any]:
    """With its data inside, a width of its own, and ink for white paper."""
    return {**figure.complete(page.datasets), "width": WIDTH, "config": _CONFIG}


def _write_latex(page: Page, folder: Path, figures: bool) -> list[Path]:
    tables = "\n".join(to_latex(grid) for grid in page.grids)
    note = "% \\usepackage{booktabs,amssymb}\n\n"
    written = [_write(folder / "tables.tex", (note + tables).encode())]
    if figures:
        blocks = [_include(name, figure) for name, figure in figure_names(page).items()]
        written.append(_write(folder / "figures.tex", ("% \\usepackage{graphicx}\n\n" + "\n".join(blocks)).encode()))
    return written


def _include(name: str, figure: Figure) -> str:
    caption = latex_text(" ".join(filter(None, [f"{figure.title}.", figure.caption])))
    return (
        "\\begin{figure}\n\\centering\n"
        f"\\includegraphics[width=\\linewidth]{{{name}.pdf}}\n\\caption{{{caption}}}\n\\label{{fig:{name}}}\n"
        "\\end{figure}\n"
    )


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
