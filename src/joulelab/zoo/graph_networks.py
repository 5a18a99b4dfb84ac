"""Graph networks over molecules: DimeNet (Gasteiger et al., 2020) and PNA (Corso et al., 2020).

DimeNet passes messages along edges and uses the angles between them. It is built from torch_geometric's blocks, because
its DimeNet needs compiled packages that are not on PyPI. Both of its bases grow like cutoff / distance; here they are
scaled to bond length / distance. Unscaled, with milabench's cutoff of 10 Å, every block multiplies the messages by 20,
and after six blocks the activations reach 1e8.

Legend: B molecules, N atoms, E edges j -> i, W triplets k -> j -> i.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import PNAConv
from torch_geometric.nn.models.dimenet import BesselBasisLayer, EmbeddingBlock, Envelope, InteractionBlock, OutputBlock

from joulelab.data.molecules import FEATURES

# Neighbor lists in plain torch. torch_geometric uses compiled packages that are not on PyPI; molecules are small.


class Edges(NamedTuple):
    source: Tensor
    """[E] j"""
    target: Tensor
    """[E] i, ascending: the edges that end at an atom are contiguous."""


class Triplets(NamedTuple):
    kj: Tensor
    """[W] Index of the edge k -> j."""
    ji: Tensor
    """[W] Index of the edge j -> i."""


def edges_within(cutoff: float, positions_N3: Tensor, molecule_N: Tensor) -> Edges:
    """All pairs of a molecule's atoms that are closer than the cutoff; the atoms of a molecule are contiguous."""
    atoms_B = torch.bincount(molecule_N)
    first_atom_B = atoms_B.cumsum(0) - atoms_B
    target_E, source_E = _spans(first_atom_B[molecule_N], atoms_B[molecule_N])
    distance_E = (positions_N3[source_E] - positions_N3[target_E]).norm(dim=-1)
    near_E = (distance_E < cutoff) & (source_E != target_E)
    return Edges(source_E[near_E], target_E[near_E])


def triplets_of(edges: Edges, atoms: int) -> Triplets:
    """All pairs of edges k -> j -> i with k != i."""
    arriving_N = torch.bincount(edges.target, minlength=atoms)
    first_edge_N = arriving_N.cumsum(0) - arriving_N
    ji_W, kj_W = _spans(first_edge_N[edges.source], arriving_N[edges.source])
    onwards_W = edges.source[kj_W] != edges.target[ji_W]
    return Triplets(kj_W[onwards_W], ji_W[onwards_W])


def _spans(first: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenated ranges first[x], first[x] + 1, ...: the x of each element, and the element."""
    owner = torch.arange(len(length), device=length.device).repeat_interleave(length)
    start = length.cumsum(0) - length
    return owner, torch.arange(len(owner), device=length.device) - start[owner] + first[owner]


# DimeNet's joint basis of distance and angle: spherical Bessel functions times spherical harmonics.
#
#     basis[l, n] = u(d / c) * N[l, n] * j_l(z[l, n] * d / c) * Y_l(angle),  z[l, n]: the n-th zero of j_l
#
# torch_geometric derives the same functions symbolically, which takes ten seconds, and evaluates them in single
# precision, where j_6 of a bond length is mostly rounding error. The recurrences here use double precision.
#
# Legend: E edges, W triplets, L orders, R zeros of each order.


_HALVINGS = 60  # more bisections than double precision resolves


class SphericalBasis(nn.Module):
    def __init__(self, orders: int, zeros: int, cutoff: float, envelope: nn.Module) -> None:
        super().__init__()
        self.cutoff, self.envelope = cutoff, envelope
        zeros_LR = bessel_zeros(orders, zeros)
        following_LR = torch.stack([spherical_bessel(order + 1, row)[-1] for order, row in enumerate(zeros_LR)])
        self.register_buffer("zeros", zeros_LR, persistent=False)
        # The integral of (x j_l(z x))^2 over [0, 1] is j_{l+1}(z)^2 / 2 at a zero z of j_l, hence
        # the factor that normalizes the basis on the ball of radius `cutoff`.
        self.register_buffer("norm", math.sqrt(2) / following_LR.abs(), persistent=False)

    def forward(self, distance_E: Tensor, cosine_W: Tensor, kj_W: Tensor) -> Tensor:
        radial_ELR = self._radial((distance_E / self.cutoff).double()).to(distance_E.dtype)
        angular_WL = torch.stack(harmonics(radial_ELR.shape[1], cosine_W), dim=1)
        return (radial_ELR[kj_W] * angular_WL[:, :, None]).flatten(1)

    def _radial(self, share_E: Tensor) -> Tensor:
        assert isinstance(self.zeros, Tensor) and isinstance(self.norm, Tensor)
        # each order has different zeros, so only row l of order l is used
        values = spherical_bessel(len(self.zeros) - 1, share_E[:, None, None] * self.zeros)
        own_ELR = torch.stack([value_ELR[:, order] for order, value_ELR in enumerate(values)], dim=1)
        fading_E: Tensor = self.envelope(share_E)
        return fading_E[:, None, None] * self.norm * own_ELR


def spherical_bessel(order: int, x: Tensor) -> list[Tensor]:
    """j_0 to j_order of x > 0, in x's precision."""
    values = [x.sin() / x, x.sin() / x**2 - x.cos() / x]
    for lower in range(1, order):
        # j_{l+1} = (2l + 1) / x j_l - j_{l-1}. Upward recurrence cancels for x < l, which single
        # precision does not survive and double precision does up to order 6.
        values.append((2 * lower + 1) / x * values[-1] - values[-2])
    return values[: order + 1]


def bessel_zeros(orders: int, count: int) -> Tensor:
    """The first zeros of j_0 to j_(orders - 1), by bisection: between two zeros of j_l is one of j_(l + 1)."""
    zeros = torch.arange(1, count + orders, dtype=torch.float64) * math.pi
    rows = [zeros[:count]]
    for order in range(1, orders):
        low, high = zeros[:-1], zeros[1:]
        at_low = spherical_bessel(order, low)[-1]
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            # Zeros of consecutive orders interlace, so each interval between two zeros of the lower
            # order has exactly one sign change.
            beyond = spherical_bessel(order, middle)[-1] * at_low > 0
            low, high = torch.where(beyond, middle, low), torch.where(beyond, high, middle)
        zeros = (low + high) / 2
        rows.append(zeros[:count])
    return torch.stack(rows)


def harmonics(orders: int, cosine: Tensor) -> list[Tensor]:
    """Y_l of an angle without azimuth: Legendre polynomials of its cosine, normalized over the sphere."""
    polynomials = [torch.ones_like(cosine), cosine]
    for order in range(1, orders - 1):
        # Bonnet's recurrence of the Legendre polynomials.
        polynomials.append(((2 * order + 1) * cosine * polynomials[-1] - order * polynomials[-2]) / (order + 1))
    return [math.sqrt((2 * order + 1) / (4 * math.pi)) * value for order, value in enumerate(polynomials[:orders])]


def sum_by_molecule(values_N: Tensor, molecule_N: Tensor, molecules: int) -> Tensor:
    """Sum over the atoms of each molecule. The number of molecules is passed: reading it back from a GPU would wait."""
    return torch.zeros(molecules, dtype=values_N.dtype, device=values_N.device).index_add(0, molecule_N, values_N)


ENVELOPE_EXPONENT = 5
LAYERS_BEFORE_SKIP, LAYERS_AFTER_SKIP = 1, 2
OUTPUT_LAYERS = 3
BOND_ANGSTROM = 2.0


class DimeNet(nn.Module):
    """One number per molecule; invariant under translation and rotation."""

    def __init__(self, width: int, blocks: int, bilinear: int, spherical: int, radial: int, cutoff: float) -> None:
        super().__init__()
        act = nn.functional.silu
        self.scale = BOND_ANGSTROM / cutoff
        self.distances = BesselBasisLayer(radial, cutoff, ENVELOPE_EXPONENT)
        self.angles = SphericalBasis(spherical, radial, cutoff, Envelope(ENVELOPE_EXPONENT))
        self.embedding = EmbeddingBlock(radial, width, act)
        self.interactions = nn.ModuleList(
            InteractionBlock(width, bilinear, spherical, radial, LAYERS_BEFORE_SKIP, LAYERS_AFTER_SKIP, act)
            for _ in range(blocks)
        )
        self.outputs = nn.ModuleList(OutputBlock(radial, width, 1, OUTPUT_LAYERS, act) for _ in range(blocks + 1))

    def forward(
        self,
        numbers_N: Tensor,
        positions_N3: Tensor,
        molecule_N: Tensor,
        edges: Edges,
        triplets: Triplets,
        molecules: int,
    ) -> Tensor:
        j_E, i_E = edges
        way_E3 = positions_N3[i_E] - positions_N3[j_E]
        distance_E = way_E3.norm(dim=-1)
        radial_ER = self.scale * self.distances(distance_E)
        angular = self.scale * self.angles(distance_E, _cosines(way_E3, distance_E, triplets), triplets.kj)
        message_EH = self.embedding(numbers_N, radial_ER, i_E, j_E)
        atoms_N1 = self.outputs[0](message_EH, radial_ER, i_E, num_nodes=len(numbers_N))
        for interaction, output in zip(self.interactions, self.outputs[1:], strict=True):
            message_EH = interaction(message_EH, radial_ER, angular, *triplets)
            atoms_N1 = atoms_N1 + output(message_EH, radial_ER, i_E, num_nodes=len(numbers_N))
        return sum_by_molecule(atoms_N1[:, 0], molecule_N, molecules)


def _cosines(way_E3: Tensor, distance_E: Tensor, triplets: Triplets) -> Tensor:
    """Cosine of the angle at j between k and i, for every triplet k -> j -> i."""
    unit_E3 = way_E3 / distance_E[:, None]
    return -(unit_E3[triplets.kj] * unit_E3[triplets.ji]).sum(-1)


# PNA's layers are torch_geometric's, as in milabench, with a residual connection around each: in a plain stack of 64
# layers only the last few get a gradient, and the atoms of a molecule become indistinguishable (oversmoothing).
#
# Legend: B molecules, N atoms, E bonds in both directions, F features of an atom, H width.


AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]


class Pna(nn.Module):
    """One number per molecule, invariant under permutation of its atoms."""

    def __init__(self, width: int, layers: int, degrees: Tensor) -> None:
        """`degrees`: number of training atoms with 0, 1, 2, ... neighbors; the scalers are normalized by it."""
        super().__init__()
        widths = [(len(FEATURES), width), *[(width, width)] * (layers - 2), (width, 1)]
        self.convolutions = nn.ModuleList(PNAConv(*ends, AGGREGATORS, SCALERS, degrees) for ends in widths)

    def forward(self, features_NF: Tensor, bonds_2E: Tensor, molecule_N: Tensor, molecules: int) -> Tensor:
        first, *middle, last = self.convolutions
        state_NH: Tensor = first(features_NF, bonds_2E).relu()
        for convolution in middle:
            state_NH = state_NH + convolution(state_NH, bonds_2E).relu()
        return sum_by_molecule(last(state_NH, bonds_2E)[:, 0], molecule_N, molecules)
