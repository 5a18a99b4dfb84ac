"""`joulelab compare`: any runs side by side, with intervals, verdict, break-even, and what differs between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from joulelab.cli.options import AsJson, Baseline, IncludeRepeated, QualityName, RunsDir, SeveralRuns
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.report.comparison import Comparison
    from joulelab.report.selection import Selection

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
    from joulelab.report.selection import select
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

        from joulelab.report.plain import comparison_data

        print(json.dumps(comparison_data(comparison), indent=2))
    elif form == "text":
        _print_text(comparison, selection)
    else:
        print(_text(comparison, form), end="")


def _print_text(comparison: Comparison, selection: Selection) -> None:
    from rich.text import Text

    from joulelab.cli.console import print_result
    from joulelab.report.facts import difference_grid
    from joulelab.report.grid import to_rich
    from joulelab.report.hardware import environment_differences, hardware_warning
    from joulelab.report.tables import comparison_view

    warning = hardware_warning(selection.records, selection.folders)
    if warning:
        print_result(Text(f"! {warning}"))
    differing = (difference_grid(selection.group), environment_differences(selection.records, selection.folders))
    print_result(*(to_rich(grid) for grid in differing if grid.rows), comparison_view(comparison))


def _text(comparison: Comparison, form: Form) -> str:
    from joulelab.report.grid_forms import to_csv, to_latex
    from joulelab.report.tables import comparison_grids, comparison_markdown

    if form == "markdown":
        return comparison_markdown(comparison)
    one = to_latex if form == "latex" else to_csv
    return "\n".join(one(grid) for grid in comparison_grids(comparison))
