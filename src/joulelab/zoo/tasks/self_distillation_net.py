"""The network of self-distillation: a vision transformer and two heads. Student and teacher are one of these each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.tasks.patch_masks import pick
from joulelab.zoo.tasks.self_supervised_recipes import DistillationRecipe

# shapes: B images, R crops, N tokens of a crop (the class token first), K hidden patches, D features, P prototypes


class Scores(NamedTuple):
    features: Tensor
    """[R, D]: class tokens of the global crops, as the backbone leaves them."""
    crops: Tensor
    """[R, P]: class tokens of all crops, global ones first, against the prototypes."""
    patches: Tensor
    """[B * K, P]: the hidden patches of the first global crop, against prototypes of their own."""


class PrototypeHead(nn.Module):
    """Compares features with learned directions: a small network, then cosines."""

    def __init__(self, features: int, recipe: DistillationRecipe) -> None:
        super().__init__()
        wide = recipe.head_width
        self.narrow = nn.Sequential(
            nn.Linear(features, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, recipe.bottleneck)
        )
        self.prototypes = nn.Parameter(torch.empty(recipe.prototypes, recipe.bottleneck))
        for weight in (self.prototypes, *(layer.weight for layer in self.narrow if isinstance(layer, nn.Linear))):
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        narrowed = functional.normalize(self.narrow(features), dim=-1)
        return functional.linear(narrowed, functional.normalize(self.prototypes, dim=-1))


class DistilledNet(nn.Module):
    def __init__(self, backbone: Any, recipe: DistillationRecipe) -> None:
        super().__init__()
        self.backbone = backbone
        self.crop_head = PrototypeHead(backbone.config.hidden_size, recipe)
        self.patch_head = PrototypeHead(backbone.config.hidden_size, recipe)
        self._skipped_share = recipe.skipped_share

    def forward(self, global_crops: Tensor, hidden_BK: Tensor, local_crops: Tensor | None = None) -> Scores:
        """With local crops it is the student: the hidden patches are hidden from it, and layers are skipped."""
        is_student = local_crops is not None
        skipped_share = self._skipped_share if is_student and self.training else 0.0
        mask = _as_mask(hidden_BK, len(global_crops), self._patches(global_crops)) if is_student else None
        tokens_RND = self._tokens(global_crops, skipped_share, mask)
        features_RD = tokens_RND[:, 0]
        seen = features_RD
        if local_crops is not None:
            seen = torch.cat([features_RD, self._tokens(local_crops, skipped_share)[:, 0]])
        hidden_SD = pick(tokens_RND[: len(hidden_BK), 1:], hidden_BK).flatten(0, 1)
        return Scores(features_RD, self.crop_head(seen), self.patch_head(hidden_SD))

    def _tokens(self, crops: Tensor, skipped_share: float, mask_RP: Tensor | None = None) -> Tensor:
        tokens_RND = self.backbone.embeddings(crops, bool_masked_pos=mask_RP)
        for layer in self.backbone.encoder.layer:
            tokens_RND = _on_some(layer, tokens_RND, skipped_share)
        normed: Tensor = self.backbone.layernorm(tokens_RND)
        return normed

    def _patches(self, crops: Tensor) -> int:
        return int((crops.shape[-1] // self.backbone.config.patch_size) ** 2)


def _as_mask(hidden_BK: Tensor, crops: int, patches: int) -> Tensor:
    """[R, patches]: true where a patch is hidden, which happens in the first crop of every image."""
    nowhere = torch.zeros((crops, patches), dtype=torch.bool, device=hidden_BK.device)
    everywhere = torch.ones_like(hidden_BK, dtype=torch.bool)
    rows = torch.arange(len(hidden_BK), device=hidden_BK.device)
    return nowhere.index_put((rows[:, None], hidden_BK), everywhere)


def _on_some(layer: nn.Module, tokens_RND: Tensor, skipped_share: float) -> Tensor:
    """The layer on a random part of the rows, always as many; what it adds is scaled up, so that its mean is kept."""
    rows = len(tokens_RND)
    kept = max(1, round(rows * (1 - skipped_share)))
    if kept == rows:
        through: Tensor = layer(tokens_RND)
        return through
    chosen = torch.rand(rows, device=tokens_RND.device).argsort()[:kept]
    before = tokens_RND.index_select(0, chosen)
    return tokens_RND.index_add(0, chosen, (layer(before) - before).to(tokens_RND.dtype), alpha=rows / kept)
