"""From atoms to molecules."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_molecule(values_N: Tensor, molecule_N: Tensor, molecules: int) -> Tensor:
    """One number per molecule: the sum of its atoms'. The number of molecules is passed: a GPU need not be asked."""
    return torch.zeros(molecules, dtype=values_N.dtype, device=values_N.device).index_add(0, molecule_N, values_N)
