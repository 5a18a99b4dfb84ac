"""A run.json that cannot be read is one clear error; other runs are listed and compared without it."""

import json
import shutil
from pathlib import Path

import pytest
from commands import joulelab_here

from joulelab.errors import CorruptedFile
from joulelab.runs.pack import unpack
from joulelab.runs.store import load_record

FIRST = Path(__file__).parents[1] / "runs" / "first_release"
BAD = "bad-20260101T000000Z-aaaa"


@pytest.fixture
def store(tmp_path):
    """Two readable runs and one that is not."""
    store = unpack(FIRST / "demo-kd.tar.gz", tmp_path / "old") / "runs"
    whole = next(store.iterdir())
    shutil.copytree(whole, store / "also-20260101T000000Z-bbbb")
    shutil.copytree(whole, store / BAD)
    return store


@pytest.mark.parametrize("content", [b'{"run_id": ', b"[1, 2]", b'{"run_id": 5, "stages": 7}', b"\xff\x00\x8b", b""])
@pytest.mark.parametrize("command", [["show"], ["report"], ["bill"], ["compare", "also"]], ids=lambda words: words[0])
def test_a_corrupted_record_is_one_error(store, command, content):
    (store / BAD / "run.json").write_bytes(content)
    done = joulelab_here(*command, BAD, "--runs-dir", store)
    assert done.returncode == 2, done.stderr
    assert f"{BAD}/run.json" in done.stderr and "hint: " in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_a_record_without_read_permission_is_never_advised_to_be_removed(store, monkeypatch):
    refused = store / BAD / "run.json"
    read_text = Path.read_text

    def read(path, *args, **options):  # root can read everything, so permissions of the file are not enough
        if path == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(CorruptedFile, match=r"run\.json cannot be read: Permission denied") as caught:
        load_record(store / BAD)
    assert caught.value.hint == "check its permissions"


@pytest.mark.parametrize("command", [["runs"], ["show", "*"], ["compare", "*"]], ids=" ".join)
def test_one_corrupted_record_ends_no_listing(store, command):
    (store / BAD / "run.json").write_text('{"run_id": ')
    done = joulelab_here(*command, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("unreadable: ") == 1 and f"{BAD}/run.json is not valid JSON" in done.stderr
    assert done.stdout.strip()


def test_a_group_is_shown_without_its_corrupted_member(store):
    runs = [folder.name for folder in store.iterdir()]
    spec = json.loads((store / "also-20260101T000000Z-bbbb" / "run.json").read_text())["spec"]
    members = [{"label": "KD", "seed": 0, "experiment": "demo-kd", "spec": spec, "run_id": run_id} for run_id in runs]
    group = store / "groups" / "both-20260101T000000Z-cccc"
    group.mkdir(parents=True)
    (group / "group.json").write_text(
        json.dumps(
            {"group_id": group.name, "name": "both", "about": "", "created_at": "2026-01-01T00:00:00+00:00"}
            | {"members": members, "varying": {}, "baseline": "KD"}
        )
    )
    (store / BAD / "run.json").write_text('{"run_id": ')
    done = joulelab_here("show", group.name, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    assert "unreadable: " in done.stderr
