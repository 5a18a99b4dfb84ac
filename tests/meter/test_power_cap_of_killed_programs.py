"""A program that is killed under a power cap: the recorder restores the limit, or else the next process does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.paths import RunPaths
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record

pytest.importorskip("torch", reason="runs an experiment, which needs torch")

CAP = {"energy": {"power_cap_w": 350.0, "sample_interval_s": 0.1}}
PROGRAM = """
import sys, time
from pathlib import Path
from joulelab.lookup import PIPELINES
from joulelab.runs.execute import execute
from joulelab.runs.context import SilentProgress
from joulelab.runs.paths import RunPaths

def pipeline(run):
    print("capped", flush=True)
    time.sleep(60)

PIPELINES.resolve = lambda name: pipeline
execute(RunPaths(Path(sys.argv[1])), SilentProgress())
"""


@pytest.fixture
def capped(nvml_here, tmp_path):
    """The simulated driver, the run's paths, and its program while it works under the cap."""
    paths = create_run(tmp_path / "runs", load_spec("demo-kd", CAP))
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(paths.folder)], stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "capped\n"
    assert nvml_here.limit_w() == 350.0
    assert len(paths.saved_power_limits()) == 1
    yield nvml_here, paths, program
    program.kill()
    program.wait()


def wait_for(condition):
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def recorder_of(program):
    children = psutil.Process(program.pid).children()
    return next(child for child in children if "joulelab.meter.recorder" in child.cmdline())


def finish(paths, monkeypatch, story=lambda run: None):
    monkeypatch.setattr("joulelab.lookup.PIPELINES.resolve", lambda name: story)
    return execute(RunPaths(paths.folder), SilentProgress())


def test_the_recorder_restores_the_limit_when_the_program_is_killed(capped):
    sim, paths, program = capped
    os.kill(program.pid, signal.SIGKILL)
    wait_for(lambda: sim.limit_w() == 700.0)
    wait_for(lambda: not paths.saved_power_limits())
    program.wait()
    record = load_record(paths.folder)
    assert record.status == "truncated"
    wait_for(lambda: any("from 350 to 700 W" in note.text for note in load_record(paths.folder).validity.notes))


def test_a_recorder_that_was_restarted_restores_it_too(capped):
    sim, _, program = capped
    first = recorder_of(program)
    first.kill()
    wait_for(lambda: any(child.pid != first.pid for child in psutil.Process(program.pid).children()))
    time.sleep(1.0)
    os.kill(program.pid, signal.SIGKILL)
    wait_for(lambda: sim.limit_w() == 700.0)


def test_where_both_were_killed_the_next_process_restores_it_and_reports_it(capped, monkeypatch):
    """The resumed run knows the limit from before, although the driver only knows the cap."""
    sim, paths, program = capped
    recorder = recorder_of(program)
    recorder.suspend()  # or it would be restarted before its program is killed
    os.kill(program.pid, signal.SIGKILL)
    recorder.kill()
    program.wait()
    assert sim.limit_w() == 350.0
    seen = []
    record = finish(paths, monkeypatch, lambda run: seen.append(sim.limit_w()))
    assert seen == [350.0], "the cap holds in the resumed attempt"
    assert sim.limit_w() == 700.0
    assert paths.saved_power_limits() == []
    assert any("restored from 350 to 700 W" in note.text for note in record.validity.notes)


def test_a_resume_right_after_the_kill_keeps_its_cap(capped, monkeypatch):
    """The recorder of the killed attempt restores its own attempt's limits and never the next one's."""
    sim, paths, program = capped
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    seen = []

    def story(run):
        time.sleep(1.5)
        seen.append(sim.limit_w())

    finish(paths, monkeypatch, story)
    assert seen == [350.0]
    assert sim.limit_w() == 700.0


def test_a_cap_on_another_host_is_reported(capped, monkeypatch):
    _, paths, program = capped
    os.kill(program.pid, signal.SIGKILL)
    wait_for(lambda: not paths.saved_power_limits())
    paths.power_limits("node7", 1).write_text("{}\n")
    record = finish(paths, monkeypatch)
    assert any("GPUs on node7 may still have the power cap" in note.text for note in record.validity.notes)
