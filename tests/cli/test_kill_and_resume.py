"""Killed, ended and resumed: the joules stay, the loss stays, the exit code tells.

One run is cut twice, by kill -9 and by SIGTERM, beside one that is left alone. Its encoder is made here: what is tested
is how a run is cut, and every further program would cost its seconds of importing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime

import pytest
import tiny_reviews
from commands import joulelab, shown

STEPS = 400
KILLED_AT, ENDED_AT = 100, 200  # far from the end, so that a busy machine does not finish before the signal comes
CHECKPOINT_EVERY = 40


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A store, and settings with which 400 steps of a student take a few seconds."""
    folder = tmp_path_factory.mktemp("world")
    encoder = tiny_reviews.write_encoder(folder / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    # with dropout, a resumed run draws the same numbers only where the generator's state came back too
    config |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    (encoder / "config.json").write_text(json.dumps(config))
    settings = [
        f"data.source={tiny_reviews.write_reviews(folder / 'reviews.csv')}", "data.subset=all", "data.train_size=80",
        "data.validation_size=16", "data.test_size=32", "data.max_tokens=16", f"teacher.model={encoder}",
        "teacher.training.epochs=3", "teacher.training.learning_rate=3e-3", f"student.init={encoder}",
        "student.layers=[0]", "training.batch_size=8", f"training.epochs={STEPS // 10}", "training.log_every_steps=1",
        f"training.checkpoint_every_steps={CHECKPOINT_EVERY}", "energy.sample_interval_s=0.1",
    ]  # fmt: skip
    return folder / "runs", settings


@pytest.fixture(scope="module")
def uninterrupted(world):
    store, settings = world
    done = joulelab("run", "demo-features", *settings, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    return shown(store, "demo-features")


@pytest.fixture(scope="module")
def killed(world, uninterrupted):
    """The record after kill -9, and when that was; the teacher comes from the run that was left alone."""
    store, settings = world
    run = started(store, "demo-features", *settings, "name=cut")
    wait_for_step(run, store, KILLED_AT)
    killed_at = time.time()
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return shown(store, "cut"), killed_at


@pytest.fixture(scope="module")
def ended(world, killed):
    """The exit code and the record after the same run was resumed and got SIGTERM."""
    store, _ = world
    run = started(store, "--resume", "cut")
    wait_for_step(run, store, ENDED_AT)
    os.kill(run.pid, signal.SIGTERM)
    return run.wait(timeout=60), shown(store, "cut")


@pytest.fixture(scope="module")
def whole(world, ended):
    store, _ = world
    done = joulelab("run", "--resume", "cut", "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"resuming student.train from its checkpoint at step (\d+)", done.stderr).group(1)) >= ENDED_AT
    return shown(store, "cut")


def started(store, *words):
    command = [sys.executable, "-m", "joulelab", "run", *words, "--runs-dir", str(store)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)


def wait_for_step(run, store, step):
    end = time.monotonic() + 300
    while time.monotonic() < end and run.poll() is None:
        if any(row["step"] >= step for row in student_rows(store, "cut")):
            return
        time.sleep(0.02)
    run.kill()
    raise AssertionError(f"the run never reached step {step}; exit code {run.wait()}")


def student_rows(store, name):
    """Metrics of the student's training; a last line that is still being written is left out."""
    texts = [metrics.read_text() for metrics in store.glob(f"{name}-*/metrics.jsonl")]
    lines = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in map(json.loads, lines) if row["stage"] == "student.train"]


def student_stage(record):
    return next(stage for stage in record["stages"] if stage["name"] == "student.train")


def samples_trained(record):
    """Those of the first step of each attempt are counted as setup."""
    stages = [stage for stage in record["stages"] if (stage["part_of"] or stage["name"]) == "student.train"]
    return sum(stage["samples"] or 0 for stage in stages)


@pytest.mark.slow
def test_kill_9_of_the_group_keeps_the_joules(killed):
    record, killed_at = killed
    assert record["status"] == "truncated"
    train = student_stage(record)
    assert train["status"] == "truncated"
    assert train["best"]["energy_j"] > 0
    # The estimate is read every 0.5 s, so at most about one reading is missing at the kill.
    assert (1 - train["best"]["coverage"]) * train["duration_s"] < 1.0
    segment = train["segments"][-1]
    ended_at = datetime.fromisoformat(segment["started_at"]).timestamp() + segment["duration_s"]
    assert abs(killed_at - ended_at) < 1.0
    assert train["phases"]["step"]["count"] >= KILLED_AT


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_ends_with_143(world, ended):
    exit_code, record = ended
    assert exit_code == 143
    assert record["status"] == "truncated"
    assert record["error"]["message"] == "ended by SIGTERM"
    (folder,) = world[0].glob("cut-*")
    newest = sorted((folder / "checkpoints" / "student.train").glob("step-*.pt"))[-1]
    assert int(newest.name.split(".")[0].removeprefix("step-")) == student_rows(world[0], "cut")[-1]["step"] >= ENDED_AT


@pytest.mark.slow
def test_what_was_cut_resumes_bit_for_bit(world, whole, uninterrupted):
    store, _ = world
    expected = {row["step"]: row["loss"] for row in student_rows(store, "demo-features")}
    assert sorted(expected) == list(range(1, STEPS + 1))
    rows = student_rows(store, "cut")
    first_steps = {number: min(row["step"] for row in rows if row["attempt"] == number) for number in (1, 2, 3)}
    assert first_steps[1] == 1
    assert first_steps[2] % CHECKPOINT_EVERY == 1, "kill -9 leaves the last of the regular checkpoints"
    assert first_steps[2] > KILLED_AT - CHECKPOINT_EVERY
    assert first_steps[3] > ENDED_AT, "SIGTERM leaves one of its own"
    for row in rows:
        assert row["loss"] == expected[row["step"]], f"attempt {row['attempt']}, step {row['step']}"
    for name in ("student.train.final_loss", "student.accuracy"):
        assert whole["results"][name] == uninterrupted["results"][name]


@pytest.mark.slow
def test_every_attempt_is_paid_and_every_sample_counted_once(killed, ended, whole, uninterrupted):
    assert whole["status"] == "done"
    assert [attempt["number"] for attempt in whole["attempts"]] == [1, 2, 3]
    spent = [attempt["energy"]["cpu_estimate"]["energy_j"] for attempt in whole["attempts"]]
    assert min(spent) > 0
    totals = [record["totals"]["cpu_estimate"]["energy_j"] for record in (killed[0], ended[1], whole)]
    assert totals == pytest.approx([sum(spent[:1]), sum(spent[:2]), sum(spent)])
    assert samples_trained(whole) == samples_trained(uninterrupted)


def test_a_student_inherits_the_teacher_s_bill(whole, uninterrupted):
    made_by = {row["name"]: row["made_by"] for row in whole["lineage"]}
    assert made_by["teacher"] == made_by["teacher-cache"] == made_by["data"] == uninterrupted["run_id"]
    assert made_by["final_model"] == whole["run_id"]


def test_the_final_model_is_in_hugging_face_format(world, uninterrupted):
    folder = world[0] / uninterrupted["run_id"] / "artifacts" / "final_model"
    assert {"config.json", "model.safetensors", "tokenizer.json", "bill.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_a_finished_run_is_not_run_again(world, uninterrupted):
    done = joulelab("run", "--resume", uninterrupted["run_id"], "--runs-dir", world[0])
    assert done.returncode == 0
    assert "is already done" in done.stderr
