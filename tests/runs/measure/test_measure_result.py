"""A wide interval is printed with its own cause: sampling, a fault of the counter, or time without readings."""

from types import SimpleNamespace

from joulelab.meter.figures import EnergyFigure, ErrorComponent
from joulelab.meter.series import Gap
from joulelab.runs.measure.result import caveats
from joulelab.runs.record import Segment

NS = 1_000_000_000
JUMP = "the energy counter jumped by more than the device can draw"


def stage(cause, coverage=1.0):
    errors = (ErrorComponent(name="counter latch", joules=(1.0,)), ErrorComponent(name=cause, joules=(300.0,)))
    figure = EnergyFigure(
        energy_j=2_820.0, method="counter", half_width_j=300.0, errors=errors, coverage=coverage, sources=("gpu:0",)
    )
    part = Segment(attempt=1, host="h", started_at="", duration_s=60.0, start_ns=10 * NS, end_ns=70 * NS)
    return SimpleNamespace(best=figure, duration_s=60.0, segments=(part,))


def trace(*gaps):
    return SimpleNamespace(gaps=gaps, devices=(SimpleNamespace(device="gpu:0", refresh_s=0.1),))


def test_a_counter_jump_is_the_reason_and_more_time_is_not_the_remedy():
    """A jump of 5,000 J made the interval wide, and `measure longer` was printed."""
    (text,) = caveats([stage("missing time")], None, trace(Gap("gpu:0", 40 * NS, JUMP)))
    assert JUMP in text and "repeat the measurement" in text and "longer" not in text


def test_faults_of_other_devices_and_other_times_are_not_the_reason():
    others = trace(Gap("gpu:1", 40 * NS, JUMP), Gap("gpu:0", 90 * NS, JUMP))
    (text,) = caveats([stage("counter latch")], None, others)
    assert "readings are too far apart to resolve the start and the end of the program; measure longer" in text


def test_time_without_readings_is_the_reason():
    (text,) = caveats([stage("missing time", coverage=0.72)], None, trace())
    assert "read during only 72 % of the time; repeat" in text and "longer" not in text
    assert text.startswith("the energy is a lower bound: "), "it is printed without an interval"


def test_a_reader_that_failed_as_a_whole_is_the_reason_for_each_of_its_domains():
    """`rapl` is the gap, `rapl:package-0` the source; `measure longer` was printed."""
    failed = stage("missing time")
    failed.best = failed.best.model_copy(update={"sources": ("rapl:package-0",)})
    (text,) = caveats([failed], None, trace(Gap("rapl", 40 * NS, "no such file")))
    assert "no such file; repeat the measurement" in text and "longer" not in text


def test_repeats_have_an_interval_of_their_own():
    """A program of 5.5 s was called short for readings every 0.5 s, with the interval of a mean of repeats printed."""
    stages = [stage("counter latch")] * 3
    assert caveats(stages, SimpleNamespace(spread_rel=0.01), trace()) == []
    (text,) = caveats(stages, SimpleNamespace(spread_rel=0.01), trace(Gap("gpu:0", 40 * NS, JUMP)))
    assert JUMP in text


def test_a_short_estimate_names_the_steps_of_cpu_time_and_no_sensor():
    short = stage("counter latch")
    short.best = short.best.model_copy(update={"method": "estimated", "sources": ("estimate:cpu",)})
    short.duration_s = 0.04
    model = SimpleNamespace(gaps=(), devices=(SimpleNamespace(device="estimate:cpu", refresh_s=0.01),))
    (text,) = caveats([short], None, model)
    assert text == (
        "40 ms is short for an estimate from CPU time, which is counted in steps of 10 ms; "
        "the program should run for at least 0.1 s"
    )


def test_a_random_error_far_below_the_scale_error_of_an_estimate_is_no_warning():
    """Next to `±70 %, estimated`, a warning said that the random interval is wider than 5 %."""
    found = stage("counter latch")
    scale = {"method": "estimated", "sources": ("estimate:cpu",), "gain_error_rel": 0.7}
    found.best = found.best.model_copy(update=scale)
    assert caveats([found], None, trace()) == []
    found.best = found.best.model_copy(update={"coverage": 0.72})
    assert len(caveats([found], None, trace())) == 1, "a lower bound is another matter"
    found.best = found.best.model_copy(update={"coverage": 1.0, "half_width_j": 2_500.0})
    assert len(caveats([found], None, trace())) == 1
