"""Differences of a method from the baseline: quality by test item or by repeat, energy as a ratio.

Runs are paired by seed if each side has each seed once and several are in common; otherwise both sides are independent
samples (Welch).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from joulelab.errors import JoulelabError
from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare.comparison import ComparedRun, EnergyRatio, QualityDifference
from joulelab.report.compare.evaluation_data import other_data
from joulelab.report.energy_sums import missing_time_rel, mixes_methods
from joulelab.runs.paths import RunPaths, read_json
from joulelab.stats import (
    PairedDifference,
    accuracy_difference,
    difference_of_means,
    mean_interval,
    ratio_paired,
    ratio_unpaired,
    repeats_for,
    repeats_needed,
    widened_ratio,
)

PREDICTIONS = "predictions.npz"
HARNESS, EXACT_ANSWERS = "harness.", "exact_answers"
_PREDICTED = ("accuracy", "exact_match")


def correct_by_item(folder: Path, measure: str = "accuracy") -> dict[str, bool] | None:
    """Item id -> correct; None if the run has no readable items (killed, or old)."""
    place = _items_file(measure)
    if place is None:
        return None
    name, read = place
    # the student's before the teacher's, like `quality_of`
    found = RunPaths(folder).artifacts.glob(name)
    files = sorted(found, key=lambda path: (not path.parent.name.startswith("student"), path))
    try:
        return read(files[0], measure) if files else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadZipFile, JoulelabError):
        return None


def _items_file(measure: str) -> tuple[str, Callable[[Path, str], dict[str, bool] | None]] | None:
    """File pattern and reader of a measure's items; None for measures that are not shares of correct items."""
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
    """By question, and its repetition if it is asked again; by number in older files, which have no questions."""
    found = read_json(file, right=list)
    right, prompts = found["right"], [item.get("prompt") for item in found.get("items", ())]
    if len(prompts) != len(right) or None in prompts:
        return {str(number): bool(hit) for number, hit in enumerate(right)} or None
    asked: Counter[str] = Counter()
    items = {}
    for prompt, hit in zip(prompts, right, strict=True):
        question = _question(prompt)
        asked[question] += 1
        items[f"{_ASKED}{asked[question]} {question}"] = bool(hit)
    return items or None


_ASKED = "asked "
# How sample:reviews asks a model without a chat template.
_CUE = "\nAnswer:"


def _question(prompt: str | list[dict[str, str]]) -> str:
    """A model with a chat template gets the question as a message, and another one as text: it is the same question."""
    if isinstance(prompt, list) and len(prompt) == 1 and prompt[0].get("role") == "user":
        prompt = prompt[0]["content"]
    return prompt.removesuffix(_CUE) if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _task_items(file: Path, measure: str) -> dict[str, bool] | None:
    for task in read_json(file, tasks=list)["tasks"]:
        if measure == f"{HARNESS}{task['task']}.{task['metric']}.value":
            return {item: bool(score) for item, score in task.get("scores", {}).items()} or None
    return None


NO_ITEMS = "the predictions needed to pair items are missing"
NO_QUESTIONS = "an older record does not contain its questions, so the answers cannot be paired"
OTHER_QUESTIONS = "the runs answered different questions"
OTHER_ITEMS = "the runs were evaluated on different test items"


def predicted_difference(
    baseline: Sequence[Path], method: Sequence[Path], same_seeds: bool, measure: str = "accuracy"
) -> PairedDifference | str:
    """Method minus baseline on the items that all runs have; `same_seeds`: run k of both sides has the same seed.

    The reason if there is none: a run has no predictions, or the questions are not the same.
    """
    sides = [[correct_by_item(folder, measure) for folder in side] for side in (baseline, method)]
    loaded = [[found for found in side if found is not None] for side in sides]
    if not all(sides) or [len(side) for side in loaded] != [len(side) for side in sides]:
        return NO_ITEMS
    asked = [set(found) for side in loaded for found in side]
    if measure == EXACT_ANSWERS and any(one != asked[0] for one in asked):
        named = [next(iter(one)).startswith(_ASKED) for one in asked]
        return OTHER_QUESTIONS if all(named) or not any(named) else NO_QUESTIONS
    items = sorted(set.intersection(*asked))
    if not items:
        return OTHER_ITEMS if all(asked) else NO_ITEMS
    baseline_SN, method_SN = (np.array([[found[item] for item in items] for found in side]) for side in loaded)  # noqa: N806
    return accuracy_difference(baseline_SN, method_SN, paired=same_seeds)


Pair = tuple[ComparedRun, ComparedRun]
ONE_SEED = "one seed has no variance"
ONE_RUN = "a single training run on one side compares models, not methods"
SINGLE = (ONE_SEED, ONE_RUN)
CPU_CONTENTION = "CPU contention"
OTHER_DATA = "the runs were evaluated on different data"


def pairs_of(runs: Sequence[ComparedRun], baseline: Sequence[ComparedRun]) -> list[Pair]:
    """(baseline, method) of equal seed. Empty if a side has a seed twice, because the pairing is then ambiguous, and if
    a single pair of several runs on both sides remains, which has no variance."""
    by_seed = {run.seed: run for run in baseline}
    if len(by_seed) < len(baseline) or len({run.seed for run in runs}) < len(runs):
        return []
    pairs = [(by_seed[run.seed], run) for run in runs if run.seed in by_seed]
    return pairs if len(pairs) > 1 or min(len(runs), len(baseline)) == 1 else []


def quality_difference(runs: Sequence[ComparedRun], baseline: Sequence[ComparedRun]) -> QualityDifference:
    ours, theirs = ([run for run in side if run.quality] for side in (runs, baseline))
    if not theirs or not ours:
        return QualityDifference(None, (), _no_quality(baseline, theirs))
    pairs = pairs_of(ours, theirs)
    by_seed = tuple(method.result.value - base.result.value for base, method in pairs)
    if ours[0].result.trials:
        return _by_items(ours, theirs, pairs, by_seed)
    assert ours[0].quality is not None
    measure = ours[0].quality.measure
    if not measure.of_training and (differing := other_data(ours, theirs)):
        return QualityDifference(None, (), f"{OTHER_DATA} ({differing})", comparable=False)
    if pairs:
        reason = "" if len(by_seed) > 1 else ONE_SEED
        found = measure.possible(mean_interval(by_seed))
        return QualityDifference(None, by_seed, reason, found, repeats_needed(by_seed))
    values = [[run.result.value for run in side] for side in (ours, theirs)]
    found = measure.possible(difference_of_means(*values))
    return QualityDifference(None, (), "" if found.bounded else ONE_SEED, found, _needed(found.value, values))


def _by_items(
    ours: Sequence[ComparedRun], theirs: Sequence[ComparedRun], pairs: Sequence[Pair], by_seed: tuple[float, ...]
) -> QualityDifference:
    base, method = zip(*pairs, strict=True) if pairs else (theirs, ours)
    assert ours[0].quality is not None
    measure = ours[0].quality.measure
    folders = [run.folder for run in base], [run.folder for run in method]
    found = predicted_difference(*folders, bool(pairs), measure.name)
    if isinstance(found, str):
        same = found not in (OTHER_QUESTIONS, OTHER_ITEMS)
        return QualityDifference(None, by_seed if same else (), found, comparable=same)
    found = replace(found, difference=measure.possible(found.difference))
    needed = repeats_needed(by_seed)
    return QualityDifference(found, by_seed, "" if found.covers_methods else ONE_RUN, needed=needed)


def _no_quality(baseline: Sequence[ComparedRun], theirs: Sequence[ComparedRun]) -> str:
    if not baseline:
        return "the baseline has no finished run"
    return "the method has no such figure" if theirs else "the baseline has no such figure"


def energy_ratio(
    runs: Sequence[ComparedRun],
    baseline: Sequence[ComparedRun],
    of: Callable[[ComparedRun], tuple[EnergyFigure, bool, str]],
) -> EnergyRatio:
    """`of` returns a run's energy, whether it adds estimates to measurements, and why no ratio is formed with it."""
    if not baseline:
        return EnergyRatio(None, 0, "the baseline has no finished run")
    pairs = pairs_of(runs, baseline)
    theirs = [base for base, _ in pairs] if pairs else list(baseline)
    ours = [method for _, method in pairs] if pairs else list(runs)
    count = min(len(ours), len(theirs))
    named = [[of(run) for run in side] for side in (ours, theirs)]
    figures = [[figure for figure, _, _ in side] for side in named]
    reasons = [incomplete for side in named for _, _, incomplete in side if incomplete]
    if reasons:
        return EnergyRatio(None, count, reasons[0])
    if mixes_methods(figure for side in figures for figure in side):
        return EnergyRatio(None, count, "one side is measured and the other estimated")
    if any(mixed for side in named for _, mixed, _ in side):
        return EnergyRatio(None, count, "the energy is partly measured and partly estimated")
    joules = [[figure.energy_j for figure in side if figure.energy_j and figure.energy_j > 0] for side in figures]
    if len(joules[0]) < len(ours) or len(joules[1]) < len(theirs):
        return EnergyRatio(None, count, "energy is missing")
    # Pairing by seed removes what both runs of a seed have in common (order of the data, initial
    # weights) from the variance of the ratio. With unpaired seeds Welch's interval makes no
    # assumption about equal spread.
    ratio = (ratio_paired if pairs else ratio_unpaired)(*joules)
    same = {device for run in ours for device in run.devices} == {device for run in theirs for device in run.devices}
    # The gain error of one sensor multiplies both sides and cancels; of two sensors both remain,
    # each with its own 95 % bound.
    if not same:
        ratio = widened_ratio(ratio, *(max(figure.gain_error_rel or 0.0 for figure in side) for side in figures))
    ratio = widened_ratio(ratio, *(max(map(missing_time_rel, side)) for side in figures))
    logs = [[math.log(value) for value in side] for side in joules]
    if pairs:
        needed = repeats_needed([a - b for a, b in zip(*logs, strict=True)])
    else:
        needed = _needed(math.log(ratio.value), logs)
    # Threads that wait for each other spin, so contention multiplies CPU time: such an estimate
    # measures the other programs as well, and no number of repeats corrects that.
    contended = any(figure.cpu_contention for side in figures for figure in side)
    return EnergyRatio(
        ratio,
        count,
        CPU_CONTENTION if contended else "",
        paired=bool(pairs),
        same_devices=same,
        needed=needed if same and not contended else None,
        contended=contended,
    )


def _needed(difference: float, sides: Sequence[Sequence[float]]) -> int | None:
    """Repeats needed on each side, from the combined spread."""
    if min(map(len, sides)) < 2 or difference == 0:
        return None
    # Variance of a difference of independent repeats: the sum of both variances.
    variances = [sum((value - sum(side) / len(side)) ** 2 for value in side) / (len(side) - 1) for side in sides]
    return repeats_for(difference, math.sqrt(sum(variances)))
