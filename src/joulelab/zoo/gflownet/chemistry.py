"""What the molecules of finished trees are worth. Importing this imports RDKit.

The reward is QED (Bickerton et al., 2012), how much a molecule looks like a drug, between 0 and 1, to the power beta.
The host computes it, in milliseconds each and mostly under Python's lock. Worker processes share that where there are
cores for them, and what was seen before is remembered.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from joulelab.meter.sensors.cpu import usable_cores
from joulelab.zoo.gflownet.fragment_molecules import ABSENT, Chemist, Joined, Tree, hire, hired_qed
from joulelab.zoo.gflownet.gflownet_policy import Trees

REMEMBERED = 1_000_000
_MOST_WORKERS = 16


class QedReward:
    def __init__(self, fragments: Sequence[str], beta: float, workers: int | None = None) -> None:
        """`workers` are processes; fewer than two: none, the work is done here."""
        self._chemist, self._beta = Chemist(fragments), beta
        self._known: dict[Tree, float] = {}
        workers = min(_MOST_WORKERS, usable_cores() - 2) if workers is None else workers
        self._pool = self._hire(fragments, workers) if workers > 1 else None

    def qed(self, trees: Trees) -> Tensor:
        """[S], on the host."""
        asked = on_host(trees)
        unknown = list(dict.fromkeys(tree for tree in asked if tree not in self._known))
        if len(self._known) + len(unknown) > REMEMBERED:
            self._known = {tree: self._known[tree] for tree in asked if tree in self._known}
        found = self._pool.map(hired_qed, unknown) if self._pool else map(self._chemist.qed, unknown)
        self._known.update(zip(unknown, found, strict=True))
        return torch.tensor([self._known[tree] for tree in asked])

    def log_reward(self, qed_S: Tensor) -> Tensor:
        return self._beta * qed_S.log()

    def molecule(self, tree: Sequence[Joined]) -> Any:
        return self._chemist.molecule(tree)

    @staticmethod
    def _hire(fragments: Sequence[str], workers: int) -> ProcessPoolExecutor:
        # spawned, not forked: a fork of a process with CUDA and threads may hang
        fresh = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, mp_context=fresh, initializer=hire, initargs=(tuple(fragments),))


def on_host(trees: Trees) -> list[Tree]:
    columns = torch.stack([trees.fragment, trees.parent, trees.parent_port, trees.own_port], dim=-1)
    return [tuple(Joined(*row) for row in tree if row[0] != ABSENT) for tree in columns.tolist()]
