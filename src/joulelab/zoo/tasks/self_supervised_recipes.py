"""Hyperparameters of the self-supervised tasks, as published; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistillationRecipe:
    """DINOv2's (dinov2/configs/train/vitg14.yaml and vitl14.yaml); the defaults are for its large sizes."""

    prototypes: int = 131_072
    """Number of prototypes; each head has its own."""
    head_width: int = 2_048
    """Width of the hidden layers of a head."""
    bottleneck: int = 384
    """Dimension of the space in which a head compares with the prototypes."""
    local_crops: int = 8
    """Number of local crops of an image, in addition to the two global ones."""
    masked_share: float = 0.3
    """Fraction of masked patches in the first global crop of the student. DINOv2 masks half of the global crops by a
    tenth to a half of their patches; here it is always one of the two, by the mean, so that shapes stay the same."""
    skipped_share: float = 0.4
    """Fraction of crops that skip a layer of the student, sampled for every layer: stochastic depth that also saves
    computation."""
    momentum: float = 0.994
    """Decay of the teacher's moving average per step."""
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    koleo_weight: float = 0.1
    """Weight of KoLeo, which spreads the images of a batch; the other two terms have weight 1."""


@dataclass(frozen=True)
class PredictionRecipe:
    """V-JEPA 2's pre-training."""

    visible_shares: tuple[float, ...] = (0.37, 0.16)
    """Fraction of patches visible to the context encoder; one prediction for each entry. V-JEPA hides 8 blocks of 15 %
    of a frame, then 2 blocks of 70 %; these are the fractions that its blocks leave visible, as fixed counts."""
    blobs: tuple[int, ...] = (5, 3)
    """Granularity of the mask for each entry: about this many blobs across a frame."""
    momentum: float = 0.99925
    """Decay of the target encoder's moving average per step."""
