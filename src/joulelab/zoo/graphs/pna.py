"""PNA: a graph network whose atoms gather their neighbours in several ways at once (Corso et al., 2020).

The layers are torch_geometric's, as in milabench, but with a way around each: of 64 in a plain row only the last few
get a gradient, and the atoms of a molecule become indistinguishable on the way. It costs one addition a layer.

Legend: B molecules, N atoms, E bonds in both directions, F features of an atom, H width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn import PNAConv

from joulelab.data.molecules import FEATURES
from joulelab.zoo.graphs.pooling import sum_by_molecule

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]


class Pna(nn.Module):
    """One number per molecule, whatever the order of its atoms."""

    def __init__(self, width: int, layers: int, degrees: Tensor) -> None:
        """`degrees`: how many atoms of the training set have 0, 1, 2, ... neighbours; the scalers are tuned to it."""
        super().__init__()
        widths = [(len(FEATURES), width), *[(width, width)] * (layers - 2), (width, 1)]
        self.convolutions = nn.ModuleList(PNAConv(*ends, AGGREGATORS, SCALERS, degrees) for ends in widths)

    def forward(self, features_NF: Tensor, bonds_2E: Tensor, molecule_N: Tensor, molecules: int) -> Tensor:
        first, *middle, last = self.convolutions
        state_NH: Tensor = first(features_NF, bonds_2E).relu()
        for convolution in middle:
            state_NH = state_NH + convolution(state_NH, bonds_2E).relu()
        return sum_by_molecule(last(state_NH, bonds_2E)[:, 0], molecule_N, molecules)
