"""Is a classifier better than guessing? A "fine-tuned" teacher whose head was never trained teaches noise for joules.

The guess to beat is always naming the commonest class. With n items of which a share p are of that class, the number
a guesser gets right is binomial; a teacher must get more right than a guesser would in all but one of a thousand tries.
"""

from __future__ import annotations

import math

import numpy as np

from joulelab.errors import ConfigError
from joulelab.evaluate.classification import Predictions

LUCK = 1e-3


def needed_right(trials: int, chance: float) -> int:
    """The fewest right answers that luck alone reaches with probability `LUCK` at most; above `trials` if none do."""
    tail = 0.0
    for right in range(trials, -1, -1):
        tail += _binomial(trials, right, chance)
        if tail > LUCK:
            return right + 1
    return 0


def chance_of(found: Predictions) -> float:
    return float(np.bincount(found.labels).max() / len(found.labels))


def shortfall(found: Predictions, name: str, split: str) -> str:
    """Why this teacher is not significantly better than guessing on the texts of `split`; empty where it is."""
    accuracy = found.accuracy()
    trials, right = len(found.labels), accuracy.successes or 0
    chance = chance_of(found)
    needed = needed_right(trials, chance)
    if right >= needed:
        return ""
    luck = f"guessing the commonest class gets {100 * chance:.1f} % and {needed} or more right once in 1,000 tries"
    return f"the teacher {name} answers {right} of {trials} {split} texts right ({100 * accuracy.value:.1f} %); {luck}"


def require_better_than_chance(found: Predictions, name: str) -> None:
    """`found`: on the validation texts."""
    problem = shortfall(found, name, "validation")
    if not problem:
        return
    below = found.accuracy().value < 1 - chance_of(found) - 0.1
    raise ConfigError(
        problem + (": its classes stand in another order" if below else ": its head is not trained for this task"),
        "name a classifier fine-tuned on these classes, or leave teacher.fine_tuned out and it is trained here; "
        f"with {len(found.labels)} validation texts more may be needed to tell (data.validation_size)",
    )


def _binomial(trials: int, right: int, share: float) -> float:
    if share >= 1.0:
        return float(right == trials)
    ways = math.lgamma(trials + 1) - math.lgamma(right + 1) - math.lgamma(trials - right + 1)
    return math.exp(ways + right * math.log(share) + (trials - right) * math.log1p(-share))
