"""Numbers by hand for formulas in which a changed operator once passed all tests of its module."""

import json
import math
import sys
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
from joulelab.meter.series import SET_BACK, DeviceSeries, ReportedCell, load_trace
from joulelab.runs.artifacts import PART, external, find_damage, list_contents, with_shards
from joulelab.runs.attempt_data import SOURCE as CODECARBON
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import Check, EnergyByComponent, Validity
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


def test_the_mutator_changes_one_place_at_a_time():
    source = (
        "def f(a: int = 1) -> int:\n    'no 1 here'\n    if a > 0 and a != 2:\n        return a + 1\n    return 0\n"
    )
    found = {(before, after) for _, _, before, after, _ in mutate.mutants(source)}
    assert ("a > 0", "a >= 0") in found and ("a + 1", "a - 1") in found and ("a != 2", "a == 2") in found
    assert ("a > 0 and a != 2", "a > 0 or a != 2") in found and ("1", "2") in found and ("0", "1") in found
    trees = [mutate.ast.unparse(tree()) for *_, tree in mutate.mutants(source)]
    assert len(set(trees)) == len(trees) and mutate.ast.unparse(mutate.ast.parse(source)) not in trees


def test_every_mutant_without_effect_is_one_of_the_present_source():
    present = {key for module in mutate.CORE for key in mutate.keys_of(module)}
    assert set(json.loads(mutate.EQUIVALENT.read_text())) - present == set()
