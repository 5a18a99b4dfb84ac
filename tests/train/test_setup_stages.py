"""The first step and compilation of a training are setup: outside its rates, and without any effect on its losses."""

import time

import pytest
import torch
from test_trainer import CrossEntropy, Ragged, model

from joulelab.meter.config import EnergyConfig
from joulelab.meter.trace import read_lines
from joulelab.runs.measure_spec import MeasureSpec
from joulelab.runs.measuring import MeasuredRun
from joulelab.train import trainer as loop
from joulelab.train.config import TrainingConfig
from joulelab.train.session import Assignment, train_in_run


class SlowStart(CrossEntropy):
    """The first batch of a process takes a second, as where kernels are loaded."""

    def __init__(self, first_s=1.0):
        self.first_s = first_s

    def __call__(self, net, batch, phase):
        time.sleep(self.first_s)
        self.first_s = 0.0
        return super().__call__(net, batch, phase)


def train(store, objective=None, **config):
    measured = MeasuredRun(store, MeasureSpec(name="t", energy=EnergyConfig(estimate_cpu=True, gpus="none")))
    run = measured.begin()
    settings = {"epochs": None, "learning_rate": 0.01, "log_every_steps": 1}
    task = Assignment(
        stage="student.train",
        role="student",
        model=model(),
        batches=Ragged([8, 8]),
        objective=objective or CrossEntropy(),
        config=TrainingConfig(**{**settings, **config}),
        seed=0,
    )
    train_in_run(run, task)
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


def test_a_short_training_reports_all_of_its_steps(tmp_path):
    record, _ = train(tmp_path, max_steps=3)
    assert record.stage("student.train").tokens == 24
    assert record.stage("student.train").tokens_per_s > 0
    assert record.stage("student.train.setup") is None


def test_a_budget_without_steps_is_judged_after_the_first_step(tmp_path):
    long, _ = train(tmp_path / "long", max_tokens=8 * 100)
    assert (long.stage("student.train").tokens, long.stage("student.train.setup").tokens) == (792, 8)
    short, _ = train(tmp_path / "short", max_tokens=8 * 10)
    assert short.stage("student.train").tokens == 80
    assert short.stage("student.train.setup") is None


def test_marking_setup_changes_no_loss(tmp_path, monkeypatch):
    _, marked = train(tmp_path / "marked", max_steps=60)
    monkeypatch.setattr(loop, "WARM_UP_SHARE", -1.0)
    _, plain = train(tmp_path / "plain", max_steps=60)
    assert marked == plain


def test_compilation_is_setup_also_in_a_short_training(tmp_path):
    torch.compiler.reset()
    record, compiled = train(tmp_path / "compiled", max_steps=10, compile="default")
    _, eager = train(tmp_path / "eager", max_steps=10)
    trained, setup = record.stage("student.train"), record.stage("student.train.setup")
    assert (setup.activity, setup.tokens) == ("compile", None)
    assert trained.tokens == 80
    assert trained.duration_s < setup.duration_s, "compiling takes seconds, ten steps of this model do not"
    assert compiled == pytest.approx(eager, rel=1e-5)
