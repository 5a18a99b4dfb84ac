"""V-JEPA 2's encoder and predictor, on chosen patches only.

transformers' own model encodes every patch and drops the hidden ones afterwards, and sizes a tensor by a number that
only the device knows. Its layers are used here one by one: the context encoder then never sees, nor pays for, what is
hidden, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.zoo.tasks.patch_masks import pick

# shapes: B clips, N patches of a clip, K patches seen, M patches to predict, D features


class ClipEncoder(nn.Module):
    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, clips_BTCHW: Tensor, places_BK: Tensor | None = None) -> Tensor:
        """[B, K, D]: features of the patches at these places, from these alone; of all where none are named."""
        tokens_BKD = self.vit.embeddings(clips_BTCHW)
        if places_BK is not None:
            tokens_BKD = pick(tokens_BKD, places_BK)
        normed: Tensor = self.vit.layernorm(_through(self.vit.layer, tokens_BKD, places_BK))
        return normed


class LatentPredictor(nn.Module):
    def __init__(self, predictor: Any) -> None:
        super().__init__()
        self.narrow = predictor

    def forward(self, seen_BKD: Tensor, places_BK: Tensor, hidden_BM: Tensor, kind: int) -> Tensor:
        """[B, M, D]: what the hidden patches' features should be; each kind of mask has a mask token of its own."""
        embeddings = self.narrow.embeddings
        seen = embeddings.predictor_embeddings(seen_BKD)
        asked = embeddings.mask_tokens[kind].to(seen.dtype).expand(*hidden_BM.shape, -1)
        tokens = _through(self.narrow.layer, torch.cat([seen, asked], dim=1), torch.cat([places_BK, hidden_BM], dim=1))
        predicted: Tensor = self.narrow.proj(self.narrow.layernorm(tokens[:, places_BK.shape[1] :]))
        return predicted


class LatentPredictionNet(nn.Module):
    def __init__(self, vjepa2: Any) -> None:
        super().__init__()
        self.encoder = ClipEncoder(vjepa2.encoder)
        self.predictor = LatentPredictor(vjepa2.predictor)

    def forward(self, clips: Tensor, visible: Sequence[Tensor], hidden: Sequence[Tensor]) -> list[Tensor]:
        """A prediction for each pair of masks."""
        return [
            self.predictor(self.encoder(clips, places_BK), places_BK, hidden_BM, kind)
            for kind, (places_BK, hidden_BM) in enumerate(zip(visible, hidden, strict=True))
        ]


def _through(layers: nn.ModuleList, tokens: Tensor, places: Tensor | None) -> Tensor:
    for layer in layers:
        tokens = layer(tokens, places)[0]  # the second is attention weights, for those who ask
    return tokens
