import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for programs.py, shared by the tests of this folder
sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # for nvml_sim

from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: F401


@pytest.fixture(autouse=True)
def _few_packages(monkeypatch):
    """Listing this environment's packages takes a quarter of a second; tests of the snapshot are elsewhere."""
    monkeypatch.setattr("joulelab.runs.environment.packages", dict)


@pytest.fixture
def joulelab(capfd, monkeypatch):
    """The command in this process, for what starts no program: exit code, stdout, stderr."""
    from joulelab.cli.main import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["joulelab", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return run
