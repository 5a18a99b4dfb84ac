"""`joulelab.telemetry(...)`: the CSV of a training loop, durable row by row, and never in its way."""

import csv
import logging
import sys
from datetime import datetime

import pytest
from fake_nvml import FakeNvml

import joulelab
from joulelab.errors import UsageError
from joulelab.lookup import SENSORS
from joulelab.meter.monitor.telemetry import COLUMNS

HEADER = (
    "timestamp,elapsed_sec,gpu_index,gpu_name,power_watts,memory_used_MB,memory_total_MB,gpu_utilization_percent,"
    "memory_utilization_percent,temperature_C,cpu_utilization_percent"
)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(present=False))


@pytest.fixture
def two_gpus(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_the_columns_are_those_operators_parse(tmp_path, no_gpu):
    with joulelab.telemetry(tmp_path / "power.csv"):
        pass
    assert (tmp_path / "power.csv").read_text().splitlines()[0] == HEADER == ",".join(COLUMNS)


def test_rows_come_at_the_start_every_so_many_steps_and_after_validation(tmp_path, two_gpus):
    path = tmp_path / "power.csv"
    with joulelab.telemetry(path, every=10) as telemetry:
        assert len(rows(path)) == 2  # durable at once: one row per GPU
        for step in range(1, 26):
            telemetry.step(step)
        assert len(rows(path)) == 6
        telemetry.log_once()
    first, second = rows(path)[:2]
    assert len(rows(path)) == 8
    assert (first["gpu_index"], second["gpu_index"], first["gpu_name"]) == ("0", "1", "Fake H200")
    assert (float(first["power_watts"]), float(first["memory_total_MB"])) == (100.0, 100.0)
    assert (first["gpu_utilization_percent"], first["temperature_C"]) == ("50", "40")
    assert datetime.fromisoformat(first["timestamp"]).tzinfo is not None
    assert float(rows(path)[-1]["elapsed_sec"]) >= 0


def test_without_a_gpu_the_cpu_column_is_kept_and_the_rest_is_empty(tmp_path, no_gpu):
    with joulelab.telemetry(tmp_path / "power.csv") as telemetry:
        telemetry.log_once()
    assert len(rows(tmp_path / "power.csv")) == 2
    for row in rows(tmp_path / "power.csv"):
        assert float(row["cpu_utilization_percent"]) >= 0
        assert row["power_watts"] == row["gpu_index"] == row["memory_used_MB"] == ""


def test_a_sensor_that_fails_leaves_an_empty_cell_one_warning_and_no_exception(tmp_path, two_gpus, caplog):
    with caplog.at_level(logging.WARNING), joulelab.telemetry(tmp_path / "power.csv") as telemetry:
        two_gpus.failing = True
        for _ in range(3):
            telemetry.log_once()
    last = rows(tmp_path / "power.csv")[-1]
    assert (last["power_watts"], last["memory_used_MB"], last["temperature_C"]) == ("", "3.0", "40")
    assert sum("gpu:GPU-aaaaaaaa cannot be read: NVML: GPU is lost" in line for line in caplog.messages) == 1


def test_a_row_costs_no_call_that_takes_milliseconds(tmp_path, two_gpus):
    with joulelab.telemetry(tmp_path / "power.csv") as telemetry:
        calls = two_gpus.counter_calls
        two_gpus.buffer = False  # asking for samples would fail from here on
        for _ in range(3):
            telemetry.log_once()
    assert two_gpus.counter_calls == calls
    assert [row["power_watts"] for row in rows(tmp_path / "power.csv")] == ["100.0"] * 8


def test_a_sensor_that_cannot_open_is_a_warning(tmp_path, monkeypatch, caplog):
    def broken(name):
        raise RuntimeError("driver and library disagree")

    monkeypatch.setattr(SENSORS, "resolve", broken)
    with joulelab.telemetry(tmp_path / "power.csv") as telemetry:
        telemetry.log_once()
    assert len(rows(tmp_path / "power.csv")) == 2
    assert "driver and library disagree" in caplog.text


def test_a_resumed_training_continues_in_the_same_table_even_after_a_truncated_row(tmp_path, no_gpu):
    path = tmp_path / "deep" / "power.csv"
    with joulelab.telemetry(path):
        pass
    path.write_text(path.read_text() + "2026-01-01T00:00:0")
    with joulelab.telemetry(path):
        pass
    lines = path.read_text().splitlines()
    assert (len(lines), lines.count(HEADER)) == (4, 1)


def test_elapsed_time_continues_where_the_table_was_left(tmp_path, no_gpu):
    path = tmp_path / "power.csv"
    with joulelab.telemetry(path):
        pass
    long_ago = path.read_text().replace(rows(path)[0]["timestamp"], "2026-01-01T00:00:00+00:00")
    path.write_text(long_ago)
    with joulelab.telemetry(path):
        pass
    assert float(rows(path)[1]["elapsed_sec"]) > 3600


def test_another_table_of_that_name_is_left_alone(tmp_path, no_gpu):
    path = tmp_path / "power.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="is not a telemetry table"), joulelab.telemetry(path):
        pass
    assert path.read_text() == "a,b\n1,2\n"


def test_a_full_disk_does_not_end_the_training(no_gpu, tmp_path, caplog, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    with joulelab.telemetry(tmp_path / "power.csv") as telemetry:
        monkeypatch.setattr("joulelab.meter.monitor.telemetry.os.write", full)
        telemetry.log_once()
        monkeypatch.undo()
    assert "No space left" in caplog.text


def test_outside_the_with_block_and_with_a_negative_period_it_is_reported_or_does_nothing(tmp_path, no_gpu):
    telemetry = joulelab.telemetry(tmp_path / "power.csv")
    telemetry.log_once()
    telemetry.step(0)
    assert not (tmp_path / "power.csv").exists()
    with pytest.raises(UsageError, match="every=-1"):
        joulelab.telemetry(every=-1)
