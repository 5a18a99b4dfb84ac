"""A bill before it is a table: its lines, what each student bears of them, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.grids import GridFactor
from joulelab.report.joules import known_sum, mixes_methods
from joulelab.runs.bills import ELSEWHERE, UNMETERED
from joulelab.runs.record import EnergyByComponent, RunRecord

COMPONENTS = tuple(EnergyByComponent.model_fields)


@dataclass(frozen=True)
class BillLine:
    """One piece of work: a stage of the run, or an ancestor."""

    key: str
    name: str
    kind: str
    made_by: str
    figure: EnergyFigure
    components: dict[str, EnergyFigure]
    parents: tuple[str, ...]
    shared: bool
    """A teacher's work, which N students share."""

    @property
    def elsewhere(self) -> bool:
        return self.made_by == ELSEWHERE


@dataclass(frozen=True)
class EnergyBill:
    title: str
    kind: str
    made_by: str
    own: tuple[BillLine, ...]
    inherited: tuple[BillLine, ...]
    """Each ancestor once."""
    roots: tuple[str, ...]
    """Keys of the ancestors it uses directly."""
    students: int
    provisional: bool = False
    record: RunRecord | None = None
    """The run behind it, where its folder is still there."""
    duration_s: float | None = None
    grid: GridFactor | None = None
    pue: float | None = None
    """How the run reckons CO2e; of a group, where its runs agree."""
    own_totals: dict[str, EnergyFigure] = field(default_factory=dict)
    """What the run's record says of its own stages together, by component, and as `best` what tables show."""

    @property
    def lines(self) -> tuple[BillLine, ...]:
        return self.own + self.inherited

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(line.name for line in self.inherited if line.figure.energy_j is None)

    @property
    def unmetered(self) -> tuple[str, ...]:
        """Work for it that no meter saw: these joules are a lower bound."""
        return tuple(line.name for line in self.inherited if line.kind == UNMETERED)

    @property
    def mixed(self) -> bool:
        return mixes_methods(line.figure for line in self.lines)

    def share(self, line: BillLine) -> EnergyFigure:
        """What one student has to bear of a line."""
        return line.figure.scaled(1 / self.students) if line.shared else line.figure

    @property
    def own_figure(self) -> EnergyFigure:
        return self._own("best") or _sum(self.share(line) for line in self.own)

    @property
    def inherited_figure(self) -> EnergyFigure | None:
        return _sum(self.share(line) for line in self.inherited) if self.inherited else None

    @property
    def whole(self) -> EnergyFigure:
        return _sum([self.own_figure, *(self.share(line) for line in self.inherited)])

    def _own(self, name: str) -> EnergyFigure | None:
        """The record's own sum, as other tables have it: two neighbours' errors at their common edge cancel in it.

        None where there is none, or where N students share some of these stages.
        """
        if self.students > 1 and any(line.shared for line in self.own):
            return None
        found = self.own_totals.get(name)
        return found.model_copy(update={"reason": None}) if found and found.energy_j is not None else None

    def own_component(self, name: str) -> EnergyFigure:
        return self._own(name) or self._component(name, self.own)

    def inherited_component(self, name: str) -> EnergyFigure:
        return self._component(name, self.inherited)

    def component(self, name: str) -> EnergyFigure:
        """Own and inherited together."""
        return _sum([self.own_component(name), *([self.inherited_component(name)] if self.inherited else [])])

    def _component(self, name: str, lines: Sequence[BillLine]) -> EnergyFigure:
        absent = missing("not in its bill")
        parts = [line.figure if line.kind == UNMETERED else line.components.get(name, absent) for line in lines]
        shares = [
            part.scaled(1 / self.students) if line.shared else part for part, line in zip(parts, lines, strict=True)
        ]
        return _sum(shares)


def _sum(figures: Iterable[EnergyFigure]) -> EnergyFigure:
    """Of what is known; what is not stands in no sum, and its reasons would only repeat its lines."""
    summed = known_sum(list(figures))
    return summed if summed.energy_j is None else summed.model_copy(update={"reason": None})
