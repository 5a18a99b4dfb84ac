"""Which test items a run got right, so that two methods can be compared item by item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from joulelab.errors import JoulelabError
from joulelab.runs.json_file import read_json
from joulelab.runs.paths import RunPaths
from joulelab.stats import PairedDifference, accuracy_difference

PREDICTIONS = "predictions.npz"
HARNESS, EXACT_ANSWERS = "harness.", "exact_answers"
_PREDICTED = ("accuracy", "exact_match")


def correct_by_item(folder: Path, measure: str = "accuracy") -> dict[str, bool] | None:
    """Item id -> answered right; None where the run left no readable items (a killed run, an old one)."""
    place = _kept(measure)
    if place is None:
        return None
    name, read = place
    # the student's where a run has its teacher's as well, as `quality_of` takes the student's figure
    found = RunPaths(folder).artifacts.glob(name)
    files = sorted(found, key=lambda path: (not path.parent.name.startswith("student"), path))
    try:
        return read(files[0], measure) if files else None
    except (OSError, ValueError, KeyError, JoulelabError):
        return None


def _kept(measure: str) -> tuple[str, Callable[[Path, str], dict[str, bool] | None]] | None:
    """Where the items of a measure are, and how they are read; None for a share of something else than right items."""
    if measure.startswith(HARNESS):
        return "*-quality/harness.json", _task_items
    if measure == EXACT_ANSWERS:
        return "*-quality/answers.json", _exact_answers
    return (f"*-predictions/{PREDICTIONS}", _predictions) if measure in _PREDICTED else None


def _predictions(file: Path, measure: str) -> dict[str, bool]:
    with np.load(file, allow_pickle=False) as arrays:
        ids, right = arrays["ids"], arrays["labels"] == arrays["predicted"]
    return {str(item): bool(hit) for item, hit in zip(ids, right, strict=True)}


def _exact_answers(file: Path, measure: str) -> dict[str, bool] | None:
    return {str(number): bool(hit) for number, hit in enumerate(read_json(file)["right"])} or None


def _task_items(file: Path, measure: str) -> dict[str, bool] | None:
    for task in read_json(file)["tasks"]:
        if measure == f"{HARNESS}{task['task']}.{task['metric']}.value":
            return {item: bool(score) for item, score in task.get("scores", {}).items()} or None
    return None


def predicted_difference(
    baseline: Sequence[Path], method: Sequence[Path], same_seeds: bool, measure: str = "accuracy"
) -> PairedDifference | None:
    """Method minus baseline on the items that all runs saw; `same_seeds`: run k of both sides has the same seed.

    None where a run has no predictions.
    """
    sides = [[correct_by_item(folder, measure) for folder in side] for side in (baseline, method)]
    loaded = [[found for found in side if found is not None] for side in sides]
    if not all(sides) or [len(side) for side in loaded] != [len(side) for side in sides]:
        return None
    items = sorted(set.intersection(*(set(found) for side in loaded for found in side)))
    if not items:
        return None
    baseline_SN, method_SN = (np.array([[found[item] for item in items] for found in side]) for side in loaded)  # noqa: N806
    return accuracy_difference(baseline_SN, method_SN, paired=same_seeds)
