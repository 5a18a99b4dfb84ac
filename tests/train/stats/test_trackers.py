"""The trackers of the loop, one by one and all at once; none of them changes what is trained."""

import csv
import gzip
import json
import random
import statistics

import pytest
import torch
from stats_training import all_numbers, assert_same_numbers, make_trainer, trained

from joulelab import lookup
from joulelab.train.stats import hooks, phase_times
from joulelab.train.stats.hooks import StatsList, TrackerContext, TrainerStats, load_tracker, unused_path
from joulelab.train.stats.phase_times import RESERVOIR_SIZE, CudaClock, Durations, HostClock, PhaseTimes, SimpleStats
from joulelab.train.stats.step_energy import MAX_WINDOWS, CleanWindows
from joulelab.train.stats.torch_profiler import TorchProfilerStats


def test_all_trackers_at_once_leave_the_training_as_it_is(tmp_path):
    pytest.importorskip("codecarbon")
    plain = make_trainer(max_steps=12)
    plain.train()
    results = {}
    everything = StatsList([load_tracker(name) for name in lookup.TRAINER_STATS.names()])
    watched = make_trainer(everything, max_steps=12)
    output_text = trained(watched, folder=tmp_path, result=results.__setitem__)
    assert_same_numbers(all_numbers(watched), all_numbers(plain))
    assert set(results) == {"simple", "codecarbon", "averaged-energy", "torch-profiler", "energy"}
    json.dumps(results)  # it goes into the run's events
    for words in ("p95 ms", "codecarbon (its own", "averaged energy: missing", "torch profiler", "energy per phase"):
        assert words in output_text
    assert {path.name for path in tmp_path.iterdir()} == {"simple", "codecarbon", "torch-profiler"}


def test_simple_states_mean_and_quantiles_per_phase_and_writes_them_down(tmp_path):
    results = {}
    output_text = trained(make_trainer(SimpleStats()), folder=tmp_path, result=results.__setitem__)
    assert [row["phase"] for row in results["simple"]["phases"]] == [
        "train", "step", "input", "forward", "backward", "optimizer_step",
    ]  # fmt: skip
    heads = "phase clock count mean ms p50 ms p95 ms p99 ms max ms"
    assert output_text.splitlines()[0].split() == heads.split()
    rows = {row["phase"]: row for row in csv.DictReader((tmp_path / "simple" / "phases.csv").open())}
    assert (rows["forward"]["count"], rows["optimizer_step"]["count"]) == ("60", "30")  # two micro-batches a step
    assert float(rows["forward"]["p50_s"]) <= float(rows["forward"]["p99_s"]) <= float(rows["forward"]["max_s"])
    assert json.loads((tmp_path / "simple" / "phases.json").read_text())["phases"] == results["simple"]["phases"]
    losses = list(csv.DictReader((tmp_path / "simple" / "losses.csv").open()))
    assert [row["step"] for row in losses] == ["5", "10", "15", "20", "25", "30"]
    assert output_text.splitlines()[-1].startswith(f"loss {float(losses[0]['loss']):.4f} at the first log line")


def test_a_second_training_writes_next_to_the_first(tmp_path):
    for _ in range(2):
        trained(make_trainer(SimpleStats(), max_steps=2), folder=tmp_path)
    assert {path.name for path in (tmp_path / "simple").glob("*.csv")} == {
        "losses.csv", "losses_2.csv", "phases.csv", "phases_2.csv", "steps.csv", "steps_2.csv",
    }  # fmt: skip
    assert unused_path(tmp_path / "simple", "phases", ".csv").name == "phases_3.csv"


def test_durations_are_exact_while_few_and_a_fair_sample_beyond():
    few, many, state = Durations(), Durations(), random.getstate()
    values = [random.Random(1).lognormvariate(0, 1) for _ in range(101)]
    for value in values:
        few.add(value)
    assert few.quantiles_s(0.5) == [statistics.median(values)]
    for number in range(100_000):
        many.add(number / 100_000)
    assert many.mean_s == pytest.approx(0.5, rel=1e-4)
    assert many.quantiles_s(0.5, 0.99) == [pytest.approx(0.5, abs=0.03), pytest.approx(0.99, abs=0.006)]
    assert len(many._kept) == RESERVOIR_SIZE
    assert random.getstate() == state


class FakeEvents:
    """A device that runs behind: events are passed only when the test says so."""

    def __init__(self):
        self.made, self.recorded, self.passed = 0, 0, 0

    def __call__(self, enable_timing):
        assert enable_timing
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device):
        self._device = device

    def record(self):
        self._device.recorded += 1
        self.place = self._device.recorded

    def query(self):
        return self.place <= self._device.passed

    def elapsed_time(self, end):
        assert end.query()
        return 10.0 * (end.place - self.place)  # ms


def test_device_times_come_late_and_without_waiting(monkeypatch):
    device = FakeEvents()
    monkeypatch.setattr(torch.cuda, "Event", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a tracker waited for the device"))
    clock = CudaClock()
    for phase in ("forward", "backward"):
        clock.start(phase)
        clock.stop(phase)
    assert clock.harvest() == []
    device.passed = 3  # all of the forward pass, the begin of the backward pass
    assert [(timed.phase, timed.device_s) for timed in clock.harvest()] == [("forward", 0.01)]
    device.passed = 4
    (backward,) = clock.harvest()
    assert (backward.phase, backward.duration_s) == ("backward", 0.01)
    assert backward.host_s < 0.01
    clock.start("forward")
    clock.stop("forward")
    assert device.made == 4  # the next phases use the same events again


def test_a_device_far_behind_costs_no_memory_without_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvents())
    monkeypatch.setattr(phase_times, "MAX_PENDING", 3)
    clock = CudaClock()
    for _ in range(5):
        clock.start("forward")
        clock.stop("forward")
    assert clock.untimed == 2


def test_a_phase_that_never_began_is_passed_over():
    clock = HostClock()
    clock.stop("forward")
    assert clock.harvest() == []


def test_no_op_sync_waits_at_every_hook(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    stats = hooks.NoOpSyncStats()
    stats.attach(TrackerContext(trainer=None, device=torch.device("cuda")))
    for phase in ("step", "forward"):
        stats.start(phase)
        stats.stop(phase)
    assert waits == [torch.device("cuda")] * 4


def test_the_profiler_writes_a_trace_of_a_few_steps_and_is_gone(tmp_path):
    stats = TorchProfilerStats(wait=1, warmup=1, active=2)
    output_text = trained(make_trainer(stats, max_steps=6), folder=tmp_path)
    assert stats._profiler is None
    (trace,) = (tmp_path / "torch-profiler").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    assert "steps 3 to 4 of this attempt" in output_text
    assert "aten::" in output_text


def test_the_profiler_reports_it_when_training_was_too_short():
    output_text = trained(make_trainer(TorchProfilerStats(), max_steps=3))
    assert output_text == "torch profiler: training ended within the 4 steps before recording"


def test_an_interruption_is_a_hook_of_its_own():
    class Journal(TrainerStats):
        lines = ()

        def start(self, phase):
            self.lines += (f"start {phase}",)

        def stop(self, phase):
            self.lines += (f"stop {phase}",)

    journal = Journal()
    several = StatsList([journal])
    several.start_aside()
    several.stop_aside()
    assert journal.lines == ("start aside", "stop aside")


class Clock:
    ns = 0

    def __call__(self):
        return self.ns


def steps(clean, clock, count, each_s=0.5):
    for _ in range(count):
        clean.start_step()
        clock.ns += round(each_s * 1e9)
        clean.stop_step()


def test_a_clean_window_ends_where_something_else_happens():
    clock = Clock()
    clean = CleanWindows(clock)
    steps(clean, clock, 4)
    clock.ns += 1_000_000_000  # an evaluation without a hook
    steps(clean, clock, 4)
    clean.interrupt()
    assert [(window.steps, window.duration_s) for window in clean.windows] == [(4, 2.0), (4, 2.0)]


def test_waiting_for_the_losses_is_part_of_the_steps():
    clock = Clock()
    clean = CleanWindows(clock)
    steps(clean, clock, 4)
    clock.ns += 1_000_000_000  # the device finishes its queue
    clean.touch()
    steps(clean, clock, 2)
    clean.interrupt()
    assert [(window.steps, window.duration_s) for window in clean.windows] == [(6, 4.0)]


def test_a_long_training_keeps_a_bounded_number_of_windows_and_all_of_its_time():
    clock = Clock()
    clean = CleanWindows(clock)
    steps(clean, clock, 20_000, each_s=1.0)
    clean.interrupt()
    assert len(clean.windows) <= MAX_WINDOWS + 1
    assert sum(window.steps for window in clean.windows) == 20_000
    assert sum(window.duration_s for window in clean.windows) == 20_000
    assert all(len(window.spans) == 1 for window in clean.windows)


def test_hooks_of_a_users_tracker_under_the_earlier_name_are_called(capsys):
    class Earlier(TrainerStats):
        def __init__(self):
            self.calls = []

        def start_optimiser_step(self):
            self.calls.append("start")

        def stop_optimiser_step(self):
            self.calls.append("stop")

    tracker = Earlier()
    with tracker.phase("optimizer_step"):
        pass
    assert tracker.calls == ["start", "stop"]
    assert "start_optimiser_step is now called start_optimizer_step" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "watched"), [(1, []), (5, [1]), (6, [1, 5]), (26, [1, 5, 15, 25])])
def test_a_few_steps_are_timed_and_never_the_first(steps, watched):
    times, found = PhaseTimes(torch.device("cpu")), []
    for step in range(steps):
        times.start("step")
        found += [step] if times.watching else []
        times.start("forward")
        times.stop("forward")
        times.stop("step")
    times.harvest()
    assert found == watched
    assert times.shares().keys() == ({"input", "forward", "backward", "optimizer_step"} if watched else set())
