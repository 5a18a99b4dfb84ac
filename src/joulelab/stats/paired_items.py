"""McNemar's test: whether one method gets more of the same test items right than another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from joulelab.stats.intervals import Z95, Interval


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


def paired_shares(share_a_N: np.ndarray, share_b_N: np.ndarray) -> PairedDifference:  # noqa: N803
    """b against a where the seeds of the two sides do not pair: the items still do, each with its share over seeds."""
    if share_a_N.shape != share_b_N.shape:
        raise ValueError("a paired test needs the same items on both sides")
    net_N, items = share_b_N - share_a_N, len(share_a_N)  # noqa: N806
    mean = float(net_N.mean())
    error = float(net_N.std(ddof=1)) / math.sqrt(items) if items > 1 else math.inf
    p_value = math.erfc(abs(mean) / error / math.sqrt(2)) if error > 0 else float(mean == 0)
    interval = Interval(mean, mean - Z95 * error, mean + Z95 * error)
    return PairedDifference(interval, p_value, items, int(np.count_nonzero(net_N)))


def _sign_test(wins: int, losses: int) -> float:
    trials = wins + losses
    tail = sum(math.comb(trials, k) for k in range(min(wins, losses) + 1)) / (1 << trials)
    return min(1.0, 2.0 * tail)
