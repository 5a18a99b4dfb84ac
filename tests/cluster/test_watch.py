"""Live state of runs and jobs."""

import time
from dataclasses import replace

import pytest
from made_hosts import made_run, write_lines

from joulelab import clock
from joulelab.cluster.jobs import (
    JobsFile,
    SubmittedJob,
    close_queued,
    write_home,
    write_jobs,
)
from joulelab.cluster.slurm import JobState
from joulelab.cluster.watch import UNKNOWN, LiveRun, RunWatcher, WatchedJobs, Watcher, read_speed, watch_grids
from joulelab.report.tables.grid import render_text, to_rich
from joulelab.runs.attempt import create_run
from joulelab.runs.lock import holding
from joulelab.runs.spec import RunSpec
from joulelab.runs.store import load_record


def line(step, second, attempt=1, stage="student.train"):
    stamp = {"mono_ns": round(second * 1e9), "attempt": attempt, "stage": stage, "step": step}
    return {**stamp, "loss": 1.0 / step, "fraction": step / 100, "tokens": 1000 * step, "samples": step}


def test_speed_and_remaining_time_come_from_one_stage_of_one_attempt():
    lines = [
        line(1, 1000),
        line(50, 2000),
        line(10, 5, attempt=2),
        line(20, 10, attempt=2),
        {"step": 21, "held_out_loss": 1},
    ]
    speed = read_speed(lines)
    assert speed.tokens_per_s == pytest.approx(2000)
    assert speed.left_s == pytest.approx(40)
    assert speed.loss == pytest.approx(0.05)
    assert read_speed([]).left_s is None


def test_a_running_run_shows_stage_power_energy_and_what_remains(tmp_path):
    paths = made_run(tmp_path / "run", (100.0, 300.0))
    for host in ("node0001", "node0002"):  # nobody has closed anything yet
        trace, ends = paths.trace(host, 1), paths.trace(host, 1).read_text().splitlines()[:-1]
        trace.write_text("\n".join(ends) + "\n")
    write_lines(paths.metrics, [line(10, 0), line(20, 10)])
    with holding(paths.folder):
        seen = RunWatcher(paths.folder).poll()
    assert (seen.status, seen.stage, seen.hosts) == ("running", "between stages", ("node0001", "node0002"))
    assert seen.energy_j == pytest.approx(400 * 40)
    assert seen.power_w == pytest.approx(400)
    assert seen.left_s == pytest.approx(80)
    assert seen.left_j == pytest.approx(400 * 80)
    (killed,) = Watcher(tmp_path, "run").poll().runs  # its lock is free
    assert (killed.status, killed.energy_j) == ("truncated", load_record(paths.folder).best_energy.energy_j)
    assert killed.energy_j > 0


def submitted(store, names, array=False):
    """Queued runs that one job, 41, was submitted for, as the first of them knows."""
    runs = [create_run(store, RunSpec(name=name, pipeline="measure")).folder for name in names]
    job = SubmittedJob(
        key="01-students", about="", job_id="41", script="", runs=[run.name for run in runs], array=array,
        submitted_at=clock.iso(time.time()),
    )  # fmt: skip
    write_jobs(runs[0], JobsFile(jobs=(job,)))
    return runs


def test_a_queued_run_is_over_if_no_job_can_start_it(tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.cluster.slurm.states", lambda ids: answer(ids))
    alone = create_run(tmp_path, RunSpec(name="alone", pipeline="measure")).folder
    answer = lambda ids: {}  # noqa: E731
    assert Watcher(tmp_path, alone.name).poll().over, "it was never submitted"
    (run,) = submitted(tmp_path, ["run"])
    watcher = Watcher(tmp_path, run.name)
    assert watcher.poll().over, "Slurm has forgotten its job"
    answer = lambda ids: {"41": JobState("41", "PENDING")}  # noqa: E731
    assert not watcher.poll().over


def test_without_slurm_completion_is_read_from_the_runs(tmp_path, monkeypatch):
    (run,) = submitted(tmp_path, ["run"])
    monkeypatch.setenv("PATH", str(tmp_path))
    watcher = Watcher(tmp_path, run.name)
    seen = watcher.poll()
    assert (seen.over, seen.jobs[0].state) == (False, UNKNOWN)
    assert "Slurm is not installed on this machine" in seen.jobs[0].reason
    close_queued([run], "truncated", "cancelled")
    assert watcher.poll().over


def test_a_run_of_an_array_is_over_while_other_tasks_run(tmp_path, monkeypatch):
    runs = submitted(tmp_path, ["first", "second"], array=True)
    output_text = {f"41_{task}": JobState(f"41_{task}", state) for task, state in enumerate(("RUNNING", "COMPLETED"))}
    monkeypatch.setattr("joulelab.cluster.slurm.states", lambda ids: output_text)
    write_home(runs[1], runs[0])
    close_queued(runs, "done", "")
    second = Watcher(tmp_path, runs[1].name).poll()
    assert ([job.job_id for job in second.jobs], second.over) == (["41_1"], True)
    whole = Watcher(tmp_path, runs[0].name).poll()
    assert (len(whole.jobs), whole.over) == (2, False)


RUNNING = LiveRun(
    run_id="compare-tiny-20261117T130242Z-4e66", label="KD", status="running", stage="student.train", energy_j=2.13,
    power_w=0.372, estimated=True, tokens_per_s=9359.0, fraction=0.87, loss=0.2443, left_s=61.0, left_j=389.0,
    left_co2e_g=(0.02, 0.03), j_per_token=3.97e-5, contention="other processes used 1.9 of 2 CPU cores",
)  # fmt: skip


def at_80_columns(*runs):
    (grid,) = watch_grids(WatchedJobs("compare-tiny", runs))
    return render_text(to_rich(grid), width=80)


def test_one_running_run_is_a_list_of_all_its_readings():
    text = at_80_columns(RUNNING)
    for line in (
        "Energy so far       2.13 J, estimated",
        "Stage               student.train",
        "Power now           0.372 W (estimated)",
        "Tokens per second   9359 (39.7 µJ per token, estimated)",
        "Left in this stage  1 min 01 s (389 J, 20.0 to 30.0 mgCO2e, estimated)",
        "Warning             CPU contention now: other processes used 1.9 of 2 CPU",
    ):
        assert line in text, text


def test_several_runs_fit_80_columns_without_breaking_a_word():
    text = at_80_columns(RUNNING, replace(RUNNING, run_id="compare-tiny-20261117T130242Z-9f02", status="queued"))
    words = text.split()
    for word in ("student.train", "0.2443", "estimated", "87", "queued"):
        assert word in words, text
