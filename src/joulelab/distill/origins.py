"""What a pipeline takes from its user: a text, a model, a folder, by the name that was written."""

from __future__ import annotations

from joulelab.data import sources
from joulelab.distill.prepare_delivery import bill_of
from joulelab.runs.bills import Bill, external
from joulelab.runs.context import RunContext


def from_elsewhere(run: RunContext, name: str, source: str, kind: str) -> Bill:
    """Known by what it is, its joules missing, unless one of our runs has prepared it."""
    path = sources.parse(source).path
    return run.uses(name, external(source, kind, source)) if path is None else bill_of(run, name, path, kind, source)
