"""Molecules from trees of fragments, and their QED. Imports RDKit but not torch, so that worker processes start
fast."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from rdkit import Chem
from rdkit.Chem import QED

# Fragments as SMILES. Each `*` is a port where another fragment can be bonded. A port replaces a hydrogen, and an open
# port becomes one, so that every tree has legal valences. The first eight form a small alphabet.


ABSENT = -1
"""Marks a place without a fragment."""
FRAGMENTS = (
    "*c1ccc(*)cc1",
    "*N(*)*",
    "*C(*)=O",
    "*C",
    "*O",
    "*C*",
    "*N1CCN(*)CC1",
    "*F",
    # enough for the small alphabet; the rest makes the large one
    "*c1cccc(*)c1",
    "*c1cc(*)cc(*)c1",
    "*c1ccc(*)nc1",
    "*c1cnc(*)nc1",
    "*c1ccc(*)s1",
    "*c1cn(*)cn1",
    "*c1cc(*)[nH]n1",
    "*c1ccc2[nH]cc(*)c2c1",
    "*N1CCC(*)CC1",
    "*C1CCN(*)C1",
    "*C1CCC(*)OC1",
    "*C1CCC(*)CC1",
    "*C1CC1",
    "*C(*)*",
    "*CC*",
    "*C=C*",
    "*O*",
    "*N*",
    "*C(=O)N*",
    "*S(*)(=O)=O",
    "*N",
    "*Cl",
    "*OC",
    "*C#N",
    "*C(F)(F)F",
    "*C(=O)O",
    "*C(N)=O",
    "*S(C)(=O)=O",
)


def port_count(smiles: str) -> int:
    return smiles.count("*")


MIN_QED = 1e-4  # lower bound, because the loss uses log QED


class TreeNode(NamedTuple):
    """One fragment of a tree, on the host."""

    kind: int
    parent: int
    parent_port: int
    own_port: int


Tree = tuple[TreeNode, ...]


class MoleculeScorer:
    def __init__(self, fragments: Sequence[str]) -> None:
        self._fragments = [Chem.MolFromSmiles(smiles) for smiles in fragments]

    def qed(self, tree: Tree) -> float:
        qed: Any = QED.qed
        return max(MIN_QED, float(qed(self.molecule(tree))))

    def molecule(self, tree: Sequence[TreeNode]) -> Any:
        return assemble(self._fragments, tree)


_worker_scorer: list[MoleculeScorer] = []
"""The scorer of this worker process."""


def init_worker(fragments: Sequence[str]) -> None:
    """Initialize a new worker process. It exits with its parent, even if the parent is killed."""
    _worker_scorer[:] = [MoleculeScorer(fragments)]
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def worker_qed(tree: Tree) -> float:
    return _worker_scorer[0].qed(tree)


def assemble(fragments: Sequence[Any], tree: Sequence[TreeNode]) -> Any:
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
            whole.AddBond(_attachment_atom(whole, one), _attachment_atom(whole, other), Chem.BondType.SINGLE)
    whole.BeginBatchEdit()
    for port in (port for group in ports for port in group):
        if port in used:
            whole.RemoveAtom(port)
        else:
            whole.GetAtomWithIdx(port).SetAtomicNum(1)
    whole.CommitBatchEdit()
    return Chem.RemoveHs(whole.GetMol())


def _attachment_atom(whole: Any, port: int) -> int:
    """The atom that the port is attached to."""
    index: int = whole.GetAtomWithIdx(port).GetNeighbors()[0].GetIdx()
    return index
