"""The shell scripts in scripts/slurm, run with bash."""

import os
import subprocess
from pathlib import Path

import pytest

from joulelab.cluster.submission import dry_text

STORE = Path("/shared/runs")


GROUP = STORE / "groups" / "demo-1"


def scripts(jobs, settings, monkeypatch):
    monkeypatch.setattr("joulelab.cluster.submission.script_text.__defaults__", ("/usr/bin/python",))
    return dry_text(jobs, GROUP, STORE, "demo", settings)


SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "slurm"


def bash(text, tmp_path, **environ):
    """With a scontrol that writes down what it is asked, and a squeue that says what state the job is in."""
    programs = {"scontrol": f'echo "$@" >> {tmp_path}/asked', "squeue": f"echo {environ.pop('state', 'RUNNING')}"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **environ}
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, env=env, check=False)


def test_the_plain_scripts_are_whole():
    scripts = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")]
    assert len(scripts) == 8
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"`{script.name}`" in (SCRIPTS / "README.md").read_text() or script.name == "until_done.sh"


@pytest.mark.parametrize(
    ("environ", "requested"),
    [
        ({}, "requeue 77\n"),
        ({"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}, "requeue 77_3\n"),  # 77 would be all of them
        ({"state": "COMPLETING"}, None),  # cancelled
    ],
)
def test_a_warned_command_saves_and_its_job_goes_back_to_the_queue(tmp_path, environ, requested):
    child = f"trap 'echo saved > {tmp_path}/saved; exit 143' TERM; while :; do sleep 0.1; done"
    warned = f'source {SCRIPTS}/until_done.sh; (sleep 0.5; kill -TERM $$) & until_done bash -c "{child}"'
    assert bash(warned, tmp_path, **environ).returncode == 143
    assert (tmp_path / "saved").exists()
    assert ((tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else None) == requested


def test_a_command_that_fails_by_itself_does_not_come_back(tmp_path):
    assert bash(f"source {SCRIPTS}/until_done.sh; until_done bash -c 'exit 7'", tmp_path).returncode == 7
    assert not (tmp_path / "asked").exists()


def test_what_a_job_needs_and_is_not_there_ends_it_with_2(tmp_path):
    done = bash(f"bash {SCRIPTS}/check_setup.sh {tmp_path}/gone.csv", tmp_path)
    assert done.returncode == 2
    assert f"missing: {tmp_path}/gone.csv" in done.stderr
