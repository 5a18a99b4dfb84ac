"""Self-distillation (DINOv2, Oquab et al., 2023): from one crop of an image, a student predicts the output of its own
moving average for another crop. The teacher sees the two global crops; the student sees them, one with masked patches,
and small local crops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.synthetic import generator_on
from joulelab.errors import ConfigError
from joulelab.zoo import objective
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker, Workload
from joulelab.zoo.pretrained import seeded_init
from joulelab.zoo.registry import WorkloadRequest
from joulelab.zoo.tasks.image_classification import Images, open_images
from joulelab.zoo.tasks.masked_patches import MovingAverage, Tensors, chain_expand, gather_tokens, ranked_patches
from joulelab.zoo.tasks.self_supervised_recipes import DistillationRecipe

# The three terms of DINOv2, and the targets from a teacher's scores. Sums over images, in fp32.
#
# Two terms depend on the batch as a whole, hence on its split into micro-batches: the targets, which are balanced over
# the batch, and KoLeo, which uses each image's nearest neighbor in it.


# shapes: S samples (crops or patches), P prototypes, G global crops and L local crops of B images, D features
SINKHORN_ROUNDS = 3
_EPS = 1e-8


@torch.no_grad()
def balanced_targets(scores_SP: Tensor, temperature: float) -> Tensor:
    """Probabilities [S, P] that use every prototype about equally (Sinkhorn-Knopp; Caron et al., 2020). Without
    balancing, the same prototype for all samples would minimize the loss. Every row sums to 1."""
    with torch.autocast(scores_SP.device.type, enabled=False):
        weights_SP = torch.exp(scores_SP.float() / temperature)
        samples_S = torch.ones_like(weights_SP[:, 0])
        # Alternating scaling of columns and rows converges to the matrix with equal column sums and
        # rows that sum to 1 (Sinkhorn and Knopp, 1967). Only the two scaling vectors are kept,
        # which saves copies of S x P numbers.
        for _ in range(SINKHORN_ROUNDS):
            prototypes_P = 1 / (samples_S @ weights_SP)
            samples_S = 1 / (weights_SP @ prototypes_P)
        return weights_SP * samples_S[:, None] * prototypes_P


def crop_agreement(global_GBP: Tensor, local_LBP: Tensor, targets_GBP: Tensor, temperature: float) -> Tensor:
    """DINO: cross-entropy between each crop of an image and the teacher's scores of each *other* global crop, averaged
    over those pairs. Cross-entropy is linear in its target, so the pairs of one local crop are one cross-entropy with
    the mean target."""
    globals_, locals_ = len(global_GBP), len(local_LBP)
    # Mean of the other global crops' targets: a crop must not be trained to agree with itself.
    others_GBP = (targets_GBP.sum(0) - targets_GBP) / (globals_ - 1)
    for_locals_LBP = targets_GBP.mean(0).expand(locals_, -1, -1)
    pairs_of_a_global, pairs_of_a_local = globals_ - 1, globals_
    total = pairs_of_a_global * _cross_entropy(global_GBP, others_GBP, temperature)
    total = total + pairs_of_a_local * _cross_entropy(local_LBP, for_locals_LBP, temperature)
    return total / (globals_ * pairs_of_a_global + locals_ * pairs_of_a_local)


def patch_agreement(scores_SP: Tensor, targets_SP: Tensor, temperature: float, patches_per_image: int) -> Tensor:
    """iBOT: cross-entropy at masked patches with the scores of the teacher, which sees them; the mean over an image."""
    return _cross_entropy(scores_SP, targets_SP, temperature) / patches_per_image


def koleo(features_BD: Tensor) -> Tensor:
    """KoLeo: minus the log distance of each image to its nearest neighbor in the batch, on the unit sphere."""
    if len(features_BD) < 2:
        return features_BD.sum() * 0.0  # a single image has no neighbor
    with torch.autocast(features_BD.device.type, enabled=False):
        places_BD = functional.normalize(features_BD.float(), dim=-1)
        with torch.no_grad():
            # On the unit sphere the largest dot product is the smallest distance. The choice of the
            # neighbor has no gradient; its distance has.
            likeness_BB = places_BD @ places_BD.T
            nearest_B = likeness_BB.fill_diagonal_(-2.0).argmax(dim=1)
        # -log d is the Kozachenko-Leonenko estimate of entropy, up to constants: maximizing it
        # spreads features evenly (Sablayrolles et al., 2019).
        distances_B = functional.pairwise_distance(places_BD, places_BD.index_select(0, nearest_B), eps=_EPS)
        return -torch.log(distances_B + _EPS).sum()


def _cross_entropy(scores: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return functional.cross_entropy(
        scores.flatten(0, -2).float() / temperature, targets.flatten(0, -2), reduction="sum"
    )


# The network of self-distillation, for student and teacher: a vision transformer and two heads.


# shapes: B images, R crops, N tokens of a crop (the class token first), K hidden patches, D features, P prototypes


class Scores(NamedTuple):
    features: Tensor
    """[R, D]: class tokens of the global crops, from the backbone."""
    crops: Tensor
    """[R, P]: class tokens of all crops, global ones first, against the prototypes."""
    patches: Tensor
    """[B * K, P]: masked patches of the first global crop, against separate prototypes."""


class PrototypeHead(nn.Module):
    """Projects features by a small network and returns their cosines with learned prototypes."""

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


class SelfDistillationNet(nn.Module):
    def __init__(self, backbone: Any, recipe: DistillationRecipe) -> None:
        super().__init__()
        self.backbone = backbone
        self.crop_head = PrototypeHead(backbone.config.hidden_size, recipe)
        self.patch_head = PrototypeHead(backbone.config.hidden_size, recipe)
        self._skipped_share = recipe.skipped_share

    def forward(self, global_crops: Tensor, hidden_BK: Tensor, local_crops: Tensor | None = None) -> Scores:
        """With local crops it is the student: masked patches are replaced, and layers are skipped at random."""
        is_student = local_crops is not None
        skipped_share = self._skipped_share if is_student and self.training else 0.0
        mask = _as_mask(hidden_BK, len(global_crops), self._patches(global_crops)) if is_student else None
        tokens_RND = self._tokens(global_crops, skipped_share, mask)
        features_RD = tokens_RND[:, 0]
        seen = features_RD
        if local_crops is not None:
            seen = torch.cat([features_RD, self._tokens(local_crops, skipped_share)[:, 0]])
        hidden_SD = gather_tokens(tokens_RND[: len(hidden_BK), 1:], hidden_BK).flatten(0, 1)
        return Scores(features_RD, self.crop_head(seen), self.patch_head(hidden_SD))

    def _tokens(self, crops: Tensor, skipped_share: float, mask_RP: Tensor | None = None) -> Tensor:
        tokens_RND = self.backbone.embeddings(crops, bool_masked_pos=mask_RP)
        for layer in self.backbone.encoder.layer:
            tokens_RND = _stochastic_depth(layer, tokens_RND, skipped_share)
        normed: Tensor = self.backbone.layernorm(tokens_RND)
        return normed

    def _patches(self, crops: Tensor) -> int:
        return int((crops.shape[-1] // self.backbone.config.patch_size) ** 2)


def _as_mask(hidden_BK: Tensor, crops: int, patches: int) -> Tensor:
    """[R, patches]: true for masked patches, which only the first crop of every image has."""
    nowhere = torch.zeros((crops, patches), dtype=torch.bool, device=hidden_BK.device)
    everywhere = torch.ones_like(hidden_BK, dtype=torch.bool)
    rows = torch.arange(len(hidden_BK), device=hidden_BK.device)
    return nowhere.index_put((rows[:, None], hidden_BK), everywhere)


def _stochastic_depth(layer: nn.Module, tokens_RND: Tensor, skipped_share: float) -> Tensor:
    """Apply the layer to a random subset of the rows, of constant size; its residual is scaled up to keep the mean."""
    rows = len(tokens_RND)
    kept = max(1, round(rows * (1 - skipped_share)))
    if kept == rows:
        through: Tensor = layer(tokens_RND)
        return through
    chosen = torch.rand(rows, device=tokens_RND.device).argsort()[:kept]
    before = tokens_RND.index_select(0, chosen)
    return tokens_RND.index_add(0, chosen, (layer(before) - before).to(tokens_RND.dtype), alpha=rows / kept)


# Random crops of a batch of images, computed on their device, so that the host does no work per crop.


# shapes: B images, R crops (the first crop of every image, then the second of every image, ...), C color channels
GLOBAL_AREA, LOCAL_AREA = (0.32, 1.0), (0.05, 0.32)  # area as a fraction of the image, as in DINOv2
RATIO = (3 / 4, 4 / 3)
JITTER = 0.4
"""Largest change of contrast and brightness. DINOv2 also changes hue, blurs and solarizes."""


def random_crops(
    images_BCHW: Tensor, crops: int, side: int, area: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """[R, C, side, side]: random crops, flipped with probability 1/2, with random contrast and brightness."""
    rows = crops * len(images_BCHW)
    windows = _random_windows(rows, area, generator)
    grid = functional.affine_grid(windows, [rows, 3, side, side], align_corners=False)
    seen = functional.grid_sample(images_BCHW.repeat(crops, 1, 1, 1), grid, padding_mode="border", align_corners=False)
    contrast, brightness = _uniform((2, rows, 1, 1, 1), -JITTER, JITTER, generator)
    changed: Tensor = seen * (1 + contrast) + brightness
    return changed


def _random_windows(rows: int, area: tuple[float, float], generator: torch.Generator) -> Tensor:
    """[R, 2, 3]: half width, half height and center of each crop, in the coordinates of `affine_grid` (-1 to 1)."""
    shares = _uniform((rows,), *area, generator)
    aspect = _uniform((rows,), math.log(RATIO[0]) / 2, math.log(RATIO[1]) / 2, generator).exp()
    extents_2R = torch.stack([shares.sqrt() * aspect, shares.sqrt() / aspect]).clamp(max=1.0)
    middles_2R = _uniform((2, rows), -1.0, 1.0, generator) * (1 - extents_2R)
    mirrored = _uniform((rows,), -1.0, 1.0, generator).sign()
    windows = torch.zeros((rows, 2, 3), device=generator.device)
    windows[:, 0, 0], windows[:, 1, 1] = extents_2R[0] * mirrored, extents_2R[1]
    windows[:, :, 2] = middles_2R.T
    return windows


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)


# shapes: B images, C crops of each, G = 2 of them global, K hidden patches of the first global crop, P prototypes
GLOBAL_CROPS = 2
SYNTHETIC_CLASSES = 1000
MARGIN = 8 / 7  # side of the image that crops are taken from, relative to a global crop: 256 for 224
BLOBS = 4
OWN_STREAM = 1 << 16  # crops have a separate seed from the noise of synthetic images


def prepare(request: WorkloadRequest) -> Workload:
    recipe: DistillationRecipe = request.entry.options[request.size_name or request.entry.default_size]
    cutting = _CropPipeline(request, recipe)
    side = round(cutting.global_side * MARGIN)
    train, held_out = open_images(request, side, SYNTHETIC_CLASSES, augment=False, center_share=1.0)
    student = build(request, recipe)
    return Workload(student, SelfDistillation(student, recipe), cutting.batches(train), cutting.batches(held_out))


def build(request: WorkloadRequest, recipe: DistillationRecipe) -> SelfDistillationNet:
    backbone = objective.build(request, image_size=request.shape["side"])
    with seeded_init(request.seed):
        return SelfDistillationNet(backbone, recipe).train()


class SelfDistillation:
    """DINO, iBOT and KoLeo, each by its name in the loss's parts."""

    def __init__(self, student: SelfDistillationNet, recipe: DistillationRecipe) -> None:
        self._recipe = recipe
        self._teacher = MovingAverage(student, recipe.momentum)

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        with phase("forward.teacher"), torch.no_grad():
            teacher: Scores = self._teacher.module(batch["global_crops"], batch["hidden"])
            crop_targets = balanced_targets(teacher.crops, self._recipe.teacher_temperature)
            patch_targets = balanced_targets(teacher.patches, self._recipe.teacher_temperature)
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
class _CropPipeline:
    """Computes crops and masked patches from images, on the device."""

    request: WorkloadRequest
    recipe: DistillationRecipe

    def __post_init__(self) -> None:
        for name in ("side", "local_side"):
            if self.request.shape[name] % self.patch_side:
                raise ConfigError(
                    f"{name}={self.request.shape[name]} is not a multiple of the patch size {self.patch_side}",
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
            return chain_expand(images.batch(rows, draw), partial(self._cut, draw=draw))

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
