"""Self-distillation (DINOv2): from a part of an image, a student is to say what its own moving average says of another.

The teacher sees the two global crops whole; the student sees them, one with patches hidden, and small local crops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.synthetic import generator_on
from joulelab.errors import ConfigError
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker
from joulelab.zoo.pretrained import drawn_from
from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.tasks.crops import GLOBAL_AREA, LOCAL_AREA, random_crops
from joulelab.zoo.tasks.image_rows import Images, open_images
from joulelab.zoo.tasks.moving_average import MovingAverage
from joulelab.zoo.tasks.on_device import Tensors, then
from joulelab.zoo.tasks.patch_masks import ranked_patches
from joulelab.zoo.tasks.self_distillation_losses import balanced_targets, crop_agreement, koleo, patch_agreement
from joulelab.zoo.tasks.self_distillation_net import DistilledNet, Scores
from joulelab.zoo.tasks.self_supervised_recipes import DistillationRecipe
from joulelab.zoo.workload import Workload

# shapes: B images, C crops of each, G = 2 of them global, K hidden patches of the first global crop, P prototypes
GLOBAL_CROPS = 2
SYNTHETIC_CLASSES = 1000
MARGIN = 8 / 7  # crops are cut from an image of this many times the side of a global crop: 256 for 224
BLOBS = 4
OWN_STREAM = 1 << 16  # crops are drawn apart from the noise of synthetic images


def prepare(request: WorkloadRequest) -> Workload:
    recipe: DistillationRecipe = request.entry.options[request.size_name or request.entry.default_size]
    cutting = _Cutting(request, recipe)
    side = round(cutting.global_side * MARGIN)
    train, held_out = open_images(request, side, SYNTHETIC_CLASSES, augment=False, centre_share=1.0)
    student = build(request, recipe)
    return Workload(student, SelfDistillation(student, recipe), cutting.batches(train), cutting.batches(held_out))


def build(request: WorkloadRequest, recipe: DistillationRecipe) -> DistilledNet:
    backbone = architectures.build(request, image_size=request.shape["side"])
    with drawn_from(request.seed):
        return DistilledNet(backbone, recipe).train()


class SelfDistillation:
    """DINO, iBOT and KoLeo, each by its name in the loss's parts."""

    def __init__(self, student: DistilledNet, recipe: DistillationRecipe) -> None:
        self._recipe = recipe
        self._teacher = MovingAverage(student, recipe.momentum)

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        with phase("forward.teacher"), torch.no_grad():
            taught: Scores = self._teacher.module(batch["global_crops"], batch["hidden"])
            crop_targets = balanced_targets(taught.crops, self._recipe.teacher_temperature)
            patch_targets = balanced_targets(taught.patches, self._recipe.teacher_temperature)
        with phase("forward.student"):
            scores: Scores = model(batch["global_crops"], batch["hidden"], batch["local_crops"])
            parts = self._parts(scores, crop_targets, patch_targets, images=batch.samples)
        loss_sum = torch.stack(list(parts.values())).sum()
        return ObjectiveOutput(loss_sum, batch.count, {name: part.detach() for name, part in parts.items()})

    def _parts(self, scores: Scores, crop_targets: Tensor, patch_targets: Tensor, images: int) -> dict[str, Tensor]:
        recipe, temperature = self._recipe, self._recipe.student_temperature
        crops_CBP = scores.crops.view(-1, images, recipe.prototypes)
        targets_GBP = crop_targets.view(GLOBAL_CROPS, images, recipe.prototypes)
        hidden_per_image = len(patch_targets) // images
        spread = koleo(scores.features[:images]) + koleo(scores.features[images:])
        return {
            "dino": crop_agreement(crops_CBP[:GLOBAL_CROPS], crops_CBP[GLOBAL_CROPS:], targets_GBP, temperature),
            "ibot": patch_agreement(scores.patches, patch_targets, temperature, hidden_per_image),
            "koleo": recipe.koleo_weight * spread,
        }

    def modules(self) -> Mapping[str, nn.Module]:
        return {"teacher": self._teacher.module}

    def after_step(self, model: nn.Module) -> None:
        self._teacher.update()


@dataclass(frozen=True)
class _Cutting:
    """From images to crops and hidden patches, on the device."""

    request: WorkloadRequest
    recipe: DistillationRecipe

    def __post_init__(self) -> None:
        for name in ("side", "local_side"):
            if self.request.shape[name] % self.patch_side:
                raise ConfigError(
                    f"{name}={self.request.shape[name]} is no multiple of the patches' side, {self.patch_side}",
                    "the published sides are 224 and 98",
                )

    @property
    def patch_side(self) -> int:
        return int(self.request.size.settings.get("patch_size", 14))

    @property
    def global_side(self) -> int:
        return self.request.shape["side"]

    def batches(self, images: Images) -> ShuffledRows:
        def make(rows: Rows, draw: int) -> TensorBatch:
            return then(images.batch(rows, draw), partial(self._cut, draw=draw))

        return ShuffledRows(images.rows, self.request.rows_per_batch, self.request.seed, make)

    def _cut(self, tensors: Tensors, draw: int) -> Tensors:
        pixels = tensors["pixels"]
        generator = generator_on(pixels.device, draw ^ OWN_STREAM)
        grid = self.global_side // self.patch_side
        hidden = max(1, round(self.recipe.masked_share * grid**2))
        return {
            "global_crops": random_crops(pixels, GLOBAL_CROPS, self.global_side, GLOBAL_AREA, generator),
            "local_crops": random_crops(
                pixels, self.recipe.local_crops, self.request.shape["local_side"], LOCAL_AREA, generator
            ),
            "hidden": ranked_patches(len(pixels), grid, BLOBS, generator)[:, :hidden],
        }
