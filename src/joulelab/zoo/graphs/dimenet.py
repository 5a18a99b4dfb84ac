"""DimeNet: messages along the edges of a molecule that know the angles between them (Gasteiger et al., 2020).

Made of torch_geometric's own blocks; its DimeNet itself cannot run without packages that PyPI does not have. Both of
its bases grow like cutoff / distance. Here they are scaled to bond length / distance: with milabench's cutoff of 10 Å
and unscaled, every block multiplies the messages by 20, and after six of them the first step ends in numbers of 1e8.

Legend: B molecules, N atoms, E edges j -> i, W triplets k -> j -> i.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn.models.dimenet import BesselBasisLayer, EmbeddingBlock, Envelope, InteractionBlock, OutputBlock

from joulelab.zoo.graphs.neighbours import Edges, Triplets
from joulelab.zoo.graphs.pooling import sum_by_molecule
from joulelab.zoo.graphs.spherical_basis import SphericalBasis

ENVELOPE_EXPONENT = 5
LAYERS_BEFORE_SKIP, LAYERS_AFTER_SKIP = 1, 2
OUTPUT_LAYERS = 3
BOND_ANGSTROM = 2.0


class DimeNet(nn.Module):
    """One number per molecule; it stays the same when a molecule is moved or turned."""

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
    """Of the angle at j between k and i, for every triplet k -> j -> i."""
    unit_E3 = way_E3 / distance_E[:, None]
    return -(unit_E3[triplets.kj] * unit_E3[triplets.ji]).sum(-1)
