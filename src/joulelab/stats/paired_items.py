"""Accuracy differences on the same test items, over several training seeds.

Two things vary: which items are in the test set, and which seed trained the model. A statement about *methods* needs
both: with two seeds that differ by one point, a test over items alone rejects about 20 % of true nulls. One run per
side shows how these two trained models differ, and nothing about their methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from joulelab.stats.intervals import Interval, t_quantile

_ALPHA = 0.05
_SMALLEST_P = 1e-9


@dataclass(frozen=True)
class PairedDifference:
    """Mean accuracy difference with a 95 % interval that contains 0 exactly where `p_value` is 0.05 or more."""

    difference: Interval
    p_value: float
    items: int
    discordant: int
    """Items on which the two sides differ, net over the seeds."""
    runs: int = 1
    """Training runs of the smaller side. With one, interval and p are about these trained models only."""

    @property
    def covers_methods(self) -> bool:
        """Seeds vary on both sides, so the interval includes their variance."""
        return self.runs > 1

    @property
    def significant(self) -> bool:
        """For methods where `covers_methods`, else for these two trained models."""
        return self.p_value < _ALPHA


def accuracy_difference(baseline_SN: np.ndarray, method_SN: np.ndarray, paired: bool = True) -> PairedDifference:  # noqa: N803
    """Method minus baseline; rows are training runs (S), columns the same test items (N), entries correct or not.

    `paired`: row s of both sides has the same seed. With one run on a side this is McNemar's exact test. Otherwise the
    difference is a crossed random-effects mean: run means vary by seed (and by item noise within a run), item means
    vary by item. The half-width is sqrt(t^2 V_runs + z^2 V_items), each variance with the quantile of its own degrees
    of freedom (Banerjee 1961, Sankhya 23:233), which never covers less than 95 %. Satterthwaite's degrees of freedom
    do: two seeds that happen to agree make it trust the normal quantile, and it rejects 11 % of true nulls.
    """
    if baseline_SN.shape[1] != method_SN.shape[1] or (paired and baseline_SN.shape != method_SN.shape):
        raise ValueError(f"a paired test needs the same {'seeds and ' if paired else ''}items on both sides")
    base, ours = baseline_SN.astype(float), method_SN.astype(float)
    runs, items = min(len(base), len(ours)), base.shape[1]
    net_N = ours.mean(axis=0) - base.mean(axis=0)  # noqa: N806
    mean = float(net_N.mean())
    # One more item for and one against (Bonett and Price 2012): a handful of discordant items has no normal interval.
    item_variance = float(np.append(net_N, (1.0, -1.0)).var(ddof=1))
    p_items = _sign_flip_p(np.rint(net_N * math.lcm(len(base), len(ours))).astype(int))
    run_terms: list[tuple[float, int]] = []
    if runs > 1:
        for side_SN in [ours - base] if paired else [ours, base]:  # noqa: N806
            count = len(side_SN)
            run_terms.append((float(side_SN.mean(axis=1).var(ddof=1)) / count, count - 1))
            # E[variance of item means over S runs] = sigma_item^2 + sigma_residual^2 / S. The
            # second term is in the variance of the run means too; without the subtraction it would
            # count twice.
            item_variance -= _residual_variance(side_SN) / count  # already in the variance of the run means
    # A method-of-moments estimate of a variance can be negative where the items differ by chance
    # alone; 0 is then its maximum-likelihood value.
    item_term = max(0.0, item_variance) / items
    half = _half_width(_ALPHA, run_terms, item_term)
    # The larger of two p: the exact test over items, which needs no normal distribution, and the test that
    # includes the seeds.
    p_value = max(p_items, _p_value(mean, run_terms, item_term)) if runs > 1 else p_items
    interval = _agreeing(Interval(mean, mean - half, mean + half), p_value)
    return PairedDifference(interval, p_value, items, int(np.count_nonzero(net_N)), runs)


def _residual_variance(side_SN: np.ndarray) -> float:  # noqa: N803
    """Variance that neither the run nor the item explains."""
    runs, items = side_SN.shape
    if items < 2:
        return 0.0
    # Two-way analysis of variance without replication: what remains after subtracting run and item
    # means has (S - 1)(N - 1) degrees of freedom.
    residual = side_SN - side_SN.mean(axis=1, keepdims=True) - side_SN.mean(axis=0, keepdims=True) + side_SN.mean()
    return float((residual**2).sum() / ((runs - 1) * (items - 1)))


def _half_width(alpha: float, run_terms: Sequence[tuple[float, int]], item_term: float) -> float:
    normal = NormalDist().inv_cdf(1 - alpha / 2)
    runs = sum(t_quantile(1 - alpha / 2, degrees) ** 2 * variance for variance, degrees in run_terms)
    return math.sqrt(runs + normal**2 * item_term)


def _p_value(mean: float, run_terms: Sequence[tuple[float, int]], item_term: float) -> float:
    """The level at which the interval ends at 0, by bisection of its logarithm."""
    if mean == 0:
        return 1.0
    low, high = math.log(_SMALLEST_P), 0.0
    for _ in range(30):
        middle = (low + high) / 2
        if _half_width(math.exp(middle), run_terms, item_term) > abs(mean):
            low = middle
        else:
            high = middle
    return math.exp(high)


def _sign_flip_p(net_N: np.ndarray) -> float:  # noqa: N803
    """Exact two-sided p that items' net differences have a random sign; with one run the binomial McNemar test."""
    sizes, counts = np.unique(np.abs(net_N[net_N != 0]), return_counts=True)
    largest, observed = int((sizes * counts).sum()), abs(int(net_N.sum()))
    if observed == 0:
        return 1.0
    # An item that differs by k adds k or -k, with the characteristic function cos(k w); that of the
    # sum is the product, and its discrete Fourier transform over all 2 largest + 1 values is the
    # exact distribution. Convolutions would take minutes for tens of thousands of items and
    # different numbers of runs.
    length = 2 * largest + 1
    phases = 2 * np.pi / length * np.arange(largest + 1)
    product = np.ones(largest + 1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        product *= np.cos(size * phases) ** count
    probabilities = np.fft.irfft(product, n=length)
    # Two-sided: all sums at least as far from 0 as the observed one, on both sides, which are equal.
    return min(1.0, max(0.0, 2 * float(probabilities[observed : largest + 1].sum())))


def _agreeing(interval: Interval, p_value: float) -> Interval:
    """The interval, with its end moved to 0 if the exact test decides otherwise than the normal interval."""
    if p_value >= _ALPHA:
        return Interval(interval.value, min(interval.low, 0.0), max(interval.high, 0.0))
    if interval.value > 0:
        return Interval(interval.value, max(interval.low, 0.0), interval.high)
    return Interval(interval.value, interval.low, min(interval.high, 0.0))
