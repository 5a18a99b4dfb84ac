"""Ratios of energy and differences of items, by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from joulelab.meter.figures import EnergyFigure, ErrorComponent
from joulelab.report.compare.differences import (
    CPU_CONTENTION,
    ONE_RUN,
    correct_by_item,
    energy_ratio,
    predicted_difference,
    quality_difference,
)
from joulelab.runs.paths import write_json
from joulelab.stats import ratio_paired, ratio_unpaired, repeats_needed, widened_ratio


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
    assert predicted_difference([base], [other], True) is None
    assert predicted_difference([base], [tmp_path / "none"], True) is None
    assert predicted_difference([], [method], True) is None


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
        quality = SimpleNamespace(measure=SimpleNamespace(name="accuracy"))
        result = SimpleNamespace(value=0.0 if correct is None else sum(correct.values()) / len(correct), trials=2)
        return SimpleNamespace(folder=folder, seed=seed, quality=quality, result=result)

    base, method = run("base", {"a": False, "b": True}, 0), run("method", {"a": True, "b": True}, 0)
    found = quality_difference([method], [base])
    assert (found.by_seed, found.reason, found.paired.difference.value) == ((0.5,), ONE_RUN, 0.5)
    gone = quality_difference([run("gone", None, 0)], [base])
    assert gone.reason == "the predictions needed to pair items are missing"
