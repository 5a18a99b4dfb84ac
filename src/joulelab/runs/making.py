"""What is noted of an artefact while it is made, and the bill that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from joulelab import clock
from joulelab.meter.figures import EnergyFigure
from joulelab.runs.bills import Ancestor, Bill, ancestry_of, unmetered


@dataclass
class Making:
    stages: list[str] = field(default_factory=list)
    unmetered: dict[str, str] = field(default_factory=dict)
    """Work that no meter of ours saw, and why."""
    joined: list[Bill] = field(default_factory=list)
    """Of the shares that others made."""

    def bill(self, artefact: Ancestor, parents: Sequence[Bill], code: str, inputs: dict[str, Any]) -> Bill:
        # not in the key: where a server stood, or how work was split, does not change what came out
        unseen = [unmetered(work, artefact.key, reason) for work, reason in self.unmetered.items()]
        parents = [*parents, *self.joined, *unseen]
        known = {"stages": tuple(self.stages), "parents": tuple(parent.key for parent in parents)}
        return Bill(
            artefact=artefact.model_copy(update=known),
            ancestry=ancestry_of(parents),
            made_at=clock.iso(clock.now().wall_s),
            code_version=code,
            inputs=inputs,
            provisional=True,
        )


def spent_between(before: Mapping[str, EnergyFigure], after: Mapping[str, EnergyFigure]) -> dict[str, EnergyFigure]:
    """For a first bill, from the trace so far; the closing of the run replaces it with the stages' own figures."""
    spent = {}
    for component, figure in after.items():
        start = before[component]
        left = figure if figure.energy_j is None or start.energy_j is None else figure.minus(start)
        spent[component] = left.model_copy(update={"energy_j": left.energy_j and max(0.0, left.energy_j)})
    return spent
