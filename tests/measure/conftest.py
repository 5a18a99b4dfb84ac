import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for programs.py, shared by the tests of this folder


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


@pytest.fixture
def rapl_tree(tmp_path):
    """A package whose counter stands still until a test moves it."""
    place = tmp_path / "powercap" / "intel-rapl:0"
    place.mkdir(parents=True)
    (place / "name").write_text("package-0")
    (place / "energy_uj").write_text("1000000")
    (place / "max_energy_range_uj").write_text("1000000000")
    return tmp_path / "powercap"
