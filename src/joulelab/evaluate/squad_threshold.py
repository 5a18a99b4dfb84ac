"""Where "no answer" should begin to win: the threshold that would have given the best score on these questions.

It is chosen after the fact on the same questions, so it flatters; it says how much a better threshold could bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BestThreshold:
    score: float  # mean over the questions
    threshold: float  # "no answer" where its margin is above this


def best_threshold(margins: Sequence[float], if_answered: Sequence[float], if_silent: Sequence[float]) -> BestThreshold:
    """Each question's margin of "no answer", and its score with its best span and with none.

    With a threshold of t the questions whose margin is at most t are answered, so only the margins themselves and
    "answer nothing" need to be tried.
    """
    order = np.argsort(np.asarray(margins), kind="stable")
    sorted_margins = np.asarray(margins, dtype=float)[order]
    gains = (np.asarray(if_answered, dtype=float) - np.asarray(if_silent, dtype=float))[order]
    totals = float(np.sum(if_silent)) + np.concatenate([[0.0], np.cumsum(gains)])
    # equal margins are answered together: a cut between them is none
    possible = np.concatenate([[True], sorted_margins[:-1] < sorted_margins[1:], [True]])
    answered = int(np.argmax(np.where(possible, totals, -np.inf)))
    finite = sorted_margins[np.isfinite(sorted_margins)]
    below_all = float(finite[0]) - 1.0 if len(finite) else 0.0
    threshold = below_all if answered == 0 else float(sorted_margins[answered - 1])
    return BestThreshold(float(totals[answered]) / len(order), threshold)
