"""`joulelab demo`: a first comparison in about five minutes, on a laptop, with real models and text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings for every member of the group.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a teacher, train a student three ways with two seeds each, and compare them by joules and accuracy."""
    from joulelab.cli.run import start
    from joulelab.data.samples import locate
    from joulelab.runs.sensing import sensing_text
    from joulelab.runs.store import store_root

    for name in ("minilm", "reviews"):
        locate(name)
    print(sensing_text(estimate_cpu=True), file=sys.stderr)
    start(store_root(runs_dir), "demo", overrides or [], as_json=as_json)
