"""SMILES strings to atoms, bonds and positions as arrays, with RDKit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from joulelab.data.molecules import FEATURES
from joulelab.errors import ConfigError


class Molecule(NamedTuple):
    features: NDArray[np.float32]
    positions: NDArray[np.float32]
    bonds: NDArray[np.int64]
    """[2, bonds], each in both directions."""


def read_molecule(smiles: str, with_positions: bool) -> Molecule:
    """Its heavy atoms; without positions they all lie at 0."""
    from rdkit import Chem
    from rdkit.rdBase import BlockLogs

    _silent = BlockLogs()  # until the end of this function: what RDKit cannot do is dealt with here
    chem = Chem.MolFromSmiles(smiles)
    if chem is None or not chem.GetNumAtoms():
        raise ConfigError(f"'{smiles}' is not a molecule that RDKit can read", "check the column of SMILES")
    features = np.array([_features(atom) for atom in chem.GetAtoms()], dtype=np.float32)
    positions = _positions(chem) if with_positions else np.zeros((len(features), 3))
    ends = [(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in chem.GetBonds()]
    bonds = np.array([end for pair in ends for end in (pair, pair[::-1])], dtype=np.int64).reshape(-1, 2).T
    return Molecule(features, positions.astype(np.float32), bonds)


def _features(atom: Any) -> tuple[int, ...]:
    found = (
        atom.GetAtomicNum(),
        int(atom.GetChiralTag()),
        atom.GetTotalDegree(),
        atom.GetFormalCharge(),
        atom.GetTotalNumHs(),
        atom.GetNumRadicalElectrons(),
        int(atom.GetHybridization()),
        int(atom.GetIsAromatic()),
        int(atom.IsInRing()),
    )
    assert len(found) == len(FEATURES)
    return found


def _positions(chem: Any) -> NDArray[np.float64]:
    """In ångström: RDKit's embedding, or the flat drawing for the few molecules that it gives up on."""
    from rdkit import Chem
    from rdkit.Chem import rdDepictor, rdDistGeom

    whole = Chem.AddHs(chem)
    for random_start in (False, True):
        if rdDistGeom.EmbedMolecule(whole, randomSeed=1, useRandomCoords=random_start) == 0:
            return np.array(whole.GetConformer().GetPositions()[: chem.GetNumAtoms()])
    rdDepictor.Compute2DCoords(chem)
    return np.array(chem.GetConformer().GetPositions())
