"""Joules per phase on a machine where the right answer is known, and a training that never notices it was measured."""

import json
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stats_training import (
    Machine,
    MachineTrainer,
    all_numbers,
    assert_same_numbers,
    make_trainer,
    trained,
)

from joulelab.clock import NS
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.figures import EnergyFigure, ErrorComponent
from joulelab.train.parallel import Ranks
from joulelab.train.stats import phase_energy, phase_times
from joulelab.train.stats.hooks import NoOpStats, StatsList
from joulelab.train.stats.isolated import (
    LOOP_OF_PHASE,
    Isolation,
    LoopPlan,
    LoopWindow,
    Snapshot,
    TooLittleTime,
    isolated_energy,
)
from joulelab.train.stats.phase_energy import AveragedEnergyStats, EnergyStats
from joulelab.train.stats.step_energy import CleanWindow, energy_per_step, last_timestamp_ns
from joulelab.train.trainer import TrainerCallbacks

QUICK = LoopPlan(window_s=1.6, settle_s=0.2, rounds=4)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    monkeypatch.setattr(phase_times, "time", SimpleNamespace(perf_counter=machine.perf_counter))
    monkeypatch.setattr(MachineTrainer, "machine", machine)
    return machine


def measured(machine, steps=40, costs=None, meter=None, plan=QUICK, earlier_attempts=(), **config):
    """What the tracker found, its text, and its stages."""
    results, stages = {}, []

    @contextmanager
    def aside(name):
        stages.append(name)
        yield

    stats = EnergyStats(plan=plan, now_ns=machine.now_ns)
    trainer = make_trainer(stats, kind=MachineTrainer, max_steps=steps, **config)
    trainer.costs = {**MachineTrainer.costs, **(costs or {})}
    meter = meter or machine.meter()
    context = {"aside": aside, "result": results.__setitem__, "earlier_attempts": earlier_attempts}
    text = trained(trainer, meter=meter, **context)
    return results["energy"], text, stages, meter


def phases(found, way="isolated"):
    return {phase: row["energy_j"] for phase, row in found[way]["phases"].items()}


def per_step(costs, accumulate=2):
    joules = {phase: seconds * watts for phase, (seconds, watts) in costs.items()}
    return {phase: value * (1 if phase == "optimizer_step" else accumulate) for phase, value in joules.items()}


def test_the_isolated_split_finds_what_each_phase_costs_and_closes_on_the_step(machine):
    found, text, stages, meter = measured(machine)
    truth = per_step(MachineTrainer.costs)
    split = phases(found)
    assert split == pytest.approx(truth, rel=0.01)
    assert sum(split.values()) == pytest.approx(found["isolated"]["step"]["energy_j"], rel=1e-12)
    assert stages == ["train.phases"]
    assert found["isolated"]["agrees"] is True
    assert found["direct"]["step"]["energy_j"] == pytest.approx(sum(truth.values()), rel=0.01)
    assert "agrees with undisturbed training" in text
    assert [kind for kind, _ in meter.events] == ["isolated"]


def test_powers_are_reported_where_time_is_resolved(machine):
    found, text, _, _ = measured(machine)
    rows = found["isolated"]["phases"]
    assert rows["forward"]["power_w"] == pytest.approx(300, rel=0.02)
    assert rows["optimizer_step"]["power_w"] == pytest.approx(700, rel=0.02)
    assert [line.split()[0] for line in text.splitlines()[2:9]] == [
        "input", "forward", "forward.student", "forward.teacher", "backward", "optimizer_step", "step",
    ]  # fmt: skip


class PartsTrainer(MachineTrainer):
    """Its forward pass costs what its parts do."""

    part_costs = {"forward.teacher": (0.02, 150.0), "forward.student": (0.03, 400.0)}

    def forward(self, batch):
        for name, cost in self.part_costs.items():
            with self.mark_phase(name):
                self.machine.spend(*cost)
        return self.objective(self.model, batch, lambda name: nullcontext())


def test_the_forward_pass_is_taken_apart_into_the_parts_it_marks(machine):
    results = {}
    stats = EnergyStats(plan=QUICK, now_ns=machine.now_ns)
    trainer = make_trainer(stats, kind=PartsTrainer, max_steps=40)
    text = trained(trainer, meter=machine.meter(), result=results.__setitem__)
    isolated = results["energy"]["isolated"]
    parts = {name: row["energy_j"] for name, row in isolated["parts"].items()}
    assert parts == pytest.approx({"forward.teacher": 2 * 3.0, "forward.student": 2 * 12.0}, rel=0.02)
    assert sum(parts.values()) == pytest.approx(isolated["phases"]["forward"]["energy_j"], rel=1e-9)
    assert isolated["agrees"] is True
    assert "  forward.student" in text


class Rounds:
    """Makes the batches of ten steps at a time, as on-policy distillation does."""

    drawn = 0

    def is_due(self, position):
        return position.drawn >= self.drawn

    def prepare(self, position, paused):
        self.drawn += 20


class RoundTrainer(MachineTrainer):
    def next_batch(self):
        assert self.position.drawn < self.callbacks.preparation.drawn, "this batch does not exist yet"
        return super().next_batch()


def test_batches_that_do_not_exist_yet_are_not_drawn(machine):
    """The warm-up ends where a round ends."""
    results = {}
    around = TrainerCallbacks(phase=lambda name: nullcontext(), preparation=Rounds())
    trainer = make_trainer(EnergyStats(plan=QUICK, now_ns=machine.now_ns), around, RoundTrainer, max_steps=40)
    trained(trainer, meter=machine.meter(), result=results.__setitem__)
    assert phases(results["energy"]) == pytest.approx(per_step(MachineTrainer.costs), rel=0.01)
    assert trainer.position.drawn == 80


def test_a_resumed_training_uses_the_isolation_of_an_earlier_attempt(machine, tmp_path):
    first, _, _, meter = measured(machine)
    events, trace = tmp_path / "events.jsonl", tmp_path / "earlier.jsonl"
    events.write_text(
        "".join(json.dumps({"kind": kind, "mono_ns": 1, **fields}) + "\n" for kind, fields in meter.events)
    )
    trace.write_bytes(meter.trace_path.read_bytes())
    machine.spend(3600, 1000)  # another attempt, an hour later
    again, text, stages, _ = measured(machine, earlier_attempts=[(events, trace)])
    assert stages == [] and again["isolated"]["duration_s"] == first["isolated"]["duration_s"]
    short, _, stages, _ = measured(machine, steps=5, earlier_attempts=[(events, trace)])
    assert stages == [] and phases(short) == phases(again), "also an attempt that ends within the warm-up"
    events.write_text(events.read_text().replace("1 x ", "8 x "))
    assert measured(machine, earlier_attempts=[(events, trace)])[2] == ["train.phases"], "other ranks, other energy"
    events.write_text(events.read_text().replace("8 x ", "1 x "))
    assert phases(again) == pytest.approx(phases(first), rel=1e-9)
    assert again["isolated"]["energy_j"] == pytest.approx(first["isolated"]["energy_j"], rel=1e-9)
    assert "agrees with undisturbed training" in text


def test_copying_the_state_is_part_of_the_limit(machine, monkeypatch):
    class SlowSnapshot(Snapshot):
        def __init__(self, trainer):
            super().__init__(trainer)
            machine.spend(10, 100)

    monkeypatch.setattr(phase_energy, "Snapshot", SlowSnapshot)
    found, _, _, _ = measured(machine, steps=400, plan=None, isolation_s=40)
    assert found["isolated"]["duration_s"] == pytest.approx(10 + 20, abs=4)  # restoring takes no time here
    found, text, _, _ = measured(machine, steps=400, plan=None, isolation_s=20)
    assert "The attempt took 10.0 s" in text
    assert found["isolated"]["phases"] == {} and found["isolated"]["duration_s"] == pytest.approx(10)
    assert "it may take 20.0 s" in found["isolated"]["problem"]


def test_ten_optimizer_steps_raise_that_phase_and_no_other(machine):
    once, _, _, _ = measured(machine)
    seconds, watts = MachineTrainer.costs["optimizer_step"]
    tenfold, _, _, _ = measured(machine, costs={"optimizer_step": (10 * seconds, watts)})
    before, after = phases(once), phases(tenfold)
    assert after["optimizer_step"] == pytest.approx(10 * before["optimizer_step"], rel=0.01)
    for phase in ("input", "forward", "backward"):
        assert after[phase] == pytest.approx(before[phase], rel=0.02)


STEP_S = sum(seconds * (1 if phase == "optimizer_step" else 2) for phase, (seconds, _) in MachineTrainer.costs.items())


def test_isolation_takes_a_tenth_of_the_training_and_its_figures_say_that_they_are_coarse(machine):
    found, text, _, _ = measured(machine, steps=round(240 / STEP_S), plan=None)
    isolated = found["isolated"]
    assert 12 < isolated["duration_s"] <= 30  # repetitions of 0.3 s are not divided
    assert isolated["shortened"]["limit_s"] == pytest.approx(24, rel=0.1)
    assert isolated["shortened"]["whole_s"] > 30
    assert "so the figures per phase are coarse" in text
    assert phases(found) == pytest.approx(per_step(MachineTrainer.costs), rel=0.1)


@pytest.mark.parametrize(("scale", "budget_s"), [(1.0, 240), (0.1, 60), pytest.param(0.02, 30, marks=pytest.mark.slow)])
def test_isolation_takes_a_tenth_of_a_training_that_energy_limits(machine, scale, budget_s):
    """Also where ten steps are over before the counter has moved: its first readings say nothing of the power."""
    spans = []

    @contextmanager
    def aside(name):
        begin_s = machine.seconds
        yield
        spans.append(machine.seconds - begin_s)

    def counter():  # refreshes every 0.1 s
        return float(np.interp(machine.seconds // 0.1 * 0.1, *zip(*machine._edges, strict=True)))

    costs = {phase: (seconds * scale, watts) for phase, (seconds, watts) in MachineTrainer.costs.items()}
    mean_w = sum(per_step(costs).values()) / (STEP_S * scale)
    around = TrainerCallbacks(phase=lambda name: nullcontext(), energy_j=counter)
    stats = EnergyStats(now_ns=machine.now_ns)
    trainer = make_trainer(stats, around, MachineTrainer, max_steps=None, max_energy_j=budget_s * mean_w)
    trainer.costs, trainer.budget.clock_s = costs, machine.perf_counter
    begin_s, results = machine.seconds, {}
    trained(trainer, meter=machine.meter(), aside=aside, result=results.__setitem__)
    training_s = machine.seconds - begin_s - sum(spans)
    assert training_s == pytest.approx(budget_s, rel=0.1)
    assert sum(spans) <= 0.13 * training_s  # repetitions are not divided
    assert results["energy"]["isolated"]["phases"]


def test_isolation_takes_longer_on_request(machine):
    asked, text, _, _ = measured(machine, steps=round(60 / STEP_S), plan=None, isolation_s=170)
    assert asked["isolated"]["duration_s"] > 30
    assert asked["isolated"]["shortened"] is None
    assert "coarse" not in text


def test_a_training_that_is_too_short_is_not_isolated_and_loses_no_time(machine):
    found, text, stages, _ = measured(machine, steps=round(60 / STEP_S), plan=None)
    assert found["isolated"]["phases"] == {}
    assert found["isolated"]["duration_s"] is None and stages == []
    assert "10 % of the training" in found["isolated"]["problem"]
    assert "training.isolation_s" in text
    assert found["time-share"]["phases"]


@pytest.mark.parametrize(
    ("left_s", "rounds", "window_s"), [(40.0, 4, 1.5), (16.0, 2, 1.5), (8.0, 2, 0.75), (3.2, 2, 0.25)]
)
def test_less_time_means_fewer_rounds_then_shorter_windows(left_s, rounds, window_s):
    plan = LoopPlan(limit_s=left_s).within(left_s, [0.01] * 4)
    assert (plan.rounds, plan.window_s) == (rounds, pytest.approx(window_s, rel=0.01))
    assert plan.rounds * plan.round_s([0.01] * 4) <= left_s + 1e-9


def test_windows_below_one_refresh_of_the_sensor_are_refused():
    with pytest.raises(TooLittleTime):
        LoopPlan(limit_s=1.0).within(1.0, [0.01] * 4)


def test_time_shares_are_wrong_where_phases_draw_unlike_power_and_state_what_they_are(machine):
    found, text, _, _ = measured(machine)
    shares = phases(found, "time-share")
    assert sum(shares.values()) == pytest.approx(found["direct"]["step"]["energy_j"])
    assert shares["forward"] > 1.2 * phases(found)["forward"]
    assert found["time-share"]["phases"]["forward"]["method"] == "time-share"
    assert "time-share" in text
    for phase, row in found["time-share"]["phases"].items():
        assert abs(row["energy_j"] - phases(found)[phase]) <= row["half_width_j"], "no tight interval"


def test_time_without_readings_widens_the_energy_of_a_step():
    """70 % of 10 s have readings, and no power limit is known: the rest may have used nothing or twice as much."""
    seen = EnergyFigure(energy_j=700.0, method="counter", coverage=0.7, half_width_j=1.0)
    found = energy_per_step([CleanWindow(((0, 10 * NS),), steps=100)], lambda spans: seen).step
    assert found.energy_j == pytest.approx(10.0)
    assert found.half_width_j >= 3.0


def test_the_lag_of_the_samples_adds_up_over_rounds_and_cancels_between_loops():
    """It is the same in all windows; added in quadrature over four rounds, half of it was lost."""
    lag = ErrorComponent(name="sample lag", joules=(-2.0, 2.0), shared=True)
    latch = ErrorComponent(name="counter latch", joules=(1.0,))
    seen = EnergyFigure(energy_j=100.0, method="counter").with_errors(lag, latch)
    loops = dict.fromkeys([*LOOP_OF_PHASE.values(), "step"])
    windows = [LoopWindow(loop, number, 0, 5 * NS, repetitions=10) for number in range(4) for loop in loops]
    found = isolated_energy(windows, lambda spans: seen)
    assert found.step.half_width_j == pytest.approx((0.2**2 + 0.05**2) ** 0.5)
    assert found.phases["backward"].half_width_j == pytest.approx(0.1 * (2 / 4) ** 0.5)


def test_a_step_that_isolation_does_not_repeat_faithfully_is_flagged(machine, monkeypatch):
    """A card that throttles in training and not in the loops, say."""
    run = Isolation.run

    def cheaper(self):
        self._trainer.costs = {**MachineTrainer.costs, "backward": (0.09, 400.0)}
        windows = run(self)
        self._trainer.costs = MachineTrainer.costs
        return windows

    monkeypatch.setattr(Isolation, "run", cheaper)
    found, text, _, _ = measured(machine)
    assert found["isolated"]["agrees"] is False
    assert "differs from undisturbed training by -1" in text
    assert "use the isolated energies as shares" in text


def test_drift_cancels_in_the_mirrored_order(machine):
    """A card that draws 0.2 % more with every second."""
    spend = machine.spend
    machine.spend = lambda seconds, watts: spend(seconds, watts * (1 + 0.002 * (machine.seconds - 1000)))
    found, _, _, _ = measured(machine, steps=20)
    split = phases(found)
    truth = per_step(MachineTrainer.costs)
    for phase in ("forward", "backward", "optimizer_step"):
        assert split[phase] / split["forward"] == pytest.approx(truth[phase] / truth["forward"], rel=0.01)


def test_phases_of_seconds_are_read_directly(machine):
    costs = {"forward": (1.5, 300.0), "backward": (2.5, 500.0)}
    found, _, _, _ = measured(machine, steps=41, costs=costs)
    direct = phases(found, "direct")
    assert set(direct) == {"forward", "backward"}
    assert direct["backward"] == pytest.approx(2 * 2.5 * 500, rel=0.01)


def test_without_a_sensor_nothing_is_taken_apart_and_nothing_is_zero(machine):
    meter = machine.meter(reason="no NVIDIA GPU")
    found, text, stages, _ = measured(machine, meter=meter)
    assert stages == []
    assert found["direct"]["step"] is None
    assert found["isolated"]["step"] is None
    assert phases(found, "time-share") == {}
    assert text == "energy per phase: missing. gpu: no NVIDIA GPU (buy one)"


def test_a_missing_meter_is_reported():
    text = trained(make_trainer(EnergyStats(), max_steps=12))
    assert text == "energy per phase: missing. the training runs without a meter (train inside a run: `joulelab train`)"


def test_an_estimate_is_called_one(machine):
    found, text, _, _ = measured(machine, meter=machine.meter("cpu_estimate"))
    assert found["figure"]["method"] == "estimated"
    assert "The energy is estimated from CPU time" in text
    assert phases(found)["backward"] == pytest.approx(90.0, rel=0.05)


def test_a_training_shorter_than_the_warm_up_keeps_its_average(machine):
    costs = {"backward": (0.2, 500.0)}
    found, text, stages, _ = measured(machine, steps=8, costs=costs)
    assert stages == []
    assert found["direct"]["step"]["energy_j"] == pytest.approx(
        sum(per_step({**MachineTrainer.costs, **costs}).values()), rel=0.02
    )
    assert "Not isolated: training ended within the 10 warm-up steps" in text


def reporting(losses):
    return TrainerCallbacks(on_log=lambda report: losses.append((report.loss, report.parts, report.learning_rate)))


def test_the_training_is_bit_for_bit_the_one_without_the_tracker(machine):
    losses = {"plain": [], "watched": []}
    plain = make_trainer(around=reporting(losses["plain"]), kind=MachineTrainer)
    plain.train()
    expected = all_numbers(plain)
    stats = EnergyStats(plan=QUICK, now_ns=machine.now_ns)
    watched = make_trainer(stats, reporting(losses["watched"]), kind=MachineTrainer, prefetch=2)
    assert "isolated" in trained(watched, meter=machine.meter())
    assert losses["watched"] == losses["plain"]
    assert_same_numbers(all_numbers(watched), expected)
    assert watched.position == plain.position


@pytest.mark.parametrize(
    "config",
    [{}, {"optimizer": "sgd"}, {"optimizer": "adafactor"}, {"precision": "fp16"}],
    ids=["adamw", "sgd", "adafactor", "fp16"],
)
def test_a_snapshot_undoes_steps_that_never_were(config):
    trainer = make_trainer(schedule="constant", **config)
    for _ in range(3):
        trainer.step()
    before, scaler = all_numbers(trainer), trainer.loop_state()["scaler"]
    position, rates = trainer.position, [group["lr"] for group in trainer.optimizer.param_groups]
    snapshot = Snapshot(trainer)
    Isolation(trainer, LoopPlan(window_s=0.005, settle_s=0.005, rounds=2), time.monotonic_ns, lambda: None).run()
    assert not torch.equal(all_numbers(trainer)["rng"], before["rng"])
    snapshot.restore()
    assert_same_numbers(all_numbers(trainer), before)
    assert trainer.loop_state()["scaler"] == scaler
    assert trainer.position == position
    assert [group["lr"] for group in trainer.optimizer.param_groups] == rates
    assert all(parameter.grad is None for parameter in trainer.trained.parameters())


def test_a_snapshot_forgets_what_the_optimizer_first_saw_meanwhile():
    trainer = make_trainer()
    snapshot = Snapshot(trainer)
    trainer.step()
    assert trainer.optimizer.state
    snapshot.restore()
    assert not trainer.optimizer.state


def test_a_loop_that_fails_is_reported_and_training_continues(machine, monkeypatch):
    def fail(self):
        self._trainer.forward(self._trainer.next_batch())
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(Isolation, "run", fail)
    plain = make_trainer(kind=MachineTrainer)
    plain.train()
    watched = make_trainer(EnergyStats(plan=QUICK, now_ns=machine.now_ns), kind=MachineTrainer)
    text = trained(watched, meter=machine.meter())
    assert "Not isolated: OutOfMemoryError: no room" in text
    assert_same_numbers(all_numbers(watched), all_numbers(plain))


def test_a_loop_that_fails_on_one_of_several_ranks_ends_the_run(machine, monkeypatch):
    """Its next step would otherwise pair with the collective operations that the other ranks are in."""

    def fail(self):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(Isolation, "run", fail)
    watched = make_trainer(EnergyStats(plan=QUICK, now_ns=machine.now_ns), kind=MachineTrainer)

    class TwoRanks(Ranks):
        def sum(self, values):
            return list(values)

    watched.ranks = TwoRanks(1, 2)
    with pytest.raises(JoulelabError, match="failed on rank 1: OutOfMemoryError: no room"):
        trained(watched, meter=machine.meter())


def test_a_run_asked_to_stop_leaves_the_loops_and_then_saves_as_ever(machine):
    requested = []

    def check_stop():
        if machine.seconds > 1020:  # in the middle of the loops
            requested.append(1)
            raise EndedBySignal(15)

    around = TrainerCallbacks(check_stop=check_stop)
    trainer = make_trainer(EnergyStats(plan=QUICK, now_ns=machine.now_ns), around, kind=MachineTrainer)
    with pytest.raises(EndedBySignal):
        trained(trainer, meter=machine.meter())
    assert len(requested) == 2  # once in the loops, once by the loop itself
    assert trainer.position.step == 11
    plain = make_trainer(kind=MachineTrainer)
    for _ in range(11):
        plain.step()
    assert_same_numbers(all_numbers(trainer), all_numbers(plain))


def test_averaged_energy_is_the_whole_over_the_steps_and_its_phases_a_share_of_time(machine):
    results = {}
    stats = AveragedEnergyStats(now_ns=machine.now_ns)
    trainer = make_trainer(stats, kind=MachineTrainer, max_steps=50)
    text = trained(trainer, meter=machine.meter(), result=results.__setitem__)
    found = results["averaged-energy"]
    assert found["step"]["energy_j"] == pytest.approx(sum(per_step(MachineTrainer.costs).values()), rel=0.01)
    assert sum(row["energy_j"] for row in found["phases"].values()) == pytest.approx(found["step"]["energy_j"])
    assert {row["method"] for row in found["phases"].values()} == {"time-share"}
    assert "49 steps" in text  # the first one is setup


def test_what_another_tracker_spends_between_steps_is_not_the_training_s(machine):
    results = {}
    both = StatsList([AveragedEnergyStats(machine.now_ns), EnergyStats(plan=QUICK, now_ns=machine.now_ns)])
    trained(make_trainer(both, kind=MachineTrainer, max_steps=50), meter=machine.meter(), result=results.__setitem__)
    averaged = results["averaged-energy"]
    assert averaged["step"]["energy_j"] == pytest.approx(sum(per_step(MachineTrainer.costs).values()), rel=0.01)
    assert averaged["duration_s"] < 20


def test_taking_the_step_apart_takes_nothing_off_a_budget_and_is_over_for_all_trackers(machine):
    seen = []

    class Listening(NoOpStats):
        def start(self, phase):
            seen.append(("start", phase))

        def stop(self, phase):
            seen.append(("stop", phase))

    both = StatsList([EnergyStats(plan=QUICK, now_ns=machine.now_ns), Listening()])
    trainer = make_trainer(both, kind=MachineTrainer, max_steps=40)
    trainer.budget.clock_s = machine.perf_counter
    trainer.budget._began_s = machine.perf_counter()
    results = {}
    trained(trainer, meter=machine.meter(), result=results.__setitem__)
    assert [edge for edge, phase in seen if phase == "aside"] == ["start", "stop"]
    step_s = sum(
        seconds * (1 if phase == "optimizer_step" else 2) for phase, (seconds, _) in MachineTrainer.costs.items()
    )
    spent_s = trainer.budget.state()["time_s"]
    assert spent_s == pytest.approx(40 * step_s, rel=0.05) and machine.seconds > 1000 + 2 * spent_s


def test_the_last_line_of_a_trace_is_found_behind_a_torn_one(tmp_path):
    trace = tmp_path / "trace.jsonl"
    assert last_timestamp_ns(trace) == 0
    trace.write_text('{"mono_ns": 5}\n{"mono_ns": 7}\n{"mono_')
    assert last_timestamp_ns(trace) == 7


class ColdTrainer(MachineTrainer):
    """Its first forward pass loads libraries and compiles, as on a GPU."""

    first_s, costs = 0.0, {phase: (seconds / 5, watts) for phase, (seconds, watts) in MachineTrainer.costs.items()}

    def forward(self, batch):
        self.machine.spend(self.first_s, 80.0)
        self.first_s = 0.0
        return super().forward(batch)


@pytest.mark.parametrize("tracker", [EnergyStats, AveragedEnergyStats])
def test_a_slow_first_step_changes_no_figure(machine, tracker):
    found = []
    for first_s in (0.0, 8.0):
        results = {}
        trainer = make_trainer(tracker(now_ns=machine.now_ns), kind=ColdTrainer, max_steps=700)
        trainer.first_s = first_s
        trained(trainer, meter=machine.meter(), result=results.__setitem__)
        (values,) = results.values()
        found.append(values)
    normal, slow = ([found.get("time-share", found)["phases"], found.get("direct", found)["step"]] for found in found)
    assert [row["energy_j"] for row in slow[0].values()] == pytest.approx(
        [row["energy_j"] for row in normal[0].values()], rel=0.02
    )
    assert slow[1]["energy_j"] == pytest.approx(normal[1]["energy_j"], rel=0.02)
    if tracker is EnergyStats:  # neither refused for its expected length, nor is a short phase taken for a long one
        assert found[1]["isolated"]["rounds"] == found[0]["isolated"]["rounds"] > 0
        assert found[1]["direct"]["phases"] == {}
