"""A language model that is sharded over ranks (FSDP) trains as the model of one process does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_program import CHECKPOINTED, OBJECTIVES, interrupted, make_trainer, one_step, write_teacher_cache
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.train.checkpoint import ModelState
from joulelab.train.parallel import Ranks
from joulelab.train.sharding_fsdp import ShardedCheckpoints, _state_dicts
from joulelab.train.trainer import TrainerCallbacks

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


@pytest.fixture
def single_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


def flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}|")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_one_rank_loads_all_that_two_ranks_have_saved(launched, single_rank, tmp_path, optimizer):
    """Weights, moments and the compensation of their rounding, bit for bit."""
    folder, _ = launched
    place = folder / f"checkpoints-{optimizer}"
    (newest,) = sorted(place.glob("step-*"))[-1:]
    dcp_to_torch_save(newest, tmp_path / "whole.pt")
    expected = dict(flat(torch.load(tmp_path / "whole.pt", weights_only=False)))
    around = TrainerCallbacks(ranks=single_rank)
    trainer = make_trainer("sft", folder, around, optimizer=optimizer, **CHECKPOINTED)
    state = ModelState(trainer.trained, trainer.optimizer)
    position, _ = ShardedCheckpoints(place, single_rank, 2).load(state, print)
    assert position.step == int(newest.name.removeprefix("step-"))
    found = dict(flat(_state_dicts(state)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        own = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
        same = torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value
        assert same, name


def test_one_rank_trains_on_from_what_two_ranks_have_begun(launched, single_rank):
    _, rest = interrupted(launched[0], single_rank, "adamw", rest_only=True)
    assert sorted(rest) == [4, 5, 6]


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
    # bf16 weights are rounded with other random bits in every shard, so an on-policy student writes other completions
    token_tolerance, step_tolerance = (0.05, 1) if pipeline == "on-policy" else (0, 0)
    if pipeline != "kd":
        assert record.stage("student.sft").tokens == alone.stage("student.sft").tokens > 0
    tokens, steps = alone.stage("student.train").tokens, alone.results["student.train.steps"].value
    assert record.stage("student.train").tokens == pytest.approx(tokens, rel=token_tolerance) and tokens > 0
    assert record.results["student.train.steps"].value == pytest.approx(steps, abs=step_tolerance)
    assert record.results["student.clm_loss"].value == pytest.approx(alone.results["student.clm_loss"].value, rel=0.05)
    # one recorder per host, whatever the number of ranks: the stages of one trace
    folder = next(path for path in (tmp_path / "two").iterdir() if (path / "run.json").exists())
    assert len(list(RunPaths(folder).traces())) == 1
