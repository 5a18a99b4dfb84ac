"""Ratios of energy and differences of items, by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from joulelab.meter.figures import EnergyFigure, ErrorComponent
from joulelab.report.compare.differences import (
    CPU_CONTENTION,
    NO_ITEMS,
    NO_QUESTIONS,
    ONE_RUN,
    ONE_SEED,
    OTHER_ITEMS,
    OTHER_QUESTIONS,
    _needed,
    correct_by_item,
    energy_ratio,
    pairs_of,
    predicted_difference,
    quality_difference,
)
from joulelab.report.compare.quality import Measure
from joulelab.runs.paths import write_json
from joulelab.stats import ratio_paired, ratio_unpaired, repeats_needed, widened_ratio

ACCURACY = Measure("accuracy", lower_is_better=False, percent=True)
LOSS = Measure("mlm_loss", lower_is_better=True, percent=False)


def runs(*joules, seeds=None, device="A", **fields):
    plain = {"method": "counter", "gain_error_rel": 0.05}
    return [
        SimpleNamespace(
            seed=seed, devices=(device,), figure=EnergyFigure(energy_j=one, **{**plain, **fields}), mixed=False, why=""
        )
        for seed, one in zip(seeds or range(len(joules)), joules, strict=True)
    ]


def ratio(ours, theirs):
    return energy_ratio(ours, theirs, lambda run: (run.figure, run.mixed, run.why))


def test_runs_of_equal_seeds_are_paired_and_the_error_of_one_sensor_cancels():
    found = ratio(runs(20.0, 42.0, 80.0), runs(10.0, 20.0, 41.0))
    assert found.ratio == ratio_paired([20.0, 42.0, 80.0], [10.0, 20.0, 41.0])
    logs = [math.log(one) for one in (2.0, 2.1, 80 / 41)]
    assert (found.seeds, found.paired, found.same_devices, found.needed) == (3, True, True, repeats_needed(logs))
    assert (found.reason, found.contended) == ("", False)


def test_other_seeds_are_compared_by_their_means():
    found = ratio(runs(20.0, 42.0, 80.0), runs(10.0, 20.0, seeds=(7, 8)))
    assert found.ratio == ratio_unpaired([20.0, 42.0, 80.0], [10.0, 20.0])
    assert (found.seeds, found.paired, found.needed is not None) == (2, False, True)
    part = ratio(runs(20.0, 42.0, 80.0), runs(10.0, 20.0, seeds=(1, 2)))
    assert part.ratio == ratio_paired([42.0, 80.0], [10.0, 20.0]) and part.seeds == 2
    one = ratio(runs(20.0, 42.0, 80.0), runs(10.0, 20.0, seeds=(2, 8)))
    assert one.ratio == found.ratio and not one.paired, "one pair of several runs has no variance"


def test_errors_of_two_sensors_and_missing_time_widen_the_ratio():
    plain = ratio_paired([20.0, 42.0], [10.0, 20.0])
    found = ratio(runs(20.0, 42.0), runs(10.0, 20.0, device="B", gain_error_rel=None))
    assert found.ratio == widened_ratio(plain, 0.05, 0.0) and not found.same_devices and found.needed is None
    lost = ErrorComponent(name="missing time", joules=(4.0,), shared=True)
    found = ratio(runs(20.0, 42.0, lower_bound=True, errors=(lost,)), runs(10.0, 20.0))
    assert found.ratio == widened_ratio(plain, 0.2, 0.0)


@pytest.mark.parametrize("missing_j", [None, 0.0])
def test_a_ratio_needs_the_energy_of_all_runs(missing_j):
    for ours, theirs in ((runs(1.0, missing_j), runs(1.0, 2.0)), (runs(1.0, 2.0), runs(missing_j, 2.0))):
        found = ratio(ours, theirs)
        assert (found.ratio, found.seeds, found.reason) == (None, 2, "energy is missing")


def test_estimates_are_not_compared_with_measurements_nor_after_contention():
    found = ratio(runs(1.0, method="estimated"), runs(1.0))
    assert (found.ratio, found.reason) == (None, "one side is measured and the other estimated")
    mixed = runs(1.0)
    mixed[0].mixed = True
    assert ratio(runs(1.0), mixed).reason == "the energy is partly measured and partly estimated"
    mixed[0].why = "it is not finished"
    assert ratio(mixed, runs(1.0)).reason == "it is not finished"
    busy = ratio(runs(1.0, 2.0, method="estimated", cpu_contention=True), runs(1.0, 2.1, method="estimated"))
    assert (busy.contended, busy.reason, busy.needed) == (True, CPU_CONTENTION, None) and busy.ratio is not None


def write_items(folder, correct, name="student-predictions"):
    file = Path(folder, "artifacts", name, "predictions.npz")
    file.parent.mkdir(parents=True)
    labels = np.zeros(len(correct), dtype=int)
    np.savez(
        file, ids=np.array(list(correct)), labels=labels, predicted=np.array([int(not one) for one in correct.values()])
    )
    return folder


def test_items_are_those_that_all_runs_have(tmp_path):
    base = write_items(tmp_path / "base", {"a": True, "b": False, "c": True, "x": False})
    method = write_items(tmp_path / "method", {"a": True, "b": True, "c": True, "y": False})
    found = predicted_difference([base], [method], True)
    assert found.difference.value == pytest.approx(1 / 3)
    other = write_items(tmp_path / "other", {"z": True})
    assert predicted_difference([base], [other], True) == OTHER_ITEMS
    assert predicted_difference([base], [tmp_path / "none"], True) == NO_ITEMS
    assert predicted_difference([], [method], True) == NO_ITEMS


def test_the_students_items_come_before_the_teachers(tmp_path):
    write_items(tmp_path, {"a": False}, "a-teacher-predictions")
    write_items(tmp_path, {"a": True})
    assert correct_by_item(tmp_path) == correct_by_item(tmp_path, "exact_match") == {"a": True}
    assert correct_by_item(tmp_path, "loss") is None


def test_items_of_the_harness_are_of_the_task_and_metric(tmp_path):
    tasks = [{"task": "t", "metric": name, "scores": {"1": score}} for name, score in (("acc", 1.0), ("f1", 0.0))]
    file = tmp_path / "artifacts" / "student-quality" / "harness.json"
    file.parent.mkdir(parents=True)
    write_json(file, {"tasks": tasks})
    assert correct_by_item(tmp_path, "harness.t.f1.value") == {"1": False}
    assert correct_by_item(tmp_path, "harness.t.acc.value") == {"1": True}
    assert correct_by_item(tmp_path, "harness.other.acc.value") is None


def test_a_difference_of_items_names_what_it_lacks(tmp_path):
    def run(name, correct, seed):
        folder = tmp_path / name if correct is None else write_items(tmp_path / name, correct)
        quality = SimpleNamespace(measure=ACCURACY)
        result = SimpleNamespace(value=0.0 if correct is None else sum(correct.values()) / len(correct), trials=2)
        return SimpleNamespace(folder=folder, seed=seed, quality=quality, result=result)

    base, method = run("base", {"a": False, "b": True}, 0), run("method", {"a": True, "b": True}, 0)
    found = quality_difference([method], [base])
    assert (found.by_seed, found.reason, found.paired.difference.value) == ((0.5,), ONE_RUN, 0.5)
    gone = quality_difference([run("gone", None, 0)], [base])
    assert gone.reason == NO_ITEMS and gone.comparable
    other = quality_difference([run("other", {"c": True, "d": True}, 0)], [base])
    assert (other.reason, other.comparable, other.by_seed) == (OTHER_ITEMS, False, ())


def figure(energy_j, *sources, method="counter"):
    return EnergyFigure(energy_j=energy_j, method=method, sources=sources)


def test_runs_are_paired_by_seed_unless_a_side_has_a_seed_twice():
    def runs(*seeds):
        return [SimpleNamespace(seed=seed) for seed in seeds]

    ours, theirs = runs(1, 2, 3), runs(2, 3, 4)
    assert [(a.seed, b.seed) for a, b in pairs_of(ours, theirs)] == [(2, 2), (3, 3)]
    assert pairs_of(runs(1, 1), runs(1)) == []
    assert pairs_of(runs(1), runs(1, 1)) == []
    assert len(pairs_of(runs(1), runs(1))) == len(pairs_of(runs(1), runs(1, 2))) == 1
    assert pairs_of(runs(1, 2, 3), runs(3, 4, 5)) == []


def test_repeats_needed_on_each_side_come_from_both_variances():
    """Variances 1 and 1 give a combined standard deviation of sqrt 2; no difference and a single repeat give none."""
    sides = [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]
    assert _needed(2.06 * math.sqrt(2), sides) == 5
    assert _needed(0.0, sides) is None and _needed(1.0, sides) is not None
    assert _needed(1.0, [[1.0], [1.0, 2.0]]) is None
    assert _needed(100.0, [[1.0, 2.0], [1.0, 2.0]]) is not None


def scored(*values, seeds=None, measure=LOSS):
    seeds = seeds or range(len(values))
    return [
        SimpleNamespace(
            seed=seed,
            quality=None if value is None else SimpleNamespace(measure=measure),
            result=SimpleNamespace(value=value, trials=None),
            record=SimpleNamespace(spec={}, lineage=()),
            folder=Path("gone"),
        )
        for seed, value in zip(seeds, values, strict=True)
    ]


def test_a_difference_of_quality_states_why_it_has_no_interval():
    unpaired = quality_difference(scored(1.0, 2.0, 4.0), scored(5.0, 6.0, 9.0, seeds=(7, 8, 9)))
    assert (unpaired.reason, unpaired.by_seed) == ("", ())
    assert quality_difference(scored(1.0), scored(5.0, seeds=(7,))).reason == ONE_SEED
    assert quality_difference(scored(1.0), scored(5.0)).reason == ONE_SEED
    assert quality_difference(scored(7.0, 5.0), scored(5.0, 4.0)).reason == ""
    assert quality_difference(scored(None), scored(5.0)).reason == "the method has no such figure"
    assert quality_difference(scored(5.0), scored(None)).reason == "the baseline has no such figure"
    assert quality_difference(scored(5.0), []).reason == "the baseline has no finished run"
    assert energy_ratio(scored(1.0), [], None).seeds == 0


def ratio_of(ours, theirs, *, seeds=((1, 2, 3), (1, 2, 3)), other_device=False, **fields):
    """Of runs with these energies in J; `fields` are those of our figures."""

    def runs(side, own_seeds, device, **changed):
        plain = {"gain_error_rel": 0.05, **changed}
        return [
            SimpleNamespace(seed=seed, devices=(device,), figure=figure(joules, device).model_copy(update=plain))
            for seed, joules in zip(own_seeds, side, strict=True)
        ]

    sides = runs(ours, seeds[0], "gpu:B" if other_device else "gpu:A", **fields), runs(theirs, seeds[1], "gpu:A")
    return energy_ratio(*sides, lambda run: (run.figure, False, ""))


def test_energies_are_divided_by_those_of_the_baseline_with_the_same_seed():
    """Ratios 2, 2.2 and 2: the standard deviation of their logarithms is ln(1.1) / sqrt(3) = 0.055, so two suffice."""
    paired = ratio_of([200.0, 440.0, 800.0], [100.0, 200.0, 400.0])
    assert paired.ratio.value == pytest.approx((2 * 2.2 * 2) ** (1 / 3))
    assert (paired.seeds, paired.paired, paired.same_devices, paired.needed, paired.reason) == (3, True, True, 2, "")
    unpaired = ratio_of([200.0, 440.0], [100.0, 200.0, 400.0], seeds=((4, 5), (1, 2, 3)))
    assert (unpaired.seeds, unpaired.paired) == (2, False) and unpaired.needed > 2
    assert ratio_of([5.0], [7.0, 8.0], seeds=((4,), (1, 2))).seeds == 1


def test_the_gain_errors_of_two_devices_remain_in_the_ratio():
    same, other = (ratio_of([200.0] * 3, [100.0] * 3, other_device=one) for one in (False, True))
    assert (same.ratio.low, same.ratio.high) == (pytest.approx(2.0), pytest.approx(2.0))
    scale = math.exp(math.sqrt(2) * math.log(1.05))
    assert (other.ratio.low, other.ratio.high) == (pytest.approx(2 / scale), pytest.approx(2 * scale))
    assert (other.same_devices, other.needed) == (False, None)
    unknown = ratio_of([200.0] * 3, [100.0] * 3, other_device=True, gain_error_rel=None)
    assert unknown.ratio.high == pytest.approx(2 * 1.05)


def test_a_ratio_under_cpu_contention_needs_no_more_repeats_but_an_idle_machine():
    contended = ratio_of([200.0, 440.0, 800.0], [100.0, 200.0, 400.0], cpu_contention=True)
    assert (contended.reason, contended.needed, contended.contended) == ("CPU contention", None, True)


@pytest.mark.parametrize("sides", [([200.0, 0.0], [100.0, 100.0]), ([200.0, 200.0], [100.0, 0.0])])
def test_an_energy_of_0_on_either_side_is_a_missing_one(sides):
    assert ratio_of(*sides, seeds=((1, 2), (1, 2))).reason == "energy is missing"


def predicted(folder, *right, name="student-predictions"):
    file = folder / "artifacts" / name / "predictions.npz"
    file.parent.mkdir(parents=True)
    np.savez(file, ids=np.arange(len(right)), labels=np.ones(len(right)), predicted=np.array(right, dtype=float))
    return folder


def test_items_are_those_of_the_student_before_those_of_the_teacher(tmp_path):
    both = predicted(tmp_path / "both", True, False)
    predicted(both, False, True, name="a-predictions")
    assert correct_by_item(both) == {"0": True, "1": False} and correct_by_item(both, "perplexity") is None
    assert correct_by_item(tmp_path) is None


def test_items_are_compared_if_all_runs_have_some_in_common(tmp_path):
    """Of the two common items, the method has one more right in both of its runs: a difference of 0.5."""
    base = [predicted(tmp_path / f"base-{k}", True, False) for k in (1, 2)]
    method = [predicted(tmp_path / f"method-{k}", True, True, False) for k in (1, 2)]
    found = predicted_difference(base, method, same_seeds=True)
    assert found.difference.value == pytest.approx(0.5)
    assert predicted_difference(base, [*method, tmp_path / "none"], same_seeds=False) == NO_ITEMS
    assert predicted_difference(base, [], same_seeds=False) == NO_ITEMS
    assert predicted_difference(base, [predicted(tmp_path / "empty")], same_seeds=False) == NO_ITEMS


def test_a_task_of_the_harness_has_the_items_of_its_metric(tmp_path):
    file = tmp_path / "artifacts" / "student-quality" / "harness.json"
    file.parent.mkdir(parents=True)
    tasks = [
        {"task": "arc", "metric": metric, "scores": scores}
        for metric, scores in (("acc", {"a": 1, "b": 0}), ("f1", {}))
    ]
    write_json(file, {"tasks": tasks})
    assert correct_by_item(tmp_path, "harness.arc.acc.value") == {"a": True, "b": False}
    assert correct_by_item(tmp_path, "harness.arc.f1.value") is None
    assert correct_by_item(tmp_path, "harness.other.acc.value") is None


def test_exact_answers_are_items(tmp_path):
    file = tmp_path / "artifacts" / "student-quality" / "answers.json"
    file.parent.mkdir(parents=True)
    write_json(file, {"right": [True, False]})
    assert correct_by_item(tmp_path, "exact_answers") == {"0": True, "1": False}
    write_json(file, {"right": []})
    assert correct_by_item(tmp_path, "exact_answers") is None


def answered(folder, *right, prompts=None):
    file = folder / "artifacts" / "model-quality" / "answers.json"
    file.parent.mkdir(parents=True)
    items = [{"prompt": prompt, "expected": "", "given": ""} for prompt in prompts or ()]
    write_json(file, {"right": right, **({"items": items} if prompts else {})})
    return folder


def answers_difference(base, method):
    return predicted_difference([base], [method], True, "exact_answers")


def test_answers_are_paired_by_question_and_not_by_line(tmp_path):
    """The files have the same questions in another order, one of them twice; the method knows `b`, too."""
    base = answered(tmp_path / "base", True, False, True, prompts=["a", "b", "a"])
    method = answered(tmp_path / "method", True, True, True, prompts=["b", "a", "a"])
    found = answers_difference(base, method)
    assert (found.items, found.discordant, found.difference.value) == (3, 1, pytest.approx(1 / 3))


def test_a_question_is_the_same_as_text_and_as_a_message(tmp_path):
    plain = answered(tmp_path / "plain", True, False, prompts=["a\nAnswer:", "b"])
    chat = answered(
        tmp_path / "chat", True, True, prompts=[[{"role": "user", "content": question}] for question in ("a", "b")]
    )
    assert answers_difference(plain, chat).discordant == 1
    instructed = answered(
        tmp_path / "instructed",
        True,
        True,
        prompts=[[{"role": "system", "content": "s"}, {"role": "user", "content": q}] for q in "ab"],
    )
    assert answers_difference(plain, instructed) == OTHER_QUESTIONS


def test_answers_to_other_questions_are_not_paired(tmp_path):
    base = answered(tmp_path / "base", True, True, prompts=["a", "b"])
    assert answers_difference(base, answered(tmp_path / "other", False, False, prompts=["c", "d"])) == OTHER_QUESTIONS
    assert answers_difference(base, answered(tmp_path / "part", False, prompts=["a"])) == OTHER_QUESTIONS


def test_answers_of_older_files_are_paired_by_line_if_neither_side_has_questions(tmp_path):
    old = answered(tmp_path / "old", True, True)
    assert answers_difference(old, answered(tmp_path / "older", True, False)).discordant == 1
    assert answers_difference(old, answered(tmp_path / "new", True, False, prompts=["a", "b"])) == NO_QUESTIONS


def test_a_difference_of_shares_is_at_most_100_points(tmp_path):
    """All right against all wrong: the plain interval of two items reaches to 2.6; t of two seeds to 3.4."""

    def run(name, *right):
        quality = SimpleNamespace(measure=ACCURACY)
        result = SimpleNamespace(value=float(right[0]), trials=2)
        return SimpleNamespace(folder=predicted(tmp_path / name, *right), seed=0, quality=quality, result=result)

    items = quality_difference([run("method", False, False)], [run("base", True, True)]).interval
    assert (items.value, items.low) == (-1.0, -1.0)
    f1 = Measure("f1", lower_is_better=False, percent=True)
    seeds = quality_difference(scored(0.9, 0.6, measure=f1), scored(0.1, 0.1, measure=f1))
    assert seeds.interval.high == 1.0 and seeds.interval.low == -1.0
    assert not quality_difference(scored(0.9, measure=f1), scored(0.1, measure=f1)).interval.bounded
    assert quality_difference(scored(9.0, 6.0), scored(1.0, 1.0)).interval.high > 1.0
