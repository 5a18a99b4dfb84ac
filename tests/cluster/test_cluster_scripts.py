"""The job script is text that a person reads: compared with recorded text, letter by letter."""

import os
import subprocess
from pathlib import Path

import pytest

from joulelab.cluster.chosen import seeds_of
from joulelab.cluster.plan import Member, plan, read_steps
from joulelab.cluster.script import activation_lines
from joulelab.cluster.settings import Environment, job_settings
from joulelab.cluster.submission import dry_text, submit_plan
from joulelab.errors import ConfigError, JoulelabError, NotFoundError, UsageError

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
    first = "joulelab teacher-logits corpus --shard {shard}"
    jobs = plan(MEMBERS[:1], ("students",), report_on=GROUP, nodes=2, ranks=4, first=first, shards=8)
    assert scripts(jobs, settings, monkeypatch) == (GOLDEN / "two-nodes.txt").read_text()


def test_the_teacher_is_made_in_the_first_run_that_has_one():
    jobs = {job.key.partition("-")[2]: job for job in plan(MEMBERS, ("data", "teacher", "students"), report_on=GROUP)}
    assert jobs["data"].runs == (STORE / "labels-1",)
    assert jobs["teacher"].runs == (STORE / "kd-1",)
    assert [jobs[name].after for name in jobs] == [None, "01-data", "02-teacher"]


def test_options_go_over_the_site_file_and_that_over_the_preset(site):
    settings = job_settings("h100", {"cpus": 4}, site)
    assert (settings.partition, settings.account, settings.cpus, settings.memory) == ("hopper", "physics", 4, "128G")


@pytest.mark.parametrize(
    ("preset", "asked", "error", "text"),
    [
        ("h10", {}, NotFoundError, "did you mean 'h100'"),
        (None, {"time": "two hours"}, ConfigError, "D-HH:MM:SS"),
        (None, {"gpu": 2}, ConfigError, "gpus"),
    ],
)
def test_a_mistake_in_the_settings_is_answered_with_what_was_expected(preset, asked, error, text, tmp_path):
    with pytest.raises(error) as refused:
        job_settings(preset, asked, tmp_path / "none")
    assert text in f"{refused.value.message} {refused.value.hint}"


def test_an_unknown_key_of_the_site_file_is_refused(tmp_path):
    (tmp_path / "slurm.yaml").write_text("default: {account: physics}\n")
    with pytest.raises(ConfigError, match="unknown key 'default'"):
        job_settings(None, {}, tmp_path / "slurm.yaml")


def test_conda_and_setup_lines_come_in_their_order():
    lines = activation_lines(Environment(modules=("gcc",), conda="lab", setup=("ulimit -n 4096",)))
    assert [line.split()[0] for line in lines] == ["module", "set", "ulimit"]
    assert "conda activate lab" in lines[1]


def test_shards_without_a_place_for_them_are_refused():
    with pytest.raises(UsageError, match="does not say where its share goes"):
        plan(MEMBERS, ("students",), report_on=GROUP, first="make cache", shards=4)


def test_what_was_submitted_before_a_refusal_is_cancelled_again(tmp_path, monkeypatch):
    cancelled = []
    monkeypatch.setattr("joulelab.cluster.slurm.cancel", cancelled.extend)

    def submit(script, after):
        if after is not None:
            raise JoulelabError("sbatch refused it")
        return "17"

    jobs = plan(MEMBERS, ("data", "students"), report_on=tmp_path)
    with pytest.raises(JoulelabError, match="refused"):
        submit_plan(jobs, tmp_path, tmp_path, "demo", job_settings(None, {}, tmp_path / "none"), submit)
    assert cancelled == ["17"]


def test_seeds_of_an_array():
    assert seeds_of("0-3") == (0, 1, 2, 3)
    assert seeds_of("5, 1-2") == (5, 1, 2)
    with pytest.raises(UsageError, match="no number or range"):
        seeds_of("a-b")
    with pytest.raises(UsageError, match="twice"):
        seeds_of("1,1")


SCRIPTS = Path(__file__).parent.parent.parent / "scripts" / "slurm"


def bash(text, tmp_path, **environ):
    """With a scontrol that writes down what it is asked."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **environ}
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, env=env, check=False)


def test_the_plain_scripts_are_whole():
    scripts = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")]
    assert len(scripts) == 8
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"`{script.name}`" in (SCRIPTS / "README.md").read_text() or script.name == "until_done.sh"


def test_a_warned_command_saves_and_its_job_goes_back_to_the_queue(tmp_path):
    child = f"trap 'echo saved > {tmp_path}/saved; exit 143' TERM; while :; do sleep 0.1; done"
    warned = f'source {SCRIPTS}/until_done.sh; (sleep 1; kill -TERM $$) & until_done bash -c "{child}"'
    assert bash(warned, tmp_path).returncode == 143
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "asked").read_text() == "requeue 77\n"


def test_a_command_that_fails_by_itself_does_not_come_back(tmp_path):
    assert bash(f"source {SCRIPTS}/until_done.sh; until_done bash -c 'exit 7'", tmp_path).returncode == 7
    assert not (tmp_path / "asked").exists()


def test_what_a_job_needs_and_is_not_there_ends_it_with_2(tmp_path):
    done = bash(f"bash {SCRIPTS}/check_setup.sh {tmp_path}/gone.csv", tmp_path)
    assert done.returncode == 2
    assert f"missing: {tmp_path}/gone.csv" in done.stderr
