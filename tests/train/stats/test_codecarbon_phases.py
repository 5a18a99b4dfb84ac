"""CodeCarbon as a tracker of the loop: its tables, its silence toward the network, and what a reading is worth."""

import csv
import dataclasses
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from stats_training import make_trainer, trained

from joulelab import lookup
from joulelab.errors import DependencyMissing
from joulelab.train.stats.codecarbon_phases import CodeCarbonStats, PhaseReadings
from joulelab.train.stats.hooks import load_tracker


def rows(folder, name):
    return list(csv.DictReader((folder / "codecarbon" / name).open()))


def test_it_writes_the_run_its_steps_and_their_phases_offline(tmp_path, monkeypatch):
    pytest.importorskip("codecarbon")
    home = tmp_path / "home"
    home.mkdir()
    # a user's own settings that would lock, send and look up
    settings = "[codecarbon]\nsave_to_api=true\nallow_multiple_runs=false\nelectricitymaps_api_token=abc\n"
    (home / ".codecarbon.config").write_text(settings)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CODECARBON_EMISSIONS_ENDPOINT", "http://localhost:1")
    requested = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: requested.append(address))
    lock = Path(tempfile.gettempdir()) / ".codecarbon.lock"
    was_locked = lock.exists()
    output_text = trained(make_trainer(CodeCarbonStats(), max_steps=6, log_every_steps=3), folder=tmp_path)
    assert requested == []
    assert lock.exists() == was_locked
    assert [path.name for path in home.iterdir()] == [".codecarbon.config"]
    (run,) = rows(tmp_path, "run_rank0.csv")
    steps, phases = rows(tmp_path, "steps_rank0.csv"), rows(tmp_path, "substeps_rank0.csv")
    assert [row["task_name"] for row in steps] == [f"step_{number}" for number in range(1, 7)]
    assert [row["task_name"] for row in phases if row["task_name"].endswith("_2")] == [
        *("input_2", "forward_2", "backward_2") * 2, "optimizer_step_2",
    ]  # fmt: skip
    assert float(run["energy_consumed"]) > 0 and run["emissions"] == "", "no grid, so no emissions"
    assert [row["step"] for row in rows(tmp_path, "losses.csv")] == ["3", "6"]
    assert "codecarbon (its own figures): " in output_text and "no emissions (set energy.grid)" in output_text
    assert "quality of single phase readings" in output_text
    assert "optimizer_step: 6 readings of" in output_text


def test_its_tasks_do_not_pile_up_in_memory(tmp_path):
    pytest.importorskip("codecarbon")
    stats = CodeCarbonStats()
    trained(make_trainer(stats, max_steps=3))
    assert all(len(level._tracker._tasks) == 0 for level in stats._levels.values())


def test_where_it_is_not_installed_the_command_is_reported(monkeypatch):
    monkeypatch.setattr(lookup, "absent_packages", lambda *packages: list(packages))
    with pytest.raises(DependencyMissing) as refused:
        load_tracker("codecarbon")
    assert refused.value.hint == 'pip install "joulelab[codecarbon]"'


def test_one_that_breaks_is_reported_and_training_continues(monkeypatch):
    monkeypatch.setitem(sys.modules, "codecarbon", None)  # what Python does with a package that cannot be imported
    monkeypatch.setattr(lookup, "absent_packages", lambda *packages: [])
    trainer = make_trainer(CodeCarbonStats(), max_steps=3)
    assert trained(trainer).startswith("codecarbon: failed (ModuleNotFoundError")
    assert trainer.position.step == 3


def test_on_a_node_only_one_rank_runs_it(monkeypatch):
    pytest.importorskip("codecarbon")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert trained(make_trainer(CodeCarbonStats(), max_steps=2)) == "codecarbon: measured by another rank of this node"


def test_readings_of_a_counter_between_refreshes_are_reported_as_such():
    readings = PhaseReadings()
    for number in range(100):
        readings.add(0.005, 0.05 + (60.0 if number % 20 == 0 else 0.0), 60.0 if number % 20 == 0 else 0.0)
    assert readings.text("forward") == (
        "  forward: 100 readings of 5.0 ms, 3.05 J each: 95 % are 0 J, so single readings are meaningless"
    )


def test_readings_that_are_a_constant_times_time_are_reported_too():
    readings = PhaseReadings()
    for number in range(100):
        readings.add(0.005 + number * 1e-5, 42.5 * (0.005 + number * 1e-5), 0.0)
    assert readings.text("forward").endswith("duration times a constant, no information beyond the duration")
    readings.add(0.005, 0.5, 0.0)
    assert "none is 0 J; coefficient of variation" in readings.text("forward")


def test_its_files_have_its_own_columns_and_emissions_and_are_imported(tmp_path):
    pytest.importorskip("codecarbon")
    from codecarbon.output_methods.emissions_data import EmissionsData, TaskEmissionsData

    from joulelab.meter.importers.convert import read_log
    from joulelab.meter.importers.power_log import TimeRule

    trained(make_trainer(CodeCarbonStats(), max_steps=4), folder=tmp_path, grid="FR")
    (run,), steps = rows(tmp_path, "run_rank0.csv"), rows(tmp_path, "steps_rank0.csv")
    assert list(run) == [field.name for field in dataclasses.fields(EmissionsData)]
    assert list(steps[0]) == [field.name for field in dataclasses.fields(TaskEmissionsData)]
    assert run["country_iso_code"] == "FRA"
    # kWh times the intensity of the grid is kg CO2e, in every row
    intensity = float(run["emissions"]) / float(run["energy_consumed"])
    assert 0.01 < intensity < 0.2
    for row in steps:
        assert float(row["emissions"]) == pytest.approx(intensity * float(row["energy_consumed"]), rel=1e-6)
    read = read_log(tmp_path / "codecarbon" / "steps_rank0.csv", TimeRule())
    expected_j = sum(float(row["energy_consumed"]) for row in steps) * 3.6e6
    assert read.runs[0].total_j == pytest.approx(expected_j)
    assert read.runs[0].tasks[0].count == 4
