"""The plain scripts on a real Slurm: they run as they stand, and what a scheduler does to them costs nothing."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from lm_tiny import write_teacher, write_text
from slurm_cluster import why_not_here
from tiny_reviews import settings, write_encoder, write_reviews

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or "")]

SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "slurm"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
JOURNEYS = Path(__file__).parent.parent.parent / "docs" / "journeys.md"
SMALL = ("--mem=1G", "--cpus-per-task=1", "--time=10")


@pytest.fixture(scope="module")
def training_job(lab):
    """The environment of somebody who calls the scripts: an activated environment, and settings as variables."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**lab.env, "PATH": path, "SCRIPTS": str(SCRIPTS), "RUNS": str(lab.store), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def pair(lab, training_job):
    """Preprocess and distill, submitted first and looked at last: they and the others share the machine."""
    training = {"epochs": None, "max_steps": 4, "batch_size": 8, "accumulate": 2, "learning_rate": 5e-3, "prefetch": 0}
    teacher = {
        "teacher_type": "bert",
        "teacher_name": str(write_teacher(lab.folder / "plain-teacher", "bert")),
        "training": {**training, "max_steps": 60},
    }
    chosen = {
        "pipeline": "distilbert", "label": "plain", "device": "cpu", "teacher": teacher,
        "data": {"source": "set-by-the-script", "validation_size": 20, "max_model_input_size": 32, "min_tokens": 5},
        "student": {"student_type": "distilbert", "layers": [0, 3]},
        "training": training,
        "energy": {"sample_interval_s": 0.5, "counter_interval_s": 0.2},
    }  # fmt: skip
    named = {**training_job, "TOKENS": str(lab.folder / "plain-tokens"), "TOKENIZER": teacher["teacher_name"]}
    named |= {"EXPERIMENT": str(lab.experiment("plain", chosen)), "SEEDS": "3"}
    command, dump = ("bash", SCRIPTS / "submit_both.sh", *SMALL), write_text(lab.folder / "plain.txt")
    refused = lab.cluster.call(*command, env={**named, "DUMP": "gone.txt"}, cwd=lab.folder)
    assert (refused.returncode, refused.stderr) == (2, "missing: gone.txt\n")
    done = lab.cluster.call(*command, env={**named, "DUMP": str(dump)}, cwd=lab.folder)
    assert done.returncode == 0, done.stderr
    first, second = (line.split()[1].rstrip(",") for line in done.stdout.splitlines())
    assert f"afterok:{first}" in lab.cluster.call("scontrol", "show", "job", second).stdout
    return {"job_id": second, "key": "distil", "script": str(lab.folder / "job")}


def wait_until(ready, what):
    end = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.mark.usefixtures("pair")
def test_feature_distillation_starts_its_monitor_and_a_warning_ends_both_well_and_requeues_the_task(lab, training_job):
    encoder, reviews = write_encoder(lab.folder / "fitnets-encoder"), write_reviews(lab.folder / "fitnets.csv")
    energy = {"sample_interval_s": 0.5, "counter_interval_s": 0.2}
    chosen = settings(encoder, reviews, energy=energy, telemetry_every=0)
    experiment = lab.experiment("long", {**chosen, "training": {**chosen["training"], "epochs": 5000}})
    named = {**training_job, "EXPERIMENT": str(experiment), "DATA": str(reviews)}
    job = lab.sbatch(*SMALL, "--array=7", SCRIPTS / "fitnets.sbatch", env=named)
    gone = lab.sbatch(*SMALL, "--array=0", SCRIPTS / "fitnets.sbatch", env={**named, "DATA": "gone.csv"})
    lab.wait(gone, "FAILED")
    assert "ExitCode=2:0" in lab.cluster.call("scontrol", "show", "job", gone["job_id"]).stdout
    folder = lab.store / f"long-job{job['job_id']}-seed7"
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and "student.train" in metrics.read_text(), "the student trains")
    warn = ("scancel", "--signal=TERM", "--batch", job["job_id"])  # what --signal=B:TERM@120 does, now
    assert lab.cluster.call(*warn).returncode == 0
    wait_until(lambda: "Restarts=1" in lab.cluster.call("scontrol", "show", "job", job["job_id"]).stdout, "requeued")
    lab.cluster.call("scancel", job["job_id"])
    record = lab.record(folder.name)
    assert record.status == "truncated"
    assert record.totals.gpu.energy_j > 0
    assert list((folder / "checkpoints" / "student.train").glob("step-*.pt"))
    rows = [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]
    cards = {row["gpu_uuid"] for row in rows if row["kind"] == "gpu"}
    assert cards == {device.device.removeprefix("gpu:") for device in record.attempts[0].devices}
    assert "joulelab monitor: stopped (SIGTERM)" in (lab.folder / f"fitnets.{job['job_id']}_7.log").read_text()


def test_a_warned_task_goes_back_alone_and_a_cancelled_one_not_at_all(lab):
    script = lab.folder / "patient.sbatch"
    script.write_text(f"#!/bin/bash\nset -euo pipefail\nsource {SCRIPTS}/until_done.sh\nuntil_done sleep 60\n")
    job = lab.sbatch("-c1", "--array=0-2", "--requeue", "--output=/dev/null", script)
    tasks = [f"{job['job_id']}_{number}" for number in range(3)]
    for task in tasks:
        wait_until(lambda task=task: lab.cluster.state(task) == "RUNNING", task)
    time.sleep(0.5)  # until the script has begun to listen
    lab.cluster.call("scancel", "--signal=TERM", "--batch", tasks[2])  # whose number is also that of the whole array
    wait_until(lambda: lab.cluster.state(tasks[2]) == "PENDING", "requeued")
    assert lab.cluster.state(tasks[0]) == lab.cluster.state(tasks[1]) == "RUNNING"
    lab.cluster.call("scancel", tasks[1])
    wait_until(lambda: lab.cluster.state(tasks[1]) == "CANCELLED", "cancelled")
    lab.cluster.call("scancel", job["job_id"])


def test_preprocess_and_distill_are_submitted_together_and_the_second_waits_for_the_first(lab, pair):
    ended = lab.wait(pair, "COMPLETED", "FAILED", "CANCELLED")
    assert ended == "COMPLETED", "\n".join(path.read_text() for path in lab.folder.glob("*.log"))
    record = lab.record(f"plain-job{pair['job_id']}-seed3")
    assert (record.status, record.spec["seed"]) == ("done", 3)
    assert record.spec["data"]["source"].startswith(str(lab.folder / "plain-tokens."))
    assert record.totals.gpu.energy_j > 0


def test_the_example_of_the_documentation_measures_a_training(lab, training_job):
    """examples/train.sbatch, submitted from a copy of the examples."""
    folder = shutil.copytree(EXAMPLES, lab.folder / "examples")
    named = {**training_job, "JOULELAB_RUNS": str(folder / "runs"), "CUDA_VISIBLE_DEVICES": ""}
    done = lab.cluster.call("sbatch", "--wait", "train.sbatch", "--epochs", "1", env=named, cwd=folder)
    log = "".join(path.read_text() for path in folder.glob("measure.*.log"))
    assert done.returncode == 0, f"{done.stderr}\n{log}"
    assert "test accuracy" in log
    (result,) = folder.glob("measure.*.json")
    (record,) = (folder / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "done"
    assert json.loads(result.read_text())["run_id"] == record.parent.name


def test_the_journey_of_the_documentation_runs_as_printed(lab, training_job):
    """docs/journeys.md: submit, watch and show of a training script."""
    page = JOURNEYS.read_text()
    (script,) = re.findall(r"^<!-- file: train.py -->\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    section = page.partition("## An HPC user measures a job")[2].partition("\n## ")[0]
    (commands,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    folder = lab.folder / "journey"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    named = {**training_job, "JOULELAB_RUNS": str(folder / "runs")}
    done = lab.cluster.call("bash", "-euo", "pipefail", "-c", commands, env=named, cwd=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"^train: [\d.]+ [mk]?J ", done.stdout, re.MULTILINE), done.stdout
    (record,) = (folder / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "done"
