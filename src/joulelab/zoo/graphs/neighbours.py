"""Who is near whom: the graph and the triplets that DimeNet's messages go along.

torch_geometric takes both from compiled packages that PyPI does not have. Molecules are small, so plain torch does it.

Legend: N atoms, E directed edges j -> i, W triplets k -> j -> i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Edges(NamedTuple):
    source: Tensor
    """[E] j"""
    target: Tensor
    """[E] i, in rising order: the edges that end at an atom lie side by side."""


class Triplets(NamedTuple):
    kj: Tensor
    """[W] The number of the edge k -> j."""
    ji: Tensor
    """[W] The number of the edge j -> i that it feeds."""


def edges_within(cutoff: float, positions_N3: Tensor, molecule_N: Tensor) -> Edges:
    """All pairs of a molecule's atoms that are closer than the cutoff; a molecule's atoms lie side by side."""
    atoms_B = torch.bincount(molecule_N)
    first_atom_B = atoms_B.cumsum(0) - atoms_B
    target_E, source_E = _spans(first_atom_B[molecule_N], atoms_B[molecule_N])
    distance_E = (positions_N3[source_E] - positions_N3[target_E]).norm(dim=-1)
    near_E = (distance_E < cutoff) & (source_E != target_E)
    return Edges(source_E[near_E], target_E[near_E])


def triplets_of(edges: Edges, atoms: int) -> Triplets:
    """Every two edges k -> j -> i with k other than i."""
    arriving_N = torch.bincount(edges.target, minlength=atoms)
    first_edge_N = arriving_N.cumsum(0) - arriving_N
    ji_W, kj_W = _spans(first_edge_N[edges.source], arriving_N[edges.source])
    onwards_W = edges.source[kj_W] != edges.target[ji_W]
    return Triplets(kj_W[onwards_W], ji_W[onwards_W])


def _spans(first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The spans first[x], first[x] + 1, ... in one row: to which x each number belongs, and the number."""
    owner = torch.arange(len(length), device=length.device).repeat_interleave(length)
    start = length.cumsum(0) - length
    return owner, torch.arange(len(owner), device=length.device) - start[owner] + first[owner]
