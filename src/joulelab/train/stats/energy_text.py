"""What the `energy` tracker found: as a table and sentences for people, and as values for the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from joulelab.meter.figure_text import amount_text, coverage_text, gain_text, method_text
from joulelab.meter.figures import COVERED, EnergyFigure
from joulelab.train.stats.differences import Isolated
from joulelab.train.stats.step_energy import Found, PerStep, agrees, as_values
from joulelab.units import duration_text, energy_text, percent_text, power_text

HEAD = f"{'phase':<18}{'energy per step':>20}{'power':>10}{'share':>9}  method"


@dataclass(frozen=True)
class EnergyFindings:
    step: Found
    long_phases: Mapping[str, PerStep]
    isolated: Isolated | None
    not_isolated: str
    """Why there is no isolation, where there is none."""
    time_shares: Mapping[str, PerStep]
    aside_stage: str
    aside_s: float | None
    aside_j: float | None

    def text(self) -> str:
        if self.step.step is None and self.isolated is None:
            return f"energy per phase: missing. {self.step.problem}"
        lines = [f"energy per phase ({self.sensor}), one optimiser step", HEAD, *self._rows(), *self._remarks()]
        return "\n".join(lines)

    @property
    def sensor(self) -> str:
        figure = self._sensed
        covered = coverage_text(figure.coverage) if figure.coverage < COVERED else ""
        parts = [method_text(figure), gain_text([figure]), ", ".join(figure.sources), covered]
        return "; ".join(part for part in parts if part)

    @property
    def _sensed(self) -> EnergyFigure:
        return self.isolated.figure if self.isolated else self.step.figure

    def _rows(self) -> Iterator[str]:
        sensed = self._sensed
        if self.isolated is not None:
            whole = self.isolated.step
            for phase, row in self.isolated.phases.items():
                yield row_text(phase, row, whole, sensed)
                if phase == "forward":
                    for part, inner in self.isolated.parts.items():
                        yield row_text(f"  {part}", inner, whole, sensed)
            yield row_text("step", whole, whole, sensed)
        if self.step.step is not None:
            yield row_text("step", self.step.step, self.step.step, sensed)
            yield from (row_text(phase, row, self.step.step, sensed) for phase, row in self.long_phases.items())
            yield from (row_text(phase, row, self.step.step, sensed) for phase, row in self.time_shares.items())

    def _remarks(self) -> Iterator[str]:
        if self.step.step is None:
            yield f"No energy of undisturbed steps: {self.step.problem}."
        else:
            yield f"direct: {self.step.steps} steps in {duration_text(self.step.duration_s)} of undisturbed training."
        if self.isolated is None:
            yield f"Not taken apart: {self.not_isolated}. The time-shares are all there is; they are the weakest way."
        else:
            yield self.verdict() or "The isolated step could not be checked against undisturbed training."
        if self.aside_s is not None:
            yield (
                f"Taking the step apart took {duration_text(self.aside_s)} and {energy_text(self.aside_j)}, billed to "
                f"{self.aside_stage}; the training goes on as if it had not been."
            )
        if self.step.figure.method == "estimated":
            yield "These joules are an estimate from CPU time; no sensor measured them."

    def verdict(self) -> str | None:
        """Whether the isolated step is the step that training takes."""
        if self.isolated is None or self.step.step is None:
            return None
        isolated, direct = self.isolated.step, self.step.step
        difference = isolated.energy_j / direct.energy_j - 1 if direct.energy_j else 0.0
        if agrees(isolated, direct):
            return f"The isolated step agrees with undisturbed training ({100 * difference:+.1f} %, within intervals)."
        return (
            f"The isolated step differs from undisturbed training by {100 * difference:+.1f} %, more than the "
            "intervals allow: read the isolated joules as shares of a step, not as its joules."
        )

    def values(self) -> dict[str, Any]:
        isolated, step = self.isolated, self.step.step
        return {
            "problem": self.step.problem,
            "figure": self.step.figure.model_dump(),
            "direct": {
                "steps": self.step.steps,
                "duration_s": self.step.duration_s,
                "step": as_values(step) if step else None,
                "phases": {phase: as_values(row) for phase, row in self.long_phases.items()},
            },
            "isolated": {
                "problem": self.not_isolated or None,
                "rounds": isolated.rounds if isolated else 0,
                "step": as_values(isolated.step) if isolated else None,
                "phases": {phase: as_values(row) for phase, row in isolated.phases.items()} if isolated else {},
                "parts": {part: as_values(row) for part, row in isolated.parts.items()} if isolated else {},
                "agrees": agrees(isolated.step, step) if isolated and step else None,
                "verdict": self.verdict(),
                "stage": self.aside_stage,
                "duration_s": self.aside_s,
                "energy_j": self.aside_j,
            },
            "time-share": {"phases": {phase: as_values(row) for phase, row in self.time_shares.items()}},
        }


def row_text(phase: str, row: PerStep, whole: PerStep, sensed: EnergyFigure) -> str:
    share = percent_text(row.energy_j / whole.energy_j) if whole.energy_j else "-"
    power = "-" if row.power_w is None else power_text(row.power_w)
    # energy of a step is that of covered time, and no lower bound
    each = sensed.model_copy(update={"coverage": 1.0, "lower_bound": False})
    energy = amount_text(each.with_interval(row.energy_j, row.half_width_j))
    return f"{phase:<18}{energy:>20}{power:>10}{share:>9}  {row.method}"
