"""`joulelab bill`: what an artefact or a run took, with all that it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from joulelab.meter.grids import GridFactor

Form = Literal["text", "markdown", "model-card", "codecarbon"]


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
        Form, typer.Option("--format", help="A table, Markdown, the Hub's model card (grams), or CodeCarbon's CSV.")
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
    from joulelab.report.energy_bill import find_bill
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

        from joulelab.report.bill_exports import bill_data

        print(json.dumps(bill_data(found, grams), indent=2))
    elif form in ("text", "markdown"):
        from joulelab.cli.console import print_result
        from joulelab.report.bill_tables import bill_markdown, bill_view

        print(bill_markdown(found, grams), end="") if form == "markdown" else print_result(bill_view(found, grams))
    else:
        from joulelab.report.bill_exports import codecarbon_csv, model_card

        card = form == "model-card"
        print(model_card(found, grams, factor) if card else codecarbon_csv(found, grams, factor, building), end="")


def _grid(text: str) -> GridFactor | None:
    from joulelab.meter.grids import parse_grid

    try:
        return parse_grid(text)
    except ValueError as error:
        raise ConfigError(f"--grid: {error}") from None
