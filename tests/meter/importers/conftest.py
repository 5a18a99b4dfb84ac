import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for made_logs.py, shared by the tests of this folder


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path_factory.mktemp("store")))


@pytest.fixture
def joulelab_here(monkeypatch, capsys):
    """The command in this process: (exit code, stdout, stderr)."""

    def call(*words):
        from joulelab.cli.main import main

        monkeypatch.setattr(sys, "argv", ["joulelab", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call
