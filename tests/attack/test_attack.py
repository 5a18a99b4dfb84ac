"""A small seeded part of the attack; `make attack` runs the whole of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import mutated_inputs
from attack import table
from finished_run import make_finished_run
from kills import kill_try


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_finished_run(tmp_path_factory.mktemp("finished") / "runs")


@pytest.mark.parametrize(("kind", "tries"), [("settings", 25), ("logs", 30), ("records", 10), ("arguments", 10)])
def test_mutated_inputs_are_read_or_refused(tmp_path, finished, kind, tries):
    for seed in range(tries):
        words, fault = mutated_inputs.attack(kind, seed, tmp_path / str(seed), finished)
        assert fault is None, f"{kind} {seed}: {words}\n{fault}"


@pytest.mark.parametrize("seed", [1, 4])
def test_a_killed_measurement_loses_nothing(tmp_path, seed):
    assert kill_try(seed, tmp_path / "killed") is None


def test_a_fault_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(mutated_inputs.KINDS, "settings", lambda seed, folder: ["show", "last"])
    monkeypatch.setattr("joulelab.cli.main.app", lambda **_: 1 / 0)
    _, fault = mutated_inputs.attack("settings", 0, tmp_path / "x", None)
    assert "ZeroDivisionError" in fault
    assert mutated_inputs.impossible_energy('{"energy_j": -1.0}') == ".energy_j is -1.0"
    assert mutated_inputs.impossible_energy("total: inf J") is not None
    assert "| mutated logs of other tools | 2 | 1 | 1: seeds 1 |" in table({"logs": {"done": 2, "faults": {"1": {}}}})
