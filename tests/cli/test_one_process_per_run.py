"""Pairs of commands on one run, group or folder at random offsets: one works, the other is refused with exit code 2."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from commands import joulelab_here

from joulelab.runs.attempt import create_run
from joulelab.runs.groups import create_group, load_group
from joulelab.runs.lock import is_held
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record

pytest.importorskip("torch", reason="runs an experiment, which needs torch")

# The real command with a pipeline that needs no framework: every process notes itself, then works for a while.
PROGRAM = """
import os, sys, time
from joulelab.lookup import PIPELINES

def pipeline(run):
    with open(run.paths.folder / "workers", "a") as file:
        print(os.getpid(), file=file)
    with run.stage("model.train"):
        time.sleep({seconds})

resolve = PIPELINES.resolve
PIPELINES.resolve = lambda name: pipeline if name == "classify" else resolve(name)
from joulelab.cli.main import main
sys.argv = ["joulelab", *sys.argv[1:]]
main()
"""
SETTINGS = {"energy": {"sample_interval_s": 0.1, "estimate_cpu": True, "gpus": "none"}}


def command(*words, seconds=3.0):
    program = [sys.executable, "-c", PROGRAM.format(seconds=seconds), *map(str, words)]
    return subprocess.Popen(
        program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def workers(folder):
    file = folder / "workers"
    return file.read_text().split() if file.exists() else []


def wait_for(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture
def spec():
    return load_spec("demo-kd", SETTINGS)


def refused(process, error):
    assert process.returncode == 2, error
    assert " is in use by process " in error
    assert f" on {os.uname().nodename} since " in error


@pytest.mark.parametrize("offset_s", [0.1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 0.3, 0.6, 1.2))])
def test_of_two_resumes_one_works_and_one_is_billed(tmp_path, spec, offset_s):
    """Pairs 0.1 to 1.2 s apart both ran, and both were billed."""
    paths = create_run(tmp_path / "runs", spec)
    first = command("run", "--resume", paths.folder, seconds=60)
    wait_for(lambda: workers(paths.folder))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not is_held(paths.folder), "kill -9 leaves nothing that must be waited for"
    pair = [command("run", "--resume", paths.folder)]
    time.sleep(offset_s)
    pair.append(command("run", "--resume", paths.folder))
    errors = [process.communicate(timeout=120)[1] for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 2], errors
    refused(*next((process, error) for process, error in zip(pair, errors, strict=True) if process.returncode == 2))
    assert len(workers(paths.folder)) == 2, "the one that was killed and one of the pair"
    record = load_record(paths.folder)
    assert (record.status, [attempt.number for attempt in record.attempts]) == ("done", [1, 2])


@pytest.mark.slow
def test_two_starts_in_one_chosen_folder_and_a_member_of_a_group(tmp_path, spec):
    chosen = random.Random(3)
    for number in range(3):
        folder = tmp_path / f"chosen-{number}"
        words = ["run", "demo-kd", "energy.estimate_cpu=true", "energy.gpus=none", "--run-dir", folder]
        pair = [command(*words)]
        time.sleep(chosen.uniform(0.0, 0.6))
        pair.append(command(*words))
        errors = [process.communicate(timeout=120)[1] for process in pair]
        assert sorted(process.returncode for process in pair) == [0, 2], errors
        assert len(workers(folder)) == 1


def test_a_group_and_its_members_are_worked_on_by_one_process(tmp_path, spec):
    group = create_group(tmp_path / "runs", [spec], name="pair")
    pair = [command("run", "--resume", group.folder), command("run", "--resume", group.folder)]
    wait_for(lambda: load_group(group.folder).members[0].run_id)
    member = tmp_path / "runs" / load_group(group.folder).members[0].run_id
    wait_for(lambda: workers(member))
    alone = command("run", "--resume", member)
    refused(alone, alone.communicate(timeout=120)[1])
    errors = [process.communicate(timeout=120)[1] for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 2], errors
    assert len(workers(member)) == 1


def test_readers_answer_at_once_while_a_run_is_worked_on(tmp_path, spec):
    paths = create_run(tmp_path / "runs", spec)
    worker = command("run", "--resume", paths.folder)
    wait_for(lambda: workers(paths.folder))
    for words in (["show", paths.run_id, "--json"], ["runs", "--json"], ["watch", paths.run_id, "--once", "--json"]):
        began_s = time.monotonic()
        done = joulelab_here(*words, "--runs-dir", tmp_path / "runs")
        assert time.monotonic() - began_s < 10
        assert '"running"' in json.dumps(json.loads(done.stdout)), done.stderr
    assert worker.wait(60) == 0


def test_resuming_a_measured_program_is_refused_and_changes_nothing(tmp_path):
    """It became a second, failed attempt with its own joules."""
    run = [sys.executable, "-m", "joulelab"]
    subprocess.run([*run, "measure", "--name", "once", "--", "false"], cwd=tmp_path, capture_output=True, check=False)
    (folder,) = (tmp_path / "runs").glob("once-*")
    before = (folder / "run.json").read_bytes()
    done = subprocess.run([*run, "run", "--resume", "last"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be restarted from its run directory" in done.stderr
    assert (folder / "run.json").read_bytes() == before
