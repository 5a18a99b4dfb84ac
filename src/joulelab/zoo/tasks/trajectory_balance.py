"""Trajectory balance (Malkin et al., 2022): a policy learns to sample molecules in proportion to their reward.

    loss = (log Z + sum of log P_forward - log reward - sum of log P_backward)^2, for every trajectory

It is 0 for all trajectories if and only if each tree is sampled in proportion to its reward. Trajectories are sampled
on policy without gradients; then one forward pass evaluates all their decisions.

The reward is QED^beta. QED (Bickerton et al., 2012) rates drug-likeness between 0 and 1. The host computes it with
RDKit in milliseconds per molecule, mostly under the GIL, so worker processes share the work, and results are cached.

Legend: B trajectories, T decisions of each, S trees.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joulelab.data.splits import SYNTHETIC_SIZES, Split
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.zoo.fragment_molecules import (
    ABSENT,
    FRAGMENTS,
    MoleculeScorer,
    Tree,
    TreeNode,
    init_worker,
    port_count,
    worker_qed,
)
from joulelab.zoo.gflownet_policy import (
    Decision,
    Policy,
    RolloutBatch,
    Rollouts,
    Trajectory,
    TreeBuilding,
    Trees,
    mask_illegal,
    roll_out,
)
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker, Workload
from joulelab.zoo.pretrained import build_randomly_initialized
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset

MAX_CACHED = 1_000_000
_MAX_WORKERS = 16


class QedReward:
    def __init__(self, fragments: Sequence[str], beta: float, workers: int | None = None) -> None:
        """`workers`: number of worker processes; with fewer than two, rewards are computed in this process."""
        self._chemist, self._beta = MoleculeScorer(fragments), beta
        self._known: dict[Tree, float] = {}
        workers = min(_MAX_WORKERS, usable_cores() - 2) if workers is None else workers
        self._pool = self._hire(fragments, workers) if workers > 1 else None

    def __deepcopy__(self, memo: object) -> QedReward:
        """With the same processes, and without the known rewards: a trial must not compute those of the training."""
        copied = copy.copy(self)
        copied._known = {}
        return copied

    def qed(self, trees: Trees) -> Tensor:
        """[S], on the host."""
        on_host = trees_to_host(trees)
        unknown = list(dict.fromkeys(tree for tree in on_host if tree not in self._known))
        if len(self._known) + len(unknown) > MAX_CACHED:
            self._known = {tree: self._known[tree] for tree in on_host if tree in self._known}
        found = self._pool.map(worker_qed, unknown) if self._pool else map(self._chemist.qed, unknown)
        self._known.update(zip(unknown, found, strict=True))
        return torch.tensor([self._known[tree] for tree in on_host])

    def log_reward(self, qed_S: Tensor) -> Tensor:
        return self._beta * qed_S.log()

    def molecule(self, tree: Sequence[TreeNode]) -> Any:
        return self._chemist.molecule(tree)

    @staticmethod
    def _hire(fragments: Sequence[str], workers: int) -> ProcessPoolExecutor:
        # spawned, not forked: a fork of a process with CUDA and threads may hang
        fresh = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, mp_context=fresh, initializer=init_worker, initargs=(tuple(fragments),))


def trees_to_host(trees: Trees) -> list[Tree]:
    columns = torch.stack([trees.fragment, trees.parent, trees.parent_port, trees.own_port], dim=-1)
    return [tuple(TreeNode(*row) for row in tree if row[0] != ABSENT) for tree in columns.tolist()]


SPLITS_APART = 1_000_003
"""Difference of the seeds of two splits."""


def prepare(request: WorkloadRequest) -> Workload:

    if request.dataset != SYNTHETIC:
        raise refuse_dataset(request)
    settings = dict(request.size.settings)
    fragments, beta = FRAGMENTS[: settings.pop("kinds")], settings.pop("beta")
    building = TreeBuilding([port_count(smiles) for smiles in fragments], request.shape["fragments"])
    model = build_randomly_initialized(request, lambda: Policy(building, **settings))
    train, held_out = (_rollouts(request, building, split) for split in (request.wanted_split, Split("validation")))
    return Workload(model, TrajectoryBalance(building, QedReward(fragments, beta)), train, held_out)


def _rollouts(request: WorkloadRequest, building: TreeBuilding, split: Split) -> Rollouts:
    seed = request.seed + SPLITS_APART * list(SYNTHETIC_SIZES).index(split.name)
    return Rollouts(building, len(split.rows(SYNTHETIC_SIZES[split.name])), request.rows_per_batch, seed)


class Reward(Protocol):
    def qed(self, trees: Trees) -> Tensor:
        """Reward of each tree, [S], on the host."""

    def log_reward(self, qed_S: Tensor) -> Tensor: ...


class TrajectoryBalance:
    def __init__(self, building: TreeBuilding, reward: Reward) -> None:
        self._building, self._reward = building, reward

    def __call__(self, model: nn.Module, batch: RolloutBatch, phase: PhaseMaker) -> ObjectiveOutput:
        assert batch.noise is not None  # created by `to`
        with phase("forward.rollout"):
            path = roll_out(model, self._building, batch.noise)
            finished = Trees(*(column.cpu() for column in path.final))
            batch.tokens = int(visited_fragments(path))
        with phase("forward.policy"):
            decision: Decision = model(path.before)
            log_forward_B = summed_log_forward(decision.logits, path, self._building)
            log_backward_B = summed_log_backward(path, self._building)
        with phase("forward.reward"):  # computed on the host while the GPU still runs the policy
            qed_B = self._reward.qed(finished)
            log_reward_B = self._reward.log_reward(qed_B).to(log_forward_B.device)
        # P(trajectory) Z = reward x P_backward in logarithms; the loss is the squared violation of
        # this balance (Malkin et al., 2022).
        loss_sum = (decision.log_z + log_forward_B - log_reward_B - log_backward_B).square().sum()
        parts = {"qed": qed_B.sum().to(loss_sum.device), "log_z": decision.log_z.detach() * batch.samples}
        return ObjectiveOutput(loss_sum, batch.samples, parts)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None:
        pass


def summed_log_forward(logits: Tensor, path: Trajectory, building: TreeBuilding) -> Tensor:
    """[B]: log-probability of all decisions of a trajectory under the policy's logits."""
    log_shares = mask_illegal(logits, building.legal(path.before)).log_softmax(-1)
    chosen_TB = log_shares.gather(1, path.action.flatten()[:, None]).view_as(path.action)
    return torch.where(path.decided, chosen_TB, 0.0).sum(0)


def summed_log_backward(path: Trajectory, building: TreeBuilding) -> Tensor:
    """[B]: log-probability of the backward steps; a stop has a single backward step."""
    undone_TB = building.log_backward(path.after).view_as(path.action)
    return torch.where(path.action != 0, undone_TB, 0.0).sum(0)


def visited_fragments(path: Trajectory) -> Tensor:
    return torch.where(path.decided, path.before.size.view_as(path.action), 0).sum() + path.final.size.sum()
