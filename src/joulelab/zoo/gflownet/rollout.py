"""Trajectories by the policy as it stands, from the empty tree to the decision to stop.

All randomness comes with the batch, as noise that makes the best action of a drawn one (Gumbel's trick): the same batch
and the same weights give the same trajectories, bit for bit, and training can be replayed.

Legend: B trajectories, T steps, X actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.data.synthetic import generator_on
from joulelab.zoo.gflownet.trees import STOP, TreeBuilding, Trees

SMALLEST = 1e-20
"""A drawn 0 would make noise of minus infinity, and its action illegal."""


@dataclass(eq=False)
class RolloutBatch:
    """Trajectories still to be built: how many, and the noise that decides them."""

    samples: int
    steps: int
    actions: int
    seed: int
    noise: Tensor | None = field(default=None)
    """[B, T, X], made on the device."""
    tokens: int = 0
    """Fragments of all trees on the trajectories; known, and noted here, when the objective has built them."""

    def to(self, device: torch.device) -> RolloutBatch:
        shape = (self.samples, self.steps, self.actions)
        uniform_BTX = torch.rand(shape, generator=generator_on(device, self.seed), device=device)
        gumbel_BTX = uniform_BTX.clamp_(min=SMALLEST).log_().neg_().log_().neg_()
        return RolloutBatch(*shape, self.seed, gumbel_BTX)


class Rollouts:
    """Batches of trajectories: which ones is a pure function of (seed, epoch, index)."""

    def __init__(self, building: TreeBuilding, samples: int, batch_size: int, seed: int) -> None:
        self._building, self._seed = building, seed
        self._batch_size = min(samples, batch_size)
        self.batches_per_epoch = samples // self._batch_size

    def at(self, epoch: int, index: int) -> RolloutBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        draw = np.random.SeedSequence([self._seed, epoch, index]).generate_state(1, np.uint64)[0]
        # a full tree can only stop, so that there are as many decisions as places
        return RolloutBatch(self._batch_size, self._building.most, self._building.actions, int(draw >> np.uint64(1)))


class Path(NamedTuple):
    """Steps first; a trajectory that has stopped stays where it is and takes no part any more."""

    before: Trees
    """The tree that each decision was made on; [T * B, ...]."""
    action: Tensor
    """[T, B]"""
    decided: Tensor
    """[T, B] Whether there was still something to decide."""
    after: Trees
    """The tree that each decision led to; [T * B, ...]."""
    final: Trees


@torch.no_grad()
def roll_out(model: nn.Module, building: TreeBuilding, noise_BTX: Tensor) -> Path:
    trees = building.empty(len(noise_BTX), noise_BTX.device)
    going_B = torch.ones(len(noise_BTX), dtype=torch.bool, device=noise_BTX.device)
    states, actions, decided = [trees], [], []
    for noise_BX in noise_BTX.unbind(1):
        scores_BX = mask(model(trees).logits, building.legal(trees)) + noise_BX
        action_B = torch.where(going_B, scores_BX.argmax(1), STOP)
        trees = building.apply(trees, action_B)
        decided.append(going_B)
        going_B = going_B & (action_B != STOP)
        states.append(trees)
        actions.append(action_B)
    return Path(_joined(states[:-1]), torch.stack(actions), torch.stack(decided), _joined(states[1:]), trees)


def mask(logits: Tensor, legal: Tensor) -> Tensor:
    return logits.masked_fill(~legal, float("-inf"))


def _joined(states: list[Trees]) -> Trees:
    columns: Any = zip(*states, strict=True)
    return Trees(*(torch.cat(column) for column in columns))
