"""Molecules as arrays: graphs of a batch, SMILES read with RDKit, and the PCQM4Mv2 dataset.

The molecules of a batch follow one another as one graph, with no bonds between them.

Legend: B molecules, N atoms in all, E bonds in all (each in both directions), F features of an atom.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from joulelab import lookup
from joulelab.data.batches import Rows
from joulelab.data.sources import content_hash
from joulelab.data.splits import Split
from joulelab.errors import ConfigError, DependencyMissing
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.runs.paths import cache_folder

FEATURES = (
    "atomic number",
    "chirality",
    "degree",
    "charge",
    "hydrogens",
    "radical electrons",
    "hybridization",
    "aromatic",
    "in a ring",
)
"""Features of an atom, in the order that OGB and torch_geometric use for PCQM4Mv2."""


@dataclass(frozen=True, eq=False)
class MoleculeGraph:
    features: NDArray[np.float32]
    """[N, F]"""
    positions: NDArray[np.float32]
    """[N, 3] in ångström; zeros without positions."""
    bonds: NDArray[np.int64]
    """[2, E]"""
    atoms: NDArray[np.int64]
    """[B] Number of atoms of each molecule."""
    targets: NDArray[np.float32]
    """[B]"""

    @property
    def numbers(self) -> NDArray[np.int64]:
        """[N] Atomic numbers."""
        return self.features[:, 0].astype(np.int64)

    @property
    def molecule(self) -> NDArray[np.int64]:
        """[N] Number of the molecule that each atom belongs to."""
        return np.repeat(np.arange(len(self.atoms)), self.atoms)


@dataclass(frozen=True)
class MoleculeRows:
    rows: Rows
    """Rows of the split."""
    molecules: Callable[[Rows], MoleculeGraph]


@dataclass(frozen=True, eq=False)
class MoleculeTable:
    """Molecules in flat arrays: those of row r are between two offsets."""

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
    """Positions of all entries of the rows, and the number of entries of each row."""
    sizes = offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(offsets[rows] - (ends - sizes), sizes), sizes


def degree_histogram(graph: MoleculeGraph) -> NDArray[np.int64]:
    """Number of atoms with 0, 1, 2, ... neighbors."""
    return np.bincount(np.bincount(graph.bonds[1], minlength=len(graph.features)))


class Molecule(NamedTuple):
    features: NDArray[np.float32]
    positions: NDArray[np.float32]
    bonds: NDArray[np.int64]
    """[2, bonds], each in both directions."""


def read_molecule(smiles: str, with_positions: bool) -> Molecule:
    """The heavy atoms and bonds of a SMILES string, read with RDKit; without positions all are 0."""
    from rdkit import Chem
    from rdkit.rdBase import BlockLogs

    _silent = BlockLogs()  # silences RDKit until the function returns; failures are handled here
    chem = Chem.MolFromSmiles(smiles)
    if chem is None or not chem.GetNumAtoms():
        raise ConfigError(f"'{smiles}' is not a molecule that RDKit can read", "check the SMILES column")
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
    """In ångström: RDKit's 3D embedding, or 2D coordinates for the few molecules that it cannot embed."""
    from rdkit import Chem
    from rdkit.Chem import rdDepictor, rdDistGeom

    whole = Chem.AddHs(chem)
    for random_start in (False, True):
        if rdDistGeom.EmbedMolecule(whole, randomSeed=1, useRandomCoords=random_start) == 0:
            return np.array(whole.GetConformer().GetPositions()[: chem.GetNumAtoms()])
    rdDepictor.Compute2DCoords(chem)
    return np.array(chem.GetConformer().GetPositions())


# PCQM4Mv2 as published: a CSV file (also .gz) of SMILES and HOMO-LUMO gaps. Only the requested rows are parsed; the
# arrays are cached by content, because embedding takes milliseconds per molecule. The last 2 % of the rows are held
# out, which is about where PCQM4Mv2's own validation set begins.


SMILES, TARGET = "smiles", "homolumogap"
HELD_OUT_SHARE = 0.02
SPLITS = ("train", "validation")
_FORMAT = 1  # of the cached arrays


def open_pcqm4m(path: Path, split: Split, with_positions: bool, at_most: int | None = None) -> MoleculeRows:
    smiles, targets = _read_csv(path)
    rows = _rows_of(split, len(smiles))[:at_most]
    cached = _cache_file(path, rows, with_positions)
    table = _load(cached) if cached.exists() else _parse([smiles[row] for row in rows], targets[rows], with_positions)
    if not cached.exists():
        _save(cached, table)
    return MoleculeRows(np.arange(len(rows)), table.molecules)


def _read_csv(path: Path) -> tuple[list[str], NDArray[np.float32]]:
    """Without rows whose gap is not published."""
    from pyarrow import ArrowException, csv

    try:
        table = csv.read_csv(path)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}", f"expected columns {SMILES},{TARGET}") from error
    for name in (SMILES, TARGET):
        if name not in table.column_names:
            raise ConfigError(
                f"{path} has no column '{name}': found {', '.join(table.column_names)}",
                "PCQM4Mv2's data.csv has idx,smiles,homolumogap",
            )
    targets = np.asarray(table[TARGET].to_numpy(), dtype=np.float32)
    known = np.flatnonzero(np.isfinite(targets))
    if len(known) < 2:
        raise ConfigError(f"{path} has {len(known)} molecules with a gap; expected at least 2", "check the file")
    smiles = table[SMILES].to_pylist()
    return [smiles[row] for row in known], targets[known]


def _rows_of(split: Split, total: int) -> Rows:
    if split.name not in SPLITS:
        raise lookup.unknown("split of PCQM4Mv2", split.name, SPLITS)
    held_out = max(1, int(total * HELD_OUT_SHARE))
    if split.name == "validation":
        return split.rows(held_out) + (total - held_out)
    return split.rows(total - held_out)


def _parse(smiles: list[str], targets: NDArray[np.float32], with_positions: bool) -> MoleculeTable:
    if find_spec("rdkit") is None:
        raise DependencyMissing("SMILES need RDKit, which is not installed", 'pip install "joulelab[graphs]"')
    with ThreadPoolExecutor(usable_cores()) as pool:  # RDKit releases the GIL while it embeds
        found = list(pool.map(lambda text: read_molecule(text, with_positions), smiles))
    return MoleculeTable(
        features=np.concatenate([molecule.features for molecule in found]),
        positions=np.concatenate([molecule.positions for molecule in found]),
        bonds=np.concatenate([molecule.bonds for molecule in found], axis=1),
        atom_offsets=_offsets([len(molecule.features) for molecule in found]),
        bond_offsets=_offsets([molecule.bonds.shape[1] for molecule in found]),
        targets=targets,
    )


def _offsets(sizes: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _cache_file(path: Path, rows: Rows, with_positions: bool) -> Path:
    key = hashlib.sha256(f"{_FORMAT} {content_hash(path)} {with_positions} ".encode() + rows.tobytes()).hexdigest()
    return cache_folder() / "molecules" / f"{key[:32]}.npz"


def _save(file: Path, table: MoleculeTable) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.npz")
    np.savez(temporary, **asdict(table))
    temporary.replace(file)


def _load(file: Path) -> MoleculeTable:
    with np.load(file, allow_pickle=False) as arrays:
        return MoleculeTable(**arrays)
