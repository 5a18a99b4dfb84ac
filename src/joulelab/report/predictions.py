"""Which test items a run got right, so that two methods can be compared item by item."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from joulelab.runs.paths import RunPaths
from joulelab.stats import PairedDifference, mcnemar, paired_shares

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


def paired_difference(pairs: Sequence[tuple[Path, Path]]) -> PairedDifference | None:
    """Method against baseline over (baseline folder, method folder) of equal seed, on the items all of them saw."""
    loaded = [(correct_by_item(ours), correct_by_item(theirs)) for ours, theirs in pairs]
    complete = [(a, b) for a, b in loaded if a is not None and b is not None]
    if not complete or len(complete) < len(pairs):
        return None
    shared = set.intersection(*(set(side) for pair in complete for side in pair))
    items = sorted(shared)
    if not items:
        return None
    baseline_SN = np.array([[a[item] for item in items] for a, _ in complete])  # noqa: N806
    method_SN = np.array([[b[item] for item in items] for _, b in complete])  # noqa: N806
    return mcnemar(baseline_SN, method_SN)


def item_difference(ours: Sequence[Path], theirs: Sequence[Path]) -> PairedDifference | None:
    """`theirs` against `ours` where seeds do not pair: each item's share of right answers over the runs of a side."""
    sides = [[correct_by_item(folder) for folder in side] for side in (ours, theirs)]
    if not all(sides) or any(found is None for side in sides for found in side):
        return None
    loaded = [[found for found in side if found is not None] for side in sides]
    items = sorted(set.intersection(*(set(found) for side in loaded for found in side)))
    if not items:
        return None
    shares = [np.mean([[found[item] for item in items] for found in side], axis=0) for side in loaded]
    return paired_shares(*shares)
