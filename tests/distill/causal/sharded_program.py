"""What each rank runs in the tests of sharded language models: `torchrun sharded_program.py FOLDER`.

The same functions run in a single process: there a step has two micro-batches where each of two ranks has one.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from joulelab.data.chat.encoding import DocumentList, EncodedDocument
from joulelab.data.chat.packing import pack, training_batches, use_packed_attention
from joulelab.distill.causal.config import SHAPES, CausalTraining
from joulelab.distill.causal.models import expose_hidden_states, random_student
from joulelab.distill.causal.objective import StudentSetup, TokenObjective
from joulelab.distill.causal.on_policy import StudentCopy
from joulelab.distill.logit_cache.cache_store import LogitCache
from joulelab.distill.logit_cache.kd_loss import KdLoss
from joulelab.distill.logit_cache.teacher_outputs import DistillationBatches, LiveTeacher, write_cache
from joulelab.distill.preferences.pairs import Pair, PairBatches, PairLayout
from joulelab.distill.preferences.preference_loss import PreferenceObjective, TargetLogProbabilities
from joulelab.train import parallel
from joulelab.train.sharding_fsdp import ShardedCheckpoints, gather_weights
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks

WORDS, LENGTH = 70, 24
IDS = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
OBJECTIVES = ("sft", "sft-untied", "kd", "dpo")


def make_model(seed=0, tied=True):
    model = random_student(SHAPES["nano"], WORDS, IDS, seed)
    if not tied:
        config = model.config
        config.tie_word_embeddings = False
        torch.manual_seed(seed)
        model = type(model)(config)
    return expose_hidden_states(model)


def make_rows():
    """Rows with different numbers of trained tokens, so that a mean of means would be another gradient."""
    random = np.random.default_rng(0)
    rows = [
        EncodedDocument(random.integers(3, WORDS, LENGTH), np.arange(LENGTH) >= random.integers(1, LENGTH - 2))
        for _ in range(16)
    ]
    return pack(DocumentList(rows), LENGTH, seed=0)


class SomePairs:
    def __init__(self):
        random = np.random.default_rng(1)
        self.pairs = [Pair(*(random.integers(3, WORDS, size) for size in (6, 4 + at % 3, 5))) for at in range(8)]
        self.lengths = np.array([[len(ids) for ids in (p.prompt, p.chosen, p.rejected)] for p in self.pairs])

    def __len__(self):
        return len(self.pairs)

    def pair(self, number):
        return self.pairs[number]


def make_trainer(kind, folder, around=None, **changes):
    """The trainer of a pipeline, with a hidden-state copy of a teacher for kd and a live reference for dpo."""
    torch.manual_seed(3)
    model = make_model(tied=kind != "sft-untied")
    attention = use_packed_attention(model)
    settings = {"max_steps": 1, "batch_size": 2, "optimizer": "sgd", "learning_rate": 0.1, "prefetch": 0, **changes}
    config = CausalTraining(**{"log_every_steps": 1, "precision": "fp32", **settings})
    batches = training_batches(make_rows(), 2, seed=0)
    if kind == "dpo":
        pairs = PairBatches(SomePairs(), 2, 0, None, PairLayout())
        log_probabilities = TargetLogProbabilities(7)
        objective = PreferenceObjective(model, "dpo", 0.5, log_probabilities, live_reference=make_model(seed=1))
        return SimpleTrainer(model, pairs, objective, config, NoOpStats(), around)
    if kind == "kd":
        batches = DistillationBatches(batches, LogitCache.open(folder / "cache"))
        objective = TokenObjective(model, attention, KdLoss(0.5, chunk=7), lambda batch: batch.targets)
    else:
        objective = TokenObjective(model, attention, KdLoss(1.0, chunk=7))
    return SimpleTrainer(model, batches, objective, config, NoOpStats(), around)


def write_teacher_cache(folder):
    teacher = LiveTeacher(make_model(seed=5).eval().requires_grad_(False))
    manifest = teacher.manifest("rs50", 1.0, name="random", weights="random", tokenizer="random words")
    write_cache(
        folder / "cache", teacher, make_rows(), manifest, batch_size=4, chunk=16, tick=lambda rows, tokens: None
    )


def one_step(kind, folder, ranks=parallel.SINGLE_RANK, **changes):
    """Loss and weights after a step of plain SGD, which is a step along the gradient."""
    losses = []
    around = TrainerCallbacks(ranks=ranks, on_log=lambda report: losses.append(report.loss))
    trainer = make_trainer(kind, folder, around, **changes)
    trainer.train()
    weights = gather_weights(trainer.model)
    return losses[0], trainer.model.state_dict() if weights is None else weights


CHECKPOINTED = {
    "parallel": "fsdp", "weights": "bf16", "precision": "bf16", "rounding": "kahan", "learning_rate": 3e-3,
    "max_steps": 6, "checkpoint_every_steps": 3, "keep_checkpoints": 2,
}  # fmt: skip


def interrupted(folder, ranks, optimizer, rest_only=False):
    """The losses of six steps, and those after a resume from the third one."""

    def losses_of(place):
        losses = {}
        around = TrainerCallbacks(
            ranks=ranks,
            checkpoints=ShardedCheckpoints(place, ranks, kept_at_end=2),
            on_log=lambda report: losses.setdefault(report.position.step, report.loss),
        )
        make_trainer("sft", folder, around, optimizer=optimizer, **CHECKPOINTED).train()
        return losses

    place = folder / f"checkpoints-{optimizer}"
    whole = {} if rest_only else losses_of(place)
    return whole, losses_of(place)


def copied(ranks):
    """Largest distance of the generating copy of a trained, sharded student from its gathered weights."""
    model = make_model()
    config = CausalTraining(
        max_steps=2, batch_size=2, learning_rate=0.01, parallel="fsdp", prefetch=0, precision="fp32"
    )
    setup = StudentSetup(model, use_packed_attention(model), config)
    copy = StudentCopy(setup, torch.device("cpu"))
    objective = TokenObjective(model, setup.attention, KdLoss(1.0, chunk=7))
    batches = training_batches(make_rows(), 2, seed=0)
    before = [weight.clone() for weight in copy.model.parameters()]
    SimpleTrainer(model, batches, objective, config, NoOpStats(), TrainerCallbacks(ranks=ranks)).train()
    copy.synchronize()
    moved = max(float((a - b).abs().max()) for a, b in zip(before, copy.model.parameters(), strict=True))
    weights = gather_weights(model)
    own = copy.model.state_dict()
    return moved, max((float((own[name] - value).abs().max()) for name, value in weights.items()), default=0.0)


def main():
    folder, found = Path(sys.argv[1]), {}
    with parallel.process_group() as ranks:
        for kind in OBJECTIVES:
            found[kind] = one_step(kind, folder, ranks, parallel="fsdp")
        found["adafactor"] = one_step(
            "sft", folder, ranks, parallel="fsdp", optimizer="adafactor", max_steps=3, log_every_steps=3
        )
        found["checkpointed"] = one_step("sft", folder, ranks, parallel="fsdp", activation_checkpointing=True)
        found["copied"] = copied(ranks)
        for optimizer in ("adamw", "adafactor"):
            found[f"losses-{optimizer}"] = interrupted(folder, ranks, optimizer)
        if ranks.is_first:
            torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main()
