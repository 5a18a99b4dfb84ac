"""The job script is text that a person reads: compared with recorded text, letter by letter."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from joulelab.cluster.job_settings import Environment, job_settings
from joulelab.cluster.jobs import JobsFile, SubmittedJob, close_queued, home_of, write_jobs
from joulelab.cluster.plan import Member, plan, read_steps, require_ranks, require_shards, usual_steps
from joulelab.cluster.script import activation_lines
from joulelab.cluster.submission import create_shards, dry_text, parse_seeds, resubmission, submit_plan
from joulelab.distill.causal.phases import shard_specs
from joulelab.errors import ConfigError, JoulelabError, NotFoundError, UsageError
from joulelab.runs.attempt import create_run
from joulelab.runs.groups import create_group, queue_members
from joulelab.runs.spec import RunSpec, check, merge, read_experiment
from joulelab.runs.store import load_record, run_folders

GOLDEN = Path(__file__).parent / "golden"
STORE = Path("/shared/runs")
GROUP = STORE / "groups" / "demo-1"
MEMBERS = [Member(STORE / "labels-1", False), Member(STORE / "kd-1", True), Member(STORE / "kd-2", True)]
SITE = """\
defaults:
  account: physics
  environment: {modules: [cuda/12.6], venv: /shared/venv}
  hf_home: /scratch/hf
presets:
  h100: {partition: hopper, cpu_partition: cpu}
"""


@pytest.fixture
def site(tmp_path):
    path = tmp_path / "slurm.yaml"
    path.write_text(SITE)
    return path


def scripts(jobs, settings, monkeypatch):
    monkeypatch.setattr("joulelab.cluster.submission.script_text.__defaults__", ("/usr/bin/python",))
    return dry_text(jobs, GROUP, STORE, "demo", settings)


def test_a_chain_of_all_steps_reads_as_recorded(site, monkeypatch):
    settings = job_settings("h100", {"time": "2:00:00", "max_at_once": 2, "scratch": "/local"}, site)
    jobs = plan(MEMBERS, read_steps("data,teacher,students,evaluation,report"), report_on=GROUP)
    assert scripts(jobs, settings, monkeypatch) == (GOLDEN / "chain.txt").read_text()


def test_ranks_on_two_nodes_and_shards_before_them_read_as_recorded(tmp_path, monkeypatch):
    asked = {"nodes": 2, "gpus": 4, "exclusive": True, "requeue": False, "sbatch": ["--mail-type=END"]}
    settings = job_settings("l40s", asked, tmp_path / "no-site-file")
    shards = [[STORE / f"kd-teacher-{number}-of-8" for number in range(8)]]
    jobs = plan(MEMBERS[1:2], ("teacher", "students"), report_on=GROUP, nodes=2, ranks=4, shards=shards)
    assert scripts(jobs, settings, monkeypatch) == (GOLDEN / "two-nodes.txt").read_text()


def test_the_teacher_is_made_in_the_first_run_that_has_one():
    jobs = {job.key.partition("-")[2]: job for job in plan(MEMBERS, ("data", "teacher", "students"), report_on=GROUP)}
    assert jobs["data"].runs == (STORE / "labels-1",)
    assert jobs["teacher"].runs == (STORE / "kd-1",)
    assert [jobs[name].after for name in jobs] == [None, "01-data", "02-teacher"]


@pytest.mark.parametrize(
    ("experiment", "changes", "has_teacher"),
    [
        ("demo-kd", {}, True),
        ("demo-labels", {}, False),
        ("squad-tiny", {}, True),
        ("squad-tiny-labels", {}, False),
        ("fitnets-images", {}, True),
        ("distilbert-tiny-alone", {}, False),
        ("distilbert-tiny-alone", {"until": "teacher"}, True),
        ("sft-tiny", {}, False),
        ("kd-tiny", {}, True),
    ],
)
def test_settings_declare_whether_a_run_has_a_teacher(experiment, changes, has_teacher):
    assert check(merge(read_experiment(experiment), changes)).has_teacher is has_teacher


def test_a_pipeline_declares_on_its_spec_that_it_divides_its_work_among_ranks():
    class Sharing(RunSpec):
        shares_ranks = True

    require_ranks(Sharing(pipeline="mine"), nodes=2, ranks=4)
    with pytest.raises(UsageError, match="single process, but 2 x 4") as refused:
        require_ranks(RunSpec(pipeline="mine"), nodes=2, ranks=4)
    assert "distilbert, dpo, kd, self, sft, synthetic, train" in refused.value.hint


def test_options_go_over_the_site_file_and_that_over_the_preset(site):
    settings = job_settings("h100", {"cpus": 4}, site)
    assert (settings.partition, settings.account, settings.cpus, settings.memory) == ("hopper", "physics", 4, "128G")


@pytest.mark.parametrize(
    ("preset", "asked", "error", "text"),
    [
        ("h10", {}, NotFoundError, "did you mean 'h100'"),
        (None, {"time": "two hours"}, ConfigError, "D-HH:MM:SS"),
        (None, {"gpu": 2}, ConfigError, "gpus"),
        (None, {"memory": "lots"}, ConfigError, "as in 64G or 512M, found 'lots'"),
        (None, {"sbatch": ["nonsense"]}, ConfigError, "found 'nonsense'"),
    ],
)
def test_a_mistake_in_the_settings_is_answered_with_what_was_expected(preset, asked, error, text, tmp_path):
    with pytest.raises(error) as refused:
        job_settings(preset, asked, tmp_path / "none")
    assert text in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("default: {account: physics}", "unknown key 'default'"),
        ("presets: [big]", "presets is"),
        ("presets: {big: 3}", "presets.big is '3'"),
        ("defaults: {time: 4:00:00}", "in quotes, .* found the number 14400"),
        ("defaults: {acount: physics}", "did you mean account"),
        ("defaults: {gpus: many}", "whole number"),
    ],
)
def test_a_mistake_in_the_site_file_is_refused_with_its_name(tmp_path, written, text):
    (tmp_path / "slurm.yaml").write_text(written)
    with pytest.raises(ConfigError, match=text) as refused:
        job_settings(None, {}, tmp_path / "slurm.yaml")
    assert str(tmp_path) in f"{refused.value.message} {refused.value.hint}"


def test_a_site_file_that_is_named_must_be_there(tmp_path, monkeypatch):
    for name in (str(tmp_path / "gone.yaml"), "./gone.yaml"):
        monkeypatch.setenv("JOULELAB_SLURM", name)
        with pytest.raises(NotFoundError, match=r"gone\.yaml"):
            job_settings(None, {})


def test_conda_and_setup_lines_come_in_their_order():
    lines = activation_lines(Environment(modules=("gcc",), conda="lab", setup=("ulimit -n 4096",)))
    assert [("module load gcc" in line, "conda activate lab" in line) for line in lines[:2]] == [(1, 0), (0, 1)]
    assert lines[2:] == ["ulimit -n 4096"]


def test_work_that_several_runs_need_is_split_once_and_different_work_one_after_the_other():
    specs = [check(merge(read_experiment(name), {"seed": seed})) for seed in (0, 1) for name in ("sft-tiny", "kd-tiny")]
    (shares,) = shard_specs(specs, 4)
    assert [(spec.name, spec.shard, spec.until) for spec in shares][1] == ("kd-tiny-teacher-1-of-4", "1/4", "teacher")
    works = shard_specs([*specs, *(check(read_experiment(name)) for name in ("synthetic-tiny", "dpo-tiny"))], 2)
    assert [work[0].pipeline for work in works] == ["kd", "synthetic", "dpo"]
    shared = [[STORE / spec.name for spec in work] for work in works]
    jobs = plan(MEMBERS, usual_steps(specs, shards=2), report_on=GROUP, shards=shared)
    keys = ["01-data", "02-teacher", "03-teacher", "04-teacher", "05-students", "06-report"]
    assert [job.key for job in jobs] == keys
    assert [job.after for job in jobs] == [None, *keys[:-1]]


def test_shares_know_whom_they_work_for_and_those_cut_off_go_on_when_submitted_again(tmp_path):
    works, home = shard_specs([check(read_experiment("kd-tiny"))], 2), tmp_path / "groups" / "home"
    (first,) = create_shards(tmp_path, works, home)
    assert [home_of(folder).resolve() for folder in first] == [home.resolve()] * 2
    runs = tuple(folder.name for folder in first)
    job = SubmittedJob(key="01-teacher", about="", job_id="7", script="", runs=runs, array=True, submitted_at="")
    write_jobs(home, JobsFile(jobs=(job,)))
    assert create_shards(tmp_path, works, home) == [first]


def test_shards_are_refused_where_there_is_nothing_to_split():
    for name, text in (("sft-tiny", "no teacher"), ("self-tiny", "trained first"), ("demo-kd", "in one go")):
        with pytest.raises(UsageError, match=text):
            shard_specs([check(read_experiment(name))], 4)
    with pytest.raises(UsageError, match="which --steps leaves out"):
        require_shards(4, ("data", "students"))


def test_what_was_submitted_before_a_refusal_is_cancelled_again(tmp_path, monkeypatch):
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


def test_what_is_left_of_a_group_is_told_before_anything_is_queued_again(tmp_path):
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


SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "slurm"


def bash(text, tmp_path, **environ):
    """With a scontrol that writes down what it is asked, and a squeue that says what state the job is in."""
    programs = {"scontrol": f'echo "$@" >> {tmp_path}/asked', "squeue": f"echo {environ.pop('state', 'RUNNING')}"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **environ}
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, env=env, check=False)


def test_the_plain_scripts_are_whole():
    scripts = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")]
    assert len(scripts) == 8
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"`{script.name}`" in (SCRIPTS / "README.md").read_text() or script.name == "until_done.sh"


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, "requeue 77\n"),
        ({"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}, "requeue 77_3\n"),  # 77 would be all of them
        ({"state": "COMPLETING"}, None),  # cancelled
    ],
)
def test_a_warned_command_saves_and_its_job_goes_back_to_the_queue(tmp_path, environ, asked):
    child = f"trap 'echo saved > {tmp_path}/saved; exit 143' TERM; while :; do sleep 0.1; done"
    warned = f'source {SCRIPTS}/until_done.sh; (sleep 0.5; kill -TERM $$) & until_done bash -c "{child}"'
    assert bash(warned, tmp_path, **environ).returncode == 143
    assert (tmp_path / "saved").exists()
    assert ((tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else None) == asked


def test_a_command_that_fails_by_itself_does_not_come_back(tmp_path):
    assert bash(f"source {SCRIPTS}/until_done.sh; until_done bash -c 'exit 7'", tmp_path).returncode == 7
    assert not (tmp_path / "asked").exists()


def test_what_a_job_needs_and_is_not_there_ends_it_with_2(tmp_path):
    done = bash(f"bash {SCRIPTS}/check_setup.sh {tmp_path}/gone.csv", tmp_path)
    assert done.returncode == 2
    assert f"missing: {tmp_path}/gone.csv" in done.stderr
