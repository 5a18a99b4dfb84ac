"""Each tracker against the real package: what was logged can be read back from where it says it is."""

import json
import sqlite3
import struct
import sys
import time
from pathlib import Path

import pytest

from joulelab import clock, lookup
from joulelab.errors import ConfigError, DependencyMissing
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import check
from joulelab.trackers.experiment_trackers import WandbTracker
from joulelab.trackers.tracker import TrackedRun, export_run, require_installed

NOW = clock.now().wall_s
# A step that was done twice, after a resume; and a second stage whose steps begin anew.
METRICS = [
    ("teacher.train", 1, 1, 4.0),
    ("teacher.train", 2, 1, 3.5),
    ("teacher.train", 2, 2, 3.0),
    ("student.train", 1, 2, 2.0),
    ("student.train", 2, 2, 1.0),
]
SPEC = {"seed": 3, "training": {"learning_rate": 3e-4}, "note": "hf_abcdefghijklmnopqrst"}


def needs(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """A finished run, as a tracker needs it: metrics and a record."""
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    paths = RunPaths(tmp_path / "runs" / "made-20260101T000000Z-0001")
    paths.folder.mkdir(parents=True)
    lines = [
        {"step": step, "attempt": attempt, "timestamp": clock.iso(NOW + n), "mono_ns": n, "stage": stage, "loss": loss}
        for n, (stage, step, attempt, loss) in enumerate(METRICS)
    ]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def record(paths):
    return RunRecord(
        run_id=paths.run_id, name="made", label="a label", status="done", created_at=clock.iso(NOW), spec=SPEC
    )


def test_tensorboard_has_every_step_of_every_stage_once(paths):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # a second export replaces the first
        assert export_run(paths, record(paths), "tensorboard") == 4
    read = EventAccumulator(str(paths.folder / "tensorboard"))
    read.Reload()
    found = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert found["teacher.train/loss"] == [(1, 4.0), (2, 3.0)]
    assert found["student.train/loss"] == [(1, 2.0), (2, 1.0)]
    assert found["summary/seed"] == [(0, 3.0)]
    assert read.Scalars("teacher.train/loss")[0].wall_time == pytest.approx(NOW, abs=0.001)


def wandb_records(file):
    """The records of an offline file: a 7-byte head, then blocks of 32 KiB with records or pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, place, piece = file.read_bytes(), 7, b""
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, place)
        if place + 7 + length > len(raw):
            return  # still being written
        piece += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(piece)
            piece = b""


def whole(file, patience_s=30.0):
    """Its records up to the closing one: W&B's own process writes them, and may do so after its `finish()` returned."""
    give_up = time.monotonic() + patience_s
    while not (found := list(wandb_records(file))) or not found[-1].HasField("exit"):
        assert time.monotonic() < give_up, "W&B has not closed its file"
        time.sleep(0.05)
    return found


def values(items):
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def test_wandb_offline_has_every_step_and_no_secret(paths):
    needs("wandb")
    assert export_run(paths, record(paths), "wandb") == 4
    (file,) = paths.folder.glob("wandb/offline-run-*/run-*.wandb")
    found = whole(file)
    rows = [values(line.history.item) for line in found if line.history.item]
    output_text = [
        (row["teacher/train/step"], row["teacher/train/loss"]) for row in rows if "teacher/train/loss" in row
    ]
    assert output_text == [(1, 4.0), (2, 3.0)]
    assert [row["student/train/loss"] for row in rows if "student/train/loss" in row] == [2.0, 1.0]
    settings = {name: value for line in found for name, value in values(line.run.config.update).items()}
    assert (settings["training.learning_rate"], settings["note"]) == (3e-4, "<redacted>")
    summary = {name: value for line in found for name, value in values(line.summary.update).items()}
    assert summary["seed"] == 3
    assert b"hf_abc" not in file.read_bytes()


def test_mlflow_has_one_run_in_one_database_for_the_store(paths):
    mlflow = needs("mlflow")
    for _ in range(2):  # a second export adds no second run
        assert export_run(paths, record(paths), "mlflow") == 4
    client = mlflow.MlflowClient(f"sqlite:///{paths.folder.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("made").experiment_id])
    history = client.get_metric_history(run.info.run_id, "teacher.train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 4.0), (2, 3.0)]
    assert [m.value for m in client.get_metric_history(run.info.run_id, "student.train/loss")] == [2.0, 1.0]
    assert (run.info.status, run.info.run_name) == ("FINISHED", paths.run_id)
    assert (run.data.params["training.learning_rate"], run.data.params["note"]) == ("0.0003", "<redacted>")
    assert run.data.tags["joulelab.run_id"] == paths.run_id


def test_trackio_has_every_step_in_the_stores_database(paths, monkeypatch):
    needs("trackio")
    import trackio.utils

    for _ in range(2):
        assert export_run(paths, record(paths), "trackio") == 4
    database = Path(trackio.utils.TRACKIO_DIR) / "made.db"
    with sqlite3.connect(database) as opened:
        rows = opened.execute("select metrics from metrics where run_name = ? order by step", [paths.run_id]).fetchall()
    output_text = [json.loads(text) for (text,) in rows]
    assert [row["teacher.train/loss"] for row in output_text if "teacher.train/loss" in row] == [4.0, 3.0]
    assert [row["student.train/step"] for row in output_text if "student.train/step" in row] == [1, 2]
    assert output_text[-1]["summary/status"] == "done"


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_the_way_to_get_it(name, monkeypatch):
    monkeypatch.setattr(lookup, "absent_packages", lambda *packages: list(packages))
    with pytest.raises(DependencyMissing, match=f"the tracker {name} needs {name}") as error:
        require_installed([name])
    assert error.value.hint == f'pip install "joulelab[{"trackio" if name == "trackio" else "trackers"}]"'


class FakeWandb:
    """As much of W&B as the tracker calls; `key` is that of a login."""

    def __init__(self, key):
        self.api = type("Api", (), {"api_key": key})()
        self.given = {}

    def init(self, **given):
        self.given = given
        return type("Run", (), {"log": lambda *_: None})()

    def Settings(self, **settings):  # noqa: N802
        return settings


@pytest.mark.parametrize(
    ("settings", "variables", "key", "expected"),
    [
        ({}, {}, None, ("joulelab", None, None, "offline")),
        ({}, {}, "login", ("joulelab", None, None, "online")),
        ({}, {"WANDB_PROJECT": "theirs", "WANDB_MODE": "offline"}, "login", ("theirs", None, None, "offline")),
        (
            {"project": "mine", "entity": "team", "name": "first", "mode": "online"},
            {"WANDB_PROJECT": "theirs", "WANDB_MODE": "disabled"}, None, ("mine", "team", "first", "online"),
        ),
    ],
)  # fmt: skip
def test_wandb_follows_the_settings_then_the_variables_then_the_login(
    tmp_path, monkeypatch, settings, variables, key, expected
):
    for name in ("WANDB_PROJECT", "WANDB_MODE", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wandb = FakeWandb(key)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    spec = check({"pipeline": "measure", "name": "made", "trackers": {"wandb": settings}})
    assert spec.trackers == ("wandb",)
    WandbTracker(TrackedRun("made-1", "made", "", None, tmp_path, spec.model_dump(mode="json")))
    project, entity, name, mode = expected
    found = {field: wandb.given[field] for field in ("project", "entity", "name", "mode")}
    assert found == {"project": project, "entity": entity, "name": name or "made-1", "mode": mode}


@pytest.mark.parametrize(
    ("trackers", "message"),
    [({"wandb": {"projct": "a"}}, "project"), ({"mlflow": {"project": "a"}}, "only wandb accepts settings")],
)
def test_unknown_settings_of_trackers_are_refused(trackers, message):
    with pytest.raises(ConfigError) as refused:
        check({"pipeline": "measure", "name": "made", "trackers": trackers})
    assert message in f"{refused.value.message} {refused.value.hint}"
