"""Where the model of an inference came from."""

from __future__ import annotations

from pathlib import Path

from joulelab.data import sources
from joulelab.infer.infer_config import InferSpec
from joulelab.runs.artifacts import read_bill
from joulelab.runs.bills import external
from joulelab.runs.context import RunContext


def uses(run: RunContext, spec: InferSpec) -> None:
    """The model's own bill where it is an artefact of ours, so that break-even knows what making it took; else a note
    that it came from elsewhere."""
    name = spec.weights_from
    if name is None:
        return
    place = sources.parse(name)
    bill = read_bill(place.path) if place.path is not None and place.path.is_dir() else None
    if bill is None and place.path is not None:
        bill = read_bill(Path(place.path).parent)
    if bill is None:
        identity = name if place.path is None else f"{name}@{sources.content_hash(place.path)[:16]}"
        bill = external(name, "model", identity)
    run.uses(bill.artefact.name, bill)
