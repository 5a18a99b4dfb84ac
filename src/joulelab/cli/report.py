"""`joulelab report`: the offline HTML page of runs or a group, and its figures and tables as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from joulelab.cli.options import Baseline, IncludeRepeated, QualityName, RunsDir, SeveralRuns


def report(
    names: SeveralRuns,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="FILE.html or a folder (default: into the run's or group's folder; for several, here)."
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    baseline: Baseline = None,
    quality: QualityName = None,
    svg: Annotated[bool, typer.Option("--svg", help="Also write every figure as SVG.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Also write every figure as PNG.")] = False,
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write every figure as PDF.")] = False,
    latex: Annotated[
        bool,
        typer.Option("--latex", help="Also write the tables as LaTeX, and with --pdf a file that shows the figures."),
    ] = False,
    include_repeated: IncludeRepeated = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write one HTML file that opens offline: verdict, table, figures, break-even, how it was measured.

    The page needs no server and no network. Choose, sort and filter methods in it, switch what counts, let N students
    share the teacher; the address keeps what was chosen, and tables copy as Markdown, LaTeX and CSV.

    Examples:

      joulelab report last --open

      joulelab report 'demo-labels-*' 'demo-kd-*' --out for-the-group.html

      joulelab report last --svg --pdf --latex
    """
    from joulelab.report.page import REPORT, write_page
    from joulelab.report.page_builders import selection_page
    from joulelab.report.selection import select
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    selection = select(store, names, baseline)
    page = selection_page(selection, store, quality, include_repeated)
    place = selection.place / REPORT if selection.place else Path("comparison.html")
    is_folder = out is not None and (out.is_dir() or not (out.suffix or out.is_file()))
    target = out / place.name if out and is_folder else out or place
    print(write_page(page, target))
    formats = [name for name, asked in (("svg", svg), ("png", png), ("pdf", pdf)) if asked]
    if formats or latex:
        from joulelab.report.figure_files import write_files

        for path in write_files(page, target.with_name(f"{target.stem}-figures"), formats, latex):
            print(path)
    if open_page:
        import webbrowser

        webbrowser.open(target.absolute().as_uri())
