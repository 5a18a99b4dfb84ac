"""Numbers by hand for formulas in which a changed operator once passed all tests of its module."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from joulelab.errors import UsageError
from joulelab.meter.figures import MACHINE_BASE, EnergyFigure, missing
from joulelab.meter.health import CoreUse
from joulelab.meter.importers.log_energy import (
    DeviceEnergy,
    Level,
    Segment,
    device_energy,
    parse_idle,
    without_cooldown,
)
from joulelab.meter.importers.power_log import DeviceLog, Source
from joulelab.meter.integrate import (
    TwoPaths,
    _over_windows,
    both_paths,
    component_energy,
    machine_energy,
    node_energy,
    peak_power_w,
    power_curve,
    without,
)
from joulelab.meter.integrate import device_energy as energy_of_series
from joulelab.meter.marks import PhaseAggregate
from joulelab.meter.series import SET_BACK, DeviceSeries, ReportedCell, load_trace
from joulelab.report.compare.differences import (
    ONE_SEED,
    _needed,
    correct_by_item,
    energy_ratio,
    pairs_of,
    predicted_difference,
    quality_difference,
)
from joulelab.runs import assemble
from joulelab.runs.artifacts import PART, external, find_damage, list_contents, with_shards
from joulelab.runs.attempt_data import SOURCE as CODECARBON
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import Check, EnergyByComponent, StageKind, StageRecord, Validity
from joulelab.runs.validity import _contention_notes, _energy_notes, gather, with_answer
from joulelab.stats.break_even import Estimate, _end, _roots, _upper_branch, break_even
from joulelab.stats.intervals import Interval, repeats_for, t_cdf, welch_degrees, widened_ratio

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "meter"))
import mutate
from traces import at, device, gpu_line, header, write


def test_repeats_use_one_degree_of_freedom_less_than_repeats():
    """(t_0.975 + t_0.8) / sqrt(n) with n - 1 degrees is 4.160 / 2 at n = 4 and 3.717 / 2.236 at n = 5 (t tables)."""
    assert repeats_for(2.06, 1.0) == 5
    assert repeats_for(2.09, 1.0) == 4


def test_scale_errors_add_in_quadrature_on_both_sides():
    wide = widened_ratio(Interval(2.0, 1.8, 2.5), 0.05, 0.02)
    scale = math.log(1.05) ** 2 + math.log(1.02) ** 2
    assert wide.low == pytest.approx(2 / math.exp(math.sqrt(math.log(2 / 1.8) ** 2 + scale)))
    assert wide.high == pytest.approx(2 * math.exp(math.sqrt(math.log(2.5 / 2) ** 2 + scale)))


def test_a_part_without_degrees_of_freedom_is_left_out():
    assert welch_degrees([(4.0, 0), (4.0, 8)]) == pytest.approx(64 / (16 / 8))


def test_an_estimate_of_repeats_has_their_standard_error():
    assert Estimate.of_repeats([1.0, 3.0]) == Estimate(2.0, 1.0, 1)
    assert Estimate.of_repeats([1.0, 2.0, 3.0]).degrees == 2
    assert Estimate.of_repeats([5.0]).standard_error == math.inf


def test_with_too_few_degrees_of_freedom_at_the_ratio_its_interval_is_open():
    few, sure = Estimate(1.0, 10.0, 1), Estimate(1.0, 0.4)
    assert sure.interval.excludes(0.0)
    assert _end(few, sure, 0.0, 1, 1.0) == math.inf
    assert _end(few, sure, 0.0, 0, 1.0) == -math.inf


def test_no_saving_at_all_breaks_even_never():
    none = break_even(Estimate(10.0, 0.0), Estimate(0.0, 0.0), "a student")
    assert (none.count, none.high) == (None, math.inf)


def test_energy_that_was_saved_at_once_breaks_even_with_no_item():
    found = break_even(Estimate(-10.0, 0.1), Estimate(1.0, 0.1), "a student")
    assert (found.count, found.low, found.high) == (0.0, 0.0, 0.0)


def test_an_infinite_error_leaves_no_gap_in_the_interval():
    sure, unsure = Estimate(1.0, 0.1), Estimate(1.0, math.inf)
    assert _upper_branch(sure, unsure, 0.0) == _upper_branch(unsure, sure, 0.0) == 0.0


def test_peaks_of_hosts_add_up_within_an_attempt_and_not_over_attempts(monkeypatch):
    attempts = [(1, 100.0), (1, 200.0), (2, 50.0), (2, None)]
    parts = [(SimpleNamespace(number=number, trace=peak), []) for number, peak in attempts]
    monkeypatch.setattr(assemble, "_peak_w", lambda trace, best, windows: trace)
    assert assemble.peaks_w(parts, None) == [300.0, 50.0]


def test_shards_of_an_artifact_are_its_parents_of_its_own_kind():
    def part(kind, key, parents=()):
        return SimpleNamespace(kind=kind, key=key, parents=parents)

    own = part("logits", "whole", ("a", "b"))
    others = [part("logits" + PART, "a"), part("logits" + PART, "of-another"), part("model", "b")]
    found = with_shards(SimpleNamespace(artifact=own, ancestry=others))
    assert [one.key for one in found] == ["whole", "a"]


def test_a_file_without_a_checksum_is_compared_by_its_size(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"12345")
    list_contents(tmp_path)
    (listed,) = [path for path in tmp_path.iterdir() if path.suffix == ".json"]
    write_json(listed, {**read_json(listed), "crc32": {}})
    assert find_damage(tmp_path) is None
    (tmp_path / "weights.bin").write_bytes(b"54321")
    assert find_damage(tmp_path) is None
    (tmp_path / "weights.bin").write_bytes(b"1")
    assert "1 bytes instead of 5" in find_damage(tmp_path)


def test_a_bill_from_elsewhere_names_the_commit_if_there_is_one():
    assert external("org/model", "model", "x").inputs == {"name": "org/model"}
    assert external("org/model", "model", "x", "abc").inputs == {"name": "org/model", "commit": "abc"}


def log_of(times_s, **readings):
    source = Source(device="gpu:0", name="", component="gpu")
    return DeviceLog(source=source, times_s=np.array(times_s), columns={k: np.array(v) for k, v in readings.items()})


def test_the_mean_power_of_a_log_is_energy_over_the_time_that_it_covers():
    power = device_energy(log_of([0.0, 1.0, 2.0], power_watts=[100.0, 200.0, 300.0]))
    assert (power.trapezoid_j, power.seen_s, power.mean_w, power.best_mean_w) == (400.0, 2.0, 200.0, 200.0)
    counter = device_energy(log_of([0.0, 4.0], energy_counter_j=[10.0, 50.0]))
    assert (counter.counter_j, counter.mean_w, counter.best_mean_w) == (40.0, 10.0, 10.0)
    single = device_energy(log_of([0.0], power_watts=[100.0]))
    assert (single.trapezoid_j, single.mean_w, single.best_mean_w) == (None, None, None)
    assert isinstance(single, DeviceEnergy)


def test_runs_are_paired_by_seed_unless_a_side_has_a_seed_twice():
    def runs(*seeds):
        return [SimpleNamespace(seed=seed) for seed in seeds]

    ours, theirs = runs(1, 2, 3), runs(2, 3, 4)
    assert [(a.seed, b.seed) for a, b in pairs_of(ours, theirs)] == [(2, 2), (3, 3)]
    assert pairs_of(runs(1, 1), runs(1)) == []
    assert pairs_of(runs(1), runs(1, 1)) == []
    assert len(pairs_of(runs(1), runs(1))) == 1


def test_repeats_needed_on_each_side_come_from_both_variances():
    """Variances 1 and 1 give a combined standard deviation of sqrt 2; no difference and a single repeat give none."""
    sides = [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]
    assert _needed(2.06 * math.sqrt(2), sides) == 5
    assert _needed(0.0, sides) is None and _needed(1.0, sides) is not None
    assert _needed(1.0, [[1.0], [1.0, 2.0]]) is None
    assert _needed(100.0, [[1.0, 2.0], [1.0, 2.0]]) is not None


def scored(*values, seeds=None):
    seeds = seeds or range(len(values))
    return [
        SimpleNamespace(seed=seed, quality=value is not None, result=SimpleNamespace(value=value, trials=None))
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
    assert predicted_difference(base, [*method, tmp_path / "none"], same_seeds=False) is None
    assert predicted_difference(base, [], same_seeds=False) is None
    assert predicted_difference(base, [predicted(tmp_path / "empty")], same_seeds=False) is None


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


@pytest.mark.parametrize("text", ["x..3", "3..x", "3..3", "3..2", "3"])
def test_an_idle_segment_has_two_ends_in_order(text):
    log = SimpleNamespace(first_s=0.0, has_wall=False)
    assert parse_idle("2..3", log) == (2.0, 3.0)
    with pytest.raises(UsageError, match="is not a segment"):
        parse_idle(text, log)


@pytest.mark.parametrize(("levels", "cut"), [((400, 100), True), ((400, 100, 400), False), ((100, 400, 100), False)])
def test_only_a_lower_level_at_the_end_of_the_load_is_its_cooldown(levels, cut):
    watts = np.repeat(np.array(levels, dtype=float), 20)
    times = np.arange(len(watts), dtype=float)
    busy = Level(250.0, 1.0, len(watts), "given", (Segment(0.0, times[-1], 250.0, len(watts)),))
    found = without_cooldown(times, watts, 0.0, busy)
    assert found.power_w == (400.0 if cut else 250.0)


def test_half_of_a_t_distribution_is_below_0():
    assert [t_cdf(0.0, degrees) for degrees in (1, 3, 30)] == [0.5, 0.5, 0.5]


def test_a_denominator_whose_interval_ends_at_0_gives_no_roots():
    assert _roots(Estimate(1.0, 0.1), Estimate(2.0, 1.0), 0.0, 2.0) is None


def figure(energy_j, *sources, method="counter"):
    return EnergyFigure(energy_j=energy_j, method=method, sources=sources)


def test_a_disagreement_needs_both_paths():
    assert TwoPaths(missing("none"), figure(500.0)).disagreement_rel is None
    assert TwoPaths(figure(500.0), missing("none")).disagreement_rel is None
    assert TwoPaths(figure(500.0), figure(510.0)).disagreement_rel == pytest.approx(0.02)


def test_a_device_with_power_only_has_no_second_path_and_its_node_is_no_component(tmp_path):
    devices = [device("gpu:A"), device("ipmi:0", "node")]
    lines = [line for t in range(11) for line in (gpu_line(t, 100.0), gpu_line(t, 300.0, name="ipmi:0"))]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(*devices), *lines]))
    window = [(at(0), at(10))]
    assert both_paths(trace, "gpu", window) is None
    assert node_energy(trace, window).energy_j == pytest.approx(3000)
    assert peak_power_w(trace, "gpu", window) == 100.0


def series(**fields):
    none = np.array([])
    plain = dict.fromkeys(("counter_ns", "counter_j", "power_ns", "power_w", "samples_ns", "samples_w"), none)
    plain |= {"device": "gpu:A", "component": "gpu", "name": "A", "counted": True, "refresh_s": 0.1}
    return DeviceSeries(**{**plain, "gain_error_rel": 0.05, **fields})


def test_two_paths_are_compared_for_counted_devices_of_the_component_only():
    both = {"counter_ns": stamps(0, 10), "counter_j": np.array([0.0, 1000.0]), "power_ns": stamps(0, 10)}
    gpu, cpu, twin = (
        series(component=component, counted=counted, power_w=np.array([110.0, 110.0]), **both)
        for component, counted in (("gpu", True), ("cpu", True), ("gpu", False))
    )
    window = [(2 * 10**9, 4 * 10**9)]
    found = both_paths(SimpleNamespace(devices=[gpu, cpu, twin]), "gpu", window)
    assert found.counter.energy_j == pytest.approx(200, rel=0.01) and found.integrated.energy_j == pytest.approx(220)
    assert both_paths(SimpleNamespace(devices=[cpu, twin]), "gpu", window) is None
    assert both_paths(SimpleNamespace(devices=[gpu]), "gpu", []) is None


def test_power_over_time_is_of_the_finest_readings_that_there_are_two_of():
    counter = {"counter_ns": stamps(0, 2, 6), "counter_j": np.array([0.0, 100.0, 500.0])}
    one = {"power_ns": stamps(1), "power_w": np.array([70.0])}
    times, watts = power_curve(series(**counter, **one))
    assert list(times) == list(stamps(1, 4)) and list(watts) == [50.0, 100.0]
    two = {"power_ns": stamps(1, 2), "power_w": np.array([70.0, 80.0])}
    assert list(power_curve(series(**counter, **two))[1]) == [70.0, 80.0]
    samples = {"samples_ns": stamps(1, 1.02), "samples_w": np.array([5.0, 6.0])}
    assert list(power_curve(series(**counter, **two, **samples))[1]) == [5.0, 6.0]
    single = {"samples_ns": stamps(1), "samples_w": np.array([5.0])}
    assert list(power_curve(series(**counter, **two, **single))[1]) == [70.0, 80.0]
    assert len(power_curve(series())[0]) == 0


def test_constants_of_the_machine_have_a_gain_error_and_no_random_one():
    facts = {
        f"{name}_{what}": value for name in ("base", "memory") for what, value in (("w", 30.0), ("error_rel", 0.5))
    }
    model = series(component="cpu_estimate", facts=facts | {"w_per_thread": 2.5}, counter_ns=stamps(0, 10, 20),
                   counter_j=np.array([0.0, 0.0, 0.0]))  # fmt: skip
    found = machine_energy(SimpleNamespace(devices=[model]), [(2 * 10**9, 12 * 10**9)])
    alone = energy_of_series(model, [(2 * 10**9, 12 * 10**9)])
    assert found.energy_j == pytest.approx(600.0) and found.half_width_j == pytest.approx(alone.half_width_j)
    assert set(found.sources) == {*alone.sources, MACHINE_BASE, "constant:memory"}
    dram = series(device="rapl:dram", component="dram", counter_ns=stamps(0, 10, 20), counter_j=np.array([0.0, 10, 20]))
    with_dram = machine_energy(SimpleNamespace(devices=[model, dram]), [(2 * 10**9, 12 * 10**9)])
    assert with_dram.energy_j == pytest.approx(310.0) and "constant:memory" not in with_dram.sources


def test_a_component_without_a_counted_device_states_why():
    shared = series(component="cpu", counted=False, facts={"reason": "the node is shared"})
    trace = SimpleNamespace(devices=[shared, series(component="cpu", counted=False)], missing=())
    assert component_energy(trace, "cpu", []).reason == "the node is shared"
    assert (
        component_energy(SimpleNamespace(devices=[shared], missing=()), "gpu", []).reason
        == "no sensor for it was found"
    )
    lacking = SimpleNamespace(component="gpu", reason="no driver", fix="install it")
    found = component_energy(SimpleNamespace(devices=[], missing=(lacking,)), "gpu", [])
    assert (found.reason, found.fix) == ("no driver", "install it")


def test_the_peak_of_stated_stages_leaves_out_those_without_one():
    cells = (ReportedCell(0, 10, 5.0, None), ReportedCell(10, 20, 5.0, 70.0), ReportedCell(30, 40, 5.0, 900.0))
    trace = SimpleNamespace(devices=[series(reported=cells)])
    assert peak_power_w(trace, "gpu", [(0, 20)]) == 70.0


def test_peaks_are_of_readings_in_the_windows_with_their_ends_and_of_stages_that_overlap_them():
    power = series(power_ns=stamps(1, 2, 3, 4), power_w=np.array([900.0, 50.0, 60.0, 800.0]))
    assert peak_power_w(SimpleNamespace(devices=[power]), "gpu", [(2 * 10**9, 3 * 10**9)]) == 60.0
    power = series(power_ns=stamps(1, 2, 3, 4), power_w=np.array([900.0, 60.0, 50.0, 800.0]))
    assert peak_power_w(SimpleNamespace(devices=[power]), "gpu", [(2 * 10**9, 3 * 10**9)]) == 60.0
    cells = (ReportedCell(0, 10, 5.0, 900.0), ReportedCell(10, 20, 5.0, 70.0), ReportedCell(20, 30, 5.0, 900.0))
    assert peak_power_w(SimpleNamespace(devices=[series(reported=cells)]), "gpu", [(10, 20)]) == 70.0


def test_windows_that_exclude_each_other_leave_no_empty_ones():
    assert without((0, 10), [(0, 4), (4, 10)]) == []
    assert without((0, 10), [(6, 8), (-5, 2)]) == [(2, 6), (8, 10)]
    assert without((0, 10), [(12, 14)]) == [(0, 10)]


def test_a_figure_is_a_lower_bound_below_a_coverage_of_999_permille_and_stated_ones_have_no_errors():
    def of(covered_s, **fields):
        curve = SimpleNamespace(energy=lambda windows: (5.0, ("an error",), covered_s))
        return _over_windows(series(**fields), curve, "counter", [(0, 10**9)])

    counted = energy_of_series(series(counter_ns=stamps(0, 1, 2), counter_j=np.array([0.0, 9.0, 18.0])), [(0, 10**9)])
    assert counted.errors
    cells = (ReportedCell(0, 10**9, 5.0, None),)
    assert [of(covered_s, reported=cells).lower_bound for covered_s in (0.998, 0.999, 1.0)] == [True, False, False]
    assert of(1.0, reported=cells).errors == () and of(1.0, reported=cells).half_width_j is None


def test_the_slope_of_a_counter_that_is_read_often():
    counter = series(counter_ns=stamps(0, 0.1, 0.2), counter_j=np.array([0.0, 10.0, 30.0]))
    assert list(power_curve(counter)[1]) == pytest.approx([100.0, 200.0])


def stamps(*seconds):
    return (np.array(seconds) * 1e9).astype(np.int64)


def test_two_readings_are_enough_for_a_counter_and_for_polled_power():
    counter = series(counter_ns=stamps(0, 10), counter_j=np.array([0.0, 1000.0]))
    assert counter.readings is not None and counter.counter_path.energy([(2 * 10**9, 8 * 10**9)])[0] == pytest.approx(
        600
    )
    power = series(power_ns=stamps(0, 10), power_w=np.array([100.0, 100.0]))
    assert power.power_path.energy([(0, 10**10)])[0] == pytest.approx(1000)
    assert series(power_ns=stamps(0), power_w=np.array([100.0])).power_path is None


def test_three_samples_of_the_driver_are_preferred_to_polled_power():
    samples = {"samples_ns": stamps(1.0, 1.02, 1.04), "samples_w": np.array([50.0, 50.0, 50.0])}
    both = series(power_ns=stamps(0, 10), power_w=np.array([900.0, 900.0]), **samples)
    energy_j, _, _ = both.power_path.energy([(int(1.005e9), int(1.025e9))])
    assert energy_j == pytest.approx(50.0 * 0.02, rel=0.05)


def test_a_counter_that_rises_slowly_has_no_fault_and_one_that_falls_was_set_back():
    slow = series(counter_ns=stamps(0, 1, 2), counter_j=np.array([0.0, 0.5, 0.5]))
    assert slow.counter_faults == []
    fallen = series(counter_ns=stamps(0, 1, 2), counter_j=np.array([7.0, 3.0, 4.0]))
    assert fallen.counter_faults == [(-50_000_000, 950_000_000, SET_BACK)]


@pytest.mark.parametrize(("wrap_j", "known"), [(9_000.0, True), (4_000.0, False)])
def test_a_wrap_can_hide_in_a_long_gap_unless_it_needs_five_times_the_highest_power(wrap_j, known):
    """Highest power 10 W; the gap of 100 s would need 90 W or 40 W for a wrap."""
    facts = {"max_gap_s": 1.0, "wrap_j": wrap_j}
    cpu = series(component="cpu", counter_ns=stamps(0, 1, 101), counter_j=np.array([0.0, 10.0, 20.0]), facts=facts)
    assert list(cpu.readings.known) == [True, known]


def test_a_new_answer_replaces_its_own_check_only():
    checks = [Check(name=name, ok=True, grade="A", text=name) for name in ("source", "interval")]
    validity = Validity(grade="A", checks=tuple(checks))
    changed = with_answer(validity, "interval", ("C", "wide"))
    assert changed.grade == "C"
    assert [(check.name, check.grade) for check in changed.checks] == [("source", "A"), ("interval", "C")]
    assert with_answer(validity, "interval", None) is validity
    assert with_answer(Validity(), "interval", ("C", "wide")) == Validity()


def evidence_of(best, *devices, policy="measured"):
    attempt = SimpleNamespace(
        number=1, host="h", idle_stages=(), trace=SimpleNamespace(devices=devices, ended=True, header={}),
        health=SimpleNamespace(warnings_during=lambda windows: [], during=lambda windows: []),
        core_use=lambda windows: None, energy=lambda windows: energies(),
    )  # fmt: skip
    return gather("train", [(attempt, [(0, 10**9)])], best, policy, (), {})


def energies(**figures):
    plain = dict.fromkeys(("gpu", "cpu", "dram", "cpu_estimate"), missing("no sensor"))
    return EnergyByComponent(**{**plain, **figures})


def test_evidence_is_of_the_devices_of_the_figure():
    used = series(device="gpu:A", refresh_s=0.1, facts={"shared": True})
    other = series(device="gpu:B", refresh_s=5.0, facts={"node_wide": True})
    evidence = evidence_of(figure(10.0, "gpu:A", method="estimated"), used, other)
    assert (evidence.refresh_s, evidence.shared, evidence.stated) == (0.1, ("A is shared",), False)
    evidence = evidence_of(figure(10.0, "gpu:B", method="estimated"), used, other)
    assert (evidence.refresh_s, evidence.shared) == (5.0, ("A covers the whole node",))
    assert evidence_of(figure(10.0, CODECARBON, method="estimated")).stated


def notes_of(policy, **figures):
    estimate = series(component="cpu_estimate", facts={"w_per_thread": 2.5, "source": "a table"})
    trace = SimpleNamespace(devices=[estimate], gaps=[], ended=True)
    attempt = SimpleNamespace(energy=lambda windows: energies(**figures), billed_windows=[], trace=trace)
    return {key: note.text for key, note in _energy_notes(attempt, policy).items()}


def test_notes_name_codecarbon_and_the_estimate_only_where_they_are_the_figure():
    estimated = figure(5.0, method="estimated")
    assert "codecarbon" in notes_of("codecarbon") and "codecarbon" not in notes_of("measured")
    assert any("ESTIMATED" in text for text in notes_of("measured", cpu_estimate=estimated).values())
    measured = notes_of("measured", cpu_estimate=estimated, gpu=figure(9.0, "gpu:A"))
    assert not any("ESTIMATED" in text for text in measured.values())
    assert not any("ESTIMATED" in text for text in notes_of("measured").values())


def test_contention_is_noted_for_the_stages_in_which_it_was_recorded():
    uses = {"a": None, "b": CoreUse(cores=2, others_cores=1.5, idle_cores=0.0)}
    attempt = SimpleNamespace(
        windows={"a": "a", "b": "b"}, idle_stages=(), host="h", number=1, core_use=lambda windows: uses[windows]
    )
    assert uses["b"].contended
    (note,) = _contention_notes([attempt, attempt]).values()  # of two attempts of one run
    assert "during b." in note.text
    uses["b"] = None
    assert _contention_notes([attempt]) == {}


def stage_of(name, energy_j, **fields):
    energy = energies(gpu=figure(energy_j, "gpu:A"))
    fields = {"role": "student", "activity": "train"} | fields
    return StageRecord(
        name=name, number=1, status="done", segments=(), duration_s=1.0, energy=energy, best=energy.gpu,
        energy_j=energy_j, above_idle_j=None, mean_power_w=None, peak_power_w=None, **fields,
    )  # fmt: skip


def test_the_bill_of_an_artifact_has_parts_only_where_they_differ():
    train, setup = stage_of("train", 10.0), stage_of("compile", 3.0, role="setup", activity="compile")
    whole = assemble.ancestor_energy([train])
    assert whole["energy"]["gpu"].energy_j == 10.0 and whole["work"] == whole["setup"] == {}
    parts = assemble.ancestor_energy([train, setup])
    assert [parts[name]["gpu"].energy_j for name in ("energy", "work", "setup")] == [13.0, 10.0, 3.0]
    assert parts["repeated"] == {}


def test_a_bill_mentions_machine_and_node_only_where_they_were_measured():
    assert "node" not in assemble.stage_energy([stage_of("train", 10.0)])
    metered = stage_of("train", 10.0)
    metered = metered.model_copy(update={"energy": energies(gpu=figure(10.0, "gpu:A"), node=figure(90.0, "ipmi:0"))})
    found = assemble.stage_energy([metered])
    assert found["node"].energy_j == 90.0 and "machine" not in found
    assert assemble.stage_energy([])["all"].energy_j is None


def test_the_role_of_a_stage_is_that_of_the_stage_with_its_name():
    stages = (stage_of("one", 1.0, role="data", activity="load"), stage_of("two", 1.0))
    assert assemble._kind_of("two", stages)[:2] == ("student", "train")
    assert assemble._kind_of("one", stages)[:2] == ("data", "load")


def test_a_result_in_joules_needs_the_energy_of_all_its_artifacts(monkeypatch):
    monkeypatch.setattr(assemble, "components_of", lambda one: SimpleNamespace(best=lambda policy: one.figure))
    lineage = [SimpleNamespace(key="a", figure=figure(6.0)), SimpleNamespace(key="b", figure=figure(4.0))]

    def results(*keys):
        events = SimpleNamespace(results={}, joules={"cost": (keys, 2)})
        return assemble._results([SimpleNamespace(events=events)], lineage, "measured")

    assert results("a", "b")["cost"].value == 5.0
    assert results("a")["cost"].value == 3.0
    assert results("a", "gone") == results("gone") == {}
    assert results("a")["cost"].lower_is_better
    lineage[1].figure = figure(0.0)
    assert results("a", "b")["cost"].value == 3.0 and results("b")["cost"].value == 0.0


def test_the_paces_of_other_ranks_are_read_only_on_request(monkeypatch):
    monkeypatch.setattr(assemble, "rank_paces", lambda rank, events: [rank])
    monkeypatch.setattr(assemble, "read_events", lambda path: None)
    attempt = SimpleNamespace(rank=0, event_files=[(0, "a"), (1, "b"), (2, "c")], events=None)
    assert (assemble._ranks(attempt, False), assemble._ranks(attempt, True)) == ([0], [0, 1, 2])
    two = SimpleNamespace(rank=0, event_files=[(0, "a"), (1, "b")], events=None)
    assert assemble._ranks(two, True) == [0, 1]
    single = SimpleNamespace(rank=0, event_files=[(0, "a")], events=None)
    assert assemble._ranks(single, True) == []


def test_the_slowest_twentieth_of_a_phase_begins_at_p95():
    phases = PhaseAggregate()
    for duration_s in [0.001] * 50 + [0.01] * 46 + [1.0] * 4:
        phases.add(duration_s)
    attempt = SimpleNamespace(rank=0, number=1, events=SimpleNamespace(phases={("train", "step"): phases}))
    record = assemble._phases([(attempt, [])], "train")["step"]
    assert (record.count, record.max_s) == (100, 1.0)
    assert (record.p50_s, record.p95_s) == (pytest.approx(0.001), pytest.approx(0.01))


def steps_of(*durations_s):
    found = PhaseAggregate()
    for duration_s in durations_s:
        found.add(duration_s)
    return found


def test_the_pace_of_a_rank_is_its_mean_step_and_its_own_work_in_it():
    phases = {("train", "step"): steps_of(1.0, 3.0), ("train", "input"): steps_of(0.2, 0.2)}
    phases |= {("train", "forward"): steps_of(0.6, 0.6), ("train", "backward"): steps_of(9.0)}
    phases[("load", "input")] = steps_of(7.0)
    (pace,) = assemble.rank_paces(3, SimpleNamespace(phases=phases))
    assert (pace.rank, pace.stage, pace.steps, pace.step_s) == (3, "train", 2, 2.0)
    assert pace.own_s == pytest.approx(0.8)


def test_a_rank_reads_its_own_events_and_those_of_others_from_their_files(monkeypatch):
    monkeypatch.setattr(assemble, "rank_paces", lambda rank, events: [(rank, events)])
    monkeypatch.setattr(assemble, "read_events", lambda path: f"read {path}")
    attempt = SimpleNamespace(rank=1, event_files=[(0, "a"), (1, "b")], events="own")
    assert assemble._ranks(attempt, True) == [(0, "read a"), (1, "own")]


def test_the_mean_of_a_phase_is_its_time_over_its_number():
    events = SimpleNamespace(phases={("train", "step"): steps_of(1.0, 3.0), ("other", "step"): steps_of(50.0)})
    record = assemble._phases([(SimpleNamespace(rank=0, number=1, events=events), [])], "train")["step"]
    assert (record.count, record.sum_s, record.mean_s) == (2, 4.0, 2.0)


def test_a_stage_has_the_kind_that_its_latest_attempt_declared():
    def part(**kinds):
        return SimpleNamespace(events=SimpleNamespace(kinds=kinds)), []

    first, second = StageKind("student", "train"), StageKind("teacher", "train")
    assert assemble._kind("x", [part(x=first), part(x=second), part()]) == second
    assert assemble._kind("teacher.train", [part(x=first)]).role == "teacher"
    assert assemble._kind(assemble.OVERHEAD, [part(**{assemble.OVERHEAD: first})]).role == "setup"


def test_the_status_of_a_stage():
    def status(kind=None, run="done", name="x", **statuses):
        kind = kind or StageKind("student", "train")
        attempt = SimpleNamespace(rank=0, number=1, host="h", events=SimpleNamespace(statuses=statuses))
        return assemble._stage_status(name, kind, [(attempt, [])], run)

    assert (status(x="failed"), status(x="done"), status(x="open"), status()) == ("failed", "done", *["truncated"] * 2)
    assert (status(run="running"), status(name=assemble.OVERHEAD, run="failed")) == ("running", "failed")
    part = StageKind("setup", "compile", part_of="train")
    assert status(part, x="failed") == "done"
    assert status(part._replace(repeated=True), x="done") == "truncated"


def test_the_peak_is_of_the_components_of_the_figure(monkeypatch):
    peaks = {"gpu": 300.0, "cpu": None, "dram": 20.0, "cpu_estimate": 7.0}
    monkeypatch.setattr(assemble, "peak_power_w", lambda trace, component, windows: peaks[component])
    assert assemble._peak_w(None, figure(1.0, "gpu:A"), []) == 320.0
    assert assemble._peak_w(None, figure(1.0, "cpu", method="estimated"), []) == 7.0
    assert assemble._peak_w(None, figure(1.0, CODECARBON, method="estimated"), []) is None
    peaks |= {"gpu": None, "dram": None}
    assert assemble._peak_w(None, figure(1.0, "gpu:A"), []) is None


def test_idle_energy_is_subtracted_for_covered_time_with_an_error_that_stages_share():
    half = figure(100.0, "gpu:A").model_copy(update={"coverage": 0.5})
    found = assemble._above_idle(half, SimpleNamespace(power_w=2.0, half_width_w=0.1), 20.0)
    assert found.energy_j == 80.0
    assert [(one.name, one.joules, one.shared) for one in found.errors] == [("idle", (1.0,), True)]
    assert assemble._above_idle(half, None, 20.0) is None


def test_artifacts_of_this_run_have_the_energy_of_its_stages_and_others_their_own(monkeypatch):
    def ancestor(key):
        own = SimpleNamespace(key=key, stages=("train",))
        own.model_copy = lambda update: SimpleNamespace(key=key, joules=update["energy"]["gpu"].energy_j)
        return own

    bills = {
        key: SimpleNamespace(key=key, artifact=SimpleNamespace(made_by=run))
        for key, run in (("a", "me"), ("b", "other"))
    }
    monkeypatch.setattr(assemble, "ancestry_of", lambda bills: [ancestor("a"), ancestor("b")])
    attempts = [SimpleNamespace(events=SimpleNamespace(bills=bills))]
    stages = (stage_of("train", 10.0), stage_of("other", 5.0))
    made, lineage = assemble._lineage("me", attempts, stages, lambda one: SimpleNamespace(key=one.key, joules=-1))
    assert made == ("a",) and [(one.key, one.joules) for one in lineage] == [("a", 10.0), ("b", -1)]


def test_items_of_setup_belong_to_the_stage_of_setup():
    """12 samples, 4 of them while compiling; work that was lost is counted again by the later attempt."""

    def attempt(number, samples, windows=()):
        opening = SimpleNamespace(setup_counts={"samples": 4})
        events = SimpleNamespace(
            counts={"train": {"samples": samples}}, openings={"train": [opening]} if number == 1 else {}
        )
        return SimpleNamespace(rank=0, number=number, host="h", events=events, windows=dict.fromkeys(windows)), []

    train, setup = StageKind("student", "train"), StageKind("setup", "compile", part_of="train")
    assert assemble._count([attempt(1, 12)], "train", train, "samples") == 8
    assert assemble._count([attempt(1, 12)], "compile", setup, "samples") == 4
    assert assemble._count([attempt(1, 12)], "compile", setup, "tokens") is None
    assert assemble._count([attempt(1, 12)], "train", train._replace(part_of="x"), "samples") == 8
    assert assemble._count([attempt(1, 12)], "train", StageKind("setup", "start"), "samples") == 8
    assert assemble._count([attempt(1, 12), attempt(2, 10)], "train", train, "samples") == 8
    lost = [attempt(1, 12), attempt(2, 10, [assemble.repeated_name("train")])]
    assert assemble._count(lost, "train", train, "samples") == 6


def part_of_run(*windows, number=1, host="h", stages=None, gpu_j=100.0, cpu_j=None, used_percent=(), **events):
    """A host's part of an attempt; `windows` are in seconds. All windows have the same energy."""
    plain = {name: {} for name in ("kinds", "counts", "openings", "statuses", "phases")}
    states = [SimpleNamespace(utilization_percent=one) for one in used_percent]
    figures = {"gpu": figure(gpu_j, "gpu:A")} | ({"cpu": figure(cpu_j, "rapl:0")} if cpu_j else {})
    return SimpleNamespace(
        number=number, host=host, rank=0, windows=stages or {}, overhead_windows=windows_ns(*windows),
        events=SimpleNamespace(**{**plain, "device": None, **events}), trace=SimpleNamespace(devices=()),
        energy=lambda windows: energies(**figures), core_use=lambda windows: None, started_at=str,
        health=SimpleNamespace(during=lambda windows: states),
    )  # fmt: skip


def windows_ns(*windows):
    return [(int(begin * 1e9), int(end * 1e9)) for begin, end in windows]


RUNNING = assemble._Frame("measured", "running", (), None, None, None, None, {})


def record_of(kind, seconds=(4.0, 14.0), **fields):
    attempt = part_of_run(kinds={"x": kind}, **fields)
    return assemble._stage_record("x", 1, [(attempt, windows_ns(seconds))], RUNNING)


def test_rates_of_a_stage_are_per_item_and_per_second():
    """100 J in 10 s for 20 samples of 400 tokens together."""
    train = StageKind("student", "train")
    both = record_of(train, counts={"x": {"samples": 20, "tokens": 400}})
    assert (both.j_per_sample, both.j_per_token, both.samples_per_s, both.tokens_per_s) == (5.0, 0.25, 2.0, 40.0)
    assert (both.duration_s, both.mean_power_w, both.peak_power_w, both.outside_totals) == (10.0, 10.0, 10.0, False)
    (segment,) = both.segments
    assert (segment.duration_s, segment.start_ns, segment.end_ns) == (10.0, 4 * 10**9, 14 * 10**9)
    assert record_of(StageKind("idle", "idle")).outside_totals


def test_setup_has_items_and_no_rates():
    setup = record_of(
        StageKind("setup", "start"), counts={"x": {"samples": 20, "tokens": 400}}, device="cpu", cpu_j=30.0
    )
    rates = (setup.j_per_sample, setup.j_per_token, setup.samples_per_s, setup.tokens_per_s, setup.item_energy)
    assert (setup.samples, setup.tokens) == (20, 400) and rates == (None,) * 5


@pytest.mark.parametrize("what", ["samples", "tokens"])
def test_items_of_work_on_the_cpu_have_the_energy_of_the_cpu(what):
    """30 J of the CPU and 100 J of GPUs that did nothing; if they were used, all 130 J belong to the work."""
    train, infer, counts = StageKind("student", "train"), StageKind("inference", "generate"), {"x": {what: 20}}

    def per_item(kind=train, **fields):
        found = record_of(kind, counts=counts, cpu_j=30.0, **fields)
        return found.j_per_sample if what == "samples" else found.j_per_token

    assert per_item(device="cpu") == per_item(device="cpu", used_percent=(0, 0)) == 1.5
    assert per_item(device="cuda") == per_item() == per_item(device="cpu", used_percent=(0, 50)) == 6.5
    assert per_item(infer, device="cpu", used_percent=(0, 50)) == 1.5
    without_gpu = record_of(train, counts=counts, cpu_j=30.0, gpu_j=None, device="cpu")
    assert without_gpu.item_energy is None
    assert record_of(train, cpu_j=30.0, device="cpu").item_energy is None


def test_stages_are_in_the_order_of_attempts_and_then_of_time():
    first = part_of_run((50.0, 51.0), stages={"b": windows_ns((9, 10)), "a": windows_ns((3, 4), (20, 21)), "lost": []})
    second = part_of_run(number=2, stages={"c": windows_ns((1, 2)), "lost": windows_ns((5, 7)), "never": []})
    records = assemble._stage_records([first, second], RUNNING)
    assert [(one.number, one.name) for one in records] == [
        (1, "a"), (2, "b"), (3, "never"), (4, "c"), (5, "lost"), (6, assemble.OVERHEAD),
    ]  # fmt: skip
    by_name = {one.name: one for one in records}
    assert [segment.attempt for segment in by_name["lost"].segments] == [2] and by_name["never"].segments == ()
    assert assemble.OVERHEAD not in {one.name for one in assemble._stage_records([second], RUNNING)}


def test_an_attempt_lasts_from_its_begin_to_its_end():
    attempt = part_of_run()
    vars(attempt).update(
        trace=SimpleNamespace(header={}, ended=True, devices=()), begin_ns=5 * 10**9, end_ns=8 * 10**9,
        billed_windows=windows_ns((5, 7)), event_files=[], clock_offset_s=0.0,
    )  # fmt: skip
    record = assemble.attempt_record(attempt)
    assert (record.duration_s, record.billed_s, record.boot_id, record.ranks) == (3.0, 2.0, "", ())


def test_the_grade_of_a_run_sees_the_energies_of_finished_repeats(monkeypatch):
    @dataclass(frozen=True)
    class Evidence:
        repeats_j: tuple = ()

    monkeypatch.setattr(assemble, "gather", lambda *given: Evidence())
    monkeypatch.setattr(assemble, "notes_on", lambda *given: [])
    monkeypatch.setattr(assemble, "grade", lambda evidence, notes: (evidence.repeats_j, notes))
    stages = (
        stage_of("a", 5.0, repeat=1),
        stage_of("b", 7.0),
        stage_of("c", 6.0, repeat=2),
        stage_of("d", None, repeat=3),
    )
    failed = stage_of("e", 9.0, repeat=4).model_copy(update={"status": "failed"})
    finished = replace(RUNNING, status="done")
    totals = SimpleNamespace(node=missing("no meter"), best=figure(5.0, "gpu:A"))
    assert assemble._run_validity([], (*stages, failed), totals, finished) == ((5.0, 6.0), [])
    totals.node = figure(900.0, "ipmi:0")
    (note,) = assemble._run_validity([], (), totals, finished)[1]
    assert note.text.startswith("node meter (ipmi:0): 900 J")
    assert assemble._run_validity([], (), None, finished) == Validity()


def test_the_mutator_changes_one_place_at_a_time():
    source = (
        "def f(a: int = 1) -> int:\n    'no 1 here'\n    if a > 0 and a != 2:\n        return a + 1\n    return 0\n"
    )
    found = {(before, after) for _, _, before, after, _ in mutate.mutants(source)}
    assert ("a > 0", "a >= 0") in found and ("a + 1", "a - 1") in found and ("a != 2", "a == 2") in found
    assert ("a > 0 and a != 2", "a > 0 or a != 2") in found and ("1", "2") in found and ("0", "1") in found
    trees = [mutate.ast.unparse(tree()) for *_, tree in mutate.mutants(source)]
    assert len(set(trees)) == len(trees) and mutate.ast.unparse(mutate.ast.parse(source)) not in trees
