"""What is read back: Slurm's words, a run that is under way, and its accounts; on a machine without torch or GPU."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from made_hosts import made_run, write_lines

from joulelab import clock, lookup
from joulelab.cluster.accounting import parse_accounting
from joulelab.cluster.jobs import (
    JobsFile,
    SubmittedJob,
    close_queued,
    fail_dependent_runs,
    folder_of_job,
    write_home,
    write_jobs,
)
from joulelab.cluster.slurm import JobState, parse_jobs, parse_queue, states, this_job
from joulelab.cluster.watch import UNKNOWN, RunWatcher, Watcher, read_speed
from joulelab.errors import EndedBySignal, JoulelabError, NotFoundError
from joulelab.runs.attempt import create_run
from joulelab.runs.context import JOB_SIGNALS, RunContext, SilentProgress, StopRequest
from joulelab.runs.lock import holding
from joulelab.runs.phases import PhaseFinished, end_before_later_phase
from joulelab.runs.record import RunRecord, kind_by_name
from joulelab.runs.spec import RunSpec

ROOT = Path(__file__).parent.parent.parent


def test_the_queue_s_lines_become_states_tasks_apart():
    told = parse_queue("12|N/A|RUNNING|None|node1\n13|0|PENDING|Dependency|\n13|1|PENDING|Dependency|\n")
    assert [(job.job_id, job.state, job.reason) for job in told] == [
        ("12", "RUNNING", ""), ("13_0", "PENDING", "Dependency"), ("13_1", "PENDING", "Dependency"),
    ]  # fmt: skip


def test_the_controller_s_memory_becomes_states_too():
    line = "JobId=21 ArrayJobId=20 ArrayTaskId=1 JobName=x JobState=FAILED Reason=NonZeroExitCode NodeList=node2\n"
    (job,) = parse_jobs(line + "garbage\n")
    assert (job.job_id, job.state, job.reason, job.nodes, job.alive) == (
        "20_1",
        "FAILED",
        "NonZeroExitCode",
        "node2",
        False,
    )


# Told by sacct of Slurm 22.05 with its RAPL plugin on: only what srun started is in a job's own line. The nodes of
# job 2 were written node[1-2].
ACCOUNTS = """\
1|COMPLETED|00:00:05||node1|1|1
1.batch|COMPLETED|00:00:05|198|node1|1|1
2|COMPLETED|00:00:05|402|node1,node2|8|2
2.batch|COMPLETED|00:00:05|236|node1|4|1
2.0|COMPLETED|00:00:05|402|node1,node2|8|2
3|REQUEUED|00:01:04||node2|4|1
3.batch|FAILED|00:01:04|0|node2|4|1
3|COMPLETED|00:00:05||node2|4|1
3.batch|COMPLETED|00:00:05|208|node2|4|1
4_1|CANCELLED by 0|00:00:00||None assigned|0|1
"""


def test_slurm_s_joules_are_flagged_where_they_are_zero_or_of_a_shared_node():
    jobs = parse_accounting(ACCOUNTS, {"node1": 4, "node2": 4})
    told = [(job.job_id, job.state, job.energy_j) for job in jobs]
    assert told == [
        ("1", "COMPLETED", 198), ("2", "COMPLETED", 402), ("3", "REQUEUED", None), ("3", "COMPLETED", 208),
        ("4_1", "CANCELLED", None),
    ]  # fmt: skip
    part, whole, zero, _, none = jobs
    assert "1 of 4 CPUs: may include other jobs" in part.remark
    assert "used by this job only" in whole.remark
    assert "0 J" in zero.remark
    assert "no energy" in none.remark
    assert "198 J by Slurm's accounting" in part.text


def test_a_task_of_an_array_names_itself_and_not_the_whole_array(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    assert this_job() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert this_job() == "12_3"


def line(step, second, attempt=1, stage="student.train"):
    stamp = {"mono_ns": round(second * 1e9), "attempt": attempt, "stage": stage, "step": step}
    return {**stamp, "loss": 1.0 / step, "fraction": step / 100, "tokens": 1000 * step, "samples": step}


def test_speed_and_what_is_left_come_from_one_stage_of_one_attempt():
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


def test_a_run_that_goes_on_tells_stage_watts_joules_and_what_is_left(tmp_path):
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


def test_a_job_s_number_finds_its_folder_and_a_failed_job_tells_those_who_wait(tmp_path, monkeypatch):
    runs = [create_run(tmp_path, RunSpec(name=n, pipeline="measure")).folder for n in ("a", "b")]
    jobs = [
        SubmittedJob(key=k, about="", job_id=i, script="", runs=r, after=a, submitted_at=clock.iso(time.time()))
        for k, i, r, a in [("01-data", "31", (), None), ("02-students", "32", (runs[1].name,), "01-data")]
    ]
    write_jobs(runs[0], JobsFile(jobs=tuple(jobs)))
    assert folder_of_job(tmp_path, "32_1") == runs[0]
    with pytest.raises(NotFoundError, match="job 33"):
        folder_of_job(tmp_path, "33")
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    fail_dependent_runs(runs[0], "no such file")
    record = RunRecord.model_validate_json((runs[1] / "run.json").read_text())
    assert record.status == "failed"
    assert record.error.message == "not started: job 01-data failed (no such file)"


def submitted(store, names, array=False):
    """Queued runs that one job, 41, was submitted for, as the first of them knows."""
    runs = [create_run(store, RunSpec(name=name, pipeline="measure")).folder for name in names]
    job = SubmittedJob(
        key="01-students", about="", job_id="41", script="", runs=[run.name for run in runs], array=array,
        submitted_at=clock.iso(time.time()),
    )  # fmt: skip
    write_jobs(runs[0], JobsFile(jobs=(job,)))
    return runs


def test_watching_a_run_that_waits_ends_where_no_job_can_begin_it(tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.cluster.slurm.states", lambda ids: answer(ids))
    alone = create_run(tmp_path, RunSpec(name="alone", pipeline="measure")).folder
    answer = lambda ids: {}  # noqa: E731
    assert Watcher(tmp_path, alone.name).poll().over, "it was never submitted"
    (run,) = submitted(tmp_path, ["run"])
    watcher = Watcher(tmp_path, run.name)
    assert watcher.poll().over, "Slurm has forgotten its job"
    answer = lambda ids: {"41": JobState("41", "PENDING")}  # noqa: E731
    assert not watcher.poll().over


def test_where_slurm_cannot_be_asked_the_runs_alone_say_whether_they_are_over(tmp_path, monkeypatch):
    (run,) = submitted(tmp_path, ["run"])
    monkeypatch.setenv("PATH", str(tmp_path))
    watcher = Watcher(tmp_path, run.name)
    seen = watcher.poll()
    assert (seen.over, seen.jobs[0].state) == (False, UNKNOWN)
    assert "Slurm is not installed on this machine" in seen.jobs[0].reason
    close_queued([run], "truncated", "cancelled")
    assert watcher.poll().over


def test_a_run_of_an_array_is_over_though_its_neighbours_go_on(tmp_path, monkeypatch):
    runs = submitted(tmp_path, ["first", "second"], array=True)
    told = {f"41_{task}": JobState(f"41_{task}", state) for task, state in enumerate(("RUNNING", "COMPLETED"))}
    monkeypatch.setattr("joulelab.cluster.slurm.states", lambda ids: told)
    write_home(runs[1], runs[0])
    close_queued(runs, "done", "")
    second = Watcher(tmp_path, runs[1].name).poll()
    assert ([job.job_id for job in second.jobs], second.over) == (["41_1"], True)
    whole = Watcher(tmp_path, runs[0].name).poll()
    assert (len(whole.jobs), whole.over) == (2, False)


def test_a_controller_that_does_not_answer_says_nothing_about_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, line in {"squeue": "echo $SAID >&2; exit 1", "scontrol": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("SAID", "slurm_load_jobs error: Invalid job id specified")
    assert states(["41"]) == {}
    monkeypatch.setenv("SAID", "Unable to contact slurm controller")
    with pytest.raises(JoulelabError, match="Unable to contact"):
        states(["41"])
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec /bin/sleep 5\n")
    monkeypatch.setattr("joulelab.cluster.slurm.TIMEOUT_S", 0.1)
    with pytest.raises(JoulelabError, match="did not answer"):
        states(["41"])


def test_a_part_ends_where_a_stage_of_the_next_one_begins():
    for stage in ("idle.before", "data.preprocess", "teacher.train", "teacher.evaluate"):
        end_before_later_phase(stage, kind_by_name(stage), "teacher")
    for stage, part in [("teacher.train", "data"), ("student.train", "teacher"), ("model.evaluate", "train")]:
        with pytest.raises(PhaseFinished):
            end_before_later_phase(stage, kind_by_name(stage), part)
    end_before_later_phase("student.evaluate", kind_by_name("student.evaluate"), None)


def test_a_signal_and_its_echo_are_one_request_and_a_record_being_written_is_left_in_peace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("joulelab.runs.context.time.monotonic", lambda: now[0])
    stop = StopRequest(JOB_SIGNALS)
    stop._receive(10, None)
    now[0] += 0.5
    stop._receive(15, None)
    assert stop.signum == 10
    now[0] += 5
    with pytest.raises(EndedBySignal):
        stop._receive(15, None)
    stop.ignore_repeats()
    stop._receive(15, None)


def test_a_warning_leaves_an_evaluation_inside_a_training_in_peace_so_that_the_loop_can_save(tmp_path):
    spec, stop = RunSpec(name="a", pipeline="measure"), StopRequest(JOB_SIGNALS)
    run = RunContext(create_run(tmp_path, spec), spec, MagicMock(), stop, 1, SilentProgress())
    with run.stage("student.train"):
        stop._receive(15, None)
        with run.stage("student.validate"):
            pass
    with pytest.raises(EndedBySignal), run.stage("student.evaluate"):
        pass


def test_pipelines_that_share_their_work_are_those_that_join_the_ranks():
    """`run_recipe` joins the ranks of every pipeline that declares it."""
    modules = {name: place.partition(":")[0] for name, place in lookup.PIPELINES._entries.items()}
    sources = {name: Path(find_spec(module).origin).read_text() for name, module in modules.items()}
    declared = {name for name in lookup.PIPELINE_SPECS.names() if lookup.PIPELINE_SPECS.resolve(name).shares_ranks}
    assert {name for name, text in sources.items() if "process_group() as" in text} <= declared
    assert all("process_group() as" in sources[name] or "run_recipe(" in sources[name] for name in declared)


WITHOUT_TORCH = """\
import sys
for name in ("torch", "transformers", "datasets", "tokenizers", "safetensors", "pynvml"):
    sys.modules[name] = None
sys.argv = ["joulelab", *sys.argv[1:]]
from joulelab.cli.main import main
main()
"""


def test_submit_watch_and_report_need_neither_torch_nor_a_gpu(tmp_path):
    paths = made_run(tmp_path / "run", (100.0, 300.0))
    words = {
        "submit": ["distilbert-tiny-quick", "--dry-run", "--preset", "h100"],
        "watch": ["run", "--once", "--json"],
        "report": ["run"],
    }
    said = {}
    for verb, rest in words.items():
        command = [sys.executable, "-c", WITHOUT_TORCH, verb, *rest, "--runs-dir", str(tmp_path)]
        with holding(paths.folder):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        said[verb] = done.stdout
        assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=h100:1" in said["submit"]
    assert json.loads(said["watch"])["runs"][0]["energy_j"] > 0
    assert paths.report.exists()
