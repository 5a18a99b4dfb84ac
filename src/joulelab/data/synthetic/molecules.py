"""Made-up molecules of PCQM4Mv2's sizes with a target to learn: a sum over atoms and over bonds of unlike atoms.

A molecule is a chain that winds along a strip two atoms wide, so that bonded atoms are 1.5 Å apart and no two atoms
meet; some neighbours on the strip are bonded too and close rings. All molecules of a batch are made at once, each a
pure function of (seed, row): a training on a GPU takes tens of thousands a second.

Legend: B molecules, S sites of the strip, P pairs of neighbouring sites, N atoms, E bonds in both directions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from joulelab.data.batch_source import Rows
from joulelab.data.molecules import FEATURES, MoleculeGraph

WIDE, LONG = 2, 14
SITES = WIDE * LONG
FEWEST_ATOMS, MOST_ATOMS = 8, 20  # 14 in the mean, as the heavy atoms of PCQM4Mv2
SPACING_ANGSTROM = 1.5
JITTER_ANGSTROM = 0.15
RING_CHANCE = 0.25  # that a further pair of neighbours is bonded: 14.5 bonds in the mean

NUMBERS = np.array([6, 7, 8, 9, 16, 17])
SHARES = np.array([0.72, 0.11, 0.11, 0.02, 0.02, 0.02])
ATOM_EV = np.array([-0.25, 0.35, -0.6, 0.8, -1.0, 0.5])
UNLIKE_BOND_EV = -0.2
BASE_EV = 9.0

_SLOTS = 256  # random numbers that one molecule may take


class SyntheticMolecules:
    """Molecule `row` is a pure function of (seed, row)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sites_S3 = _winding_path()
        self._pairs_P2 = _neighbours(self._sites_S3)

    def molecules(self, rows: Rows) -> MoleculeGraph:
        size_B2, luck_BS, ring_BP, jitter_BS3 = self._draws(rows)
        atoms_B = FEWEST_ATOMS + (size_B2[:, 0] * (MOST_ATOMS - FEWEST_ATOMS + 1)).astype(np.int64)
        start_B = (size_B2[:, 1] * (SITES - atoms_B + 1)).astype(np.int64)
        site_S = np.arange(SITES)
        taken_BS = (site_S >= start_B[:, None]) & (site_S < (start_B + atoms_B)[:, None])
        kind_BS = np.searchsorted(np.cumsum(SHARES)[:-1], luck_BS, side="right").astype(np.int64)
        ends_P2 = self._pairs_P2
        bonded_BP = taken_BS[:, ends_P2[:, 0]] & taken_BS[:, ends_P2[:, 1]]
        bonded_BP &= (np.diff(ends_P2)[:, 0] == 1) | (ring_BP < RING_CHANCE)
        bonds_2E = self._bonds(bonded_BP, taken_BS)
        positions_BS3 = SPACING_ANGSTROM * self._sites_S3 + JITTER_ANGSTROM * (2 * jitter_BS3 - 1)
        return MoleculeGraph(
            features=_features(NUMBERS[kind_BS[taken_BS]], bonds_2E),
            positions=positions_BS3[taken_BS].astype(np.float32),
            bonds=bonds_2E,
            atoms=atoms_B,
            targets=_targets(kind_BS, taken_BS, bonded_BP, ends_P2),
        )

    def _draws(self, rows: Rows) -> list[NDArray[np.float64]]:
        uniform = _uniform(self._seed, rows)
        parts = np.split(uniform, np.cumsum([2, SITES, len(self._pairs_P2), 3 * SITES]), axis=1)[:4]
        return [*parts[:3], parts[3].reshape(-1, SITES, 3)]

    def _bonds(self, bonded_BP: NDArray[np.bool_], taken_BS: NDArray[np.bool_]) -> NDArray[np.int64]:
        atom_BS = (np.cumsum(taken_BS) - 1).reshape(taken_BS.shape)
        molecule_E, pair_E = np.nonzero(bonded_BP)
        one_E, other_E = (atom_BS[molecule_E, self._pairs_P2[pair_E, end]] for end in (0, 1))
        return np.stack([np.concatenate([one_E, other_E]), np.concatenate([other_E, one_E])])


def _uniform(seed: int, rows: Rows) -> NDArray[np.float64]:
    """Numbers in [0, 1) that depend on (seed, row, slot) alone: splitmix64's mixing, over all of them at once."""
    slot = np.arange(_SLOTS, dtype=np.uint64)
    mixed = (rows.astype(np.uint64)[:, None] * np.uint64(_SLOTS) + slot) + np.uint64(seed << 40)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _winding_path() -> NDArray[np.int64]:
    """Every site of the strip once, each a neighbour of the one before."""
    across = [range(WIDE), range(WIDE)[::-1]]
    return np.array([(x, y, 0) for x in range(LONG) for y in across[x % 2]])


def _neighbours(sites_S3: NDArray[np.int64]) -> NDArray[np.int64]:
    steps_SS = np.abs(sites_S3[:, None] - sites_S3).sum(-1)
    return np.argwhere(np.triu(steps_SS == 1))


def _features(numbers_N: NDArray[np.int64], bonds_2E: NDArray[np.int64]) -> NDArray[np.float32]:
    """Number and degree; the rest of what is known of a real atom stays 0."""
    features_NF = np.zeros((len(numbers_N), len(FEATURES)), dtype=np.float32)
    features_NF[:, 0] = numbers_N
    features_NF[:, 2] = np.bincount(bonds_2E[0], minlength=len(numbers_N))
    return features_NF


def _targets(
    kind_BS: NDArray[np.int64],
    taken_BS: NDArray[np.bool_],
    bonded_BP: NDArray[np.bool_],
    ends_P2: NDArray[np.int64],
) -> NDArray[np.float32]:
    atoms_ev_B = (ATOM_EV[kind_BS] * taken_BS).sum(1)
    unlike_BP = kind_BS[:, ends_P2[:, 0]] != kind_BS[:, ends_P2[:, 1]]
    return np.asarray(BASE_EV + atoms_ev_B + UNLIKE_BOND_EV * (bonded_BP & unlike_BP).sum(1), dtype=np.float32)
