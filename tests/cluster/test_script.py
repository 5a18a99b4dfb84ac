"""Job scripts compared with recorded text."""

from pathlib import Path

from joulelab.cluster.job_settings import Environment, job_settings
from joulelab.cluster.plan import Member, plan, read_steps
from joulelab.cluster.script import JobScript, activation_lines, sbatch_options
from joulelab.cluster.submission import dry_text

GOLDEN = Path(__file__).parent / "golden"


STORE = Path("/shared/runs")


GROUP = STORE / "groups" / "demo-1"


MEMBERS = [Member(STORE / "labels-1", False), Member(STORE / "kd-1", True), Member(STORE / "kd-2", True)]


def scripts(jobs, settings, monkeypatch):
    monkeypatch.setattr("joulelab.cluster.submission.script_text.__defaults__", ("/usr/bin/python",))
    return dry_text(jobs, GROUP, STORE, "demo", settings)


def test_a_chain_of_all_steps_reads_as_recorded(site, monkeypatch):
    settings = job_settings("h100", {"time": "2:00:00", "max_at_once": 2, "scratch": "/local"}, site)
    jobs = plan(MEMBERS, read_steps("data,teacher,students,evaluation,report"), report_on=GROUP)
    assert scripts(jobs, settings, monkeypatch) == (GOLDEN / "chain.txt").read_text()


def test_ranks_on_two_nodes_and_shards_before_them_read_as_recorded(tmp_path, monkeypatch):
    requested = {"nodes": 2, "gpus": 4, "exclusive": True, "requeue": False, "sbatch": ["--mail-type=END"]}
    settings = job_settings("l40s", requested, tmp_path / "no-site-file")
    shards = [[STORE / f"kd-teacher-{number}-of-8" for number in range(8)]]
    jobs = plan(MEMBERS[1:2], ("teacher", "students"), report_on=GROUP, nodes=2, ranks=4, shards=shards)
    assert scripts(jobs, settings, monkeypatch) == (GOLDEN / "two-nodes.txt").read_text()


def test_the_log_is_written_into_a_store_with_a_space_and_a_percent_sign(tmp_path):
    job = JobScript("demo", "", "true", Path("/shared/my runs/50%/slurm"), STORE)
    options = sbatch_options(job, job_settings(None, {"constraint": "a&b"}, tmp_path / "no-site-file"))
    assert "'--output=/shared/my runs/50%%/slurm/demo.%j.log'" in options, (
        "sbatch splits at spaces; %% is a percent sign"
    )
    assert "'--constraint=a&b'" in options and "--nodes=1" in options


def test_conda_and_setup_lines_come_in_their_order():
    lines = activation_lines(Environment(modules=("gcc",), conda="lab", setup=("ulimit -n 4096",)))
    assert [("module load gcc" in line, "conda activate lab" in line) for line in lines[:2]] == [(1, 0), (0, 1)]
    assert lines[2:] == ["ulimit -n 4096"]
