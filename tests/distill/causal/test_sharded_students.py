"""A language model that is sharded over ranks (FSDP) trains as the model of one process does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_program import OBJECTIVES, interrupted, one_step, write_teacher_cache

from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.train.parallel import Ranks

pytestmark = pytest.mark.slow  # two launches of two ranks, each of which imports torch and transformers
PROGRAM = Path(__file__).parent / "sharded_program.py"
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d",
    "--rdzv-endpoint", "localhost:0",
]  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    write_teacher_cache(folder)
    command = [*TORCHRUN, "--nproc-per-node", "2", str(PROGRAM), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "found.pt", weights_only=True)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        if name in found[1]:  # of tied weights FSDP names one
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)
    assert len(found[1]) >= len(expected[1]) - 1


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_two_ranks_have_the_loss_and_gradients_of_one_process(launched, kind):
    folder, found = launched
    assert_same(found[kind], one_step(kind, folder, accumulate=2))


def test_activation_checkpointing_changes_nothing(launched):
    folder, found = launched
    assert_same(found["checkpointed"], one_step("sft", folder, accumulate=2))


def test_factored_moments_are_those_of_the_whole_matrix(launched):
    folder, found = launched
    settings = {"optimizer": "adafactor", "max_steps": 3, "log_every_steps": 3}
    assert_same(found["adafactor"], one_step("sft", folder, accumulate=2, **settings))


def test_the_copy_that_generates_gets_the_gathered_weights(launched):
    moved, distance = launched[1]["copied"]
    assert distance == 0 < moved


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_bf16_weights_and_their_compensation_are_resumed_bit_for_bit(launched, optimizer):
    whole, rest = launched[1][f"losses-{optimizer}"]
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    assert rest == {step: whole[step] for step in (4, 5, 6)}


def test_one_rank_resumes_what_two_ranks_have_begun(launched, tmp_path):
    """It trains on other batches than two ranks did, so only the state that was loaded is compared."""
    folder, _ = launched
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        _, rest = interrupted(folder, Ranks(), "adamw", rest_only=True)
    finally:
        dist.destroy_process_group()
    assert sorted(rest) == [4, 5, 6]
    whole = launched[1]["losses-adamw"][0]
    assert rest[4] == pytest.approx(whole[4], rel=0.3)


@pytest.mark.parametrize("pipeline", ["kd", "self", "dpo", "on-policy"])
def test_a_pipeline_on_two_ranks_trains_the_student_of_one_process_and_counts_its_joules_once(lab, tmp_path, pipeline):
    """All but kd start from an SFT student, which is sharded, saved whole by the first rank and read by all."""
    training = {"weights": "bf16", "precision": "bf16", "evaluate_every_steps": 4}
    changes = {"training": training, "on_policy": {"sync_every": 2}, "generation": {"prompt_tokens": 18}}
    alone, _ = lab.run(tmp_path / "one", pipeline, **{**changes, "training": {**training, "accumulate": 2}})
    settings = lab.settings(pipeline, **{**changes, "training": {**training, "parallel": "fsdp"}})
    (tmp_path / "ranks.yaml").write_text(json.dumps({key: settings[key] for key in settings if key != "name"}))
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "joulelab", "run", str(tmp_path / "ranks.yaml")]
    command += ["--runs-dir", str(tmp_path / "two"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    record = RunRecord.model_validate_json(done.stdout)
    for name in ["student.train"] if pipeline == "kd" else ["student.sft", "student.train"]:
        assert record.stage(name).tokens == alone.stage(name).tokens > 0, name
    assert record.results["student.train.steps"].value == alone.results["student.train.steps"].value
    # bf16 weights are rounded with other random bits in every shard
    assert record.results["student.clm_loss"].value == pytest.approx(alone.results["student.clm_loss"].value, rel=0.05)
    # one recorder per host, whatever the number of ranks: the stages of one trace
    folder = next(path for path in (tmp_path / "two").iterdir() if (path / "run.json").exists())
    assert len(list(RunPaths(folder).traces())) == 1
