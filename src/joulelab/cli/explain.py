"""`joulelab explain`: every setting, with its default, the sentence that documents it, and whose setting it is."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson

if TYPE_CHECKING:
    from joulelab.runs.settings import Explained

_AS_WRITTEN = {"None": "nothing", "True": "true", "False": "false"}


def explain(
    key: Annotated[str, typer.Argument(help="A setting or section, for example training.learning_rate.")] = "",
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", metavar="NAME", help="Whose settings (default: whichever pipelines have the key)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe settings: what they mean, what they take, what they are by default.

    Without a key and a pipeline: the pipelines, and what all of them have in common.

    Examples:

      joulelab explain training.learning_rate

      joulelab explain student.lora

      joulelab explain --pipeline infer
    """
    from joulelab.runs.settings import explained

    found = explained(key, pipeline)
    if as_json:
        import json

        print(json.dumps([{**row.__dict__, "pipelines": found.pipelines} for row in found.rows], indent=2))
        return
    if not key and pipeline is None:
        print(f"pipelines: {', '.join(found.pipelines)}\nThese settings all of them have; --pipeline NAME tells all.\n")
    for row in found.rows:
        default = f" [default {_AS_WRITTEN.get(row.default, row.default)}]" if row.default else ""
        print(f"{row.key} ({row.takes}){default}\n{indent(row.about, '    ')}")
    if key and pipeline is None:
        print(f"\n{_whose(found)}")


def _whose(found: Explained) -> str:
    of = f"pipelines: {', '.join(found.pipelines)}"
    return of + (f"\nnot the same in: {', '.join(found.otherwise)} (--pipeline NAME)" if found.otherwise else "")
