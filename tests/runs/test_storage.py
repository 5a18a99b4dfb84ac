"""A disk that is full, read-only or broken: said as such, with the folder, and the run's end is on record."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from joulelab.cli import main
from joulelab.cli.browse import prune_store
from joulelab.errors import CorruptedFile, StorageFailed
from joulelab.lookup import PIPELINES
from joulelab.meter.marks import RingWriter
from joulelab.report import report_line
from joulelab.report.tables.run_tables import header_grid
from joulelab.runs import attempt
from joulelab.runs import paths as json_file
from joulelab.runs import paths as storage
from joulelab.runs.attempt import create_run, mark_running
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.lock import holding
from joulelab.runs.paths import RunPaths, read_json, read_metrics, storage_failure, write_json
from joulelab.runs.spec import load_spec
from joulelab.runs.store import find_leftovers, load_record, read_record, remove_leftover

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


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (MemoryError(), "error: this process got no more memory"),
        (OSError(errno.EMFILE, "Too many open files"), "hint: raise the limit: ulimit -n"),
        (OSError(errno.EFBIG, "File too large"), "(`ulimit -f`)"),
    ],
)
def test_a_limit_of_the_process_is_named(monkeypatch, capsys, error, reported):
    monkeypatch.setattr(main, "app", lambda **_: (x for x in ()).throw(error))
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code in (1, 2)
    assert reported in capsys.readouterr().err


def test_a_page_that_cannot_be_written_does_not_fail_a_finished_run(tmp_path):
    assert "report: not written: " in report_line(tmp_path / "no-such-run")


def test_a_bug_after_the_program_has_ended_keeps_its_traceback_and_the_exit_code(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("joulelab.runs.measure.result.conclude", lambda *_: {}["bug"])
    monkeypatch.setattr("sys.argv", ["joulelab", "measure", "--runs-dir", str(tmp_path), "--", "sh", "-c", "exit 5"])
    with pytest.raises(SystemExit) as left:
        main.main()
    err = capfd.readouterr().err
    assert (left.value.code, "KeyError: 'bug'" in err, "was not recorded" in err) == (5, True, True), err


def test_a_run_that_never_came_to_a_trace_is_gone_with_its_process(tmp_path):
    paths = create_run(tmp_path / "runs", load_spec("demo-kd"))
    with holding(paths.folder):
        mark_running(paths)
        assert load_record(paths.folder).status == "running"
        assert read_record(paths).process.pid == os.getpid()
    record = load_record(paths.folder)
    assert record.status == "truncated"
    rows = dict(header_grid(record).rows)
    assert rows["status"] == "truncated: the process ended without closing the run"


def test_a_path_that_the_system_refuses_is_an_error_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["joulelab", "plot", "x" * 400])
    with pytest.raises(SystemExit) as ended:
        main.main()
    err = capsys.readouterr().err
    # Python 3.14 answers that there is no such file instead of passing the system's error on
    assert ended.value.code == 2 and ("File name too long" in err or "neither a file nor a run" in err), err


def test_a_file_nested_too_deep_is_corrupted(tmp_path):
    (tmp_path / "run.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CorruptedFile, match="nested too deep"):
        read_json(tmp_path / "run.json")


@pytest.fixture
def crashed(store, folder):
    """What crashes leave, all an hour old, and the same things fresh."""
    stamp = "20260101T000000Z-abcd"
    made = {
        store / f"half-{stamp}" / "config.yaml": "has no run.json",
        store / "groups" / f"half-{stamp}" / "x": "has no group.json",
        store / ".index.sqlite.abc.tmp": "unfinished file",
        folder / ".run.json.1.tmp": "unfinished file",
        folder / "checkpoints" / "a" / "step-000000009.tmp": "unfinished file",
        folder / "artifacts" / "model" / ".weights.1.tmp": "unfinished file",
        folder / "checkpoints" / "a" / "step-000000001.00000000.pt.corrupted": "corrupted checkpoint",
    }
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 100)
        old = time.time() - 3600
        for one in (path, path.parent):
            os.utime(one, (old, old))
    for path in (store / "fresh-20260101T000000Z-abcd" / "x", store / "my notes" / "x", store / ".fresh.tmp"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    old_notes = store / "my notes"
    os.utime(old_notes / "x", (old, old))
    os.utime(old_notes, (old, old))
    return {path.parent if path.name in ("config.yaml", "x") else path: reason for path, reason in made.items()}


def test_what_crashes_left_is_listed_and_only_that_is_removed(store, folder, crashed, capsys):
    before = read_record(RunPaths(folder))
    assert {one.path: one.reason for one in find_leftovers(store)} == crashed
    prune_store(store, yes=False, as_json=False)  # no terminal: nothing is removed
    out = capsys.readouterr().out
    assert "7 leftovers" in out and "--yes removes them" in out and len(find_leftovers(store)) == 7
    prune_store(store, yes=True, as_json=False)
    assert not any(path.exists() for path in crashed)
    assert find_leftovers(store) == [] and read_record(RunPaths(folder)) == before
    assert (store / "my notes" / "x").exists() and (store / ".fresh.tmp").exists()
    assert (store / "fresh-20260101T000000Z-abcd").exists()


def test_a_run_that_is_being_written_is_left_alone(store, crashed):
    half = next(path for path in crashed if path.parent == store and path.name.startswith("half-"))
    with holding(half):
        old = time.time() - 3600
        for path in (half, *half.rglob("*")):
            os.utime(path, (old, old))
        assert half not in [one.path for one in find_leftovers(store)]


def test_members_of_a_group_whose_run_is_gone_are_taken_out_and_an_empty_group_is_removed(store, folder):
    def group(name, *runs):
        path = store / "groups" / f"{name}-20260101T000000Z-abcd" / "group.json"
        write_json(path, {"members": [{"run_id": run, "label": "a"} for run in runs]})
        for one in (path, path.parent):
            os.utime(one, (0, 0))
        return path

    partly, empty, whole = (
        group("partly", folder.name, "gone", None),
        group("empty", "gone"),
        group("whole", folder.name),
    )
    for one in find_leftovers(store):
        remove_leftover(one)
    assert [member["run_id"] for member in read_json(partly)["members"]] == [folder.name, None, None]
    assert not empty.parent.exists() and read_json(whole)["members"][0]["run_id"] == folder.name


def test_lines_of_metrics_with_wrong_types_are_left_out(tmp_path):
    lines = [
        {"step": 1, "stage": "a"},
        {"step": "1"},
        {"attempt": "null"},
        {"mono_ns": 1.5},
        {"stage": []},
        {"step": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [lines[0], lines[-1]]
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("right", [None, "yes", {}, 3])
def test_a_field_of_another_type_is_a_corrupted_file(tmp_path, right):
    write_json(tmp_path / "answers.json", {"right": right})
    with pytest.raises(CorruptedFile, match=r"`right` is .*, expected a list"):
        read_json(tmp_path / "answers.json", right=list)
    assert read_json(tmp_path / "answers.json") == {"right": right}


@pytest.mark.parametrize("members", [None, "x", ["x", 3, None, {"run_id": "gone-1"}]])
def test_leftovers_are_found_in_an_edited_store(tmp_path, members):
    group = tmp_path / "groups" / "made-20260101T000000Z-abcd"
    group.mkdir(parents=True)
    write_json(group / "group.json", {"members": members})
    old = time.time() - 3600
    for path in (group / "group.json", group):
        os.utime(path, (old, old))
    found = find_leftovers(tmp_path)
    assert [leftover.path for leftover in found] == ([group] if isinstance(members, list) else [])
