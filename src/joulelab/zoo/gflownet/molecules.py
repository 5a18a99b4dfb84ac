"""From a tree of fragments to a molecule, and how much it looks like a drug. Imports RDKit and no torch, so that a
worker process is there in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from rdkit import Chem
from rdkit.Chem import QED

from joulelab.zoo.gflownet.fragments import ABSENT

LEAST_QED = 1e-4  # no molecule has less, and the logarithm of 0 would end the training


class Joined(NamedTuple):
    """One fragment of a tree, on the host."""

    kind: int
    parent: int
    parent_port: int
    own_port: int


Tree = tuple[Joined, ...]


class Chemist:
    def __init__(self, fragments: Sequence[str]) -> None:
        self._fragments = [Chem.MolFromSmiles(smiles) for smiles in fragments]

    def qed(self, tree: Tree) -> float:
        qed: Any = QED.qed
        return max(LEAST_QED, float(qed(self.molecule(tree))))

    def molecule(self, tree: Sequence[Joined]) -> Any:
        return assemble(self._fragments, tree)


_hired: list[Chemist] = []
"""Of this worker process."""


def hire(fragments: Sequence[str]) -> None:
    """In a new worker process; it ends when the training does, also where that was killed."""
    _hired[:] = [Chemist(fragments)]
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()


def _leave_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def hired_qed(tree: Tree) -> float:
    return _hired[0].qed(tree)


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
