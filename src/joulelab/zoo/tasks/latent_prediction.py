"""Masked latent prediction (V-JEPA 2): from the visible patches of a clip, predict the features of the hidden ones.

The features to predict are those of a moving average of the encoder, which sees the whole clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.splits import parse_split
from joulelab.data.synthetic import SyntheticClips, generator_on
from joulelab.errors import ConfigError
from joulelab.zoo import objective
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker, Workload
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset
from joulelab.zoo.tasks.masked_patches import (
    MovingAverage,
    Tensors,
    chain_expand,
    gather_tokens,
    ranked_patches,
    repeat_over_time,
)
from joulelab.zoo.tasks.self_supervised_recipes import PredictionRecipe

# V-JEPA 2's encoder and predictor, on chosen patches only.
#
# transformers' model encodes every patch and drops the masked ones afterwards, and sizes a tensor by a number that only
# the device knows. Calling its layers one by one avoids both: the context encoder computes only the visible patches,
# and the host does not synchronize.


# shapes: B clips, N patches of a clip, K patches seen, M patches to predict, D features


class ClipEncoder(nn.Module):
    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, clips_BTCHW: Tensor, places_BK: Tensor | None = None) -> Tensor:
        """[B, K, D]: features of the patches at these places, computed from them alone; of all patches if None."""
        tokens_BKD = self.vit.embeddings(clips_BTCHW)
        if places_BK is not None:
            tokens_BKD = gather_tokens(tokens_BKD, places_BK)
        normed: Tensor = self.vit.layernorm(_apply_layers(self.vit.layer, tokens_BKD, places_BK))
        return normed


class LatentPredictor(nn.Module):
    def __init__(self, predictor: Any) -> None:
        super().__init__()
        self.narrow = predictor

    def forward(self, seen_BKD: Tensor, places_BK: Tensor, hidden_BM: Tensor, kind: int) -> Tensor:
        """[B, M, D]: predicted features of the masked patches; each kind of mask has its own mask token."""
        embeddings = self.narrow.embeddings
        seen = embeddings.predictor_embeddings(seen_BKD)
        mask_tokens = embeddings.mask_tokens[kind].to(seen.dtype).expand(*hidden_BM.shape, -1)
        tokens = _apply_layers(
            self.narrow.layer, torch.cat([seen, mask_tokens], dim=1), torch.cat([places_BK, hidden_BM], dim=1)
        )
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


def _apply_layers(layers: nn.ModuleList, tokens: Tensor, places: Tensor | None) -> Tensor:
    for layer in layers:
        tokens = layer(tokens, places)[0]  # the second value is the attention weights, if requested
    return tokens


# shapes: B clips, K patches seen, M patches to predict, D features
OWN_STREAM = 1 << 16  # masks have a separate seed


def prepare(request: WorkloadRequest) -> Workload:
    if request.dataset != SYNTHETIC:
        raise refuse_dataset(request)
    recipe: PredictionRecipe = request.entry.options[request.size_name or request.entry.default_size]
    vjepa2: Any = objective.build(request, crop_size=request.shape["side"], frames_per_clip=request.shape["frames"])
    hiding = _MaskSampler(request, recipe, vjepa2.config.patch_size, vjepa2.config.tubelet_size)
    _set_grid_size(vjepa2, hiding.grid)
    model = LatentPredictionNet(vjepa2).train()
    train, held_out = hiding.batches(request.split), hiding.batches("validation")
    return Workload(model, LatentPrediction(model, recipe), train, held_out)


class LatentPrediction:
    def __init__(self, model: LatentPredictionNet, recipe: PredictionRecipe) -> None:
        self._kinds = range(len(recipe.visible_shares))
        self._target = MovingAverage(model.encoder, recipe.momentum)

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        visible = [batch[f"visible{kind}"] for kind in self._kinds]
        hidden = [batch[f"hidden{kind}"] for kind in self._kinds]
        with phase("forward.teacher"), torch.no_grad():
            whole_BND = self._target.module(batch["clips"])
            targets_BND = functional.layer_norm(whole_BND, whole_BND.shape[-1:])
        with phase("forward.student"):
            predicted = model(batch["clips"], visible, hidden)
            misses = [clip_distance(p, gather_tokens(targets_BND, h)) for p, h in zip(predicted, hidden, strict=True)]
        return ObjectiveOutput(torch.stack(misses).mean(0).sum(), batch.count)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"target_encoder": self._target.module}

    def after_step(self, model: nn.Module) -> None:
        self._target.update()


def clip_distance(predicted_BMD: Tensor, targets_BMD: Tensor) -> Tensor:
    """[B]: mean absolute difference over the masked patches of a clip and their features."""
    return (predicted_BMD.float() - targets_BMD.float()).abs().mean(dim=(1, 2))


def _set_grid_size(vjepa2: Any, grid: int) -> None:
    """Positions are rotary and fit any clip; loaded weights only remember the grid size that they were trained with."""
    for module in vjepa2.modules():
        if hasattr(module, "grid_size"):
            module.grid_size = grid


@dataclass(frozen=True)
class _MaskSampler:
    """Selects the visible and the predicted patches of a clip, the same in all of its frames."""

    request: WorkloadRequest
    recipe: PredictionRecipe
    patch_side: int
    patch_frames: int

    def __post_init__(self) -> None:
        for name, unit in (("side", self.patch_side), ("frames", self.patch_frames)):
            if self.request.shape[name] % unit:
                raise ConfigError(f"{name}={self.request.shape[name]} is not a multiple of the patch size {unit}")

    @property
    def grid(self) -> int:
        return self.request.shape["side"] // self.patch_side

    def batches(self, split: str) -> ShuffledRows:
        clips = SyntheticClips(self.request.shape["frames"], self.request.shape["side"], parse_split(split))

        def make(rows: Rows, draw: int) -> TensorBatch:
            return chain_expand(clips.batch(rows, draw), partial(self._hide, draw=draw))

        return ShuffledRows(clips.rows, self.request.rows_per_batch, self.request.seed, make)

    def _hide(self, tensors: Tensors, draw: int) -> Tensors:
        clips = tensors["clips"]
        generator = generator_on(clips.device, draw ^ OWN_STREAM)
        frames, patches = self.request.shape["frames"] // self.patch_frames, self.grid**2
        found = {"clips": clips}
        for kind, (share, blobs) in enumerate(zip(self.recipe.visible_shares, self.recipe.blobs, strict=True)):
            ranked = ranked_patches(len(clips), self.grid, blobs, generator)
            seen = max(1, round(share * patches))
            found[f"visible{kind}"] = repeat_over_time(ranked[:, :seen], frames, patches)
            found[f"hidden{kind}"] = repeat_over_time(ranked[:, seen:], frames, patches)
        return found
