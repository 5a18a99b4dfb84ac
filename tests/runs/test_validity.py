"""The grade of a measurement: each check alone, then the worst of them."""

import pytest

from joulelab.errors import InvalidMeasurement
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.runs.record import IdleBaseline, RunRecord, Totals
from joulelab.runs.validity import Evidence, enforce, grade


def counter(energy_j=1000.0, **fields):
    plain = {"method": "counter", "half_width_j": 5.0, "coverage": 1.0, "sources": ("gpu:A",)}
    return EnergyFigure(energy_j=energy_j, **{**plain, **fields})


def rest(stable=True):
    return IdleBaseline(
        stage="idle.before", attempt=1, duration_s=10, power_w=80, spread_rel=0.01, drift_rel=0.0, stable=stable
    )


def sound(**fields):
    plain = {"figure": counter(), "window_s": 60.0, "refresh_s": 0.1, "idle": (rest(),), "paths_j": (100.0, 101.0)}
    return Evidence(**{**plain, **fields})


def check(validity, name):
    return next((found for found in validity.checks if found.name == name), None)


def test_a_long_counter_window_with_a_steady_baseline_and_no_one_else_is_an_a():
    found = grade(sound())
    assert found.grade == "A"
    assert found.reasons == ()
    assert check(found, "idle").text == "stable idle baseline (1 segment)"


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"figure": counter(method="integrated")}, "source", "B"),
        ({"figure": counter(method="estimated")}, "source", "C"),
        ({"figure": missing("no sensor")}, "source", "C"),
        ({"figure": counter(method="estimated", sources=("codecarbon",))}, "source", "C"),
        ({"window_s": 2.0}, "window", "B"),
        ({"window_s": 0.5}, "window", "C"),
        ({"window_s": 60.0, "windows": 300}, "window", "B"),
        ({"figure": counter(half_width_j=50.0)}, "interval", "B"),
        ({"figure": counter(half_width_j=300.0)}, "interval", "C"),
        ({"figure": counter(coverage=0.985)}, "interval", "B"),
        ({"figure": counter(coverage=0.5)}, "interval", "C"),
        ({"figure": counter(lower_bound=True)}, "interval", "B"),
        ({"figure": counter(coverage=0.95)}, "coverage", "B"),
        ({"figure": counter(coverage=0.5)}, "coverage", "C"),
        ({"paths_j": (100.0, 94.0)}, "agreement", "B"),
        ({"paths_j": (100.0, 130.0)}, "agreement", "C"),
        ({"idle": ()}, "idle", "B"),
        ({"idle": (rest(stable=False),)}, "idle", "B"),
        ({"other_processes": ("another process uses this GPU",)}, "other processes", "B"),
        ({"shared": ("NVIDIA H200 is shared",)}, "shared device", "C"),
        ({"sensor_warnings": ("power is polled instead",)}, "sensors", "B"),
        ({"throttled": {"hardware thermal slowdown": 0.3}}, "throttling", "B"),
        ({"attempts": 2, "interrupted": 1}, "attempts", "B"),
        ({"unmeasured": ("cpu",)}, "completeness", "B"),
        ({"repeats_j": (100.0, 107.0, 95.0)}, "repeats", "B"),
        ({"repeats_j": (100.0, 200.0)}, "repeats", "C"),
    ],
)
def test_one_doubt_is_enough_to_lower_the_grade_and_reports_it(fields, name, expected):
    found = grade(sound(**fields))
    assert (check(found, name).grade, check(found, name).ok) == (expected, False)
    assert found.grade == expected
    assert check(found, name).text in found.reasons


def test_a_card_at_its_power_limit_is_as_its_maker_meant_it():
    found = grade(sound(throttled={"power limit": 1.0}))
    assert found.grade == "A"
    assert "power limit 100 %" in check(found, "throttling").text


def test_a_moment_of_heat_is_no_throttled_run():
    assert grade(sound(throttled={"hardware thermal slowdown": 0.01})).grade == "A"


def test_without_a_second_path_there_is_nothing_to_disagree():
    assert check(grade(sound(paths_j=None)), "agreement") is None


def test_an_idle_baseline_needs_no_idle_baseline():
    assert check(grade(sound(idle=None)), "idle") is None


def test_the_worst_reason_comes_first():
    found = grade(sound(figure=counter(coverage=0.5), idle=()))
    assert "50 %" in found.reasons[0]


def record(figure, letter_evidence, **energy):
    totals = Totals(
        policy="measured",
        energy_j=figure.energy_j,
        figure=figure,
        best=figure,
        gpu=figure,
        cpu=missing("x"),
        dram=missing("x"),
        cpu_estimate=missing("x"),
        duration_s=1.0,
        idle_power_w=None,
        above_idle_j=None,
    )
    return RunRecord(
        run_id="r",
        name="r",
        label="r",
        status="done",
        created_at="2026-01-01T00:00:00+00:00",
        spec={"energy": energy},
        totals=totals,
        validity=grade(letter_evidence),
    )


def test_a_grade_below_the_required_one_is_refused_with_the_reasons():
    with pytest.raises(InvalidMeasurement, match="grade B, but A is required: no idle baseline") as refused:
        enforce(record(counter(), sound(idle=()), require_grade="A"))
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("wanted", ["B", "C", "none"])
def test_a_grade_that_reaches_the_required_one_passes(wanted):
    enforce(record(counter(), sound(idle=()), require_grade=wanted))


def test_required_measured_joules_that_are_missing_are_refused():
    gone = missing("the driver went away")
    with pytest.raises(InvalidMeasurement, match="the driver went away"):
        enforce(record(gone, sound(figure=gone), require="measured"))


def test_a_run_without_any_record_of_joules_does_not_meet_a_required_grade():
    bare = RunRecord(
        run_id="r", name="r", label="r", status="failed", created_at="2026-01-01T00:00:00+00:00",
        spec={"energy": {"require_grade": "B"}},
    )  # fmt: skip
    with pytest.raises(InvalidMeasurement):
        enforce(bare)


def test_records_from_before_there_were_grades_keep_their_notes():
    old = record(counter(), sound()).model_dump() | {"validity": [{"level": "info", "text": "gpu not measured"}]}
    read = RunRecord.model_validate(old)
    assert (read.validity.grade, read.validity.notes[0].text) == (None, "gpu not measured")
