"""From a tree of fragments to a molecule, and what the molecule is worth. Importing this imports RDKit.

The reward is QED (Bickerton et al., 2012), how much a molecule looks like a drug, between 0 and 1, to the power beta.
The host computes it, in a millisecond or two, hence the threads and the memory of what was seen before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from rdkit import Chem
from rdkit.Chem import QED
from torch import Tensor

from joulelab.zoo.gflownet.trees import ABSENT, Trees

LEAST_QED = 1e-4  # no molecule has less, and the logarithm of 0 would end the training
REMEMBERED = 1_000_000
_THREADS = 8  # RDKit lets go of Python's lock while it looks for substructures, which is most of QED


class Joined(NamedTuple):
    """One fragment of a tree, on the host."""

    kind: int
    parent: int
    parent_port: int
    own_port: int


class QedReward:
    def __init__(self, fragments: Sequence[str], beta: float) -> None:
        self._fragments = [Chem.MolFromSmiles(smiles) for smiles in fragments]
        self._beta = beta
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="joulelab-reward")
        self._worth = lru_cache(REMEMBERED)(self._compute)

    def qed(self, trees: Trees) -> Tensor:
        """[S], on the host."""
        return torch.tensor(list(self._pool.map(self._worth, on_host(trees))))

    def log_reward(self, qed_S: Tensor) -> Tensor:
        return self._beta * qed_S.log()

    def _compute(self, tree: tuple[Joined, ...]) -> float:
        qed: Any = QED.qed
        return max(LEAST_QED, float(qed(self.molecule(tree))))

    def molecule(self, tree: Sequence[Joined]) -> Any:
        return assemble(self._fragments, tree)


def on_host(trees: Trees) -> list[tuple[Joined, ...]]:
    columns = torch.stack([trees.fragment, trees.parent, trees.parent_port, trees.own_port], dim=-1)
    return [tuple(Joined(*row) for row in tree if row[0] != ABSENT) for tree in columns.tolist()]


def assemble(fragments: Sequence[Any], tree: Sequence[Joined]) -> Any:
    """The molecule, checked by RDKit: used ports become bonds, open ones hydrogens."""
    whole, ports = Chem.RWMol(), []
    for node in tree:
        start = whole.GetNumAtoms()
        whole.InsertMol(fragments[node.kind])
        ports.append([start + atom.GetIdx() for atom in fragments[node.kind].GetAtoms() if not atom.GetAtomicNum()])
    used: set[int] = set()
    for place, node in enumerate(tree):
        if node.parent != ABSENT:
            one, other = ports[node.parent][node.parent_port], ports[place][node.own_port]
            used |= {one, other}
            whole.AddBond(_held_by(whole, one), _held_by(whole, other), Chem.BondType.SINGLE)
    whole.BeginBatchEdit()
    for port in (port for group in ports for port in group):
        if port in used:
            whole.RemoveAtom(port)
        else:
            whole.GetAtomWithIdx(port).SetAtomicNum(1)
    whole.CommitBatchEdit()
    return Chem.RemoveHs(whole.GetMol())


def _held_by(whole: Any, port: int) -> int:
    """The atom that the port stands at."""
    index: int = whole.GetAtomWithIdx(port).GetNeighbors()[0].GetIdx()
    return index
