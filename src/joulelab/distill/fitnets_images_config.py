"""Settings of the pipeline `fitnets-images`; importable without torch, so a login node can check them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.splits import parse_split
from joulelab.distill.classify_config import DistillConfig, require_frameworks
from joulelab.errors import ConfigError
from joulelab.runs.spec import Section
from joulelab.train.config import TrainingConfig, TrainingRunSpec

SYNTHETIC = "synthetic"


class ImageData(Section):
    """Labelled images and which of them."""

    source: str = SYNTHETIC
    """`synthetic`, or a folder with a sub-folder per split and in it one per class, as torchvision reads them."""
    side: int = Field(32, ge=8)
    """Images are scaled to this many pixels a side."""
    classes: int = Field(10, ge=2)
    """How many classes the synthetic images have; a folder brings its own."""
    train: str = "train[:2000]"
    """Images to train on."""
    validation: str = "validation[:500]"
    """Looked at after every epoch."""
    test: str = "test[:1000]"
    """Held out for the reported quality."""


class CnnConfig(Section):
    """A residual network, drawn from the seed."""

    channels: tuple[int, ...] = (64, 128, 256)
    """Channels of each stage; a stage halves the image's side."""
    blocks: tuple[int, ...] = (2, 2, 2)
    """Residual blocks of each stage."""
    stem: int = Field(64, ge=1)
    """Channels of the first convolution."""
    block: Literal["basic", "bottleneck"] = "basic"
    """Two 3x3 convolutions, or ResNet-50's three with a narrow middle."""
    training: TrainingConfig = TrainingConfig(batch_size=64, learning_rate=1e-3)
    """How it is trained."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.channels) != len(self.blocks) or not self.channels:
            raise ValueError(f"{len(self.channels)} channels for {len(self.blocks)} blocks: give one of each per stage")
        return self


class ImageDistill(DistillConfig):
    """As for texts, on maps of a CNN; the teacher is live, since augmented images are never the same twice."""

    teacher: Literal["live"] = "live"
    """In every step."""


class FitnetsImagesSpec(TrainingRunSpec):
    """Image classification: train a ResNet, lead a small CNN to its maps, train it on responses, evaluate both."""

    data: ImageData = ImageData()
    """Images and labels."""
    teacher: CnnConfig = CnnConfig()
    """The large network; trained once for all students of the store, from seed 0."""
    student: CnnConfig = CnnConfig(channels=(16, 32, 64), blocks=(1, 1, 1), stem=16)
    """The small one."""
    hint: TrainingConfig | None = None
    """FitNets' first stage, `student.hint`: how the student is led to the teacher's maps before it is trained whole."""
    distill: ImageDistill = ImageDistill()
    """What the student learns from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    telemetry_every: int | None = Field(50, ge=0)
    """Optimiser steps between rows of `distill_power.csv`, beside a row where a training starts and one after each
    validation; 0: those alone; nothing: no such file."""

    @property
    def has_teacher(self) -> bool:
        return self.distill.needs_teacher or self.hint is not None

    def preflight(self) -> None:
        require_frameworks()
        for split in (self.data.train, self.data.validation, self.data.test):
            parse_split(split)
        if self.data.source != SYNTHETIC and sources.parse(self.data.source).kind != "folder":
            raise ConfigError(f"data.source={self.data.source} is no folder of images", "name a folder, or `synthetic`")
        for training in (self.teacher.training, self.student.training):
            for name in training.stats:
                lookup.TRAINER_STATS.require(name)
