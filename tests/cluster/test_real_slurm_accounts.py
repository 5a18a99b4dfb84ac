"""Slurm's own accounting, read with the real sacct: what its joules are is said beside them."""

import time

import pytest
from slurm_accounts import why_no_accounts
from slurm_cluster import why_not_here

from joulelab import clock
from joulelab.cluster.jobs import JobsFile, SubmittedJob, write_jobs
from joulelab.cluster.slurm import import_accounting

WHY_NOT = why_not_here() or why_no_accounts()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
# What Slurm's RAPL plugin leaves in the accounts of a job without srun: joules of its batch step, none of its own.
JOULES = (
    "update accounts.joulelab_step_table step join accounts.joulelab_job_table job using (job_db_inx) "
    "set step.consumed_energy = {joules} where job.id_job = {job_id}"
)


def submitted(folder, *jobs):
    now = clock.iso(time.time())
    rows = [
        SubmittedJob(key=str(number), about="", job_id=job["job_id"], script="", submitted_at=now)
        for number, job in enumerate(jobs)
    ]
    write_jobs(folder, JobsFile(jobs=tuple(rows)))
    return folder


def wait_for_accounts(lab, *jobs):
    """The controller tells them a moment after the job has ended."""
    ids = ",".join(job["job_id"] for job in jobs)

    def output_text():
        lines = lab.cluster.call("sacct", "-n", "-P", "-j", ids, "--format=JobID,State").stdout.splitlines()
        return sum(line.endswith(".batch|COMPLETED") for line in lines) == len(jobs)

    lab.cluster.wait_until(output_text, "the accounts")


def test_zero_joules_a_part_of_a_node_and_a_whole_node_are_distinguished(lab, tmp_path, monkeypatch):
    quick = ("--output=/dev/null", "--wrap", "true")
    off, part, whole = (lab.sbatch(*words, *quick) for words in (["-c1"], ["-c1"], ["--exclusive"]))
    for job in (off, part, whole):
        lab.wait(job, "COMPLETED")
    wait_for_accounts(lab, off, part, whole)
    for job in (part, whole):
        command = JOULES.format(joules=360_000, job_id=job["job_id"])
        assert lab.cluster.accounts.sql(command).returncode == 0
    monkeypatch.setenv("SLURM_CONF", lab.env["SLURM_CONF"])
    rows = {row.job_id: row for row in import_accounting(submitted(tmp_path, off, part, whole))}
    assert [rows[job["job_id"]].energy_j for job in (off, part, whole)] == [None, 360_000, 360_000]
    assert "Slurm reports 0 J" in rows[off["job_id"]].remark
    assert "1 of 4 CPUs: may include other jobs" in rows[part["job_id"]].remark
    assert "used by this job only" in rows[whole["job_id"]].remark
    assert {row.state for row in rows.values()} == {"COMPLETED"}
    assert (tmp_path / "slurm" / "accounting.json").exists()


def test_what_a_job_took_before_it_was_requeued_is_reported_too(lab, tmp_path, monkeypatch):
    again = "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || sleep 60"
    job = lab.sbatch("-c1", "--requeue", "--output=/dev/null", "--wrap", again)
    lab.wait(job, "RUNNING")
    lab.cluster.call("scontrol", "requeue", job["job_id"])
    time.sleep(2)  # a start in the second in which the first one was revoked is refused
    assert lab.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
    wait_for_accounts(lab, job)
    monkeypatch.setenv("SLURM_CONF", lab.env["SLURM_CONF"])
    states = [row.state for row in import_accounting(submitted(tmp_path, job))]
    assert states == ["REQUEUED", "COMPLETED"]
