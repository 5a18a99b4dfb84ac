"""Values with 95 % intervals: proportions, means over repeats, ratios; and Student's t, which they need.

Student's t is computed from the incomplete beta function, so that a login node needs no scipy.

Ratios are computed on logarithms, where half and double are equally far from 1. Below 20 repeats the interval is
Student's t: a bootstrap of three values covers the true mean in 74 % of cases instead of 95 %, because three values
underestimate the spread. From 20 repeats on a studentized bootstrap makes no assumption about the distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

# Beyond this many degrees of freedom Student's t equals the normal distribution to all printed digits.
_NORMAL_FROM_DEGREES = 1e6


@lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t for probabilities of at least 0.5; infinite degrees give the normal quantile.

    Newton's method, starting from the normal quantile, which is too small. The distribution function is concave above
    0, so no step overshoots.
    """
    t = NormalDist().inv_cdf(probability)
    if degrees > _NORMAL_FROM_DEGREES:
        return t
    for _ in range(500):
        step = (probability - t_cdf(t, degrees)) / _density(t, degrees)
        t += step
        if abs(step) <= 1e-12 * max(1.0, t):
            break
    return t


def _density(t: float, degrees: float) -> float:
    # f(t) = Gamma((n+1)/2) / (Gamma(n/2) sqrt(n pi)) (1 + t^2/n)^(-(n+1)/2). In logarithms, because
    # Gamma overflows a double above an argument of 171, and log1p because t^2/n is tiny for many
    # degrees.
    log_front = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return math.exp(log_front - (degrees + 1) / 2 * math.log1p(t * t / degrees))


def t_cdf(t: float, degrees: float) -> float:
    # P(T > t) = I_x(n/2, 1/2) / 2 with x = n / (n + t^2) (Abramowitz and Stegun 26.5.27, 26.7.1):
    # the tail is computed directly, so that it keeps its digits where the distribution function is
    # near 1.
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return 1 - tail if t >= 0 else tail


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized incomplete beta function by its continued fraction (Lentz), where that converges quickly."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # I_x(a, b) = 1 - I_{1-x}(b, a). The fraction converges in O(sqrt(max(a, b))) terms below this
    # point and slowly above it (Press et al., Numerical Recipes, section 6.4).
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    # Modified Lentz: a numerator or denominator of exactly 0 is replaced by a number too small to
    # change the product, which avoids the division by 0 of the plain recurrence.
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for i in range(400):
        m = i // 2
        if i == 0:
            numerator = 1.0
        elif i % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or tiny)
        c = 1 + numerator / c or tiny
        fraction *= c * d
        if abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1)


Z95 = NormalDist().inv_cdf(0.975)
# A resample of n values has the variance (n - 1) / n of theirs, so with 3 values a percentile bootstrap is too
# narrow by sqrt(2/3), and with two by sqrt(1/2). Studentized it is second-order accurate, also for skewed values
# (Hall, 1988), but each resample needs enough different values to estimate an error.
BOOTSTRAP_FROM = 20
# The 2.5 % quantile of 2,000 draws has a standard error of 0.35 points of probability, well below
# what 20 repeats can show.
_DRAWS = 2_000
# Probability of detecting a difference of the observed size.
_POWER = 0.8
_MAX_REPEATS = 1_000


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; `low` and `high` are infinite if the data do not bound it."""

    value: float
    low: float
    high: float

    def excludes(self, point: float) -> bool:
        return self.low > point or self.high < point

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def wilson(successes: float, trials: int) -> Interval:
    """Wilson's score interval of a proportion. `successes` may be fractional: a mean over seeds on the same items."""
    if trials <= 0:
        raise ValueError("a proportion needs at least one trial")
    share = successes / trials
    # The interval contains all proportions p with |share - p| <= z sqrt(p (1 - p) / n), solved for
    # p (Wilson, 1927). Unlike share +- z sqrt(share (1 - share) / n) it does not shrink to a point
    # at 0 or n successes and never leaves [0, 1].
    spread = Z95**2 / trials
    center = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return Interval(share, max(0.0, center - half), min(1.0, center + half))


def mean_t(values: Sequence[float]) -> Interval:
    """Mean with Student's t interval; unbounded for a single value."""
    sample = np.asarray(values, dtype=float)
    mean = float(sample.mean())
    if len(sample) < 2:
        return Interval(mean, -math.inf, math.inf)
    # The standard deviation is estimated from the same few values, with one degree of freedom spent
    # on their mean (ddof=1); Student's t with n - 1 degrees accounts for its own error: the factor
    # is 12.7 for two repeats, 4.3 for three, and 1.96 only for many.
    half = t_quantile(0.975, len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)


def mean_bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Mean with a studentized bootstrap interval; the seed is fixed, so that reports are reproducible."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < BOOTSTRAP_FROM:
        raise ValueError(f"a bootstrap of {len(sample)} values does not cover 95 %; it needs {BOOTSTRAP_FROM}")
    mean, error = float(sample.mean()), float(sample.std(ddof=1)) / math.sqrt(len(sample))
    # Studentized (bootstrap-t): the distribution of (resampled mean - mean) / (standard error of
    # that resample) replaces Student's t. Dividing each resample by its own error makes the
    # interval second-order accurate (Efron and Tibshirani, An Introduction to the Bootstrap, ch.
    # 12).
    draws = np.random.default_rng(seed).choice(sample, size=(_DRAWS, len(sample)))
    errors = draws.std(axis=1, ddof=1) / math.sqrt(len(sample))
    varied = errors > 0  # a resample of equal values has no studentized mean
    if error == 0 or not varied.any():
        return Interval(mean, mean, mean)
    # The quantiles change sides: a resampled mean that is too high means that the true mean is
    # lower.
    low, high = np.quantile((draws.mean(axis=1)[varied] - mean) / errors[varied], [0.025, 0.975])
    return Interval(mean, mean - float(high) * error, mean - float(low) * error)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean over repeats with the interval that their number allows; the mean of thousands is normal in any case."""
    return mean_bootstrap(values) if BOOTSTRAP_FROM <= len(values) <= _MAX_REPEATS else mean_t(values)


def difference_of_means(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Welch's interval of the difference between unpaired repeats."""
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    mean = float(a.mean() - b.mean())
    if len(a) < 2 or len(b) < 2:
        return Interval(mean, -math.inf, math.inf)
    # Not the pooled variance of Student's two-sample test: two methods rarely vary equally, and
    # with unequal numbers of repeats pooling then rejects too often (Welch, 1947).
    variance_a, variance_b = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    degrees = welch_degrees([(variance_a, len(a) - 1), (variance_b, len(b) - 1)])
    half = t_quantile(0.975, degrees) * math.sqrt(variance_a + variance_b)
    return Interval(mean, mean - half, mean + half)


def welch_degrees(parts: Sequence[tuple[float, float]]) -> float:
    """Welch-Satterthwaite degrees of freedom of a sum of (variance, degrees); infinite if nothing varies."""
    # The chi-squared distribution that has the same mean and variance as the sum of the parts has
    # (sum v)^2 / sum(v^2 / n) degrees (Satterthwaite, 1946). A part without variance adds none.
    spread = sum(variance**2 / degrees for variance, degrees in parts if variance > 0 and degrees > 0)
    return sum(variance for variance, _ in parts) ** 2 / spread if spread > 0 else math.inf


def ratio_paired(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean ratio over pairs, with an interval on the logarithms."""
    if len(numerators) != len(denominators):
        raise ValueError("a paired ratio needs as many numerators as denominators")
    # Pairs share a seed, so the data order and the initialization that make both runs better or
    # worse cancel in a / b; the variance left is that of the method.
    return exponential(mean_interval([math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]))


def ratio_unpaired(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of geometric means of unpaired repeats, by Welch's interval on the logarithms."""
    logs = [[math.log(value) for value in side] for side in (numerators, denominators)]
    return exponential(difference_of_means(*logs))


def exponential(logs: Interval) -> Interval:
    return Interval(math.exp(logs.value), _exp(logs.low), _exp(logs.high))


def _exp(value: float) -> float:
    # exp overflows a double at 709.8.
    return math.inf if value > 700 else math.exp(value)


def widened_ratio(ratio: Interval, *relative_errors: float) -> Interval:
    """The ratio with scale errors (95 %) that do not cancel, as between two GPUs, added in quadrature."""
    if not ratio.bounded or ratio.low <= 0 or not any(relative_errors):
        return ratio
    # In logarithms a scale error is a shift: a device that reads 5 % high moves log(ratio) by
    # log(1.05), whatever the ratio. Independent shifts add in quadrature to each side of the
    # interval, which may be asymmetric.
    scale = sum(math.log1p(error) ** 2 for error in relative_errors)
    middle = math.log(ratio.value)
    down = math.sqrt((middle - math.log(ratio.low)) ** 2 + scale)
    up = math.sqrt((math.log(ratio.high) - middle) ** 2 + scale)
    return Interval(ratio.value, math.exp(middle - down), math.exp(middle + up))


def repeats_needed(differences: Sequence[float]) -> int | None:
    """Number of repeats that detects a mean difference of this size and spread with 80 % power.

    None for a single repeat, for no difference, and if more than 1,000 repeats would be needed.
    """
    sample = np.asarray(differences, dtype=float)
    if len(sample) < 2 or sample.mean() == 0:
        return None
    return repeats_for(float(sample.mean()), float(sample.std(ddof=1)))


def repeats_for(difference: float, standard_deviation: float) -> int | None:
    def suffices(repeats: int) -> bool:
        # A difference d is detected with probability `_POWER` if d >= (t_0.975 + t_0.8) s /
        # sqrt(n): it must exceed the critical value by one more quantile of its own spread.
        # Monotone in n, hence the bisection.
        threshold = t_quantile(0.975, repeats - 1) + t_quantile(_POWER, repeats - 1)
        return threshold * standard_deviation <= abs(difference) * math.sqrt(repeats)

    if not suffices(_MAX_REPEATS):
        return None
    return 2 + bisect_left(range(2, _MAX_REPEATS), True, key=suffices)
