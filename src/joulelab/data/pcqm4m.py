"""PCQM4Mv2 as it is published: a CSV (also .gz) of SMILES and HOMO-LUMO gaps, read into arrays with RDKit.

Only the rows that were asked for are read, and what was read is kept under ~/.cache/joulelab, by content: drawing a
molecule's positions takes RDKit milliseconds. The last 2 % of the rows are held out, which is about where PCQM4Mv2's
own validation set begins.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab import lookup
from joulelab.data.batch_source import Rows
from joulelab.data.cores import usable_cores
from joulelab.data.molecules import MoleculeRows, MoleculeTable
from joulelab.data.smiles import read_molecule
from joulelab.data.sources import content_hash
from joulelab.data.splits import Split
from joulelab.errors import ConfigError, DependencyMissing
from joulelab.runs.paths import cache_folder

SMILES, TARGET = "smiles", "homolumogap"
HELD_OUT_SHARE = 0.02
SPLITS = ("train", "validation")
_FORMAT = 1  # of the arrays that are kept


def open_pcqm4m(path: Path, split: Split, with_positions: bool, at_most: int | None = None) -> MoleculeRows:
    smiles, targets = _read_csv(path)
    rows = _rows_of(split, len(smiles))[:at_most]
    kept = _kept_at(path, rows, with_positions)
    table = _load(kept) if kept.exists() else _parse([smiles[row] for row in rows], targets[rows], with_positions)
    if not kept.exists():
        _keep(kept, table)
    return MoleculeRows(np.arange(len(rows)), table.molecules)


def _read_csv(path: Path) -> tuple[list[str], NDArray[np.float32]]:
    """Without the rows whose gap is not public."""
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
        raise ConfigError(f"{path} has {len(known)} molecules with a gap", "expected two or more")
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
    with ThreadPoolExecutor(usable_cores()) as pool:  # RDKit lets go of Python's lock while it embeds
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


def _kept_at(path: Path, rows: Rows, with_positions: bool) -> Path:
    key = hashlib.sha256(f"{_FORMAT} {content_hash(path)} {with_positions} ".encode() + rows.tobytes()).hexdigest()
    return cache_folder() / "molecules" / f"{key[:32]}.npz"


def _keep(kept: Path, table: MoleculeTable) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}.npz")
    np.savez(unfinished, **asdict(table))
    unfinished.replace(kept)


def _load(kept: Path) -> MoleculeTable:
    with np.load(kept, allow_pickle=False) as arrays:
        return MoleculeTable(**arrays)
