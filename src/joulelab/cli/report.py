"""`joulelab report`: the offline HTML page of runs or a group, and its figures and tables as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from joulelab.cli.options import AsJson, Baseline, IncludeRepeated, QualityName, RunsDir, SeveralRuns
from joulelab.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from joulelab.meter.grids import GridFactor
    from joulelab.report.compare.comparison import Comparison
    from joulelab.report.compare.run_selection import Selection


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
    from joulelab.report.compare.run_selection import select
    from joulelab.report.page import REPORT, selection_page, write_page
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
        from joulelab.report.page import write_files

        for path in write_files(page, target.with_name(f"{target.stem}-figures"), formats, latex):
            print(path)
    if open_page:
        import webbrowser

        webbrowser.open(target.absolute().as_uri())


# `joulelab compare`: any runs side by side, with intervals, verdict, break-even, and what differs between them.


Form = Literal["text", "markdown", "latex", "csv"]


def compare(
    names: SeveralRuns,
    baseline: Baseline = None,
    quality: QualityName = None,
    form: Annotated[Form, typer.Option("--format", help="How to print it.")] = "text",
    include_repeated: IncludeRepeated = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: quality, joules by stage, throughput, break-even, and what is inconclusive.

    Runs with the same label and settings but the seed are repeats. Joules are compared as ratios on logarithms, paired
    by seed where seeds pair; below 20 repeats with Student's t. Words say what the statistics allow, and how many
    repeats an inconclusive difference would need.

    Examples:

      joulelab compare last

      joulelab compare demo-labels-20260301T100000Z-ab12 demo-kd-20260301T100200Z-cd34

      joulelab compare 'demo-labels-*' 'demo-kd-*' --baseline "labels only" --format markdown
    """
    from joulelab.report.compare.run_selection import select
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    selection = select(store, names, baseline)
    if selection.group.sweep:
        raise UsageError(
            f"{selection.group.group_id} is a sweep, which has a table of its own", "joulelab show shows it"
        )
    comparison = selection.comparison(store, quality, include_repeated)
    if as_json:
        import json

        from joulelab.report.export import comparison_data

        print(json.dumps(comparison_data(comparison), indent=2))
    elif form == "text":
        _print_text(comparison, selection)
    else:
        print(_text(comparison, form), end="")


def _print_text(comparison: Comparison, selection: Selection) -> None:
    from rich.text import Text

    from joulelab.cli.console import print_result
    from joulelab.report.tables.comparison_tables import comparison_view
    from joulelab.report.tables.grid import to_rich
    from joulelab.report.tables.provenance import difference_grid, environment_differences, hardware_warning

    warning = hardware_warning(selection.records, selection.folders)
    if warning:
        print_result(Text(f"! {warning}"))
    differing = (difference_grid(selection.group), environment_differences(selection.records, selection.folders))
    print_result(*(to_rich(grid) for grid in differing if grid.rows), comparison_view(comparison))


def _text(comparison: Comparison, form: Form) -> str:
    from joulelab.report.tables.comparison_tables import comparison_grids, comparison_markdown
    from joulelab.report.tables.grid import to_csv, to_latex

    if form == "markdown":
        return comparison_markdown(comparison)
    one = to_latex if form == "latex" else to_csv
    return "\n".join(one(grid) for grid in comparison_grids(comparison))


# `joulelab bill`: what an artefact or a run took, with all that it was made from.


BillForm = Literal["text", "markdown", "model-card", "codecarbon"]


def bill(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ARTEFACT|RUN|GROUP", help="A run or group, `last`, `RUN/ARTEFACT`, an artefact's folder or key."
        ),
    ],
    students: Annotated[
        int, typer.Option("--students", min=1, metavar="N", help="How many students share the teacher's joules.")
    ] = 1,
    grid: Annotated[
        str | None, typer.Option("--grid", help="Grid for CO2e: `FR`, `world`, or g/kWh (default: the run's).")
    ] = None,
    pue: Annotated[
        float | None, typer.Option("--pue", min=1.0, help="What the building adds (default: the run's).")
    ] = None,
    form: Annotated[
        BillForm, typer.Option("--format", help="A table, Markdown, the Hub's model card (grams), or CodeCarbon's CSV.")
    ] = "text",
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Print the energy bill of a model, a cache, a data set, a whole run or a group: own, inherited, shared.

    Each ancestor counts once. What came from elsewhere is shown without joules and is in no sum.

    Examples:

      joulelab bill last

      joulelab bill demo-kd-20260301T100200Z-cd34/final_model --students 10

      joulelab bill last --grid FR --format model-card
    """
    from joulelab.report.tables.bill_tables import find_bill
    from joulelab.runs.carbon import co2e
    from joulelab.runs.store import store_root

    if pue is not None and not pue < float("inf"):
        raise UsageError(f"--pue {pue:g} is not a number", "1.0 adds nothing; most buildings have 1.1 to 1.6")
    found = find_bill(store_root(runs_dir), name, students)
    factor = _grid(grid) if grid is not None else found.grid
    building = pue if pue is not None else found.pue
    if pue is not None and factor is None and form != "codecarbon":
        raise UsageError("--pue changes grams of CO2e, and they need a grid", "--grid FR, or --grid 40-60 in g/kWh")
    grams = co2e(found.whole, factor, building)
    if as_json:
        import json

        from joulelab.report.export import bill_data

        print(json.dumps(bill_data(found, grams), indent=2))
    elif form in ("text", "markdown"):
        from joulelab.cli.console import print_result
        from joulelab.report.tables.bill_tables import bill_markdown, bill_view

        print(bill_markdown(found, grams), end="") if form == "markdown" else print_result(bill_view(found, grams))
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
