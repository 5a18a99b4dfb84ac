"""Does a classifier know how sure it may be? The expected calibration error: sureness against how often it is right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 15  # as Guo et al. (2017), so that figures can stand beside published ones


def expected_calibration_error(
    probabilities_NC: NDArray[np.floating[Any]], labels_N: NDArray[np.int64], bins: int = BINS
) -> float:
    """Answers go into equal-width bins by the probability of the class answered; the mean over answers of
    |share right - mean probability| of their bin."""
    sure_N = probabilities_NC.max(axis=1).astype(np.float64)
    right_N = probabilities_NC.argmax(axis=1) == labels_N
    # (0, 1/bins], (1/bins, 2/bins], ...: an answer of probability 1 belongs into the last bin
    bin_N = np.clip(np.ceil(sure_N * bins).astype(np.int64) - 1, 0, bins - 1)
    off_K = np.bincount(bin_N, right_N, bins) - np.bincount(bin_N, sure_N, bins)
    return float(np.abs(off_K).sum() / max(1, len(labels_N)))
