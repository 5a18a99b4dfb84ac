import json

import pytest


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path / "store"))


@pytest.fixture
def imported(joulelab, tmp_path):
    """The records of the runs that `joulelab import` makes of its arguments, and its JSON."""

    def call(*words):
        from joulelab.runs.store import load_record

        code, out, err = joulelab("import", *words, "--json")
        assert code == 0, err
        data = json.loads(out)
        return [load_record(tmp_path / "store" / one["run_id"]) for one in data["created"]], data

    return call
