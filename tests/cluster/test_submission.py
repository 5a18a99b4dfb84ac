"""Submission, resubmission and shards, without Slurm."""

import shutil

import pytest

from joulelab.cluster.job_settings import job_settings
from joulelab.cluster.jobs import JobsFile, SubmittedJob, close_queued, home_of, write_jobs
from joulelab.cluster.plan import Member, plan
from joulelab.cluster.slurm import JobState
from joulelab.cluster.submission import create_shards, parse_seeds, refuse_if_jobs_left, resubmission, submit_plan
from joulelab.distill.causal.config import shard_specs
from joulelab.errors import JoulelabError, UsageError
from joulelab.runs.attempt import create_run
from joulelab.runs.groups import create_group, queue_members
from joulelab.runs.spec import RunSpec, check, read_experiment
from joulelab.runs.store import load_record, run_folders


def test_shards_record_their_home_and_unfinished_ones_are_resumed_on_resubmission(tmp_path):
    works, home = shard_specs([check(read_experiment("kd-tiny"))], 2), tmp_path / "groups" / "home"
    (first,) = create_shards(tmp_path, works, home)
    assert [home_of(folder).resolve() for folder in first] == [home.resolve()] * 2
    runs = tuple(folder.name for folder in first)
    job = SubmittedJob(key="01-teacher", about="", job_id="7", script="", runs=runs, array=True, submitted_at="")
    write_jobs(home, JobsFile(jobs=(job,)))
    assert create_shards(tmp_path, works, home) == [first]


def test_jobs_submitted_before_a_refusal_are_cancelled(tmp_path, monkeypatch):
    cancelled = []
    monkeypatch.setattr("joulelab.cluster.slurm.cancel", cancelled.extend)

    def submit(script, after):
        if after is not None:
            raise JoulelabError("sbatch refused it")
        return "17"

    run = create_run(tmp_path, RunSpec(name="demo", pipeline="measure")).folder
    jobs = plan([Member(run, False)], ("data", "students"), report_on=tmp_path)
    with pytest.raises(JoulelabError, match="refused") as refused:
        submit_plan(jobs, run, tmp_path, "demo", job_settings(None, {}, tmp_path / "none"), submit)
    assert cancelled == ["17"]
    assert f"joulelab submit --resume {run.name}" in refused.value.hint
    record = load_record(run)
    assert (record.status, record.error.message) == ("failed", "not submitted: sbatch refused it")


def test_if_the_earlier_jobs_cannot_be_cancelled_the_refusal_names_them_and_the_runs_are_closed(tmp_path, monkeypatch):
    def unavailable(job_ids):
        raise JoulelabError("scancel did not answer within 60 s")

    def submit(script, after):
        if after is not None:
            raise JoulelabError("sbatch did not answer within 60 s", "try again later")
        return "17"

    monkeypatch.setattr("joulelab.cluster.slurm.cancel", unavailable)
    run = create_run(tmp_path, RunSpec(name="demo", pipeline="measure")).folder
    jobs = plan([Member(run, False)], ("data", "students"), report_on=tmp_path)
    with pytest.raises(JoulelabError, match="sbatch did not answer") as refused:
        submit_plan(jobs, run, tmp_path, "demo", job_settings(None, {}, tmp_path / "none"), submit)
    assert "scancel did not answer within 60 s: cancel the jobs submitted before with scancel 17" in refused.value.hint
    assert load_record(run).status == "failed"


def jobs_of(runs, **more):
    return JobsFile(jobs=(SubmittedJob(key="01", about="", job_id="7", script="", runs=runs, submitted_at="", **more),))


@pytest.mark.parametrize(("state", "refused"), [("PENDING", True), ("RUNNING", True), ("COMPLETING", False)])
def test_runs_with_a_job_that_can_still_execute_them_are_not_submitted_again(tmp_path, monkeypatch, state, refused):
    monkeypatch.setattr("joulelab.cluster.slurm.states", lambda ids: {one: JobState(one, state) for one in ids})
    run = create_run(tmp_path, RunSpec(name="demo", pipeline="measure")).folder
    write_jobs(run, jobs_of((run.name,)))
    if not refused:
        refuse_if_jobs_left(run)
        return
    with pytest.raises(UsageError, match="still has jobs: 7") as error:
        refuse_if_jobs_left(run)
    assert f"joulelab cancel {run.name}" in error.value.hint


def test_a_member_can_be_submitted_again_while_only_other_tasks_of_its_array_run(tmp_path, monkeypatch):
    states = {"7_0": JobState("7_0", "FAILED"), "7_1": JobState("7_1", "RUNNING")}
    monkeypatch.setattr("joulelab.cluster.slurm.states", lambda ids: states)
    group = create_group(tmp_path, [RunSpec(name=name, pipeline="measure") for name in ("one", "two")], name="pair")
    one, two = (run.folder for run in queue_members(group))
    write_jobs(group.folder, jobs_of((one.name, two.name), array=True))
    refuse_if_jobs_left(one)
    for still_has in (two, group.folder):
        with pytest.raises(UsageError, match="still has jobs: 7_1"):
            refuse_if_jobs_left(still_has)


def test_unfinished_runs_of_a_group_are_found_before_anything_is_queued(tmp_path):
    specs = [RunSpec(name=name, pipeline="measure") for name in ("done", "failed", "new")]
    group = create_group(tmp_path, specs, name="pair")
    done, failed, new = (run.folder for run in queue_members(group))
    close_queued([done], "done", "")
    close_queued([failed], "failed", "")
    shutil.rmtree(new)
    wanted = resubmission(tmp_path, group.group_id)
    imagined = wanted.preview(tmp_path)
    assert [spec.name for spec in wanted.specs] == ["failed", "new"]
    assert (load_record(failed).status, len(run_folders(tmp_path))) == ("failed", 2)
    made = wanted.create(tmp_path)
    assert made.members[0] == imagined.members[0]
    assert [load_record(member.folder).status for member in made.members] == ["queued", "queued"]


def test_seeds_of_an_array():
    assert parse_seeds("0-3") == (0, 1, 2, 3)
    assert parse_seeds("5, 1-2") == (5, 1, 2)
    with pytest.raises(UsageError, match="not a number or range"):
        parse_seeds("a-b")
    with pytest.raises(UsageError, match="duplicate seed"):
        parse_seeds("1,1")
