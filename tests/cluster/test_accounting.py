"""Energy from Slurm's accounting."""

from joulelab.cluster.slurm import parse_accounting

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
    output_text = [(job.job_id, job.state, job.energy_j) for job in jobs]
    assert output_text == [
        ("1", "COMPLETED", 198), ("2", "COMPLETED", 402), ("3", "REQUEUED", None), ("3", "COMPLETED", 208),
        ("4_1", "CANCELLED", None),
    ]  # fmt: skip
    part, whole, zero, _, none = jobs
    assert "1 of 4 CPUs: may include other jobs" in part.remark
    assert "used by this job only" in whole.remark
    assert "0 J" in zero.remark
    assert "no energy" in none.remark
    assert "198 J by Slurm's accounting" in part.text
