"""Intervals and paired differences: what turns a handful of numbers into "better", "worse" or "not resolved".

Pure functions over numpy. Student's t comes from its own incomplete beta function, so that a login node needs no scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; `low` and `high` may be infinite where the data cannot bound it."""

    value: float
    low: float
    high: float

    def excludes(self, point: float) -> bool:
        return self.low > point or self.high < point


def wilson(successes: float, trials: int) -> Interval:
    """Wilson's score interval for a proportion. `successes` may be fractional: a mean over seeds on the same items."""
    if trials <= 0:
        raise ValueError("a proportion needs at least one trial")
    share = successes / trials
    spread = Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


@dataclass(frozen=True)
class PairedDifference:
    """How two methods differ on the same test items: the mean difference, its interval and McNemar's p."""

    difference: Interval
    p_value: float
    items: int
    discordant: int


def mcnemar(correct_a_SN: np.ndarray, correct_b_SN: np.ndarray) -> PairedDifference:  # noqa: N803
    """McNemar's test of b against a; rows are seeds (S), columns the same test items (N).

    Predictions of several seeds on one item are not independent, so an item is a cluster and the statistic is
    (sum d)^2 / sum d^2 over the items' net differences d. With one seed that is McNemar's (b-c)^2/(b+c), and then the
    exact binomial p is used, which stays right for few discordant items.
    """
    if correct_a_SN.shape != correct_b_SN.shape:
        raise ValueError("a paired test needs the same seeds and items on both sides")
    seeds, items = correct_a_SN.shape
    net_N = (correct_b_SN.astype(float) - correct_a_SN.astype(float)).sum(axis=0)  # noqa: N806
    mean_N = net_N / seeds  # noqa: N806
    discordant = int(np.count_nonzero(net_N))
    if seeds == 1:
        p_value = _sign_test(int((net_N > 0).sum()), int((net_N < 0).sum()))
    else:
        squares = float((net_N**2).sum())
        p_value = 1.0 if squares == 0 else math.erfc(math.sqrt(float(net_N.sum()) ** 2 / squares / 2))
    mean = float(mean_N.mean())
    half = Z95 * float(mean_N.std(ddof=1)) / math.sqrt(items) if items > 1 else math.inf
    return PairedDifference(Interval(mean, mean - half, mean + half), p_value, items, discordant)


def _sign_test(wins: int, losses: int) -> float:
    trials = wins + losses
    tail = sum(math.comb(trials, k) for k in range(min(wins, losses) + 1)) / (1 << trials)
    return min(1.0, 2.0 * tail)


def mean_t(values: Sequence[float]) -> Interval:
    """Mean with Student's t interval; one value has no spread, so its interval is unbounded."""
    sample = np.asarray(values, dtype=float)
    mean = float(sample.mean())
    if len(sample) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = t_quantile(0.975, len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half)


def ratio_paired(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Geometric mean ratio over pairs, with a t interval on the logarithms."""
    if len(numerators) != len(denominators):
        raise ValueError("a paired ratio needs as many numerators as denominators")
    logs = mean_t([math.log(a / b) for a, b in zip(numerators, denominators, strict=True)])
    return Interval(math.exp(logs.value), _exp(logs.low), _exp(logs.high))


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def t_quantile(probability: float, degrees: float) -> float:
    """Student's t quantile by bisection on its distribution function (above 0.5)."""
    low, high = 0.0, 1e7
    for _ in range(200):
        middle = (low + high) / 2
        if t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(t: float, degrees: float) -> float:
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return 1 - tail if t >= 0 else tail


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz), on the side where it converges fast."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
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
