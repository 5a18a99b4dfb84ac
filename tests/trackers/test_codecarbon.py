"""CodeCarbon alongside the meter: the real package if it is installed, and the error if it is not."""

import csv
import socket
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from joulelab import lookup
from joulelab.errors import DependencyMissing
from joulelab.meter.config import EnergyConfig
from joulelab.meter.trace import read_lines
from joulelab.runs.attempt_data import load_codecarbon
from joulelab.trackers.codecarbon import check_installed, track_run

ON = EnergyConfig(codecarbon=True)


def test_nothing_happens_unless_requested():
    assert not EnergyConfig().uses_codecarbon
    assert EnergyConfig(total_energy_policy="codecarbon").uses_codecarbon
    check_installed(EnergyConfig())


def test_the_real_codecarbon_measures_offline_and_leaves_its_csv(tmp_path, monkeypatch):
    pytest.importorskip("codecarbon")
    requested = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: requested.append(address))
    begin = time.monotonic_ns()
    with track_run(tmp_path, "h", 1, EnergyConfig(codecarbon=True, grid="FR")):
        time.sleep(1.3)
    end = time.monotonic_ns()
    (row,) = csv.DictReader((tmp_path / "codecarbon" / "emissions.csv").open())
    figure = load_codecarbon(tmp_path, "h", 1).energy([(begin, end)])
    assert requested == []
    assert row["country_iso_code"] == "FRA"
    assert figure.energy_j == pytest.approx(float(row["energy_consumed"]) * 3.6e6, rel=0.05)
    assert (figure.method, figure.sources) == ("estimated", ("codecarbon",))


def test_without_a_grid_no_country_is_made_up(tmp_path):
    pytest.importorskip("codecarbon")
    with track_run(tmp_path, "h", 1, ON):
        pass
    (row,) = csv.DictReader((tmp_path / "codecarbon" / "emissions.csv").open())
    assert (row["country_name"], float(row["emissions"])) == ("", 0.0)


def test_a_codecarbon_that_breaks_never_stops_the_run_and_states_why(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "codecarbon", None)  # what Python does with a package that cannot be imported
    with track_run(tmp_path, "h", 1, ON):
        reached = True
    assert reached
    figure = load_codecarbon(tmp_path, "h", 1).energy([(0, 1)])
    assert figure.energy_j is None
    assert "it did not start" in figure.reason


def test_a_block_that_fails_fails_with_its_own_error(tmp_path):
    pytest.importorskip("codecarbon")
    with pytest.raises(ZeroDivisionError), track_run(tmp_path, "h", 1, ON):
        raise ZeroDivisionError


def test_asking_for_it_where_it_is_not_installed_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(lookup, "absent_packages", lambda *packages: list(packages))
    with pytest.raises(DependencyMissing) as refused:
        check_installed(EnergyConfig(total_energy_policy="codecarbon"))
    assert "joulelab[codecarbon]" in refused.value.hint


class FakeTracker:
    """As much of CodeCarbon's tracker as joulelab calls: 1 Wh at every measurement, half of it the CPU's."""

    made: ClassVar[list] = []

    def __init__(self, output_handlers=(), **settings):
        self.settings, self._handlers, self._tasks = settings, output_handlers, {}
        FakeTracker.made.append(self)

    def start(self):
        self._report()

    def start_task(self, name):
        pass

    def stop(self):
        self._report()

    def stop_task(self):
        return self.total()

    def total(self):
        kwh = {"energy_consumed": 1e-3, "cpu_energy": 5e-4, "gpu_energy": 3e-4, "ram_energy": 2e-4}
        return SimpleNamespace(**kwh, codecarbon_version="fake")

    def _report(self):
        for handler in self._handlers:
            handler.out(self.total(), None)


@dataclass
class FakeColumns:
    task_name: str
    energy_consumed: float


@pytest.fixture
def fake_codecarbon(monkeypatch):
    output = SimpleNamespace(OutputMethod=SimpleNamespace(CSV="csv"))
    monkeypatch.setitem(sys.modules, "codecarbon", SimpleNamespace(OfflineEmissionsTracker=FakeTracker))
    monkeypatch.setitem(sys.modules, "codecarbon.output_methods.base_output", output)
    columns = SimpleNamespace(EmissionsData=FakeColumns, TaskEmissionsData=FakeColumns)
    monkeypatch.setitem(sys.modules, "codecarbon.output_methods.emissions_data", columns)
    monkeypatch.setattr(FakeTracker, "made", [])


@pytest.mark.usefixtures("fake_codecarbon")
def test_run_and_phases_use_one_tracker_and_one_conversion_to_joules(tmp_path):
    from joulelab.train.stats.codecarbon_phases import _LevelTracker

    with track_run(tmp_path, "h", 1, ON):
        pass
    row = _LevelTracker("steps", "rank0", None, grid="none").stop("forward", 1)
    (line, _) = [line for line in read_lines(tmp_path / "codecarbon" / "readings.h.1.jsonl") if "cpu_j" in line]
    joules = {"energy_j": 3600.0, "cpu_j": 1800.0, "gpu_j": 1080.0, "ram_j": 720.0}
    assert {name: line[name] for name in joules} == pytest.approx(joules)
    assert {name: row[name] for name in joules} == pytest.approx(joules)
    for tracker in FakeTracker.made:
        assert tracker.settings["allow_multiple_runs"] is True
        assert tracker.settings["project_name"] == "joulelab"
