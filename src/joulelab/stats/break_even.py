"""Break-even of a teacher's extra energy: after N students, or after T served tokens.

Both are ratios of two uncertain numbers, energy spent over energy saved per item, and have Fieller's interval: all
ratios r for which `spent - r x saved` is not significantly different from 0. If the saving itself is not significantly
above 0, that set has no upper end, and a point estimate would change with the next repeat. The result is then "does not
break even", with the lower end of the set as the smallest count that the data allow.

Fieller, E. C. (1954), Some problems in interval estimation, J. R. Stat. Soc. B 16:175.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulelab.stats.intervals import Z95, Interval, t_quantile, welch_degrees

_ITERATIONS = 20


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, and the degrees of freedom of that error."""

    value: float
    standard_error: float
    degrees: float = math.inf

    @classmethod
    def of_repeats(cls, values: Sequence[float]) -> Estimate:
        """A single value has an infinite standard error, so that nothing computed from it is significant."""
        sample = np.asarray(values, dtype=float)
        if len(sample) < 2:
            return cls(float(sample.mean()), math.inf, 1)
        return cls(float(sample.mean()), float(sample.std(ddof=1)) / math.sqrt(len(sample)), len(sample) - 1)

    @classmethod
    def of_half_width(cls, value: float, half_width: float) -> Estimate:
        """From a sensor's 95 % half-width."""
        # A sensor's half-width is 1.96 standard deviations by definition; it is a property of the
        # sensor and not estimated from repeats, so it has no degrees of freedom to lose
        # (`math.inf`).
        return cls(value, half_width / Z95)

    def __add__(self, other: Estimate) -> Estimate:
        return self._combined(other, self.value + other.value)

    def __sub__(self, other: Estimate) -> Estimate:
        return self._combined(other, self.value - other.value)

    def _combined(self, other: Estimate, value: float) -> Estimate:
        # Variances of independent estimates add, also for a difference.
        error = math.hypot(self.standard_error, other.standard_error)
        if math.isinf(error):
            return Estimate(value, error, 1)
        return Estimate(value, error, welch_degrees([part.spread for part in (self, other)]))

    @property
    def spread(self) -> tuple[float, float]:
        return self.standard_error**2, self.degrees

    @property
    def interval(self) -> Interval:
        if math.isinf(self.standard_error):
            return Interval(self.value, -math.inf, math.inf)
        half = t_quantile(0.975, self.degrees) * self.standard_error
        return Interval(self.value, self.value - half, self.value + half)


@dataclass(frozen=True)
class BreakEven:
    """Number of students or tokens. If the saving is not significant, `count` is None and `high` is infinite."""

    spent: Estimate
    saved: Estimate
    """Per student or per token."""
    count: float | None
    low: float
    """If it does not break even: the smallest count that the data allow; infinite if they allow none."""
    high: float
    reason: str = ""

    @property
    def breaks_even(self) -> bool:
        return self.count is not None


def fieller_interval(numerator: Estimate, denominator: Estimate, covariance: float = 0.0) -> Interval:
    """Fieller's 95 % interval of numerator / denominator.

    If the denominator is not significantly different from 0, the set is unbounded: `high` is infinite and `low` is
    where its positive branch begins (0 if the data exclude no ratio).
    """
    # The set of ratios r with |a - r b| <= t sqrt(s_a^2 - 2 r c + r^2 s_b^2). The delta method
    # would give a symmetric interval around a / b, which is far too short where b is barely
    # significant: exactly the case in which a break-even count is uncertain.
    value = numerator.value / denominator.value if denominator.value else math.inf
    if not denominator.interval.excludes(0.0) or math.isinf(numerator.standard_error):
        return Interval(value, max(0.0, _upper_branch(numerator, denominator, covariance)), math.inf)
    # Both ends are iterated separately, because each has its own degrees of freedom.
    low, high = (_end(numerator, denominator, covariance, side, value) for side in (0, 1))
    return Interval(value, low, high)


def _end(a: Estimate, b: Estimate, covariance: float, side: int, start: float) -> float:
    """One end of the bounded set. The degrees of freedom depend on the ratio that is tested, hence the iteration;
    for large ratios they approach those of the denominator, so a significant denominator implies a bounded set."""
    end = start
    for _ in range(_ITERATIONS):
        roots = _roots(a, b, covariance, _quantile(a, b, end))
        if roots is None:  # too few degrees of freedom at this ratio, although the denominator alone is significant
            return math.inf if side else -math.inf
        if math.isclose(roots[side], end, rel_tol=1e-9, abs_tol=1e-12):
            break
        end = roots[side]
    return end


def _upper_branch(a: Estimate, b: Estimate, covariance: float) -> float:
    """Where the positive branch of the unbounded set begins; 0 if it has no gap or an error is infinite."""
    if math.isinf(a.standard_error) or math.isinf(b.standard_error):
        return 0.0
    end = 0.0
    for _ in range(_ITERATIONS):
        t = _quantile(a, b, end)
        square, cross, constant = _quadratic(a, b, covariance, t)
        discriminant = cross**2 - square * constant
        if square >= 0 or discriminant <= 0:
            return 0.0
        # the set lies outside the two roots, and over a negative square this is the larger one
        end = (cross - math.sqrt(discriminant)) / square
    return end


def _quantile(a: Estimate, b: Estimate, ratio: float) -> float:
    # The numerator of the test at ratio r is a - r b, whose variance is s_a^2 + r^2 s_b^2: at small
    # r the degrees of freedom are those of a, at large r those of b.
    variances = [(a.standard_error**2, a.degrees), (ratio**2 * b.standard_error**2, b.degrees)]
    return t_quantile(0.975, welch_degrees(variances))


def _quadratic(a: Estimate, b: Estimate, covariance: float, t: float) -> tuple[float, float, float]:
    """(a - r b)^2 = t^2 (variance of it), as square r^2 - 2 cross r + constant = 0."""
    return (
        b.value**2 - t**2 * b.standard_error**2,
        a.value * b.value - t**2 * covariance,
        a.value**2 - t**2 * a.standard_error**2,
    )


def _roots(a: Estimate, b: Estimate, covariance: float, t: float) -> tuple[float, float] | None:
    square, cross, constant = _quadratic(a, b, covariance, t)
    if square <= 0:
        return None
    half = math.sqrt(max(0.0, cross**2 - square * constant))
    return (cross - half) / square, (cross + half) / square


def break_even_students(teacher_j: Estimate, base_j: Estimate, distilled_j: Estimate) -> BreakEven:
    """N*: how many students must share a teacher until its energy is recovered.

    Student stages only, at equal quality: `base_j` trains a student without the teacher, `distilled_j` with it.
    """
    return break_even(teacher_j, base_j - distilled_j, "a student")


def break_even_tokens(extra_j: Estimate, reference_j_per_token: Estimate, student_j_per_token: Estimate) -> BreakEven:
    """T*: how many served tokens recover the extra energy; the reference is the model that the student replaces."""
    return break_even(extra_j, reference_j_per_token - student_j_per_token, "a token")


def break_even(spent: Estimate, saved: Estimate, each: str) -> BreakEven:
    """How many times `saved` recovers `spent`; `each` names the item in the reason."""
    # Significantly less was spent, not more: zero items recover it. Not if each item also costs
    # more, because then the total grows with every item.
    if spent.interval.high <= 0 and saved.value >= 0:
        return BreakEven(spent, saved, 0.0, 0.0, 0.0, "no extra energy was spent")
    if math.isinf(saved.standard_error):
        return BreakEven(spent, saved, None, 0.0, math.inf, "one repeat has no variance")
    # Significantly negative saving: no count recovers anything, also none beyond the data.
    if saved.interval.high < 0:
        return BreakEven(spent, saved, None, math.inf, math.inf, f"{each} uses more energy with it, not less")
    ratio = fieller_interval(spent, saved)
    if saved.interval.low <= 0:
        reason = f"the saving for {each} is not significantly above 0"
        return BreakEven(spent, saved, None, max(0.0, ratio.low), math.inf, reason)
    if ratio.value <= 0:
        return BreakEven(spent, saved, 0.0, 0.0, max(0.0, ratio.high), "no extra energy was measurably spent")
    return BreakEven(spent, saved, ratio.value, max(0.0, ratio.low), ratio.high)
