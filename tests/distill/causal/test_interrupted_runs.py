"""Runs killed in every stage and resumed: the same tokens, the same final loss, and all attempts on the bill."""

import json
import os
import signal
import subprocess
import sys

import pytest

from joulelab.runs.context import Stage
from joulelab.runs.execute import execute
from joulelab.runs.paths import RunPaths
from joulelab.runs.store import load_record

ORDER = (
    *("data.preprocess", "teacher.evaluate", "teacher.generate", "teacher.judge", "student.sft", "student.reference"),
    *("student.train", "student.evaluate"),
)


@pytest.fixture
def power(monkeypatch):
    """`power.fails_in(stage)`: the next attempt ends in the middle of that stage."""
    return Power(monkeypatch)


class Power:
    def __init__(self, monkeypatch):
        self._patch, self._count = monkeypatch, Stage.count

    def fails_in(self, name, last=2):
        """At that count; an evaluation counts once, when it knows its figures and has not yet saved them."""
        seen, last = [], 1 if name.endswith(".evaluate") else last

        def count(stage, **counts):
            self._count(stage, **counts)
            if stage.name == name:
                seen.append(counts)
                if len(seen) == last:
                    raise RuntimeError(f"power failure in {name}")

        self._patch.setattr(Stage, "count", count)

    def holds(self):
        self._patch.setattr(Stage, "count", self._count)


@pytest.mark.slow
def test_dpo_interrupted_in_eight_stages_has_the_same_result(lab, finished, tmp_path, power):
    paths = lab.paths(tmp_path, "dpo", training={"evaluate_every_steps": 4, "checkpoint_every_steps": 2})
    for stage in ORDER:
        power.fails_in(stage)
        with pytest.raises(RuntimeError, match=f"power failure in {stage}"):
            execute(paths, lab.listening)
    power.holds()
    record = execute(paths, lab.listening)
    same_outcome(record, paths, *finished["dpo"], "final_policy")
    assert [attempt.number for attempt in record.attempts] == list(range(1, 10))
    spent = sum(attempt.energy.cpu_estimate.energy_j for attempt in record.attempts)
    assert record.totals.cpu_estimate.energy_j == pytest.approx(spent)
    reference, expected = (found.stage("student.reference") for found in (record, finished["dpo"][0]))
    assert (reference.samples, reference.tokens) == (expected.samples, expected.tokens)
    # generation was begun in one attempt and finished in the next
    generate = next(stage for stage in record.stages if stage.name == "teacher.generate")
    assert {segment.attempt for segment in generate.segments} >= {3, 4}


def test_kd_interrupted_while_caching_logits_resumes(lab, finished, tmp_path, power):
    paths = lab.paths(tmp_path, "kd", training={"evaluate_every_steps": 4})
    power.fails_in("teacher.logits")
    with pytest.raises(RuntimeError, match="power failure"):
        execute(paths, lab.listening)
    power.holds()
    record = execute(paths, lab.listening)
    same_outcome(record, paths, *finished["kd"], "final_model")
    assert record.stage("teacher.logits").tokens == finished["kd"][0].stage("teacher.logits").tokens


@pytest.mark.slow
def test_an_energy_budget_resumes_with_what_is_left(lab, finished, power):
    paths = lab.paths(
        finished["sft"][1].folder.parent, "sft", budget={"tokens": None, "energy_j": 4.0},
        training={"budget_counts_estimates": True, "checkpoint_every_steps": 5},
    )  # fmt: skip
    power.fails_in("student.train", last=20)
    with pytest.raises(RuntimeError, match="power failure"):
        execute(paths, lab.listening)
    power.holds()
    record = execute(paths, lab.listening)
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    evaluations = [line for line in lines if "budget_fraction" in line]
    resumed = [line for line in evaluations if line["attempt"] == 2]
    assert resumed[0]["step"] > 0
    for attempt in (1, 2):  # the second begins at a checkpoint, before the last of the first
        fractions = [line["budget_fraction"] for line in evaluations if line["attempt"] == attempt]
        assert fractions == sorted(fractions)
    assert evaluations[-1]["budget_fraction"] >= 1
    assert record.results["student.train.steps"].value == evaluations[-1]["step"] + 1
    training = record.stage("student.train")
    assert {segment.attempt for segment in training.segments} == {1, 2}
    assert training.energy.cpu_estimate.energy_j > 3.5


def same_outcome(record, paths, whole, whole_paths, artifact):
    for name in ("student.clm_loss", "student.train.final_loss", "student.train.steps"):
        assert record.results[name].value == pytest.approx(whole.results[name].value, rel=1e-5), name
    # the first step of each attempt is setup
    counted = [[one.stage(f"student.train{part}").tokens for part in ("", ".setup")] for one in (record, whole)]
    assert sum(counted[0]) == sum(counted[1])
    trained = [json.loads((place.artifacts / artifact / "training.json").read_text()) for place in (paths, whole_paths)]
    assert trained[0]["tokens"] == trained[1]["tokens"]


def test_sigkill_during_training_loses_neither_energy_nor_steps(lab, finished, tmp_path):
    paths = lab.paths(tmp_path, "kd", training={"evaluate_every_steps": 4, "checkpoint_every_steps": 2})
    program = (
        "import os, signal, sys\n"
        "from joulelab.runs.context import SilentProgress, Stage\n"
        "from joulelab.runs.execute import execute\n"
        "from joulelab.runs.paths import RunPaths\n"
        "from pathlib import Path\n"
        "count, seen = Stage.count, []\n"
        "def killing(stage, **counts):\n"
        "    count(stage, **counts)\n"
        "    if stage.name == 'student.train':\n"
        "        seen.append(1)\n"
        "        if len(seen) == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Stage.count = killing\n"
        "execute(RunPaths(Path(sys.argv[1])), SilentProgress())\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(paths.folder)], check=False, env={**os.environ})
    assert killed.returncode == -signal.SIGKILL
    before = load_record(paths.folder)
    assert before.totals.cpu_estimate.energy_j > 0
    record = execute(RunPaths(paths.folder), lab.listening)
    same_outcome(record, paths, *finished["kd"], "final_model")
    assert record.totals.cpu_estimate.energy_j > before.totals.cpu_estimate.energy_j
