"""Numbers by hand for formulas in which a changed operator once passed all tests of its module."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from joulelab.meter.importers.log_energy import DeviceEnergy, device_energy
from joulelab.meter.importers.power_log import DeviceLog, Source
from joulelab.report.compare.differences import _needed, pairs_of
from joulelab.runs import assemble
from joulelab.runs.artifacts import PART, find_damage, list_contents, with_shards
from joulelab.runs.paths import read_json, write_json
from joulelab.stats.break_even import Estimate, _end, break_even
from joulelab.stats.intervals import Interval, repeats_for, welch_degrees, widened_ratio

sys.path.insert(0, str(Path(__file__).parent))
import mutate


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


def test_runs_are_paired_by_seed_and_a_single_pair_in_any_case():
    def runs(*seeds):
        return [SimpleNamespace(seed=seed) for seed in seeds]

    ours, theirs = runs(1, 2, 3), runs(2, 3, 4)
    assert [(a.seed, b.seed) for a, b in pairs_of(ours, theirs)] == [(2, 2), (3, 3)]
    assert pairs_of(runs(1, 1), runs(1)) == []
    assert pairs_of(runs(1), runs(1, 1)) == []


def test_repeats_needed_on_each_side_come_from_both_variances():
    """Variances 1 and 1 give a combined standard deviation of sqrt 2; no difference and a single repeat give none."""
    sides = [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]
    assert _needed(Interval(2.06 * math.sqrt(2), 0, 0), sides) == 5
    assert _needed(Interval(0.0, 0, 0), sides) is None
    assert _needed(Interval(1.0, 0, 0), [[1.0], [1.0, 2.0]]) is None


def test_the_mutator_changes_one_place_at_a_time():
    source = (
        "def f(a: int = 1) -> int:\n    'no 1 here'\n    if a > 0 and a != 2:\n        return a + 1\n    return 0\n"
    )
    found = {(before, after) for _, _, before, after, _ in mutate.mutants(source)}
    assert ("a > 0", "a >= 0") in found and ("a + 1", "a - 1") in found and ("a != 2", "a == 2") in found
    assert ("a > 0 and a != 2", "a > 0 or a != 2") in found and ("1", "2") in found and ("0", "1") in found
    trees = [mutate.ast.unparse(tree) for *_, tree in mutate.mutants(source)]
    assert len(set(trees)) == len(trees) and mutate.ast.unparse(mutate.ast.parse(source)) not in trees
