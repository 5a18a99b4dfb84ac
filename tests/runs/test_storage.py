"""A disk that is full, read-only or broken: said as such, with the folder, and the run's end is on record."""

import errno
import os
from pathlib import Path

import pytest

from joulelab.cli import main
from joulelab.errors import CorruptedFile, StorageFailed
from joulelab.lookup import PIPELINES
from joulelab.meter.marks import RingWriter
from joulelab.report.tables.run_tables import header_grid
from joulelab.runs import attempt
from joulelab.runs import paths as json_file
from joulelab.runs import paths as storage
from joulelab.runs.attempt import create_run, mark_running
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.lock import holding
from joulelab.runs.paths import read_json, storage_failure, write_json
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record, read_record

FAST = {"energy": {"estimate_cpu": True, "gpus": "none"}}
FULL = OSError(errno.ENOSPC, "No space left on device")


def fails(*_, **__):
    raise FULL


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (FULL, "no space left"),
        (OSError(errno.EDQUOT, "quota"), "quota exceeded"),
        (OSError(errno.EROFS, "read-only"), "read-only file system"),
        (OSError(errno.EIO, "io"), "input/output error"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left"),
        (RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"), "no space left"),
    ],
)
def test_disk_errors_are_distinguished_from_other_errors(error, reported, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_free_bytes", lambda folder: 4096)
    found = storage_failure(error, tmp_path)
    assert found and reported in found.message and str(tmp_path) in found.message and found.exit_code == 1
    outer = ValueError("while saving")
    outer.__context__ = error
    assert storage_failure(outer, tmp_path) is not None


def test_other_errors_stay_what_they_are(tmp_path):
    assert storage_failure(FileNotFoundError(errno.ENOENT, "no such file"), tmp_path) is None
    assert storage_failure(RuntimeError("PytorchStreamWriter failed"), Path("/")) is None, "there is room"


def test_a_run_that_meets_a_full_disk_fails_with_its_joules_and_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: fails)
    paths = create_run(tmp_path / "runs", load_spec("demo-kd", FAST))
    with pytest.raises(StorageFailed):
        execute(paths, SilentProgress())
    record = read_record(paths)
    assert (record.status, record.error.kind, record.error.traceback) == ("failed", "StorageFailed", "")
    assert record.totals is not None


def test_where_the_record_itself_finds_no_room_its_end_is_still_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(PIPELINES, "resolve", lambda name: lambda run: None)
    monkeypatch.setattr(attempt, "close_run", fails)
    paths = create_run(tmp_path / "runs", load_spec("demo-kd", FAST))
    with pytest.raises(StorageFailed, match="no space left"):
        execute(paths, SilentProgress())
    assert read_record(paths).status == "failed"


def test_what_finds_no_room_leaves_nothing_that_takes_more(tmp_path, monkeypatch):
    place = tmp_path / "a.json"
    write_json(place, {"old": 1})
    monkeypatch.setattr(json_file.os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        write_json(place, {"new": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and "old" in place.read_text()
    with pytest.raises(StorageFailed):
        create_run(tmp_path / "runs", load_spec("demo-kd"))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_ring_of_marks_that_does_not_fit_is_removed(tmp_path, monkeypatch):
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: (path.touch(), opened(Path("/dev/full"), "wb", 0))[1])
    with pytest.raises(OSError, match="No space"):
        RingWriter(tmp_path / "marks.ring")
    assert list(tmp_path.iterdir()) == []


def test_the_command_states_it_and_other_bugs_keep_their_traceback(monkeypatch, capsys):
    monkeypatch.setattr(main, "app", fails)
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 1
    assert "error: no space left" in capsys.readouterr().err
    monkeypatch.setattr(main, "app", lambda **_: (x for x in ()).throw(FileNotFoundError("a bug")))
    with pytest.raises(FileNotFoundError):
        main.main()


def test_a_run_that_never_came_to_a_trace_is_gone_with_its_process(tmp_path):
    paths = create_run(tmp_path / "runs", load_spec("demo-kd"))
    with holding(paths.folder):
        mark_running(paths)
        assert load_record(paths.folder).status == "running"
        assert read_record(paths).process.pid == os.getpid()
    record = load_record(paths.folder)
    assert record.status == "truncated"
    rows = dict(header_grid(record).rows)
    assert rows["status"] == "truncated: its process ended without closing the run"


def test_a_path_that_the_system_refuses_is_an_error_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["joulelab", "plot", "x" * 400])
    with pytest.raises(SystemExit) as ended:
        main.main()
    err = capsys.readouterr().err
    assert (ended.value.code, "File name too long" in err) == (2, True), err


def test_a_file_nested_too_deep_is_corrupted(tmp_path):
    (tmp_path / "run.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CorruptedFile, match="nested too deep"):
        read_json(tmp_path / "run.json")
