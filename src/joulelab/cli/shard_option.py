"""`--shard 2/8`: this task's share of a teacher's work, turned into the settings of the run that does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.runs.parts import Part
    from joulelab.runs.shares import Share

Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="With --part teacher, or a data script of the teacher's: do only share I of N of it, counted from 0. "
        "Tasks may run anywhere, at any time; the run that comes after joins what they made.",
    ),
]


def read_share(text: str | None, part: Part | None, data_script: str | None) -> Share | None:
    from joulelab.runs.shares import Share

    if text is None:
        return None
    if part != "teacher" and data_script is None:
        raise UsageError(
            f"--shard {text} does not say of which work",
            "--part teacher: all that the experiment needs of its teacher; --data-script logit_caching, "
            "synthetic_generation or preference_dataset: one step of it",
        )
    return Share.parse(text)
