"""Output of Slurm's commands parsed into job states."""

import pytest

from joulelab.cluster import slurm
from joulelab.cluster.job_settings import job_settings
from joulelab.cluster.slurm import parse_jobs, parse_queue, states, this_job
from joulelab.cluster.submission import require_resources
from joulelab.errors import JoulelabError, UsageError


def test_output_of_squeue_becomes_states_per_task():
    output_text = parse_queue("12|N/A|RUNNING|None|node1\n13|0|PENDING|Dependency|\n13|1|PENDING|Dependency|\n")
    assert [(job.job_id, job.state, job.reason) for job in output_text] == [
        ("12", "RUNNING", ""), ("13_0", "PENDING", "Dependency"), ("13_1", "PENDING", "Dependency"),
    ]  # fmt: skip


def test_output_of_scontrol_becomes_states():
    line = "JobId=21 ArrayJobId=20 ArrayTaskId=1 JobName=x JobState=FAILED Reason=NonZeroExitCode NodeList=node2\n"
    (job,) = parse_jobs(line + "garbage\n")
    assert (job.job_id, job.state, job.reason, job.nodes, job.alive) == (
        "20_1",
        "FAILED",
        "NonZeroExitCode",
        "node2",
        False,
    )


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


def test_a_controller_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
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


def test_gpu_types_of_partitions_from_sinfo():
    text = """\
gpu*|gpu:h100:4(S:0-1),license:2
gpu*|gpu:a100:8
old|gpu:2
cpu|(null)
mig|gpu:1g.5gb:7,gpu:2080:1
"""
    found = {one.name: (one.is_default, one.gpu_types) for one in slurm.parse_partitions(text)}
    assert found == {
        "gpu": (True, ("a100", "h100")),
        "old": (False, ("",)),
        "cpu": (False, ()),
        "mig": (False, ("1g.5gb", "2080")),
    }


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (
            {"gpu_type": "l40s"},
            "GPU type 'l40s' was requested, but partition gpu has a100, h100",
            "old: without a type",
        ),
        ({"gpu_type": "h100", "partition": "old"}, "partition old has GPUs without a type", "gpu: a100, h100"),
        ({"partition": "cpu"}, "1 GPU(s) per node were requested, but partition cpu has none", "GPUs are in: gpu"),
        ({"partition": "gpus"}, "unknown partition 'gpus'; did you mean 'gpu'?", "gpu, old, cpu"),
        ({"cpu_partition": "fast"}, "unknown partition 'fast'", "gpu, old, cpu"),
    ],
)
def test_resources_that_the_cluster_lacks_are_refused_with_what_it_has(monkeypatch, tmp_path, options, error, hint):
    known = slurm.parse_partitions("gpu*|gpu:h100:4\ngpu*|gpu:a100:8\nold|gpu:2\ncpu|(null)\n")
    monkeypatch.setattr(slurm, "partitions", lambda: known)
    with pytest.raises(UsageError) as refused:
        require_resources(job_settings(None, options, tmp_path / "none"), on_gpu=True)
    assert error in refused.value.message and hint in refused.value.hint


def test_resources_that_exist_or_cannot_be_requested_are_accepted(monkeypatch, tmp_path):
    known = slurm.parse_partitions("gpu*|gpu:h100:4\ncpu|(null)\n")
    monkeypatch.setattr(slurm, "partitions", lambda: known)
    for options in ({"gpu_type": "h100"}, {}, {"gpus": 0, "partition": "cpu"}, {"partition": "gpu,cpu"}):
        require_resources(job_settings(None, options, tmp_path / "none"), on_gpu=True)
    require_resources(job_settings("l40s", {}, tmp_path / "none"), on_gpu=False)
    monkeypatch.setattr(slurm, "partitions", lambda: None)
    require_resources(job_settings("l40s", {}, tmp_path / "none"), on_gpu=True)
