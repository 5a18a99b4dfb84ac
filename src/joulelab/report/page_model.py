"""What the page shows, before it is HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from joulelab.report.figures import Figure
from joulelab.report.grid import Grid
from joulelab.report.overview import Overview
from joulelab.report.quality_curves import Point


@dataclass(frozen=True)
class RunSection:
    """One run, as the page shows it: a line to open, and behind it everything."""

    run_id: str
    title: str
    status: str
    facts: tuple[str, ...]
    grids: tuple[Grid, ...]
    command: str
    power: Figure | None
    curve: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    identity: tuple[str, ...]
    provenance: tuple[str, ...]
    headline: str
    sentences: tuple[str, ...]
    grids: tuple[Grid, ...]
    figures: tuple[Figure, ...]
    measured: tuple[Grid, ...]
    differs: tuple[Grid, ...]
    environment: Grid
    runs: tuple[RunSection, ...]
    overview: Overview | None = None
    scopes: tuple[dict[str, Any], ...] = ()
    pue: float | None = None
    baseline: str = ""
    no_ratio: tuple[str, ...] = ()
    """Methods whose joules cannot be set against the baseline's, as an estimate against a measurement."""
    crowded: tuple[str, ...] = ()
    """Methods whose ratio says nothing, because others used the cores while joules were estimated."""
    shares_teacher: bool = False
    sign: int = 0
    """1 where more quality is a larger number, -1 where it is a smaller one, 0 where there is none."""
    no_front: str = ""
    """Why no method is marked as being on the Pareto front, where that cannot be told."""
    datasets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What the figures of a comparison read by name."""
    plain: dict[str, Any] = field(default_factory=dict)
    """The same in numbers, to be downloaded."""

    @property
    def all_figures(self) -> dict[str, Figure]:
        """By the id of the place where the page draws them."""
        figures = {f"figure-{number}": figure for number, figure in enumerate(self.figures)}
        return figures | {f"power-{number}": run.power for number, run in enumerate(self.runs) if run.power}
