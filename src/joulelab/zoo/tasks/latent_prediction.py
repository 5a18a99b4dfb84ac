"""Masked latent prediction (V-JEPA 2): from the visible patches of a clip, predict the features of the hidden ones.

The features to predict are those of a moving average of the encoder, which sees the whole clip.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker
from joulelab.zoo.request import SYNTHETIC, WorkloadRequest, refuse_dataset
from joulelab.zoo.tasks.latent_prediction_net import LatentPredictionNet
from joulelab.zoo.tasks.moving_average import MovingAverage
from joulelab.zoo.tasks.on_device import Tensors, then
from joulelab.zoo.tasks.patch_masks import pick, ranked_patches, through_time
from joulelab.zoo.tasks.self_supervised_recipes import PredictionRecipe
from joulelab.zoo.workload import Workload

# shapes: B clips, K patches seen, M patches to predict, D features
OWN_STREAM = 1 << 16  # masks are drawn apart from the clips


def prepare(request: WorkloadRequest) -> Workload:
    if request.dataset != SYNTHETIC:
        raise refuse_dataset(request)
    recipe: PredictionRecipe = request.entry.options[request.size_name or request.entry.default_size]
    vjepa2: Any = architectures.build(request, crop_size=request.shape["side"], frames_per_clip=request.shape["frames"])
    hiding = _Hiding(request, recipe, vjepa2.config.patch_size, vjepa2.config.tubelet_size)
    _tell_the_grid(vjepa2, hiding.grid)
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
            misses = [clip_distance(p, pick(targets_BND, h)) for p, h in zip(predicted, hidden, strict=True)]
        return ObjectiveOutput(torch.stack(misses).mean(0).sum(), batch.count)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"target_encoder": self._target.module}

    def after_step(self, model: nn.Module) -> None:
        self._target.update()


def clip_distance(predicted_BMD: Tensor, targets_BMD: Tensor) -> Tensor:
    """[B]: mean absolute difference over a clip's hidden patches and their features."""
    return (predicted_BMD.float() - targets_BMD.float()).abs().mean(dim=(1, 2))


def _tell_the_grid(vjepa2: Any, grid: int) -> None:
    """Positions are rotations, not a table, and fit any clip; all that loaded weights recall is the grid they had."""
    for module in vjepa2.modules():
        if hasattr(module, "grid_size"):
            module.grid_size = grid


@dataclass(frozen=True)
class _Hiding:
    """Which patches of a clip are seen and which are to be predicted: the same in all of its frames."""

    request: WorkloadRequest
    recipe: PredictionRecipe
    patch_side: int
    patch_frames: int

    def __post_init__(self) -> None:
        for name, unit in (("side", self.patch_side), ("frames", self.patch_frames)):
            if self.request.shape[name] % unit:
                raise ConfigError(f"{name}={self.request.shape[name]} is no multiple of a patch's, {unit}")

    @property
    def grid(self) -> int:
        return self.request.shape["side"] // self.patch_side

    def batches(self, split: str) -> ShuffledRows:
        clips = SyntheticClips(self.request.shape["frames"], self.request.shape["side"], parse_split(split))

        def make(rows: Rows, draw: int) -> TensorBatch:
            return then(clips.batch(rows, draw), partial(self._hide, draw=draw))

        return ShuffledRows(clips.rows, self.request.rows_per_batch, self.request.seed, make)

    def _hide(self, tensors: Tensors, draw: int) -> Tensors:
        clips = tensors["clips"]
        generator = generator_on(clips.device, draw ^ OWN_STREAM)
        frames, patches = self.request.shape["frames"] // self.patch_frames, self.grid**2
        found = {"clips": clips}
        for kind, (share, blobs) in enumerate(zip(self.recipe.visible_shares, self.recipe.blobs, strict=True)):
            ranked = ranked_patches(len(clips), self.grid, blobs, generator)
            seen = max(1, round(share * patches))
            found[f"visible{kind}"] = through_time(ranked[:, :seen], frames, patches)
            found[f"hidden{kind}"] = through_time(ranked[:, seen:], frames, patches)
        return found
