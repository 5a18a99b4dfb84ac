"""Sweeps: a group of runs that goes on past a failure, resumes after a signal, and ends in a table."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import joulelab, joulelab_here, shown

MODEL = Path(__file__).parent / "perceptron.py"


def sweep(tmp_path, *words):
    return joulelab("sweep", *words, "--runs-dir", tmp_path / "runs", timeout=300)


@pytest.mark.slow
def test_every_combination_runs_once_a_repeat_and_the_table_has_intervals(tmp_path):
    words = ["--batch_size", "4,8", "--repeats", "2", "--max_steps", "20", "--estimate-cpu"]
    done = sweep(tmp_path, "train", MODEL, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("[2/4] batch_size=8, seed 0") < done.stderr.index("[3/4] batch_size=4, seed 1")
    assert "rows/s" in done.stdout
    assert "2/2" in done.stdout
    (group,) = (tmp_path / "runs" / "groups").iterdir()
    output_text = shown(tmp_path / "runs", group.name)
    assert [row["point"] for row in output_text["configurations"]] == [
        {"training.batch_size": 4},
        {"training.batch_size": 8},
    ]
    for row in output_text["configurations"]:
        assert row["items_per_s"]["low"] < row["items_per_s"]["value"] < row["items_per_s"]["high"]
        assert row["j_per_item"]["value"] > 0
        assert {run["seed"] for run in row["runs"]} == {0, 1}
    page = (group / "report.html").read_text()
    assert "Energy per item" in page
    again = joulelab("sweep", "--resume", group.name, "--runs-dir", tmp_path / "runs")
    assert again.returncode == 0
    assert "[1/4]" not in again.stderr, "what is done is not run again"


@pytest.mark.slow
def test_a_failed_member_is_reported_and_the_others_still_run(tmp_path):
    done = sweep(tmp_path, "train", MODEL, "--learning_rate", "1e30,1e-3", "--max_steps", "5")
    assert done.returncode == 1
    assert "error: 1 of 2 runs of the sweep failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "failed: the loss became" in done.stderr
    (group,) = (tmp_path / "runs" / "groups").iterdir()
    output_text = shown(tmp_path / "runs", group.name)
    assert [len(row["runs"]) for row in output_text["configurations"]] == [0, 1]
    assert output_text["failed"][0]["why"].startswith("failed: the loss became")
    again = joulelab("run", "--resume", group.name, "--runs-dir", tmp_path / "runs")
    assert again.returncode == 1
    assert "[1/2]" in again.stderr
    assert "[2/2]" not in again.stderr


@pytest.mark.slow
def test_a_signal_ends_the_member_that_runs_and_the_sweep_resumes(tmp_path):
    words = ["train", MODEL, "--repeats", "1", "--max_time_minutes", "0.05", "--runs-dir", tmp_path / "runs"]
    run = subprocess.Popen(
        [sys.executable, "-m", "joulelab", "sweep", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while time.monotonic() < end and not list((tmp_path / "runs").glob("perceptron-*/metrics.jsonl")):
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGTERM)
    _, output_text = run.communicate(timeout=60)
    assert run.returncode == 143, output_text
    (group,) = (tmp_path / "runs" / "groups").iterdir()
    assert f"joulelab sweep --resume {group}" in output_text
    (member,) = (tmp_path / "runs").glob("perceptron-*")
    assert json.loads((member / "run.json").read_text())["status"] == "truncated"
    done = joulelab("run", "--resume", group.name, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert len(json.loads((member / "run.json").read_text())["attempts"]) == 2


def test_lists_and_brackets_are_not_swept(tmp_path):
    words = ["--train_stats", "simple,no-op", "training.betas=[0.9, 0.95]", "--precision", "fp32,bf16"]
    assert planned(tmp_path, "train", MODEL, *words) == ["precision=fp32, seed 0", "precision=bf16, seed 0"]


def test_an_experiment_is_swept_by_its_settings(tmp_path):
    output_text = planned(tmp_path, "run", "demo-kd", "distill.kd_T=1,2", "seed=5", "--repeats", "2")
    assert output_text == ["kd_T=1, seed 5", "kd_T=2, seed 5", "kd_T=1, seed 6", "kd_T=2, seed 6"]


def planned(tmp_path, *words):
    """The members that a dry run tells, and no more than that."""
    done = joulelab_here("sweep", *words, "--dry-run", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
    return done.stdout.splitlines()
