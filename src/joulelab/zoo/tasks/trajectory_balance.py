"""Trajectory balance: a policy learns to build molecules as often as their reward says (Malkin et al., 2022).

    loss = (log Z + sum of log P_forward - log reward - sum of log P_backward)^2, for every trajectory

It is 0 for all trajectories exactly where each tree of fragments comes up in proportion to its reward. The trajectories
are the policy's own, built first without gradients; then all their decisions are looked at in one forward pass.

Legend: B trajectories, T decisions of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from joulelab.data.splits import SYNTHETIC_SIZES, Split
from joulelab.zoo.gflownet.fragment_molecules import FRAGMENTS, ports_of
from joulelab.zoo.gflownet.gflownet_policy import (
    Decision,
    Path,
    Policy,
    RolloutBatch,
    Rollouts,
    TreeBuilding,
    Trees,
    mask,
    roll_out,
)
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker, Workload
from joulelab.zoo.pretrained import randomly_initialized
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset

SPLITS_APART = 1_000_003
"""Between the seeds of two splits."""


def prepare(request: WorkloadRequest) -> Workload:
    from joulelab.zoo.gflownet.chemistry import QedReward

    if request.dataset != SYNTHETIC:
        raise refuse_dataset(request)
    settings = dict(request.size.settings)
    fragments, beta = FRAGMENTS[: settings.pop("kinds")], settings.pop("beta")
    building = TreeBuilding([ports_of(smiles) for smiles in fragments], request.shape["fragments"])
    model = randomly_initialized(request, lambda: Policy(building, **settings))
    train, held_out = (_rollouts(request, building, split) for split in (request.wanted_split, Split("validation")))
    return Workload(model, TrajectoryBalance(building, QedReward(fragments, beta)), train, held_out)


def _rollouts(request: WorkloadRequest, building: TreeBuilding, split: Split) -> Rollouts:
    seed = request.seed + SPLITS_APART * list(SYNTHETIC_SIZES).index(split.name)
    return Rollouts(building, len(split.rows(SYNTHETIC_SIZES[split.name])), request.rows_per_batch, seed)


class Reward(Protocol):
    def qed(self, trees: Trees) -> Tensor:
        """What each tree is worth, [S], on the host."""

    def log_reward(self, qed_S: Tensor) -> Tensor: ...


class TrajectoryBalance:
    def __init__(self, building: TreeBuilding, reward: Reward) -> None:
        self._building, self._reward = building, reward

    def __call__(self, model: nn.Module, batch: RolloutBatch, phase: PhaseMaker) -> ObjectiveOutput:
        assert batch.noise is not None  # `to` has made it
        with phase("forward.rollout"):
            path = roll_out(model, self._building, batch.noise)
            finished = Trees(*(column.cpu() for column in path.final))
            batch.tokens = int(visited_fragments(path))
        with phase("forward.policy"):
            decision: Decision = model(path.before)
            log_forward_B = summed_log_forward(decision.logits, path, self._building)
            log_backward_B = summed_log_backward(path, self._building)
        with phase("forward.reward"):  # by the host, while a GPU is still at the policy
            qed_B = self._reward.qed(finished)
            log_reward_B = self._reward.log_reward(qed_B).to(log_forward_B.device)
        loss_sum = (decision.log_z + log_forward_B - log_reward_B - log_backward_B).square().sum()
        parts = {"qed": qed_B.sum().to(loss_sum.device), "log_z": decision.log_z.detach() * batch.samples}
        return ObjectiveOutput(loss_sum, batch.samples, parts)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None:
        pass


def summed_log_forward(logits: Tensor, path: Path, building: TreeBuilding) -> Tensor:
    """[B]: of all decisions of a trajectory, of which the policy gives the logits."""
    log_shares = mask(logits, building.legal(path.before)).log_softmax(-1)
    chosen_TB = log_shares.gather(1, path.action.flatten()[:, None]).view_as(path.action)
    return torch.where(path.decided, chosen_TB, 0.0).sum(0)


def summed_log_backward(path: Path, building: TreeBuilding) -> Tensor:
    """[B]: of undoing them; a stop is undone in one way only."""
    undone_TB = building.log_backward(path.after).view_as(path.action)
    return torch.where(path.action != 0, undone_TB, 0.0).sum(0)


def visited_fragments(path: Path) -> Tensor:
    return torch.where(path.decided, path.before.size.view_as(path.action), 0).sum() + path.final.size.sum()
