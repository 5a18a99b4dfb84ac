"""Trackers beside a run: fed while it runs, and whatever they do, the run is done and says what went wrong."""

import threading

import pytest

from joulelab import lookup
from joulelab.errors import ConfigError, NotFoundError
from joulelab.meter.config import EnergyConfig
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec
from joulelab.runs.spec import check
from joulelab.runs.store import load_record
from joulelab.trackers import tracker

KEPT = []


class Good:
    def __init__(self, run):
        self.run = run

    def log(self, point):
        KEPT.append((self.run.run_id, point.stage, point.step, dict(point.values)))

    def end(self, summary, status):
        KEPT.append((summary["run_id"], summary["shown_energy_j"], status))


class FailsToStart(Good):
    def __init__(self, run):
        raise SystemExit("no disk")


class FailsToLog(Good):
    def log(self, point):
        raise ValueError("no network")


class FailsToEnd(Good):
    def end(self, summary, status):
        raise RuntimeError("no end")


class Hangs(Good):
    def end(self, summary, status):
        threading.Event().wait()


@pytest.fixture
def table(monkeypatch):
    KEPT.clear()
    here = __name__
    names = {"good": "Good", "start": "FailsToStart", "log": "FailsToLog", "end": "FailsToEnd", "hangs": "Hangs"}
    monkeypatch.setattr(lookup, "TRACKERS", lookup.Table("tracker", {k: f"{here}:{v}" for k, v in names.items()}))


def run_with(store, *trackers):
    spec = MeasureSpec(name="made", trackers=trackers, energy=EnergyConfig(estimate_cpu=True, gpus="none"))
    measured = MeasuredRun(store, spec)
    run = measured.begin()
    with run.stage("model.train"):
        run.log(1, stage="model.train", loss=3.0)
        run.log(2, stage="model.train", loss=2.0, note="words are passed over")
    record = measured.end("done")
    assert load_record(measured.paths.folder) == record
    return record


def test_a_tracker_sees_the_metrics_while_and_the_joules_when_it_is_over(table, tmp_path):
    record = run_with(tmp_path, "good")
    (first, second, end) = KEPT
    assert first[:3] == (record.run_id, "model.train", 1)
    assert (second[2], second[3]["model.train/loss"]) == (2, 2.0)
    assert "energy/joules_so_far_estimated" in first[3]
    assert end == (record.run_id, record.totals.best.energy_j, "done")
    assert not [note for note in record.validity.notes if "tracker" in note.text]


def test_trackers_that_fail_are_warnings_of_a_run_that_is_done(table, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "END_S", 0.3)
    record = run_with(tmp_path, "start", "log", "end", "hangs", "good")
    assert record.status == "done"
    notes = sorted(note.text for note in record.validity.notes if "tracker" in note.text)
    assert notes == [
        "tracker end did not end cleanly: RuntimeError: no end",
        "tracker hangs did not finish within 0.3 s and was abandoned",
        "tracker log stopped accepting metrics: ValueError: no network",
        "tracker start did not start: SystemExit: no disk",
    ]
    assert KEPT[-1][-1] == "done" or KEPT[-2][-1] == "done"


def test_an_unknown_tracker_is_answered_before_anything_starts():
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        check({"pipeline": "measure", "trackers": ["tensorbord"]})
    with pytest.raises(NotFoundError):
        lookup.TRACKERS.require("aim")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_real_ones_keep_up_with_a_run(name, tmp_path):
    pytest.importorskip(name, reason=f"{name} is not installed")
    record = run_with(tmp_path / "runs", name)
    assert not [note for note in record.validity.notes if "tracker" in note.text]
    places = {"wandb": "*/wandb/offline-run-*", "mlflow": "mlflow.db"}
    if name in places:  # trackio reads its place once in a process
        assert list((tmp_path / "runs").glob(places[name]))
