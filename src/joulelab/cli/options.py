"""Options that several verbs share, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunsDir = Annotated[
    Path | None,
    typer.Option("--runs-dir", help="Where runs are kept (default: JOULELAB_RUNS, else ./runs).", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Require = Annotated[
    str | None,
    typer.Option("--require", metavar="measured", help="Do not start where nothing can be measured (exit code 3)."),
]
RequireGrade = Annotated[
    str | None,
    typer.Option("--require-grade", metavar="A|B|C", help="The lowest validity grade that is accepted (exit code 4)."),
]
SeveralRuns = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Runs or groups: an id, its beginning or end, a folder, a pattern in quotes, or `last`."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline", metavar="LABEL", help="What the others are compared with (default: the group's, or the first)."
    ),
]
QualityName = Annotated[
    str | None,
    typer.Option(
        "--quality", metavar="NAME", help="The result that is compared, as `exact_match` (default: the runs' main one)."
    ),
]
IncludeRepeated = Annotated[
    bool,
    typer.Option(
        "--include-repeated", help="Count work that was done again after an interruption as energy of the method."
    ),
]
