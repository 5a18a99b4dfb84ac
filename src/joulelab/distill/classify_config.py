"""Settings of the pipeline `classify`; importable without torch, so a login node can check them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Self

from pydantic import Field, model_validator

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.text import check_source
from joulelab.errors import DependencyMissing
from joulelab.runs.spec import LARGEST_SEED, Section
from joulelab.train.config import TrainingConfig, TrainingRunSpec


class TextData(Section):
    """Labelled text and how much of it."""

    source: str = "sample:reviews"
    """`sample:reviews`, a CSV, JSONL or Parquet file, a folder, or a hub id."""
    subset: str = "short"
    """Of sample:reviews: `short` (one-sentence snippets), `long` (full reviews) or `all`; of a hub id: its config."""
    train_size: int = Field(1500, ge=1)
    """Texts to train on."""
    validation_size: int = Field(300, ge=1)
    """Texts for choices made during development; not used for reported quality."""
    test_size: int = Field(1000, ge=1)
    """Held-out texts on which quality is reported."""
    max_tokens: int = Field(64, ge=8)
    """Longer texts are cut here."""


class TeacherConfig(Section):
    """The large model, fine-tuned in a metered stage of its own, or brought along fine-tuned."""

    model: str = "sample:minilm"
    """`sample:minilm`, a local folder or a hub id of an encoder."""
    fine_tuned: str | None = None
    """A classifier that is fine-tuned already: a folder (its bill comes along where it has one) or a hub id. Then
    `teacher.train` is left out; a head that answers no better than chance is refused."""
    training: TrainingConfig = TrainingConfig()
    """How it is fine-tuned."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of the teacher; its own, so that all students of a comparison share one teacher."""

    @property
    def source(self) -> str:
        """Whose tokenizer and weights are used."""
        return self.fine_tuned or self.model


class StudentConfig(Section):
    """The small model: some layers of a pretrained encoder under a fresh head, or one of its own size, drawn."""

    init: str = "sample:minilm"
    """Where the layers come from, and the vocabulary: `sample:minilm`, a local folder or a hub id."""
    layers: int | tuple[int, ...] | Literal["all"] = (0, 5)
    """Which layers are taken, counted from 0, or `all`; a single number is how many are drawn from the seed."""
    width: int | None = Field(None, ge=1)
    """Width of a student that is drawn; nothing: as wide as `init`."""
    heads: int | None = Field(None, ge=1)
    """Attention heads of a student that is drawn; nothing: as many as `init`."""
    hint: TrainingConfig | None = None
    """FitNets' first stage, `student.hint`: how the student is trained up to `s_layer` on the teacher's features only,
    before it is trained whole; nothing: one stage. With it, feat_beta 0 gives FitNets as published."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.layers, int) and self.layers < 1:
            raise ValueError(f"layers: {self.layers} layers cannot be drawn; expected 1 or more")
        if not isinstance(self.layers, int) and (self.width or self.heads):
            raise ValueError("width and heads are those of a drawn student: set layers to a number")
        if self.width and self.heads and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class DistillConfig(Section):
    """loss = kd_alpha CE + (1 - kd_alpha) T^2 KL + feat_beta MSE + relations; a term with weight 0 is not computed."""

    kd_alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the labels; 1 switches the teacher's responses off, 0 the labels."""
    kd_T: float = Field(2.0, gt=0)
    """Temperature of the teacher's responses."""
    kd_T2: bool = True
    """Multiply the responses' term by T^2, so that kd_T does not change its weight; false leaves it out."""
    feat_beta: float = Field(1.0, ge=0)
    """Weight of the feature loss; 0 switches it off."""
    t_layer: int | str = -2
    """Teacher's hidden state for features and relations: an index (-1 the last layer's), or a layer's name."""
    s_layer: int | str = -2
    """Student's hidden state, likewise."""
    feat_pool: Literal["cls", "mean"] = "mean"
    """One vector per text: the first token's, or the mean over its tokens."""
    feat_ln: bool = False
    """A LayerNorm at the end of the connector."""
    feat_normalize: bool = False
    """Bring both sides' features to length 1 before they are compared: directions count, sizes do not."""
    rel_distance: float = Field(0.0, ge=0)
    """Weight of the relation loss over distances between samples. Depends on which samples meet in a micro-batch."""
    rel_angle: float = Field(0.0, ge=0)
    """Weight of the relation loss over angles between samples. Depends on which samples meet in a micro-batch."""
    teacher: Literal["cached", "live"] = "cached"
    """Let the teacher answer once for all epochs and students, or anew in every step; the student is the same."""

    @property
    def needs_features(self) -> bool:
        return self.feat_beta > 0 or self.rel_distance > 0 or self.rel_angle > 0

    @property
    def needs_teacher(self) -> bool:
        return self.kd_alpha < 1 or self.needs_features


class ClassifySpec(TrainingRunSpec):
    """Text classification: fine-tune a teacher, cache what it says, train a student, evaluate both."""

    data: TextData = TextData()
    """Texts and labels."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher."""
    student: StudentConfig = StudentConfig()
    """The student."""
    distill: DistillConfig = DistillConfig()
    """What the student learns from."""
    training: TrainingConfig = TrainingConfig()
    """How the student is trained."""
    until: Literal["teacher", "student"] = "student"
    """`teacher` ends after the teacher and its cache are made; other runs then reuse them with their bills."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    eval_batch_size: int = Field(64, ge=1)
    """Texts at a time where nothing is trained."""
    validate_every_epoch: bool = True
    """Look at the validation texts after every epoch, in a stage of its own; accuracy, F1, calibration, agreement."""
    telemetry_every: int | None = Field(50, ge=0)
    """Optimiser steps between rows of `distill_power.csv`, beside a row where a training starts and one after each
    validation; 0: those alone; nothing: no such file."""

    @property
    def has_teacher(self) -> bool:
        return self.until == "teacher" or self.distill.needs_teacher or self.student.hint is not None

    def preflight(self) -> None:
        require_frameworks()
        check_source(self.data.source, self.data.subset)
        for model in (self.teacher.source, self.student.init):
            sources.parse(model)
        for training in (self.teacher.training, self.training, *([self.student.hint] if self.student.hint else [])):
            for name in training.stats:
                lookup.TRAINER_STATS.require(name)


def require_frameworks() -> None:
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if absent:
        raise DependencyMissing(f"training needs {' and '.join(absent)}", 'pip install "joulelab[train]"')
