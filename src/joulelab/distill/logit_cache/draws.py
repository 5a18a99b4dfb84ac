"""Draws from many distributions at once, evenly spaced, each with the right chance.

With n draws at the points (0 + u) / n, (1 + u) / n, ... of the cumulated probability and one random u, a word of
probability p comes n p times on average: exactly as with independent draws, so a mean over them is unbiased. But it
comes at least floor(n p) times and at most once more, so likely words hardly vary, and 50 such draws are worth more
than 50 independent ones.

Shapes: C positions, V vocabulary, n draws, J blocks of words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_BLOCK = 64
"""Words are summed in blocks first: a running sum over 128,256 words in float32 would lose the small ones, and only the
blocks that are drawn from are looked into."""


def spaced_draws(weights_CV: Tensor, count: int, starts_C: Tensor) -> Tensor:
    """Word ids [C, count], rising, or -1 in rows without any weight; `starts_C` is u, in 0 to below 1."""
    missing = -weights_CV.shape[1] % _BLOCK
    whole_CV = F.pad(weights_CV, (0, missing)) if missing else weights_CV
    weights_CJb = whole_CV.reshape(len(whole_CV), -1, _BLOCK)
    up_to_CJ = weights_CJb.sum(-1).double().cumsum(-1)
    spaced_n = torch.arange(count, device=weights_CV.device, dtype=torch.float64)
    points_Cn = (spaced_n + starts_C.double()[:, None]) / count * up_to_CJ[:, -1:]
    block_Cn = torch.searchsorted(up_to_CJ, points_Cn, right=True).clamp_(max=up_to_CJ.shape[1] - 1)
    before_Cn = torch.where(block_Cn > 0, up_to_CJ.gather(1, (block_Cn - 1).clamp_(min=0)), 0.0)
    rows_C1 = torch.arange(len(weights_CV), device=weights_CV.device)[:, None]
    inside_Cnb = weights_CJb[rows_C1, block_Cn].cumsum(-1)
    # rounding may carry a point to its block's very end, behind the last word that has weight
    left_Cn = torch.minimum((points_Cn - before_Cn).float(), inside_Cnb[..., -1] * (1 - 1e-6))
    word_Cn = block_Cn * _BLOCK + (inside_Cnb <= left_Cn[..., None]).sum(-1)
    word_Cn = word_Cn.clamp(max=weights_CV.shape[1] - 1).sort(-1).values  # they rise, but for rounding
    return torch.where(up_to_CJ[:, -1:] > 0, word_Cn, -1)
