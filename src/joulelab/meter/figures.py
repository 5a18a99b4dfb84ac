"""An energy figure and everything a reader needs to trust it: method, coverage, random interval, gain error, reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

Method = Literal["counter", "integrated", "estimated", "missing"]
# What a sum may call itself: the weakest method among its parts.
_STRENGTH: tuple[Method, ...] = ("counter", "integrated", "estimated", "missing")


class Frozen(BaseModel):
    """What crosses a file: immutable, and with no room for a misspelt field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EnergyFigure(Frozen):
    energy_j: float | None
    method: Method
    coverage: float = 1.0
    """Share of the interval in which the sensor was seen working."""
    half_width_j: float | None = None
    """Random 95 % half-width from refresh and sampling; it shrinks with longer windows and more repeats."""
    gain_error_rel: float | None = None
    """The sensor's stated scale error; it does not average out, and it cancels in ratios on the same device."""
    sources: tuple[str, ...] = ()
    reason: str | None = None
    """Why there is no figure, or what is wrong with it."""
    fix: str | None = None
    lower_bound: bool = False
    """Work that belongs to it was done where no meter saw it: it took these joules at least."""
    crowded: bool = False
    """Estimated from CPU time while others kept the cores busy: not comparable with other estimates."""

    @property
    def measured(self) -> bool:
        return self.method in ("counter", "integrated")


def missing(reason: str, fix: str | None = None) -> EnergyFigure:
    return EnergyFigure(energy_j=None, method="missing", coverage=0.0, reason=reason, fix=fix)


def total(figures: Iterable[EnergyFigure], durations_s: Sequence[float] | None = None) -> EnergyFigure:
    """Sum of figures: energies add, random half-widths add in quadrature, gains by energy, coverage by duration.

    A part that is missing lowers the coverage of the sum instead of counting as 0 J.
    """
    parts = list(figures)
    present = [part for part in parts if part.energy_j is not None]
    if not present:
        return parts[0] if parts else missing("nothing to add")
    weights = list(durations_s) if durations_s is not None else [1.0] * len(parts)
    weight_sum = sum(weights) or 1.0
    energy_j = sum(part.energy_j or 0.0 for part in present)
    gains = [(part.gain_error_rel or 0.0) * abs(part.energy_j or 0.0) for part in present]
    reasons = list(dict.fromkeys(part.reason for part in parts if part.reason))
    return EnergyFigure(
        energy_j=energy_j,
        method=max((part.method for part in present), key=_STRENGTH.index),
        coverage=sum(w * part.coverage for w, part in zip(weights, parts, strict=True)) / weight_sum,
        half_width_j=math.sqrt(sum((part.half_width_j or 0.0) ** 2 for part in present)),
        gain_error_rel=sum(gains) / abs(energy_j) if energy_j else max((p.gain_error_rel or 0.0) for p in present),
        sources=tuple(dict.fromkeys(source for part in parts for source in part.sources)),
        reason="; ".join(reasons) or None,
        lower_bound=any(part.lower_bound for part in parts),
        crowded=any(part.crowded for part in parts),
    )
