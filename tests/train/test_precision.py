"""How a step is computed changes its speed and its rounding, not what is learned."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ragged_language import Language, RaggedSequences, language_trainer, next_token
from torch import nn

from joulelab.errors import ConfigError
from joulelab.train.checkpoint import CheckpointFolder
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import (
    checkpoint_activations,
    compile_in_place,
    float32_matmul_precision,
    make_scaler,
    repeated_blocks,
)
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks
from joulelab.zoo.objective import PlainObjective


def weights(**config):
    trainer = language_trainer(8, max_steps=3, **config)
    trainer.train()
    return trainer.model.state_dict()


def gap(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_bf16_stays_near_fp32_and_keeps_fp32_weights():
    whole, half = weights(), weights(precision="bf16")
    assert all(value.dtype == torch.float32 for value in half.values())
    assert 0 < gap(whole, half) < 0.02


def test_fp16_scales_the_loss_and_its_scale_survives_a_resume(tmp_path):
    around = TrainerCallbacks(checkpoints=CheckpointFolder(tmp_path))
    trainer = language_trainer(8, around, max_steps=3, precision="fp16", checkpoint_every_steps=1)
    trainer.train()
    assert gap(weights(), trainer.model.state_dict()) < 0.02
    trainer.scaler.update(64.0)
    trainer.save(wait=True)
    later = language_trainer(8, around, max_steps=4, precision="fp16")
    later.resume()
    assert later.scaler.get_scale() == 64.0


def test_the_scale_of_a_sum_is_smaller_than_that_of_a_mean():
    device = torch.device("cpu")
    assert make_scaler("fp16", device, 1).get_scale() == 2.0**16
    assert make_scaler("fp16", device, 5000).get_scale() == 2.0**4


def test_fp32_means_fp32_and_the_setting_is_put_back():
    torch.backends.cudnn.allow_tf32 = True
    before = torch.get_float32_matmul_precision()
    with float32_matmul_precision("fp32"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    with float32_matmul_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (before, True)


def test_forgetting_activations_changes_no_weight():
    whole, frugal = weights(), weights(activation_checkpointing=True)
    assert gap(whole, frugal) < 1e-6
    assert whole.keys() == frugal.keys()


def test_activations_are_really_recomputed():
    trainer = language_trainer(8)
    calls = []
    block = trainer.model.blocks[0]
    block.inner.register_forward_pre_hook(lambda *_: calls.append(1))
    assert checkpoint_activations(trainer.model) == len(repeated_blocks(trainer.model)) == 2
    trainer.step()
    assert len(calls) == 2


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_every_optimizer_lowers_the_loss(optimizer):
    losses = []
    around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
    rate = {"adamw": 0.03, "adafactor": 0.1, "sgd": 0.1}[optimizer]
    trainer = language_trainer(32, around, optimizer=optimizer, learning_rate=rate, max_steps=30, schedule="constant")
    same = trainer._input._source.at(0, 0)
    trainer._input._source.at = lambda epoch, index: same
    trainer.train()
    assert losses[-1] < 0.9 * losses[0]


def test_no_clipping_where_none_is_asked():
    assert gap(weights(clip_norm=None, learning_rate=1.0), weights(clip_norm=0.01, learning_rate=1.0)) > 0.01


def test_a_clipped_step_is_as_long_as_allowed():
    trainer = language_trainer(
        8, optimizer="sgd", learning_rate=1.0, schedule="constant", clip_norm=0.01, weight_decay=0.0, max_steps=1
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    moved = torch.cat([(after[name] - value).flatten() for name, value in before.items()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("how", [pytest.param("default", marks=pytest.mark.slow), "blocks"])
def test_a_compiled_step_gives_the_same_weights(how):
    """In a separate process: what other tests have imported is then no part of it."""
    program = f"from test_precision import gap, weights; assert gap(weights(), weights(compile='{how}')) < 1e-5"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()


def test_of_equal_blocks_one_is_compiled_for_all():
    """By a compiler that counts what it is asked to compile."""
    requested = []

    def counting(graph, inputs):
        requested.append(graph)
        return graph.forward

    blocks = nn.ModuleList(Block() for _ in range(5))
    compile_in_place(nn.Sequential(nn.Linear(4, 4), blocks), "blocks")
    for block in blocks:
        assert block._compiled_call_impl is not None
        block.compile(backend=counting)
        block(torch.ones(2, 4))
    assert len(requested) == 1


class WithConnector(PlainObjective):
    def __init__(self):
        super().__init__(next_token)
        self.connector = nn.Linear(2, 2)

    def modules(self):
        return {"connector": self.connector}


def test_modules_of_an_objective_may_have_no_blocks():
    config = TrainingConfig(max_steps=1, compile="blocks")
    objective = WithConnector()
    trainer = SimpleTrainer(Language(), RaggedSequences(8), objective, config, NoOpStats())
    assert trainer.model.blocks[0]._compiled_call_impl is not None
    assert objective.connector._compiled_call_impl is None
    trainer.close()


def test_a_model_without_blocks_is_reported_so():
    with pytest.raises(ConfigError, match="no list of identical layers"):
        compile_in_place(nn.Linear(2, 2), "blocks")
