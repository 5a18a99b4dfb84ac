"""`joulelab explain`: every setting, with its default and the sentence that documents it."""

from __future__ import annotations

from typing import Annotated

import typer

from joulelab.cli.options import AsJson


def explain(
    key: Annotated[str, typer.Argument(help="A setting or section, for example training.learning_rate.")] = "",
    pipeline: Annotated[str, typer.Option("--pipeline", help="Whose settings.")] = "classify",
    as_json: AsJson = False,
) -> None:
    """Describe settings: what they mean, what they take, what they are by default."""
    from joulelab import lookup
    from joulelab.runs.settings import describe

    rows = describe(lookup.PIPELINE_SPECS.resolve(pipeline), key)
    if as_json:
        import json

        print(json.dumps([row.__dict__ for row in rows], indent=2))
        return
    for row in rows:
        default = f" [default {row.default}]" if row.default else ""
        print(f"{row.key} ({row.takes}){default}\n    {row.about}")
