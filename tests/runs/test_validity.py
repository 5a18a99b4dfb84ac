"""The grade of a measurement: each check alone, then the worst of them."""

from types import SimpleNamespace

import pytest

from joulelab.errors import InvalidMeasurement
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.health import CoreUse
from joulelab.runs.attempt_data import idle_power
from joulelab.runs.record import EnergyByComponent, IdleBaseline, RunRecord, Totals
from joulelab.runs.validity import (
    Evidence,
    _codecarbon_text,
    _stages_text,
    _step,
    _two_paths,
    _unmeasured,
    check_cores,
    check_interval,
    check_throttling,
    check_window,
    enforce,
    gather,
    grade,
    notes_on,
    with_answer,
)


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
        ({"imported": "a log"}, "imported", "B"),
        ({"imported": "a log", "figure": counter(method="integrated"), "refresh_s": 0.1}, "imported", "B"),
        ({"imported": "a log", "figure": counter(method="integrated"), "refresh_s": 1.0}, "imported", "C"),
        ({"imported": "a log", "refresh_s": 1.0}, "imported", "B"),
        ({"imported": "a log", "stated": True}, "imported", "C"),
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


def attempt_of(number=1, host="h", ended=True, facts=None, events=None, **figures):
    plain = dict.fromkeys(("gpu", "cpu", "dram", "cpu_estimate"), missing("no sensor"))
    energy = EnergyByComponent(**{**plain, **figures})
    model = SimpleNamespace(component="cpu_estimate", facts=facts or {}, name="A", gain_error_rel=0.5)
    events = {"warnings": [], "notes": [], "marks_lost": 0} | (events or {})
    return SimpleNamespace(
        number=number, host=host, windows={}, idle_stages=(), billed_windows=[], energy=lambda windows: energy,
        trace=SimpleNamespace(devices=[model], gaps=[], ended=ended), health=SimpleNamespace(warnings=[]),
        events=SimpleNamespace(**events),
    )  # fmt: skip


def texts(*attempts, policy="measured", idle=(), running=False):
    return [note.text for note in notes_on(attempts, policy, idle, running)]


def test_a_component_without_a_figure_is_noted_with_its_fix_and_one_with_gaps_with_its_coverage():
    one = attempt_of(gpu=counter(coverage=0.5), cpu=missing("no RAPL", fix="sudo chmod"), dram=missing("none"))
    assert texts(one) == ["gpu: the sensor covers 50 % of the run", "cpu not measured: no RAPL (sudo chmod)"]
    whole = attempt_of(gpu=counter(coverage=0.98), cpu=counter(), dram=counter(coverage=0.97))
    assert texts(whole) == ["dram: the sensor covers 97 % of the run"]
    assert texts(attempt_of(gpu=counter())) == ["cpu not measured: no sensor"]


def test_only_an_open_trace_of_an_attempt_that_does_not_run_was_interrupted():
    sensors = {"gpu": counter(), "cpu": counter()}
    text = "attempt 1 was interrupted; its energy ends with the last reading"
    assert texts(attempt_of(ended=False, **sensors)) == [text]
    assert texts(attempt_of(ended=False, **sensors), running=True) == texts(attempt_of(**sensors)) == []
    two = [attempt_of(ended=False, **sensors), attempt_of(2, ended=False, **sensors)]
    assert texts(*two, running=True) == [text, "energy of both attempts is counted"]
    three = [attempt_of(number, host=f"h{number}", **sensors) for number in (1, 2, 3)]
    assert texts(*three) == ["energy of all 3 attempts is counted", "energy of all 3 hosts is counted, each host once"]
    lost = attempt_of(events={"marks_lost": 7}, **sensors)
    assert texts(lost)[0].startswith("7 phase marks were lost")


def test_idle_power_is_noted_if_it_changed_by_more_than_a_tenth():
    def idle(power_w, clock=None, host=""):
        return rest().model_copy(update={"power_w": power_w, "sm_clock_MHz": clock, "host": host})

    sensors = {"gpu": counter(), "cpu": counter()}
    (text,) = texts(attempt_of(**sensors), idle=[idle(111.0, 1980.0), idle(100.0)])
    assert text.startswith("idle power was 100 W (idle.before) and 111 W at 1980 MHz (idle.before): two states")
    assert "above-idle" not in text
    after = idle(50.0).model_copy(update={"stage": "idle.after", "before_load": False})
    (text,) = texts(attempt_of(**sensors), idle=[idle(100.0), after])
    assert text.endswith("two states of the machine; above-idle energy subtracts the power before the load")
    assert idle_power([idle(100.0), after]).power_w == 100.0
    for same in ([idle(109.0), idle(100.0)], [idle(111.0)], [idle(0.0), idle(50.0)]):
        assert texts(attempt_of(**sensors), idle=same) == []
    assert texts(attempt_of(**sensors), idle=[idle(111.0, host="a"), idle(100.0, host="b")]) == []


def test_the_estimate_of_the_machine_names_its_constants():
    sensors = {"gpu": counter(), "cpu": counter()}
    facts = {"w_per_thread": 2.0, "base_w": 30.0, "memory_w": 4.0, "base_error_rel": 0.3, "memory_error_rel": 0.2}
    facts |= {"base_source": "a table", "memory_source": "a rule"}
    found = texts(attempt_of(facts=facts, **sensors), policy="machine")
    assert "2.0 W per hardware thread; 30.0 W idle; 4.0 W memory" in found[0]
    assert "CPU time ±50 %; idle power ±30 % (a table); memory ±20 % (a rule)" in found[1]
    assert "has no figure" in texts(attempt_of(**sensors), policy="machine")[0]


def test_the_two_paths_are_those_that_disagree_most(monkeypatch):
    def pair(counter_j, integral_j):
        return SimpleNamespace(
            counter=SimpleNamespace(energy_j=counter_j), integrated=SimpleNamespace(energy_j=integral_j)
        )

    found = {"gpu": pair(100.0, 95.0), "cpu": pair(100.0, 104.0), "dram": None}
    monkeypatch.setattr("joulelab.runs.validity.both_paths", lambda trace, component, windows: found[component])
    parts = [(SimpleNamespace(trace=None), [])]
    assert _two_paths(parts, counter(), "measured") == (100.0, 95.0)
    assert _two_paths(parts * 2, counter(), "measured") == (200.0, 190.0)
    assert _two_paths(parts, missing("none"), "measured") is None
    found |= {"gpu": pair(None, 95.0)}
    assert _two_paths(parts, counter(), "measured") == (100.0, 104.0)
    found |= {"cpu": pair(100.0, None)}
    assert _two_paths(parts, counter(), "measured") is None


def test_what_exists_and_was_not_measured_is_excluded_from_the_total():
    gpu_only = [(attempt_of(gpu=counter()), [])]
    assert _unmeasured(gpu_only, "measured", {"gpus": ["H200"]}) == ("cpu",)
    neither = [(attempt_of(), [])]
    assert set(_unmeasured(neither, "measured", {"gpus": ["H200"]})) == {"gpu", "cpu"}
    assert _unmeasured(neither, "measured", {}) == ("cpu",)
    assert _unmeasured(neither, "machine", {}) == _unmeasured([], "measured", {}) == ()


@pytest.mark.parametrize(
    ("fields", "name", "grades"),
    [
        ({"repeats_j": (10.0, 10.0)}, "repeats", "A"),
        ({"repeats_j": (0.0, 0.0)}, "repeats", "A"),
        ({"paths_j": (100.0, 90.0)}, "agreement", "BC"),
        ({"paths_j": (100.0, 110.0)}, "agreement", "BC"),
    ],
)
def test_spread_and_agreement_are_relative(fields, name, grades):
    assert check(grade(sound(**fields)), name).grade in grades


def test_a_limit_belongs_to_the_better_grade():
    assert [_step(value, 1.0, 2.0, "x", "bad") for value in (1.0, 1.5, 2.0, 2.1)] == [
        ("A", "x"), ("B", "x: bad"), ("B", "x: bad"), ("C", "x: bad"),
    ]  # fmt: skip


def test_a_new_answer_is_good_only_with_an_a():
    for letter, ok in (("A", True), ("B", False)):
        answered = with_answer(grade(sound()), "interval", (letter, "new"))
        assert (check(answered, "interval").ok, answered.grade) == (ok, letter)


def test_windows_are_counted_in_refreshes():
    """6 s are 60 refreshes of 0.1 s; four windows together have the edges of two."""
    assert check_window(sound(window_s=6.0)) == ("A", "6 s, equivalent to 60 sensor refreshes")
    assert check_window(sound(window_s=6.0, windows=4))[1].startswith("6 s in 4 windows, equivalent to 30 sensor")
    assert check_window(sound(refresh_s=None)) is check_window(sound(figure=counter(method="estimated"))) is None


def test_only_measured_energy_has_a_random_interval():
    for figure in (counter(method="estimated"), counter(0.0), counter(half_width_j=None)):
        assert check_interval(sound(figure=figure)) is None
    bound = counter(lower_bound=True, coverage=0.999)
    assert check_interval(sound(figure=bound)) == ("B", "a lower bound has no interval")
    assert check_interval(sound(figure=counter(coverage=0.9)))[0] == "B"
    assert check_interval(sound(figure=counter(coverage=0.89)))[0] == "C"


def test_contention_matters_by_what_was_measured():
    busy = CoreUse(cores=2, others_cores=1.5, idle_cores=0.0)

    def answer(figure):
        found = check_cores(sound(figure=figure, core_use=busy))
        return found and found[0]

    assert (answer(counter()), answer(counter(sources=("rapl:0",)))) == ("A", "B")
    assert (answer(counter(method="estimated")), answer(missing("none"))) == ("C", None)


def test_two_percent_of_throttling_are_a_moment():
    assert check_throttling(sound(throttled={"heat": 0.02})) is None
    assert check_throttling(sound(throttled={"heat": 0.03}))[0] == "B"


def test_without_a_requirement_nothing_has_to_be_measured():
    gone = missing("the driver went away")
    enforce(record(gone, sound(figure=gone)))
    enforce(record(counter(), sound(), require="measured"))


def test_warnings_about_processes_are_kept_apart_and_an_idle_stage_needs_no_baseline():
    attempt = attempt_of(gpu=counter())
    warnings = ["another process uses it", "the driver is slow"]
    vars(attempt).update(
        idle_stages=("idle.before",), core_use=lambda windows: None,
        trace=SimpleNamespace(devices=(), header={}, ended=True),
        health=SimpleNamespace(warnings_during=lambda windows: warnings, during=lambda windows: []),
    )  # fmt: skip

    def of(stage):
        return gather(stage, [(attempt, [(0, 10**9)])], missing("none"), "measured", (rest(),), {})

    assert of("train").other_processes == (warnings[0],) and of("train").sensor_warnings == (warnings[1],)
    assert (of("train").idle, of("idle.before").idle) == ((rest(),), None)


def test_the_component_that_disagrees_most_is_the_one_whose_ratio_is_farthest_from_1(monkeypatch):
    joules = {"gpu": (100.0, 99.0), "cpu": (100.0, 110.0), "dram": (50.0, 51.0)}

    def both(trace, component, windows):
        return SimpleNamespace(
            **{
                name: SimpleNamespace(energy_j=value)
                for name, value in zip(("counter", "integrated"), joules[component], strict=True)
            }
        )

    monkeypatch.setattr("joulelab.runs.validity.both_paths", both)
    assert _two_paths([(SimpleNamespace(trace=None), [])], counter(), "measured") == (100.0, 110.0)


def test_notes_name_hosts_stages_and_small_idle_powers():
    sensors = {"gpu": counter(), "cpu": counter()}
    hosts = [attempt_of(host=host, **sensors) for host in ("a", "b")]
    assert texts(*hosts) == ["energy of both hosts is counted, each host once"]
    assert [_stages_text(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a, b",
        "a and other stages",
    ]
    small = [rest().model_copy(update={"power_w": power_w}) for power_w in (0.5, 50.0)]
    assert len(texts(attempt_of(**sensors), idle=small)) == 1


def test_the_policy_codecarbon_states_why_it_has_no_figure():
    assert _codecarbon_text(missing("not installed")) == "policy `codecarbon` has no figure: not installed"
    assert _codecarbon_text(counter(reason="of CodeCarbon")).startswith("energy is of CodeCarbon, not from this meter")
