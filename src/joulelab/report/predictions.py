"""Which test items a run got right, so that two methods can be compared item by item."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from joulelab.runs.paths import RunPaths
from joulelab.stats import PairedDifference, accuracy_difference

PREDICTIONS = "predictions.npz"


def correct_by_item(folder: Path) -> dict[str, bool] | None:
    """Item id -> predicted right; None where the run left no readable predictions (a killed run, an old one)."""
    # the student's where a run has its teacher's as well, as `quality_of` takes the student's figure
    found = RunPaths(folder).artifacts.glob(f"*-predictions/{PREDICTIONS}")
    files = sorted(found, key=lambda path: (not path.parent.name.startswith("student"), path))
    if not files:
        return None
    try:
        with np.load(files[0], allow_pickle=False) as arrays:
            ids, right = arrays["ids"], arrays["labels"] == arrays["predicted"]
    except (OSError, ValueError, KeyError):
        return None
    return {str(item): bool(hit) for item, hit in zip(ids, right, strict=True)}


def predicted_difference(baseline: Sequence[Path], method: Sequence[Path], same_seeds: bool) -> PairedDifference | None:
    """Method minus baseline on the items that all runs saw; `same_seeds`: run k of both sides has the same seed.

    None where a run has no predictions.
    """
    sides = [[correct_by_item(folder) for folder in side] for side in (baseline, method)]
    loaded = [[found for found in side if found is not None] for side in sides]
    if not all(sides) or [len(side) for side in loaded] != [len(side) for side in sides]:
        return None
    items = sorted(set.intersection(*(set(found) for side in loaded for found in side)))
    if not items:
        return None
    baseline_SN, method_SN = (np.array([[found[item] for item in items] for found in side]) for side in loaded)  # noqa: N806
    return accuracy_difference(baseline_SN, method_SN, paired=same_seeds)
