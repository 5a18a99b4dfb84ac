"""Molecules as arrays: those of a batch lie one after the other as one graph, with no bonds between them.

Legend: B molecules, N atoms in all, E bonds in all (each in both directions), F features of an atom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.data.batch_source import Rows

FEATURES = (
    "atomic number",
    "chirality",
    "degree",
    "charge",
    "hydrogens",
    "radical electrons",
    "hybridisation",
    "aromatic",
    "in a ring",
)
"""What is said of an atom, in the order that OGB and torch_geometric use for PCQM4Mv2."""


@dataclass(frozen=True, eq=False)
class MoleculeGraph:
    features: NDArray[np.float32]
    """[N, F]"""
    positions: NDArray[np.float32]
    """[N, 3] in ångström; zeros where nobody asked for positions."""
    bonds: NDArray[np.int64]
    """[2, E]"""
    atoms: NDArray[np.int64]
    """[B] How many atoms each molecule has."""
    targets: NDArray[np.float32]
    """[B]"""

    @property
    def numbers(self) -> NDArray[np.int64]:
        """[N] Atomic numbers."""
        return self.features[:, 0].astype(np.int64)

    @property
    def molecule(self) -> NDArray[np.int64]:
        """[N] Which molecule each atom belongs to."""
        return np.repeat(np.arange(len(self.atoms)), self.atoms)


@dataclass(frozen=True)
class MoleculeRows:
    rows: Rows
    """Which rows belong to the split."""
    molecules: Callable[[Rows], MoleculeGraph]


@dataclass(frozen=True, eq=False)
class MoleculeTable:
    """Many molecules, read once: what belongs to row r lies between two of the offsets."""

    features: NDArray[np.float32]
    positions: NDArray[np.float32]
    bonds: NDArray[np.int64]
    """Atoms are numbered within their molecule."""
    atom_offsets: NDArray[np.int64]
    bond_offsets: NDArray[np.int64]
    targets: NDArray[np.float32]

    def molecules(self, rows: Rows) -> MoleculeGraph:
        atom_N, atoms_B = _gathered(self.atom_offsets, rows)
        bond_E, bonds_B = _gathered(self.bond_offsets, rows)
        first_atom_B = np.cumsum(atoms_B) - atoms_B
        return MoleculeGraph(
            features=self.features[atom_N],
            positions=self.positions[atom_N],
            bonds=self.bonds[:, bond_E] + np.repeat(first_atom_B, bonds_B),
            atoms=atoms_B,
            targets=self.targets[rows],
        )


def _gathered(offsets: NDArray[np.int64], rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where everything lies that belongs to the rows, and how much belongs to each."""
    sizes = offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(offsets[rows] - (ends - sizes), sizes), sizes


def degree_histogram(graph: MoleculeGraph) -> NDArray[np.int64]:
    """How many atoms have 0, 1, 2, ... neighbours."""
    return np.bincount(np.bincount(graph.bonds[1], minlength=len(graph.features)))
