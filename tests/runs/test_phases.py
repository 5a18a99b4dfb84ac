"""Phases of a run, and stop requests at their borders."""

from unittest.mock import MagicMock

import pytest

from joulelab.errors import EndedBySignal
from joulelab.runs.attempt import create_run
from joulelab.runs.context import JOB_SIGNALS, RunContext, SilentProgress, StopRequest
from joulelab.runs.phases import comes_after
from joulelab.runs.spec import RunSpec


def test_phases_have_an_order_and_evaluation_comes_last():
    for phase, last in [("data", "data"), ("data", "teacher"), ("teacher", "teacher"), ("train", "train")]:
        assert not comes_after(phase, last)
    for phase, last in [("teacher", "data"), ("train", "teacher"), ("evaluate", "train")]:
        assert comes_after(phase, last)


def test_a_signal_and_its_echo_are_one_request_and_a_record_being_written_is_left_in_peace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("joulelab.runs.context.time.monotonic", lambda: now[0])
    stop = StopRequest(JOB_SIGNALS)
    stop._receive(10, None)
    now[0] += 0.5
    stop._receive(15, None)
    assert stop.signum == 10
    now[0] += 31
    with pytest.raises(EndedBySignal):
        stop._receive(15, None)
    stop.ignore_repeats()
    stop._receive(15, None)


def test_a_warning_leaves_an_evaluation_inside_a_training_in_peace_so_that_the_loop_can_save(tmp_path):
    spec, stop = RunSpec(name="a", pipeline="measure"), StopRequest(JOB_SIGNALS)
    run = RunContext(create_run(tmp_path, spec), spec, MagicMock(), stop, 1, SilentProgress())
    with run.stage("student.train"):
        stop._receive(15, None)
        with run.stage("student.validate"):
            pass
    with pytest.raises(EndedBySignal), run.stage("student.evaluate"):
        pass
