"""A teacher's work in shards on a real Slurm: an array of tasks that never meet, and a student that joins them."""

import json
import sys
from pathlib import Path

import pytest
from slurm_cluster import why_not_here

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or "")]


@pytest.fixture(scope="module")
def tiny_kd(lab):
    sys.path.insert(0, str(Path(__file__).parents[1] / "distill" / "causal"))
    from tiny_llama import write_chats, write_teacher

    chosen = {
        "pipeline": "kd",
        "data": {"source": str(write_chats(lab.folder / "chats.jsonl")), "held_out": 8, "max_tokens": 32},
        "teacher": {"model": str(write_teacher(lab.folder / "teacher", steps=0)), "batch_size": 4},
        "student": {"size": "nano"},
        "budget": {"tokens": 600},
        "training": {"batch_size": 4},
        "quality": {"against_teacher": False},
        "energy": {"sample_interval_s": 0.2, "counter_interval_s": 0.2},
        "device": "cpu",
        "chunk": 64,
    }
    chosen["data"]["row_length"] = 64
    return lab.experiment("tiny-kd", chosen)


def test_an_array_over_shards_is_joined_by_the_student_and_its_bill_is_theirs(lab, tiny_kd):
    jobs = lab.submit(tiny_kd, "--shards", "2", "--gpus", "1", "--time", "10")
    assert [(name, job["array"], len(job["runs"])) for name, job in jobs.items()] == [
        ("data", False, 1), ("teacher", True, 2), ("students", False, 1),
    ]  # fmt: skip
    assert lab.wait(jobs["students"], "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", "".join(
        map(lab.log, jobs.values())
    )
    shares = [lab.record(run_id) for run_id in jobs["teacher"]["runs"]]
    student = lab.record(jobs["students"]["runs"][0])
    assert {record.status for record in (*shares, student)} == {"done"}
    parts = [one for one in student.inherited if one.kind == "logit-cache-part"]
    assert sorted(part.made_by for part in parts) == sorted(jobs["teacher"]["runs"])
    spent = sum(share.stage("teacher.logits").energy.gpu.energy_j for share in shares)
    assert sum(part.energy["gpu"].energy_j for part in parts) == pytest.approx(spent)
    assert all("data.preprocess" not in [stage.name for stage in share.stages] for share in shares)
    assert student.stage("teacher.logits").samples is None
    watched = lab.joulelab("watch", student.run_id, "--once", "--json")
    assert watched.returncode == 0, watched.stderr
    assert {run["status"] for run in json.loads(watched.stdout)["runs"]} == {"done"}
    assert len(json.loads(watched.stdout)["runs"]) == 3
