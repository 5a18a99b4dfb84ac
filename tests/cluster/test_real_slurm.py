"""A real Slurm: what is submitted runs, survives the scheduler, and counts every joule once.

One cluster for the file, with two nodes of two make-believe GPUs each, whose driver says exactly what they draw. The
job with a time limit is submitted first and looked at last: Slurm takes its time over it, and the others use that.
"""

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from rapl_tree import domain
from slurm_cluster import why_not_here
from slurm_lab import PATIENCE_S
from tiny_reviews import settings, write_encoder, write_reviews

from joulelab.report.tables.run_tables import node_grids

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or "")]

LIMITED_STEPS = 600


@pytest.fixture(scope="module")
def limited(lab):
    """Its limit is drawn close once it trains: Slurm then warns it within half a minute, on any machine."""
    words = ("--time", "30", "--warn", "65", "--gpus", "1", "name=limited")
    job = lab.submit(lab.slow("limited", LIMITED_STEPS), *words)["run"]
    threading.Thread(target=draw_limit_close, args=(lab, job, time.monotonic()), daemon=True).start()
    return job


def draw_limit_close(lab, job, submitted_s):
    metrics = lab.store / job["runs"][0] / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        time.sleep(0.5)
    minutes = int((time.monotonic() - submitted_s) // 60) + 2
    lab.cluster.call("scontrol", "update", f"jobid={job['job_id']}", f"TimeLimit={minutes}")


@pytest.fixture(scope="module")
def tiny(lab):
    energy = {"gpus": "none", "estimate_cpu": True, "sample_interval_s": 0.5}
    return settings(write_encoder(lab.folder / "encoder"), write_reviews(lab.folder / "reviews.csv"), energy=energy)


def test_a_chain_runs_from_the_data_to_the_report_with_one_bill(lab, limited, tiny):
    jobs = lab.submit(lab.experiment("tiny", tiny), "--array", "0-1", "--gpus", "0", env={"LD_LIBRARY_PATH": ""})
    assert [(name, job["array"]) for name, job in jobs.items()] == [
        ("data", False), ("teacher", False), ("students", True), ("report", False),
    ]  # fmt: skip
    assert lab.wait(jobs["report"], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", "".join(
        map(lab.log, jobs.values())
    )
    first, second = (lab.record(run_id) for run_id in jobs["students"]["runs"])
    assert first.status == second.status == "done"
    assert [attempt.number for attempt in first.attempts] == [1, 2, 3]  # data, teacher, student
    assert len(second.attempts) == 1
    spent = sum(attempt.energy.cpu_estimate.energy_j for attempt in first.attempts)
    assert first.totals.cpu_estimate.energy_j == pytest.approx(spent)
    stages = {stage.name: {segment.attempt for segment in stage.segments} for stage in first.stages}
    assert stages["data.preprocess"] == {1}
    assert stages["teacher.train"] == stages["teacher.logits"] == {2}
    assert stages["student.train"] == {3}
    assert {row.made_by for row in second.lineage if row.name in ("data", "teacher", "teacher-cache")} == {first.run_id}
    group = Path(jobs["report"]["script"]).parent.parent
    assert (group / "report.html").exists()
    shown = lab.joulelab("watch", jobs["students"]["job_id"], "--once", "--json")
    assert shown.returncode == 0, shown.stderr
    assert {job["state"] for job in json.loads(shown.stdout)["jobs"]} == {"COMPLETED"}


def test_missing_data_ends_with_2_before_any_gpu_work_and_the_rest_is_cancelled_and_states_why(lab, tiny):
    gone = {**tiny, "data": {**tiny["data"], "source": str(lab.folder / "gone.csv")}}
    refused = lab.joulelab("submit", lab.experiment("gone", gone), "--array", "0-1")
    assert refused.returncode == 2
    assert "gone.csv" in refused.stderr
    jobs = lab.submit(lab.experiment("gone", gone), "--both", "--gpus", "0", "--no-check")
    assert lab.wait(jobs["report"], "CANCELLED", "COMPLETED") == "CANCELLED"
    assert lab.wait(jobs["data"], "FAILED") == "FAILED"
    assert "ExitCode=2:0" in lab.cluster.call("scontrol", "show", "job", jobs["data"]["job_id"]).stdout
    records = [lab.record(run_id) for run_id in jobs["students"]["runs"]]
    assert len(records) == 4
    assert [record.status for record in records] == ["failed"] * 4
    assert not records[0].attempts
    assert "gone.csv" in records[0].error.message
    assert records[3].error.message.startswith("not started: job 01-data failed")
    watched = lab.joulelab("watch", jobs["data"]["job_id"])
    assert watched.returncode == 1
    assert "not started: job 01-data failed" in watched.stdout


def test_what_sbatch_refuses_is_reported_in_its_words_and_can_be_submitted_again(lab):
    refused = lab.joulelab("submit", lab.slow("elsewhere", steps=1), "--partition", "nosuch", "--no-check")
    assert refused.returncode == 1
    (folder,) = lab.store.glob("elsewhere-*")
    assert f"joulelab submit --resume {folder.name}" in refused.stderr
    record = lab.record(folder.name)
    assert record.status == "failed"
    assert "invalid partition specified: nosuch" in record.error.message
    (job,) = lab.submit("--resume", folder.name, "--gpus", "0", "--no-check").values()
    assert job["runs"] == [folder.name]
    assert lab.joulelab("cancel", job["job_id"]).returncode == 0


def test_two_nodes_with_two_ranks_each_are_one_run_and_their_joules_are_its_total(lab):
    four = ("--nodes", "2", "--gpus", "2", "--time", "10", "--no-check")
    (job,) = lab.submit(lab.slow("ranks", steps=20), *four).values()
    shards = lab.submit(lab.slow("shards", steps=20), "training.parallel=fsdp", *four, env={"SLOW_MODEL_STEP_S": "0"})
    assert lab.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", lab.log(job)
    record = lab.record(job["runs"][0])
    assert record.status == "done"
    # whose node has rank 0 is for torchrun to say
    assert sorted((attempt.host, attempt.number, attempt.closed) for attempt in record.attempts) == [
        ("node1", 1, True), ("node2", 1, True),
    ]  # fmt: skip
    by_host = {attempt.host: attempt.energy.gpu.energy_j for attempt in record.attempts}
    assert record.totals.gpu.energy_j == pytest.approx(sum(by_host.values()), rel=1e-9)
    powers_w = {"node1": 210, "node2": 410}
    for attempt in record.attempts:
        assert by_host[attempt.host] == pytest.approx(powers_w[attempt.host] * attempt.billed_s, rel=0.02)
    assert sorted(d.device for a in record.attempts for d in a.devices) == [
        "gpu:GPU-node1-0", "gpu:GPU-node1-1", "gpu:GPU-node2-0", "gpu:GPU-node2-1",
    ]  # fmt: skip
    assert sorted(pace.rank for attempt in record.attempts for pace in attempt.ranks) == [0, 1, 2, 3]
    train = record.stage("model.train")
    output_text = sum(powers_w[segment.host] * segment.duration_s for segment in train.segments)
    assert train.energy_j == pytest.approx(output_text, rel=0.03)
    assert train.samples == (20 - 1) * 4 * 4  # the first step is setup
    assert abs(record.attempts[1].clock_offset_s) < 1.0
    assert node_grids(record)[0].caption == "By host"
    kept = [file.name for file in (lab.store / job["runs"][0] / "trace").glob("node*")]
    assert sorted(name for name in kept if name.endswith(("jsonl", "parquet"))) == [
        "node1.1.parquet",
        "node2.1.parquet",
    ]
    (job,) = shards.values()
    assert lab.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", lab.log(job)
    in_shards = lab.record(job["runs"][0])
    assert in_shards.totals.gpu.energy_j == pytest.approx(sum(a.energy.gpu.energy_j for a in in_shards.attempts))
    losses = [run.results["model.train.final_loss"].value for run in (record, in_shards)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_two_jobs_on_a_node_see_their_own_gpu_each_and_rapl_is_in_neither_total(lab):
    rapl = lab.folder / "powercap"
    counter = domain(rapl)
    names = ("left", "right")
    jobs = []
    for name in names:
        command = f"{sys.executable} -m joulelab measure --runs-dir {lab.store} --name {name} --rapl-root {rapl}"
        jobs.append(
            lab.cluster.call(
                "sbatch", "--parsable", "-w", "node2", "--gpus-per-node=1", "-c", "1", "--output=/dev/null",
                "--wrap", f"{command} -- sleep 4", env=lab.env,
            ).stdout.strip()
        )  # fmt: skip
    for _ in range(200):
        counter.write_text(f"{int(time.monotonic() * 5e7)}\n")  # 50 W
        if all(lab.cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING") for job in jobs):
            break
        time.sleep(0.2)
    records = [lab.record(next(lab.store.glob(f"{name}-*")).name) for name in names]
    cards = [{device.device for device in record.attempts[0].devices} for record in records]
    assert sorted(map(sorted, cards)) == [["gpu:GPU-node2-0"], ["gpu:GPU-node2-1"]]
    for record in records:
        card = int(record.attempts[0].devices[0].device[-1])
        assert record.totals.energy_j == pytest.approx((200 + 10 * card) * record.totals.duration_s, rel=0.02)
        assert record.totals.cpu.energy_j is None
        assert "includes other jobs" in record.totals.cpu.reason


def test_a_cancelled_run_keeps_checkpoint_and_joules_and_does_not_come_back(lab):
    (job,) = lab.submit(lab.slow("ended", steps=2000), "--gpus", "1", "--time", "10").values()
    metrics = lab.store / job["runs"][0] / "metrics.jsonl"
    end = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.read_text().count("\n") > 1) and time.monotonic() < end:
        time.sleep(0.2)
    live = json.loads(lab.joulelab("watch", job["runs"][0], "--once", "--json").stdout)["runs"][0]
    assert (live["status"], live["stage"]) == ("running", "model.train")
    assert live["energy_j"] > 0
    assert live["power_w"] > 0
    assert live["left_s"] > 0
    done = lab.joulelab("cancel", job["job_id"])
    assert job["job_id"] in done.stdout, done.stderr
    assert lab.wait(job, "CANCELLED", "COMPLETED", "PENDING") == "CANCELLED"
    record = lab.record(job["runs"][0])
    assert record.status == "truncated"
    assert record.totals.energy_j > 0
    assert list((lab.store / job["runs"][0] / "checkpoints" / "model.train").glob("step-*.pt"))


def test_a_time_limit_puts_the_run_back_into_the_queue_and_it_continues_to_the_same_loss(lab, limited):
    limited["seen_running"] = True  # while the others ran
    assert lab.wait(limited, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") == "COMPLETED", lab.log(limited)
    record = lab.record(limited["runs"][0])
    assert record.status == "done"
    assert len(record.attempts) >= 2
    assert all(attempt.closed for attempt in record.attempts)
    assert "is requeued and will resume" in lab.log(limited)
    joules = sum(attempt.energy.gpu.energy_j for attempt in record.attempts)
    assert record.totals.energy_j == pytest.approx(joules)
    train = record.stage("model.train")
    assert len({segment.attempt for segment in train.segments}) >= 2
    setup = record.stage("model.train.setup")  # the first step of each attempt
    assert train.samples + (setup.samples or 0 if setup else 0) == LIMITED_STEPS * 4
    words = ("run", lab.slow("limited", LIMITED_STEPS), "name=at-once", "energy.gpus=none")
    quick = lab.joulelab(*words, "--json", env={"SLOW_MODEL_STEP_S": "0"})
    assert quick.returncode == 0, quick.stderr
    at_once = json.loads(quick.stdout)["results"]["model.train.final_loss"]["value"]
    assert record.results["model.train.final_loss"].value == at_once
