"""How well a model predicts held-out tokens, asked the same way of teacher and student; whether it knows anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.distill.chunked_vocabulary import TermWeights, VocabularyLoss
from joulelab.distill.lm_batches import LmBatch, LmBatches
from joulelab.distill.lm_data import LmCorpus
from joulelab.distill.lm_heads import decoder_of
from joulelab.distill.vocabulary_losses import NO_TARGET
from joulelab.errors import ConfigError
from joulelab.evaluate.language import token_loss, unigram_loss

QUALITY = "quality.json"


@dataclass(frozen=True)
class LmQuality:
    loss: float
    """Mean cross-entropy of the held-out tokens, in nats."""
    perplexity: float
    tokens: int
    unigram: float
    """What guessing by frequency alone would lose."""

    def save(self, folder: Path) -> None:
        (folder / QUALITY).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> LmQuality:
        return cls(**json.loads((folder / QUALITY).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Examiner:
    """Held-out batches and how they are computed."""

    batches: LmBatches
    corpus: LmCorpus
    device: torch.device
    precision: str
    chunk: int
    tick: Callable[[LmBatch], None] = lambda batch: None

    def examine(self, model: nn.Module) -> LmQuality:
        """`model` is on the device and opened for losses."""
        loss = VocabularyLoss(TermWeights(ce=1.0), self.chunk)

        def loss_of(batch: LmBatch) -> tuple[Tensor, int]:
            features_ND, _ = model(**batch.inputs, for_loss=True, positions=batch.rows)
            found, _ = loss(features_ND, *decoder_of(model), batch.positions)
            return found, batch.predicted

        found = token_loss(model, self.batches, loss_of, self.device, self.precision, self.tick)
        return LmQuality(found.mean, found.perplexity, found.tokens, self.unigram)

    @cached_property
    def unigram(self) -> float:
        every = range(self.batches.batches_per_epoch)
        targets = np.concatenate([self.batches.at(0, index)["targets"].numpy() for index in every])
        recipe = self.batches.task.recipe
        asked_V = None if recipe is None else recipe.weights_V  # masks fall on rare tokens more often
        return unigram_loss(self.corpus.counts_V, targets[targets != NO_TARGET], asked_V)


def require_knowledge(teacher: LmQuality, name: str) -> None:
    """A teacher that knows no more than word frequencies teaches those at the price of a teacher."""
    if not teacher.loss < teacher.unigram:
        raise ConfigError(
            f"the teacher {name} has a validation loss of {teacher.loss:.3f} nats per token; guessing by frequency "
            f"alone has {teacher.unigram:.3f}",
            "its language head is probably untrained: train it first with teacher.training, or name another teacher",
        )
