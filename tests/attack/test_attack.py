"""A small seeded part of the attack; `make attack` runs the whole of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import environments
import mutated_inputs
import soak
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


def survive(environment, folder):
    try:
        fault = environment(folder)
    except environments.NotHere as reason:
        pytest.skip(str(reason))
    assert fault is None


@pytest.mark.parametrize("environment", environments.QUICK, ids=lambda one: one.__name__)
def test_an_environment_that_lacks_something_works_or_is_named(tmp_path, environment):
    survive(environment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("environment", environments.THOROUGH, ids=lambda one: one.__name__)
def test_other_environments_work_or_are_named(tmp_path, environment):
    survive(environment, tmp_path)


@pytest.mark.slow
def test_two_simulated_hours_of_eight_gpus_cost_little_and_their_memory_is_flat(tmp_path):
    """In a separate process, because the clocks are replaced; `soak.py --hours 168` is the week."""
    program = f"import sys, json, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    program += "import soak; rows = soak.soak(2, pathlib.Path(sys.argv[1])); print(json.dumps(rows))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert second["cpu_s"] < 36 and 60e6 < second["bytes"] < 90e6
    assert abs(second["bytes"] / first["bytes"] - 1) < 0.02
    assert second["memory_mb"] - first["memory_mb"] < 5


@pytest.mark.slow
def test_measurements_at_the_same_time_in_one_store_are_all_listed(tmp_path):
    assert soak.measures(12, 6, tmp_path / "runs") == (12, 12)


def test_a_fault_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(mutated_inputs.KINDS, "settings", lambda seed, folder: ["show", "last"])
    monkeypatch.setattr("joulelab.cli.main.app", lambda **_: 1 / 0)
    _, fault = mutated_inputs.attack("settings", 0, tmp_path / "x", None)
    assert "ZeroDivisionError" in fault
    assert mutated_inputs.impossible_energy('{"energy_j": -1.0}') == ".energy_j is -1.0"
    assert mutated_inputs.impossible_energy("total: inf J") is not None
    assert "| mutated logs of other tools | 2 | 1 | 1: seeds 1 |" in table({"logs": {"done": 2, "faults": {"1": {}}}})
