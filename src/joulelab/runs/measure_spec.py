"""Settings of a measured program or block of code: a run whose stages are not ours."""

from __future__ import annotations

from typing import Literal, NoReturn

from pydantic import Field

from joulelab.errors import UsageError
from joulelab.runs.context import RunContext
from joulelab.runs.spec import RunSpec


class MeasureSpec(RunSpec):
    """What `joulelab measure`, the Python API and the callbacks were asked to do."""

    pipeline: Literal["measure"] = "measure"
    """Always `measure`: the work is somebody else's."""
    command: tuple[str, ...] = ()
    """The command line as it was run, with what looks like a secret taken out; empty where Python code was measured."""
    repeat: int = Field(1, ge=1, le=100_000)
    """How often the program is run and measured."""
    warmup: int = Field(0, ge=0, le=100_000)
    """How often it is run before that; the joules of warm-ups are in the total and outside the mean."""


def not_restartable() -> UsageError:
    """The folder keeps a redacted command, and code in a `with` block not at all: neither can be started from it."""
    return UsageError(
        "a measured program is not started again from its run folder", "run `joulelab measure -- COMMAND` once more"
    )


def refuse(run: RunContext) -> NoReturn:
    raise not_restartable()
