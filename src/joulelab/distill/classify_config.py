"""Settings of the pipeline `classify`; importable without torch, so a login node can check them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.text_sources import check_source
from joulelab.errors import DependencyMissing
from joulelab.runs.spec import RunSpec, Section
from joulelab.train.config import TrainingConfig


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
    """The large model, fine-tuned in a metered stage of its own."""

    model: str = "sample:minilm"
    """`sample:minilm`, a local folder or a hub id of an encoder."""
    training: TrainingConfig = TrainingConfig()
    """How it is fine-tuned."""
    seed: int = Field(0, ge=0)
    """Seed of the teacher; its own, so that all students of a comparison share one teacher."""


class StudentConfig(Section):
    """The small model: some layers of a pretrained encoder under a fresh head."""

    init: str = "sample:minilm"
    """Where the layers come from: `sample:minilm`, a local folder or a hub id."""
    layers: tuple[int, ...] = (0, 5)
    """Which layers are taken, counted from 0."""


class DistillConfig(Section):
    """loss = kd_alpha CE + (1 - kd_alpha) T^2 KL + feat_beta MSE; a term with weight 0 is not computed."""

    kd_alpha: float = Field(0.5, ge=0, le=1)
    """Weight of the labels; 1 switches the teacher's responses off, 0 the labels."""
    kd_T: float = Field(2.0, gt=0)
    """Temperature of the teacher's responses."""
    feat_beta: float = Field(0.0, ge=0)
    """Weight of the feature loss; 0 switches it off."""
    t_layer: int = -2
    """Teacher's hidden state for the feature loss, as an index into its hidden states."""
    s_layer: int = -2
    """Student's hidden state for the feature loss."""
    feat_pool: Literal["cls", "mean"] = "mean"
    """One vector per text: the first token's, or the mean over its tokens."""

    @property
    def needs_teacher(self) -> bool:
        return self.kd_alpha < 1 or self.feat_beta > 0


class ClassifySpec(RunSpec):
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

    def preflight(self) -> None:
        absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if absent:
            raise DependencyMissing(f"training needs {' and '.join(absent)}", 'pip install "joulelab[train]"')
        check_source(self.data.source, self.data.subset)
        for model in (self.teacher.model, self.student.init):
            sources.parse(model)
        for name in (*self.teacher.training.stats, *self.training.stats):
            lookup.TRAINER_STATS.require(name)
