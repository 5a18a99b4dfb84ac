"""Student's t from its own incomplete beta function, so that a login node needs no scipy."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

# Beyond this many degrees of freedom the normal distribution is the same to more digits than anyone prints.
_AS_GOOD_AS_NORMAL = 1e6


@lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: float) -> float:
    """Student's t quantile (from 0.5 on); infinite degrees: the normal's.

    Newton's steps from the normal quantile, which lies below: above 0 the distribution function bends down, so each
    step stays below the answer and none overshoots.
    """
    t = NormalDist().inv_cdf(probability)
    if degrees > _AS_GOOD_AS_NORMAL:
        return t
    for _ in range(500):
        step = (probability - t_cdf(t, degrees)) / _density(t, degrees)
        t += step
        if abs(step) <= 1e-12 * max(1.0, t):
            break
    return t


def _density(t: float, degrees: float) -> float:
    log_front = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return math.exp(log_front - (degrees + 1) / 2 * math.log1p(t * t / degrees))


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
