"""Traces of several hosts become one record: every host once, times by one clock, and who held the others up."""

import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from made_hosts import IDLE_S, SECONDS, TRAIN_S, made_run
from nvml_sim.driver import SimGpu, constant

from joulelab.report.tables.run_tables import node_grids
from joulelab.runs.assemble import assemble
from joulelab.runs.execute import _job_name
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord

PROGRAM = Path(__file__).parent / "rank_without_torch.py"
POWERS_W = (100.0, 200.0, 400.0)


@pytest.fixture
def record(tmp_path) -> RunRecord:
    paths = made_run(tmp_path / "run", POWERS_W, clocks_s=(0.0, 100.0, -3.0), own_s=(0.5, 0.52, 0.9))
    return assemble(paths, "done")


def test_the_hosts_joules_add_up_to_the_total_and_time_passes_once(record):
    billed_s = SECONDS - IDLE_S
    assert record.totals.energy_j == pytest.approx(sum(POWERS_W) * billed_s, rel=0.01)
    assert sum(attempt.energy.gpu.energy_j for attempt in record.attempts) == pytest.approx(record.totals.energy_j)
    assert record.totals.duration_s == pytest.approx(billed_s)
    train = record.stage("student.train")
    assert train.duration_s == pytest.approx(TRAIN_S)
    assert train.mean_power_w == pytest.approx(sum(POWERS_W), rel=0.01)
    assert train.peak_power_w == pytest.approx(sum(POWERS_W), rel=0.01)
    assert train.tokens_per_s == pytest.approx(50_000 / TRAIN_S)
    assert train.phases["step"].count == 10
    # each host was at rest in its own way, and drew that all along
    assert train.above_idle_j == pytest.approx(0.0, abs=sum(POWERS_W))
    assert record.results["student.accuracy"].value == 0.9


def test_clocks_that_differ_by_minutes_give_one_time_of_day(record):
    assert [round(attempt.clock_offset_s, 3) for attempt in record.attempts] == [0.0, 100.0, -3.0]
    started = {segment.started_at for segment in record.stage("student.train").segments}
    moments = [datetime.fromisoformat(text).timestamp() for text in started]
    assert max(moments) - min(moments) < 0.001


def test_the_tables_name_hosts_devices_and_the_straggler(record):
    text = "".join(map(plain, node_grids(record)))
    # the last reading is half a refresh before the end, so the energies may be lower bounds
    assert re.search(r"node0003 (≥ )?12\.0 kJ", text)
    assert "gpu:GPU-node0002" in text
    assert "Stragglers: rank 2 on node0003." in text
    assert re.search(r"Sum: (≥ )?21\.0 kJ", text)


def test_tables_of_many_hosts_say_that_they_are_cut(record, monkeypatch):
    monkeypatch.setattr("joulelab.report.tables.run_tables.MOST_ROWS", 2)
    hosts, devices, _ = node_grids(record)
    assert (len(hosts.rows), len(devices.rows)) == (2, 2)
    assert hosts.note.endswith("rank 0. The first 2 of 3 are shown.")
    assert devices.note == "The first 2 of 3 are shown."


def plain(grid):
    return "\n".join([grid.caption, *(" ".join(row) for row in grid.rows), grid.note, ""])


def test_one_process_on_one_host_has_no_such_tables(tmp_path):
    assert node_grids(assemble(made_run(tmp_path / "run", (100.0,)), "done")) == ()


def test_four_ranks_on_a_node_are_one_run_and_the_node_is_counted_once(tmp_path, nvml_sim):
    nvml_sim.gpus = [SimGpu(wave=constant(250.0))]
    nvml_sim.write()
    environ = {**os.environ, "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1", "SLURM_JOB_ID": "7"}
    environ |= {"SLURMD_NODENAME": "node9", "SLURM_JOB_CPUS_PER_NODE": "1"}
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(4)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    (folder,) = tmp_path.glob("ranks-*")
    record = RunRecord.model_validate_json((folder / "run.json").read_text())
    assert [path.name for _, _, path in RunPaths(folder).traces()] == ["node9.1.parquet"]  # all recorders have ended
    assert len(list((folder / "events").glob("node9.*.1.jsonl"))) == 4
    assert len(record.attempts) == 1
    stage = record.stage("student.train")
    assert stage.mean_power_w == pytest.approx(250.0, rel=0.02)
    assert {pace.rank for pace in record.attempts[0].ranks} == {0, 1, 2, 3}
    assert not list(tmp_path.glob(".ranks/*"))


def test_ranks_of_two_nodes_find_each_other_and_a_restarted_job_is_another_one():
    job = {"TORCHELASTIC_RUN_ID": "7", "MASTER_PORT": "1", "MASTER_ADDR": "a", "GROUP_WORLD_SIZE": "2"}
    assert _job_name(job, 100) == _job_name(job, 200)
    assert _job_name({**job, "SLURM_RESTART_COUNT": "1"}, 100) != _job_name({**job, "SLURM_RESTART_COUNT": "2"}, 100)
    alone = {**job, "GROUP_WORLD_SIZE": "1"}
    assert _job_name(alone, 100) != _job_name(alone, 200)
