"""`joulelab demo` with the real models and texts, ended by a signal on its way and resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from commands import joulelab, shown

pytestmark = pytest.mark.samples

SMALL = [
    "data.train_size=32", "data.validation_size=8", "data.test_size=16", "data.max_tokens=16",
    "teacher.training.epochs=1", "training.batch_size=8", "training.epochs=1", "training.log_every_steps=1",
    "energy.sample_interval_s=0.2",
]  # fmt: skip


@pytest.mark.slow
def test_a_group_resumes_the_members_that_are_missing(tmp_path):
    """The group is ended while its second member trains; what was done stays, the rest is run."""
    store = tmp_path / "runs"
    command = [sys.executable, "-m", "joulelab", "demo", *SMALL, "--runs-dir", str(store)]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and not list(store.glob("demo-labels-*/metrics.jsonl")):
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(timeout=60) == 143
    (teacher,) = store.glob("demo-teacher-*")
    (group,) = (store / "groups").iterdir()
    done = joulelab("run", "--resume", group.name, "--runs-dir", store, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (group / "report.html").exists()
    assert "feature KD" in done.stdout and "[7/7] response + feature KD, seed 1: " in done.stderr
    members = [json.loads(path.read_text()) for path in store.glob("demo-*/run.json")]
    assert [member["status"] for member in members] == ["done"] * 7
    assert [folder.name for folder in store.glob("demo-teacher-*")] == [teacher.name], "what is done is not run again"
    assert len(json.loads((teacher / "run.json").read_text())["attempts"]) == 1
    assert shown(store, group.name)

    features = next(member for member in members if member["name"] == "demo-features")
    made_by = {row["name"]: row["made_by"] for row in features["lineage"]}
    assert made_by["teacher"] == made_by["teacher-cache"] == made_by["data"] == teacher.name
    assert made_by["sample:minilm"] == "elsewhere"
