"""`joulelab report`, `compare` and `bill`: the offline HTML report, comparisons of runs, and energy bills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from joulelab.cli.options import AsJson, Baseline, IncludeRepeated, QualityName, RunsDir, SeveralRuns, complete_runs
from joulelab.errors import ConfigError, UsageError
from joulelab.lookup import require_extra

if TYPE_CHECKING:
    from joulelab.meter.grids import GridFactor
    from joulelab.report.compare.comparison import Comparison
    from joulelab.report.compare.method_rows import Selection
    from joulelab.report.page import Page
    from joulelab.report.tables.grid import Grid


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            help="Runs or groups: id (or its start or end), directory, quoted pattern, or `last`.",
            autocompletion=complete_runs,
        ),
    ] = None,
    whole_store: Annotated[
        bool, typer.Option("--store", help="One page over all runs of the store: trend over time, filter, links.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE|DIR",
            help="FILE.html, or FILE.pdf, .png, .svg (the first chart), .tex (the main table), or a directory "
            "(default: report.html in the run, group or store; for several runs, comparison.html here).",
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    baseline: Baseline = None,
    quality: QualityName = None,
    svg: Annotated[bool, typer.Option("--svg", help="Also write every figure as SVG.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Also write every figure as PNG.")] = False,
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write every figure as PDF.")] = False,
    latex: Annotated[
        bool,
        typer.Option("--latex", help="Also write the tables as LaTeX; with --pdf, a document with the figures."),
    ] = False,
    include_repeated: IncludeRepeated = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write a single offline HTML page: result tiles, one chart, a verdict; details below, collapsed.

    The page needs no server and no network. In it you can sort and filter methods, select the energy scope, and split
    the teacher across N students; the URL keeps the selection, and tables can be copied as Markdown, LaTeX or CSV.

    Examples:

      joulelab report last --open

      joulelab report last --out figure.pdf

      joulelab report last --out table.tex

      joulelab report --store --open

      joulelab report 'demo-labels-*' 'demo-kd-*' --out comparison.html

      joulelab report last --svg --pdf --latex
    """
    require_extra("joulelab report", "report")
    from joulelab.report.page import check_document, write_document
    from joulelab.runs.store import store_root

    is_folder = out is not None and (out.is_dir() or not (out.suffix or out.is_file()))
    if out is not None and not is_folder:
        check_document(out)
    store = store_root(runs_dir)
    if whole_store:
        if names or baseline or quality or include_repeated:
            raise UsageError("--store covers all runs of the store", "leave runs and comparison options out")
        page, place = _store_page(store)
    elif names:
        page, place = _runs_page(store, names, baseline, quality, include_repeated)
    else:
        raise UsageError("no run was named", "joulelab report last, or joulelab report --store for all runs")
    target = out / place.name if out and is_folder else out or place
    print(write_document(page, target))
    formats = [name for name, requested in (("svg", svg), ("png", png), ("pdf", pdf)) if requested]
    if formats or latex:
        from joulelab.report.page import write_files

        for path in write_files(page, target.with_name(f"{target.stem}-figures"), formats, latex):
            print(path)
    if open_page:
        import webbrowser

        webbrowser.open(target.absolute().as_uri())


def _store_page(store: Path) -> tuple[Page, Path]:
    from joulelab.cli.browse import progress_messages
    from joulelab.report.store_page import store_page
    from joulelab.runs.paths import REPORT

    return store_page(store, progress_messages()), store / REPORT


def _runs_page(
    store: Path, names: list[str], baseline: str | None, quality: str | None, include_repeated: bool
) -> tuple[Page, Path]:
    """The page, and where it is written by default."""
    from joulelab.report.compare.method_rows import select
    from joulelab.report.page import selection_page
    from joulelab.runs.paths import REPORT

    selection = select(store, names, baseline)
    page = selection_page(selection, store, quality, include_repeated)
    return page, selection.place / REPORT if selection.place else Path("comparison.html")


Form = Literal["text", "markdown", "latex", "csv"]


def compare(
    names: SeveralRuns,
    baseline: Baseline = None,
    quality: QualityName = None,
    students: Annotated[
        int, typer.Option("--students", min=1, metavar="N", help="Also split the teacher's energy across N students.")
    ] = 1,
    form: Annotated[
        Form, typer.Option("--format", help="Output format; csv: the figures, one line per method.")
    ] = "text",
    include_repeated: IncludeRepeated = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: quality, energy by stage, throughput, break-even, and which differences are significant.

    Runs that differ only in the seed are repeats. Energy is compared as a ratio (on logarithms, paired by seed where
    possible; Student's t below 20 repeats). For an inconclusive difference the required number of repeats is printed.

    Examples:

      joulelab compare last

      joulelab compare demo-labels-20260301T100000Z-ab12 demo-kd-20260301T100200Z-cd34

      joulelab compare 'demo-labels-*' 'demo-kd-*' --baseline "labels only" --format markdown
    """
    from joulelab.report.compare.method_rows import is_about_inference, select
    from joulelab.runs.store import store_root

    _require_one_form(form, as_json)
    store = store_root(runs_dir)
    selection = select(store, names, baseline)
    about_inference = is_about_inference(selection.group)
    if about_inference and selection.place is not None and form == "text":
        given = {"--baseline": baseline, "--quality": quality, "--students": students > 1}
        for option in (name for name, value in {**given, "--include-repeated": include_repeated}.items() if value):
            raise UsageError(f"{option} has no effect: this is no comparison of methods", "leave it out")
        from joulelab.cli.browse import show_inference_group

        show_inference_group(selection.place, as_json)
        return
    if selection.group.sweep or about_inference:
        kind = "a group of serving runs" if about_inference else "a sweep"
        if selection.group.compares_inference:
            kind = "an inference run of several models"
        raise UsageError(
            f"{selection.group.group_id} is {kind}; expected runs or a group of methods to compare",
            f"its table: joulelab show {selection.group.group_id}",
        )
    comparison = selection.comparison(store, quality, include_repeated)
    if as_json:
        import json

        from joulelab.report.export import comparison_data

        print(json.dumps(comparison_data(comparison, students), indent=2))
        return
    if form == "csv":
        from joulelab.report.export import comparison_csv

        print(comparison_csv(comparison, students), end="")
        return
    from joulelab.report.tables.comparison_tables import shared_grid

    shared = [shared_grid(comparison, students)] if students > 1 else []
    if form == "text":
        _print_text(comparison, selection, shared)
    else:
        print(_text(comparison, form, shared), end="")


def _require_one_form(form: str, as_json: bool) -> None:
    if as_json and form != "text":
        raise UsageError(f"--json and --format {form} were both given", "choose one of them")


def _print_text(comparison: Comparison, selection: Selection, shared: list[Grid]) -> None:
    from joulelab.cli.browse import print_comparison
    from joulelab.cli.console import print_grid
    from joulelab.cli.options import detail
    from joulelab.report.tables.provenance import difference_grid, environment_differences, hardware_warning

    differing = (difference_grid(selection.group), environment_differences(selection.records, selection.folders))
    warning = hardware_warning(selection.records, selection.folders)
    print_comparison(comparison, warning, [grid for grid in differing if grid.rows])
    for grid in shared if detail() != "quiet" else ():
        print_grid(grid)


def _text(comparison: Comparison, form: Form, shared: list[Grid]) -> str:
    from joulelab.report.tables.comparison_tables import comparison_grids, comparison_markdown
    from joulelab.report.tables.grid import to_latex, to_markdown

    if form == "markdown":
        return "\n".join([comparison_markdown(comparison), *map(to_markdown, shared)])
    return "\n".join(to_latex(grid) for grid in (*comparison_grids(comparison), *shared))


BillForm = Literal["text", "markdown", "model-card", "codecarbon"]


def bill(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ARTIFACT|RUN|GROUP",
            help="Run, group, `last`, `RUN/ARTIFACT`, or an artifact's folder or key.",
            autocompletion=complete_runs,
        ),
    ],
    students: Annotated[
        int, typer.Option("--students", min=1, metavar="N", help="Split the teacher's energy across N students.")
    ] = 1,
    grid: Annotated[
        str | None,
        typer.Option("--grid", help="Grid for CO2e: `FR`, `world`, or g/kWh (default: the run's)."),
    ] = None,
    pue: Annotated[
        float | None, typer.Option("--pue", min=1.0, help="Power usage effectiveness (default: the run's).")
    ] = None,
    form: Annotated[
        BillForm, typer.Option("--format", help="Table, Markdown, Hub model card (grams), or CodeCarbon CSV.")
    ] = "text",
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the energy bill of a model, cache, dataset, run or group: own, inherited and shared energy.

    Each ancestor counts once. Inputs of unknown energy are listed and not included in the sums.

    Examples:

      joulelab bill last

      joulelab bill demo-kd-20260301T100200Z-cd34/final_model --students 10

      joulelab bill last --grid FR --format model-card
    """
    from joulelab.meter.grids import co2e
    from joulelab.report.tables.bill_tables import find_bill
    from joulelab.runs.store import store_root

    _require_one_form(form, as_json)
    if pue is not None and not pue < float("inf"):
        raise UsageError(f"--pue {pue:g} is not a number", "1.0 means no overhead; data centers have 1.1 to 1.6")
    found = find_bill(store_root(runs_dir), name, students)
    factor = _grid(grid) if grid is not None else found.grid
    building = pue if pue is not None else found.pue
    if pue is not None and factor is None and form != "codecarbon":
        raise UsageError("--pue affects only CO2e, which needs a grid", "add --grid FR, or --grid 40-60 in g/kWh")
    grams = co2e(found.whole, factor, building)
    if as_json:
        import json

        from joulelab.report.export import bill_data

        print(json.dumps(bill_data(found, grams), indent=2))
    elif form in ("text", "markdown"):
        from joulelab.cli.console import print_answer
        from joulelab.report.tables.bill_tables import bill_markdown, bill_view, sentences, tree_grid
        from joulelab.report.tables.grid import without_column

        if form == "markdown":
            print(bill_markdown(found, grams), end="")
            return
        result, *remarks = sentences(found, grams)
        grids = [without_column(replace(tree_grid(found), note=""), "Made by")]
        print_answer(
            result, grids, remarks, full=lambda: [bill_view(found, grams)], more="energy by component and method"
        )
    else:
        from joulelab.report.export import codecarbon_csv, model_card

        card = form == "model-card"
        print(model_card(found, grams, factor) if card else codecarbon_csv(found, grams, factor, building), end="")


def _grid(text: str) -> GridFactor | None:
    from joulelab.meter.grids import parse_grid

    try:
        return parse_grid(text)
    except ValueError as error:
        raise ConfigError(f"--grid: {error}") from None
