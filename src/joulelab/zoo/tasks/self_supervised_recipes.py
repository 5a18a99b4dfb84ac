"""Hyperparameters of the self-supervised tasks, as published; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistillationRecipe:
    """DINOv2's (dinov2/configs/train/vitg14.yaml and vitl14.yaml); the defaults are for its large sizes."""

    prototypes: int = 131_072
    """Directions that crops and patches are compared with; one set for each head."""
    head_width: int = 2_048
    """Of the hidden layers of a head."""
    bottleneck: int = 384
    """Numbers in which a head compares with the prototypes."""
    local_crops: int = 8
    """Small crops of an image, in addition to its two global ones."""
    masked_share: float = 0.3
    """Patches that the student does not see in the first global crop. DINOv2 masks half of the global crops by a tenth
    to a half of their patches; here it is always one of the two, by the mean, so that shapes stay the same."""
    skipped_share: float = 0.4
    """Crops that skip a layer of the student, drawn anew for every layer: stochastic depth that also saves the work."""
    momentum: float = 0.994
    """Share of its weights that the teacher keeps after a step."""
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    koleo_weight: float = 0.1
    """Of the term that spreads the images of a batch apart; the other two terms count 1."""


@dataclass(frozen=True)
class PredictionRecipe:
    """V-JEPA 2's pre-training."""

    visible_shares: tuple[float, ...] = (0.37, 0.16)
    """Patches that the context encoder sees, a prediction for each. V-JEPA hides 8 blocks of 15 % of a frame, then 2
    blocks of 70 %; these are the shares that its blocks leave on average, kept at fixed counts."""
    blobs: tuple[int, ...] = (5, 3)
    """How finely the hidden part is broken up, for each share: about this many pieces across a frame."""
    momentum: float = 0.99925
    """Share of its weights that the target encoder keeps after a step."""
