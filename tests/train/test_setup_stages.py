"""The first step and compilation of a training are setup: outside its rates, and without any effect on its losses."""

import time

import pytest
import torch
from simulated_machine import POWER_W, machine  # noqa: F401 (a fixture)
from test_trainer import CrossEntropy, Ragged, model

from joulelab.meter.config import EnergyConfig
from joulelab.meter.trace import read_lines
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec
from joulelab.train import trainer as loop
from joulelab.train.budget import Budget
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import track_compilations
from joulelab.train.training_session import TrainingJob, train_in_run


class SlowStart(CrossEntropy):
    """The first batch of a process takes a second, as where kernels are loaded."""

    def __init__(self, first_s=1.0):
        self.first_s = first_s

    def __call__(self, net, batch, phase):
        time.sleep(self.first_s)
        self.first_s = 0.0
        return super().__call__(net, batch, phase)


ESTIMATE = EnergyConfig(estimate_cpu=True, gpus="none")


def train(store, objective=None, energy=ESTIMATE, after=lambda: None, **config):
    measured = MeasuredRun(store, MeasureSpec(name="t", energy=energy))
    run = measured.begin()
    settings = {"epochs": None, "learning_rate": 0.01, "log_every_steps": 1}
    task = TrainingJob(
        stage="student.train",
        role="student",
        model=model(),
        batches=Ragged([8, 8]),
        objective=objective or CrossEntropy(),
        config=TrainingConfig(**{**settings, **config}),
        seed=0,
    )
    train_in_run(run, task)
    after()
    record = measured.end("done")
    return record, [line["loss"] for line in read_lines(measured.paths.metrics) if "loss" in line]


def test_the_first_step_of_a_long_training_is_setup(tmp_path):
    record, losses = train(tmp_path, SlowStart(), max_steps=60)
    trained, setup = record.stage("student.train"), record.stage("student.train.setup")
    assert (trained.tokens, setup.tokens) == (59 * 8, 8)
    assert (setup.role, setup.part_of) == ("setup", "student.train")
    assert setup.duration_s >= 1.0
    assert trained.duration_s < 1.0 or trained.tokens_per_s < 59 * 8  # slower only where the machine is
    assert len(losses) == 60


@pytest.mark.parametrize("limit", [{"max_steps": 3}, {"max_tokens": 24}])
def test_the_first_step_of_a_short_training_is_setup_too(tmp_path, limit):
    record, _ = train(tmp_path, **limit)
    trained, setup = record.stage("student.train"), record.stage("student.train.setup")
    assert (trained.tokens, setup.tokens) == (16, 8)
    assert trained.tokens_per_s > 0


class Work(CrossEntropy):
    """A step takes 0.2 s of the simulated machine, the first one of a process 5 s."""

    def __init__(self, machine):  # noqa: F811
        self.machine, self.seconds = machine, 5.0

    def __call__(self, net, batch, phase):
        self.machine.work(self.seconds)
        self.seconds = 0.2
        return super().__call__(net, batch, phase)


def test_trainings_of_10_and_of_1000_steps_of_equal_cost_report_equal_joules_per_token(tmp_path, machine):  # noqa: F811
    """The first step was kept where it was more than 2 % of the training: 3.4 times the J/token for 10 steps."""
    short, long = (
        train(tmp_path / str(steps), Work(machine), EnergyConfig(), lambda: machine.work(1), max_steps=steps)[0]
        for steps in (10, 1000)
    )
    short, long = short.stage("student.train"), long.stage("student.train")
    assert (short.tokens, long.tokens) == (9 * 8, 999 * 8)
    assert short.j_per_token == pytest.approx(POWER_W * 0.2 / 8, rel=1e-9)
    assert long.j_per_token == pytest.approx(POWER_W * 0.2 / 8, rel=1e-9)


def test_a_training_of_one_step_keeps_it(tmp_path):
    record, _ = train(tmp_path, max_steps=1)
    assert record.stage("student.train").tokens == 8
    assert record.stage("student.train.setup") is None


def test_marking_setup_changes_no_loss(tmp_path, monkeypatch):
    _, marked = train(tmp_path / "marked", max_steps=60)
    monkeypatch.setattr(loop.Trainer, "_warm_up", loop.Trainer.step)
    _, plain = train(tmp_path / "plain", max_steps=60)
    assert marked == plain


def test_compilation_is_setup_also_in_a_short_training(tmp_path):
    torch.compiler.reset()
    record, compiled = train(tmp_path / "compiled", max_steps=10, compile="default")
    _, eager = train(tmp_path / "eager", max_steps=10)
    trained, setup = record.stage("student.train"), record.stage("student.train.setup")
    assert (setup.role, setup.tokens) == ("setup", 8)
    assert trained.tokens == 72
    assert trained.duration_s < setup.duration_s, "compiling takes seconds, ten steps of this model do not"
    assert compiled == pytest.approx(eager, rel=1e-5)


def test_a_budget_is_paused_while_torch_compiles():
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    now_s = [0.0]
    budget = Budget(TrainingConfig(epochs=None, max_time_s=100.0), 1, 1, clock_s=lambda: now_s[0])
    budget.start()
    with track_compilations("default", lambda *_: None, budget.paused):
        now_s[0] += 1.0
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
            now_s[0] += 60.0
        now_s[0] += 1.0
    assert budget.state()["time_s"] == pytest.approx(2.0)
