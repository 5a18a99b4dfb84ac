"""A small language model and 32 ragged sequences, cut into micro-batches of any size: what the tests of ranks train."""

from dataclasses import dataclass

import torch
from torch import nn

from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective

ROWS, VOCABULARY, WIDTH = 32, 23, 16


@dataclass(frozen=True)
class Sequences:
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def samples(self):
        return len(self.ids)

    @property
    def tokens(self):
        return int(self.mask.sum())

    def to(self, device):
        return self


class RaggedSequences:
    """The same rows in the same order, whatever the size of a micro-batch; other rows in every epoch."""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.batches_per_epoch = ROWS // batch_size

    def at(self, epoch, index):
        random = torch.Generator().manual_seed(epoch)
        ids = torch.randint(VOCABULARY, (ROWS, 12), generator=random)
        lengths = torch.randint(2, 13, (ROWS,), generator=random)
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return Sequences(ids[rows], torch.arange(12) < lengths[rows, None])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)


class Language(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


def next_token(model, batch):
    logits = model(batch.ids[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch.ids[:, 1:], reduction="none")
    mask = batch.mask[:, 1:]
    return ObjectiveOutput((losses * mask).sum(), int(mask.sum()))


def language_trainer(batch_size, around=None, dropout=0.0, **config):
    torch.manual_seed(0)
    model = Language(dropout)
    defaults = {"epochs": None, "max_steps": 1, "learning_rate": 0.1, "optimizer": "sgd", "log_every_steps": 1}
    settings = TrainingConfig(**{**defaults, **config})
    objective = PlainObjective(next_token)
    return SimpleTrainer(model, RaggedSequences(batch_size), objective, settings, NoOpStats(), around)
