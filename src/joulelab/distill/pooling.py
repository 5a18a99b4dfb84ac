"""One vector per text from a layer's hidden states: the first token's, or the mean over the real tokens."""

from __future__ import annotations

from torch import Tensor


def pool(hidden_BTH: Tensor, mask_BT: Tensor, how: str) -> Tensor:
    if how == "cls":
        return hidden_BTH[:, 0]
    weights_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTH.dtype)
    return (hidden_BTH * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1).clamp(min=1)
