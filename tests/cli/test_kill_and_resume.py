"""Killed, ended, failed and resumed, with the real models: the joules stay, the loss stays, the exit code tells."""

import os
import signal
import subprocess
import sys
import time

import pytest
from commands import joulelab, shown

pytestmark = pytest.mark.samples

SMALL = [
    "data.train_size=96", "data.validation_size=16", "data.test_size=32", "data.max_tokens=16",
    "teacher.training.epochs=0.2", "training.batch_size=8", "training.epochs=4", "training.log_every_steps=1",
    "training.checkpoint_every_steps=10", "energy.sample_interval_s=0.2",
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a finished teacher, so that the runs of this file train students only."""
    store = tmp_path_factory.mktemp("runs")
    done = joulelab("run", "demo-teacher", *SMALL, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    return store


@pytest.fixture(scope="module")
def uninterrupted(store):
    done = joulelab("run", "demo-features", *SMALL, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    return shown(store, "demo-features")


def started(store, name, at_step):
    """Start a run and wait until its student has done so many steps."""
    settings = [*SMALL, f"name={name}"]
    run = subprocess.Popen(
        [sys.executable, "-m", "joulelab", "run", "demo-features", *settings, "--runs-dir", str(store)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for metrics in store.glob(f"{name}-*/metrics.jsonl"):
            if metrics.read_text().count('"stage":"student.train"') >= at_step:
                return run
        time.sleep(0.02)
    raise AssertionError("the run never reached that step")


def final_loss(record):
    return record["results"]["student.train.final_loss"]["value"]


def resumed(store, name):
    done = joulelab("run", "--resume", name, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    return shown(store, name)


def test_kill_9_of_the_group_keeps_the_joules_and_the_run_can_go_on(store, uninterrupted):
    run = started(store, "killed", at_step=14)
    killed_at = time.time()
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    record = shown(store, "killed")
    assert record["status"] == "truncated"
    train = next(stage for stage in record["stages"] if stage["name"] == "student.train")
    assert train["status"] == "truncated"
    assert train["best"]["energy_j"] > 0
    assert train["best"]["coverage"] > 0.9
    segment = train["segments"][-1]
    from datetime import datetime

    ended_at = datetime.fromisoformat(segment["started_at"]).timestamp() + segment["duration_s"]
    assert abs(killed_at - ended_at) < 1.0
    assert train["phases"]["step"]["count"] >= 14

    whole = resumed(store, "killed")
    assert whole["status"] == "done"
    assert final_loss(whole) == final_loss(uninterrupted)
    assert [attempt["number"] for attempt in whole["attempts"]] == [1, 2]
    spent = sum(attempt["energy"]["cpu_estimate"]["energy_j"] for attempt in whole["attempts"])
    assert whole["totals"]["cpu_estimate"]["energy_j"] == pytest.approx(spent)
    assert spent > record["totals"]["cpu_estimate"]["energy_j"]
    counted = next(stage["samples"] for stage in whole["stages"] if stage["name"] == "student.train")
    assert counted == next(s["samples"] for s in uninterrupted["stages"] if s["name"] == "student.train")


def test_sigterm_saves_a_checkpoint_ends_with_143_and_resumes_bit_for_bit(store, uninterrupted):
    run = started(store, "ended", at_step=14)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(timeout=60) == 143
    record = shown(store, "ended")
    assert record["status"] == "truncated"
    assert record["error"]["message"] == "ended by SIGTERM"
    (folder,) = store.glob("ended-*")
    newest = sorted((folder / "checkpoints" / "student.train").glob("step-*.pt"))[-1]
    assert int(newest.stem.removeprefix("step-")) >= 14
    whole = resumed(store, "ended")
    assert final_loss(whole) == final_loss(uninterrupted)
    assert whole["results"]["student.accuracy"] == uninterrupted["results"]["student.accuracy"]


def test_a_nan_loss_ends_the_run_as_failed_with_its_joules(store):
    done = joulelab("run", "demo-kd", *SMALL, "name=nan", "training.learning_rate=1e30", "--runs-dir", store)
    assert done.returncode == 1
    assert "error: the loss became nan" in done.stderr
    assert "Traceback" not in done.stderr
    record = shown(store, "nan")
    assert record["status"] == "failed"
    assert record["totals"]["best"]["energy_j"] > 0
    assert record["error"]["kind"] == "NonFiniteLoss"


def test_a_student_inherits_the_teacher_s_bill(store, uninterrupted):
    made_by = {row["name"]: row["made_by"] for row in uninterrupted["lineage"]}
    (teacher,) = store.glob("demo-teacher-*")
    assert made_by["teacher"] == made_by["teacher-cache"] == made_by["data"] == teacher.name
    assert made_by["sample:minilm"] == "elsewhere"


def test_the_final_model_is_in_hugging_face_format(store, uninterrupted):
    folder = store / uninterrupted["run_id"] / "artifacts" / "final_model"
    assert {"config.json", "model.safetensors", "tokenizer.json", "bill.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_a_finished_run_is_not_run_again(store, uninterrupted):
    done = joulelab("run", "--resume", uninterrupted["run_id"], "--runs-dir", store)
    assert done.returncode == 0
    assert "is done already" in done.stderr


def test_a_group_resumes_the_members_that_are_missing(store):
    """The group is ended while its second member trains; what was done stays, the rest is run."""
    settings = [*SMALL, "training.epochs=1"]
    command = [sys.executable, "-m", "joulelab", "demo", *settings, "--runs-dir", str(store)]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and not list(store.glob("demo-labels-*/metrics.jsonl")):
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(timeout=60) == 143
    (group,) = (store / "groups").iterdir()
    done = joulelab("run", "--resume", group.name, "--runs-dir", store, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (group / "report.html").exists()
    assert "response + feature KD" in done.stdout
    members = shown(store, group.name)
    assert members
