"""CodeCarbon as a tracker of the loop: its tables, its silence toward the network, and what a reading is worth."""

import csv
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from stats_training import make_trainer, trained

from joulelab.errors import DependencyMissing
from joulelab.train.stats import codecarbon_phases as tracker
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
    assert (run["phase"], run["step"]) == ("train", "6")
    assert [row["step"] for row in steps] == ["1", "2", "3", "4", "5", "6"]
    assert [row["phase"] for row in phases if row["step"] == "2"] == [
        *("input", "forward", "backward") * 2, "optimizer_step",
    ]  # fmt: skip
    assert float(run["duration_s"]) >= sum(float(row["duration_s"]) for row in steps)
    assert [row["step"] for row in rows(tmp_path, "losses.csv")] == ["3", "6"]
    assert "what a reading of one phase is worth" in output_text
    assert "optimizer_step: 6 readings of" in output_text


def test_its_tasks_do_not_pile_up_in_memory(tmp_path):
    pytest.importorskip("codecarbon")
    stats = CodeCarbonStats()
    trained(make_trainer(stats, max_steps=3))
    assert all(len(level._tracker._tasks) == 0 for level in stats._levels.values())


def test_where_it_is_not_installed_the_command_is_reported(monkeypatch):
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(DependencyMissing) as refused:
        load_tracker("codecarbon")
    assert refused.value.hint == 'pip install "joulelab[codecarbon]"'


def test_one_that_breaks_is_reported_and_training_continues(monkeypatch):
    monkeypatch.setitem(sys.modules, "codecarbon", None)  # what Python does with a package that cannot be imported
    monkeypatch.setattr(tracker, "find_spec", lambda name: object())
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
