"""An energy figure with what is needed to trust it (method, coverage, errors, gain error), sums of figures, their text.

Text is number, unit, uncertainty, method, in that order; every place that prints energy uses the functions here.
Measured figures print their random 95 % interval; the gain error follows once per output (`gain_text`). Estimates print
their total uncertainty, because their scale is the larger error. A figure with time or work without data is a lower
bound, measured or estimated: `≥` with the coverage and never with `±`, since no interval around it would cover the true
value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from joulelab.units import energy_text, with_prefix

Method = Literal["counter", "integrated", "estimated", "missing"]
# The method of a sum is the weakest method among its parts.
_STRENGTH: tuple[Method, ...] = ("counter", "integrated", "estimated", "missing")
ErrorName = Literal[
    "sample lag",
    "scale",
    "counter latch",
    "read time",
    "shape",
    "idle",
    "missing time",
    "repeats",
    "time share",
    "reused work",
    "unspecified",
]
# A figure with less of its time covered than this is a lower bound; the rest is covered by its interval.
COVERED = 0.999


class Frozen(BaseModel):
    """What crosses a file: immutable, and without unknown fields, so that a misspelled one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorComponent(Frozen):
    """One cause of error, as its 95 % half-width in joules.

    An independent error is one number; sums add it in quadrature. A shared error has one cause in all figures (the
    lag of the driver's samples is one number for all cards and windows): `joules` then holds the signed change of the
    figure for each of several values of that cause, sums add these one by one, and opposite signs cancel.
    """

    name: ErrorName
    joules: tuple[float, ...]
    shared: bool = False

    @property
    def half_width_j(self) -> float:
        return max(map(abs, self.joules), default=0.0)

    def scaled(self, factor: float) -> ErrorComponent:
        return self.model_copy(update={"joules": tuple(factor * value for value in self.joules)})


def add_errors(parts: Iterable[ErrorComponent]) -> tuple[ErrorComponent, ...]:
    """The components of a sum: shared ones add with their signs, independent ones in quadrature, each by name."""
    by_name: dict[tuple[ErrorName, bool], list[ErrorComponent]] = {}
    for part in parts:
        by_name.setdefault((part.name, part.shared), []).append(part)
    return tuple(
        ErrorComponent(name=name, shared=shared, joules=_add_shared(group) if shared else _add_independent(group))
        for (name, shared), group in by_name.items()
    )


def _add_shared(group: list[ErrorComponent]) -> tuple[float, ...]:
    if len({len(part.joules) for part in group}) == 1:
        # fsum, because a run adds thousands of signed changes that nearly cancel.
        return tuple(math.fsum(values) for values in zip(*(part.joules for part in group), strict=True))
    return (math.fsum(part.half_width_j for part in group),)  # of different scenarios: the worst case of each


def _add_independent(group: list[ErrorComponent]) -> tuple[float, ...]:
    # Half-widths are all 1.96 standard deviations, so they add like standard deviations (JCGM
    # 100:2008, the GUM, 5.1.2).
    return (math.hypot(*(part.half_width_j for part in group)),)


def combined_half_width_j(errors: Iterable[ErrorComponent]) -> float:
    """The 95 % half-width of all components together: different causes are independent of each other."""
    return math.hypot(*(error.half_width_j for error in errors))


class EnergyFigure(Frozen):
    energy_j: float | None
    method: Method
    coverage: float = 1.0
    """Share of the interval in which the sensor was seen working."""
    half_width_j: float | None = None
    """95 % half-width from all components in `errors`; it shrinks with longer windows and more repeats."""
    errors: tuple[ErrorComponent, ...] = ()
    """What `half_width_j` consists of; empty in records older than error components."""
    gain_error_rel: float | None = None
    """The sensor's stated scale error; it does not average out, and it cancels in ratios on the same device."""
    sources: tuple[str, ...] = ()
    reason: str | None = None
    """Why there is no figure, or what is wrong with it."""
    fix: str | None = None
    lower_bound: bool = False
    """More energy was used than was seen: time without readings, or work done where no meter was."""
    cpu_contention: bool = Field(default=False, validation_alias=AliasChoices("cpu_contention", "crowded"))
    """Estimated from CPU time while other processes used the cores: not comparable with other estimates. Records of
    earlier versions call it `crowded`."""

    @property
    def measured(self) -> bool:
        return self.method in ("counter", "integrated")

    @property
    def is_lower_bound(self) -> bool:
        """Records of the first release state it by their coverage alone."""
        return self.energy_j is not None and (self.lower_bound or self.coverage < COVERED)

    @property
    def is_unresolved(self) -> bool:
        """An estimate of 0 J: less CPU time was used than its smallest step."""
        return self.energy_j == 0 and not self.measured and bool(self.half_width_j) and not self.is_lower_bound

    @property
    def error_components(self) -> tuple[ErrorComponent, ...]:
        """The components; the whole half-width as one of unspecified cause where a record has no others."""
        if self.errors or self.half_width_j is None:
            return self.errors
        return (ErrorComponent(name="unspecified", joules=(self.half_width_j,)),)

    @property
    def total_error_j(self) -> float | None:
        """Random interval and gain error together, in joules; None where neither is known."""
        if self.energy_j is None or (self.half_width_j is None and self.gain_error_rel is None):
            return None
        # independent causes, so they add in quadrature (JCGM 100:2008, the GUM, 5.1.2)
        return math.hypot(self.half_width_j or 0.0, (self.gain_error_rel or 0.0) * self.energy_j)

    @property
    def total_error_rel(self) -> float | None:
        """`total_error_j` relative to the figure."""
        error_j = self.total_error_j
        return error_j / abs(self.energy_j) if error_j is not None and self.energy_j else None

    @property
    def total_range_j(self) -> tuple[float, float] | None:
        """The figure minus and plus `total_error_j`, not below 0; everything computed from the energy uses it."""
        if self.energy_j is None:
            return None
        error_j = self.total_error_j or 0.0
        return max(0.0, self.energy_j - error_j), max(0.0, self.energy_j + error_j)

    def mean_power_w(self, duration_s: float) -> float | None:
        """Energy over the covered time: time without readings has no joules in the figure."""
        covered_s = self.coverage * duration_s
        return self.energy_j / covered_s if self.energy_j is not None and covered_s > 0 else None

    def scaled(self, factor: float) -> EnergyFigure:
        """The figure and its errors times a factor: a mean of several, a share, joules per item."""
        return self.model_copy(
            update={
                "energy_j": None if self.energy_j is None else self.energy_j * factor,
                "half_width_j": None if self.half_width_j is None else self.half_width_j * abs(factor),
                "errors": tuple(error.scaled(factor) for error in self.errors),
            }
        )

    def with_errors(self, *more: ErrorComponent) -> EnergyFigure:
        """The figure with further error components; its half-width follows."""
        errors = add_errors((*self.error_components, *more))
        return self.model_copy(update={"errors": errors, "half_width_j": combined_half_width_j(errors)})

    def with_interval(self, energy_j: float, half_width_j: float, cause: ErrorName = "unspecified") -> EnergyFigure:
        """The same kind of figure with another value and an interval from one cause, as of repeated measurements."""
        errors = (ErrorComponent(name=cause, joules=(half_width_j,)),)
        return self.model_copy(update={"energy_j": energy_j, "half_width_j": half_width_j, "errors": errors})

    def minus(self, part: EnergyFigure) -> EnergyFigure:
        """What is left without a part of it; shared errors cancel."""
        if self.energy_j is None or part.energy_j is None:
            return missing("one of the two figures is missing")
        # Scaled by -1, a shared error keeps its sign relative to the whole and cancels; an
        # independent one has no sign and adds in quadrature, which is right for disjoint windows
        # and an upper bound for overlapping ones.
        errors = add_errors((*self.error_components, *part.scaled(-1.0).error_components))
        changes = {
            "energy_j": self.energy_j - part.energy_j,
            "errors": errors,
            "half_width_j": combined_half_width_j(errors),
        }
        return self.model_copy(update=changes)


def time_share_half_width_j(share: float, energy_j: float) -> float:
    """Half-width of a share by time: any amount from none to all of the energy may have been used in it."""
    return max(share, 1 - share) * abs(energy_j)


def missing(reason: str, fix: str | None = None) -> EnergyFigure:
    return EnergyFigure(energy_j=None, method="missing", coverage=0.0, reason=reason, fix=fix)


def _energy_weights(parts: Sequence[EnergyFigure]) -> list[float]:
    """Shares of the energy, where durations are not known; a missing part weighs as much as the mean of the others."""
    sizes = [abs(part.energy_j) for part in parts if part.energy_j is not None]
    mean_j = sum(sizes) / len(sizes) if any(sizes) else 1.0
    return [mean_j if part.energy_j is None or not any(sizes) else abs(part.energy_j) for part in parts]


def total(figures: Iterable[EnergyFigure], durations_s: Sequence[float] | None = None) -> EnergyFigure:
    """Sum of figures: energies add, errors by component (`add_errors`), gains by energy, coverage by duration.

    Where durations are not known, coverage goes by energy. A part that is missing lowers the coverage of the sum
    instead of counting as 0 J.
    """
    parts = list(figures)
    present = [part for part in parts if part.energy_j is not None]
    if not present:
        return parts[0] if parts else missing("nothing to add")
    energy_j = sum(part.energy_j or 0.0 for part in present)
    weights = list(durations_s) if durations_s is not None else _energy_weights(parts)
    weight_sum = sum(weights) or 1.0
    gains = [(part.gain_error_rel or 0.0) * abs(part.energy_j or 0.0) for part in present]
    reasons = list(dict.fromkeys(part.reason for part in parts if part.reason))
    errors = add_errors(error for part in present for error in part.error_components)
    return EnergyFigure(
        energy_j=energy_j,
        method=max((part.method for part in present), key=_STRENGTH.index),
        coverage=sum(w * part.coverage for w, part in zip(weights, parts, strict=True)) / weight_sum,
        # the interval of a sum is not known if that of a part is not
        half_width_j=None if any(part.half_width_j is None for part in present) else combined_half_width_j(errors),
        errors=errors,
        # Gain errors add linearly, weighted by energy: two sensors of one kind are off in the same
        # direction, so quadrature would be too small.
        gain_error_rel=sum(gains) / abs(energy_j) if energy_j else max((p.gain_error_rel or 0.0) for p in present),
        sources=tuple(dict.fromkeys(source for part in parts for source in part.sources)),
        reason="; ".join(reasons) or None,
        lower_bound=len(present) < len(parts) or any(part.lower_bound or part.is_lower_bound for part in parts),
        cpu_contention=any(part.cpu_contention for part in parts),
    )


# Energy figures as text: number, unit, uncertainty, method, in that order. Every place that prints joules uses this.
#
# Measured figures print their random 95 % interval; the gain error follows once per output (`gain_text`). Estimates
# print their total uncertainty, because their scale is the larger error. A figure with time or work without data is a
# lower bound, measured or estimated: `≥` with the coverage and never with `±`, since no interval around it would
# cover the true value.


CODECARBON = "codecarbon"
"""The source of figures that CodeCarbon reported."""
MACHINE_BASE = "constant:base"
"""A source of figures that estimate the whole machine: its power without load."""
LOWER_BOUND = "≥: lower bound, some time or work has no readings"
_METHODS: dict[Method, str] = {
    "counter": "energy counter",
    "integrated": "integrated power",
    "estimated": "estimated",
    "missing": "missing",
}


def amount_text(figure: EnergyFigure | None) -> str:
    """`512 J ±0.2 %`, estimated `146 J ±70 %`, incomplete `≥ 512 J (72 % covered)`; for cells next to a method.

    An estimate below its resolution is `< 268 µJ`.
    """
    if figure is None:
        return "-"
    if figure.energy_j is None:
        return "missing"
    if figure.is_unresolved:
        return f"< {energy_text(figure.half_width_j)}"
    spread = uncertainty_text(figure)
    number = with_prefix(figure.energy_j, "J", _more_digits(figure) if spread else 0)
    covered = f" ({coverage_text(figure.coverage)})" if figure.coverage < COVERED else ""
    if figure.is_lower_bound and _is_undetermined(figure):
        return f"inconclusive{covered}"
    return f"{bound_mark(figure)}{number}{f' {spread}' if spread else ''}{covered}"


def _is_undetermined(figure: EnergyFigure) -> bool:
    """Whether energy above idle, a difference, is not distinguishable from 0 in the covered time: it bounds nothing."""
    known = [error for error in figure.errors if error.name != "missing time"]
    difference = any(error.name == "idle" for error in known)
    return difference and combined_half_width_j(known) >= abs(figure.energy_j or 0.0)


def _more_digits(figure: EnergyFigure) -> int:
    """One digit beyond the usual three where rounding to three could leave the printed interval."""
    if not figure.energy_j or not figure.measured:
        return 0
    size = abs(figure.energy_j)
    # Half a unit of the third significant digit: 512 J is printed for 511.5 to 512.5 J.
    rounding_j = 0.005 * 10 ** math.floor(math.log10(size))
    return int((figure.half_width_j or 0.0) < 1.01 * rounding_j)


def labeled_text(figure: EnergyFigure, mixed: bool = False) -> str:
    """`512 J ±0.2 %, energy counter`; for cells and sentences without room for the reason of a missing figure."""
    return "missing" if figure.energy_j is None else f"{amount_text(figure)}, {method_text(figure, mixed)}"


def figure_text(figure: EnergyFigure, mixed: bool = False) -> str:
    """`512 J ±0.2 %, gain ±5 %, energy counter`; `missing` with its reason and the fix."""
    if figure.energy_j is None:
        fix = f" ({figure.fix})" if figure.fix else ""
        return f"missing: {figure.reason or 'no reason recorded'}{fix}"
    parts = [amount_text(figure), gain_text([figure]), method_text(figure, mixed)]
    return ", ".join(part for part in parts if part)


def bound_mark(figure: EnergyFigure) -> str:
    """`≥ ` before a number that is a lower bound, else empty: also for rates computed from the figure."""
    return "≥ " if figure.is_lower_bound else ""


def uncertainty_text(figure: EnergyFigure) -> str:
    """`±0.2 %`: random for measured energy, total for an estimate; empty where it is not known or is a lower bound.

    CodeCarbon states no scale error, so the total of its figures is not known.
    """
    if figure.energy_j is None or figure.half_width_j is None or figure.is_lower_bound:
        return ""
    if not figure.measured and not figure.gain_error_rel:
        return ""
    if not figure.energy_j:
        return f"±{energy_text(figure.half_width_j)}" if figure.half_width_j else ""
    relative = figure.half_width_j / abs(figure.energy_j)
    if not figure.measured:
        relative = figure.total_error_rel or relative
    return f"±{relative_text(relative) if relative <= 1 else energy_text(relative * abs(figure.energy_j))}"


def gain_text(figures: Iterable[EnergyFigure]) -> str:
    """`gain ±5 %` of measured figures, a range where sensors differ; `scale error ±70 %` of estimates; empty where none
    is stated.

    Estimates are left out where the uncertainty printed with them contains theirs.
    """
    listed = [figure for figure in figures if figure.gain_error_rel]
    apart = {
        "gain": [figure for figure in listed if figure.measured],
        "scale error": [figure for figure in listed if not figure.measured and figure.is_lower_bound],
    }
    texts = []
    for name, some in apart.items():
        stated = sorted({round(figure.gain_error_rel or 0.0, 3) for figure in some})
        ends = list(dict.fromkeys(f"±{relative_text(end)}" for end in stated[:1] + stated[-1:]))
        texts += [f"{name} {' to '.join(ends)}"] if ends else []
    return ", ".join(texts)


def uncertainty_note(figures: Iterable[EnergyFigure], with_gain: bool = True) -> str:
    """What ± and ≥ mean below a table, with the gain error; empty where no figure has either."""
    listed = list(figures)
    interval = _interval_note(listed, with_gain)
    bounds = [figure for figure in listed if figure.is_lower_bound]
    if not bounds:
        return interval
    # the gain error is printed once: the sentence on ± has it where there is one
    gain = f"; {gain}" if with_gain and not interval and (gain := gain_text(bounds)) else ""
    return f"{interval} {LOWER_BOUND}{gain}.".strip()


def _interval_note(figures: Iterable[EnergyFigure], with_gain: bool) -> str:
    shown = [figure for figure in figures if uncertainty_text(figure)]
    measured = [figure for figure in shown if figure.measured]
    gain = f"; {gain} in addition" if with_gain and (gain := gain_text(measured)) else ""
    if not shown:
        return ""
    if len(measured) == len(shown):
        return f"±: random 95 % interval{gain}."
    if not measured:
        return "±: total uncertainty of the estimate."
    return f"±: random 95 % interval of measured energy{gain}; total uncertainty of estimates."


def estimate_note(figures: Iterable[EnergyFigure], compared: bool = True) -> str:
    """Below a table of sums and differences without ±: how uncertain they are where they are estimates; else empty.

    `compared`: the table has ratios or counts, in which the scale error cancels.
    """
    estimates = [figure for figure in figures if not figure.measured and uncertainty_text(figure)]
    largest = max((figure.total_error_rel or 0.0 for figure in estimates), default=0.0)
    cancels = "; the scale error cancels in ratios and counts" if compared else ""
    return f"Energy is estimated, ±{relative_text(largest)}{cancels}." if largest else ""


def method_text(figure: EnergyFigure, mixed: bool = False) -> str:
    if mixed:
        return "measured + estimated"
    if MACHINE_BASE in figure.sources:
        sensors = any(source.startswith(("gpu:", "rapl:")) for source in figure.sources)
        return f"whole machine, {'measured + ' if sensors else ''}estimated"
    return "estimated by CodeCarbon" if figure.sources == (CODECARBON,) else _METHODS[figure.method]


def methods_text(figures: Iterable[EnergyFigure]) -> str:
    """All methods that occur, strongest first: for the caption of a table."""
    found = {figure.method for figure in figures if figure.energy_j is not None}
    return " and ".join(text for method, text in _METHODS.items() if method in found) or _METHODS["missing"]


def relative_text(share: float) -> str:
    """At most two significant digits: an uncertainty deserves no more."""
    value = 100 * share
    if value < 0.05:
        return "<0.1 %"
    return f"{value:.1f}".removesuffix(".0") + " %" if value < 9.95 else f"{value:.0f} %"


def coverage_text(coverage: float) -> str:
    """`57.7 % covered`."""
    return f"{covered_percent(coverage)} covered"


def covered_percent(coverage: float) -> str:
    """`57.7 %`, the same digits wherever coverage is printed; rounded down, so that incomplete never reads as 100 %."""
    return f"{math.floor(round(1000 * coverage, 6)) / 10:g} %"
