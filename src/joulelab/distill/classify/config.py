"""Settings of the pipelines `classify` (texts) and `fitnets-images`; importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from joulelab.data import sources
from joulelab.data.image_folders import LabeledFiles, find_split
from joulelab.data.labeled_text import LabeledSource, check_labeled_text
from joulelab.data.splits import SPLITS, Split, SplitName, all_of_own_data, is_own_data, is_place, parse_split
from joulelab.distill.config import DistillSpec, LabelsAndTeacherSection, TeacherSection
from joulelab.errors import ConfigError
from joulelab.runs.spec import Section
from joulelab.train.config import PipelineTraining, TrainingConfig

SYNTHETIC = "synthetic"


class TextData(LabeledSource):
    """Labeled text, its splits and how much of each."""

    max_tokens: int = Field(64, ge=8)
    """Longer texts are truncated to this many tokens."""

    @model_validator(mode="before")
    @classmethod
    def _all_of_own_data(cls, values: object) -> object:
        return all_of_own_data(values, "train_size", "validation_size", "test_size")


class ImageData(Section):
    """Labeled images and which of them."""

    source: str = SYNTHETIC
    """`synthetic`, or a folder with one subfolder per split and in each of them one per class, as for torchvision."""
    side: int = Field(32, ge=8)
    """Images are scaled to this many pixels per side."""
    classes: int = Field(10, ge=2)
    """Number of classes of the synthetic images; a folder defines its own."""
    train: str = "train[:2000]"
    """Images to train on: a split or a slice of it, or a folder with one folder per class. The default for your own
    images is all of `train`."""
    validation: str = "validation[:500]"
    """Images evaluated after every epoch, in the same form; held out from `train` where `source` has no such folder."""
    test: str = "test[:1000]"
    """Held-out images on which quality is reported, in the same form."""

    @model_validator(mode="before")
    @classmethod
    def _all_of_own_images(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        train = values.get("train")
        if not is_own_data(values.get("source"), train if isinstance(train, str) and is_place(train) else None):
            return values
        return {**{split: split for split in SPLITS}, **values}

    @property
    def folders(self) -> dict[str, str]:
        """Split -> folder, of the splits that the settings name by a folder."""
        return {split: name for split in SPLITS if is_place(name := getattr(self, split))}

    @property
    def is_own(self) -> bool:
        return self.source != SYNTHETIC or bool(self.folders)

    def find(self, split: SplitName) -> LabeledFiles:
        """The user's images of a split, before a slice is taken."""
        return find_split(self.source, self.folders, split)

    def slice_of(self, split: str) -> Split:
        return Split(split) if split in self.folders else parse_split(getattr(self, split))


class TeacherConfig(TeacherSection):
    """The large model, fine-tuned in a metered stage, or given fine-tuned."""

    model: str = "sample:minilm"
    """`sample:minilm`, a local folder or a hub id of an encoder."""
    fine_tuned: str | None = None
    """A classifier that is already fine-tuned: a folder (with its energy, if joulelab trained it) or a hub id. The
    stage `teacher.train` is then skipped; a classifier that is no better than chance is rejected."""
    training: PipelineTraining = PipelineTraining()
    """How it is fine-tuned."""

    @property
    def source(self) -> str:
        """Whose tokenizer and weights are used."""
        return self.fine_tuned or self.model


class StudentConfig(Section):
    """The small model: some layers of a pretrained encoder under a new head, or a randomly initialized one."""

    renamed: ClassVar = {"init": "model"}

    model: str = "sample:minilm"
    """Model that layers and vocabulary are taken from: `sample:minilm`, a local folder or a hub id."""
    layers: int | tuple[int, ...] | Literal["all"] = (0, 5)
    """Layers taken from `model`, counted from 0, or `all`; a single number N initializes N layers randomly instead."""
    width: int | None = Field(None, ge=1)
    """Width of a randomly initialized student; null: as wide as `model`."""
    heads: int | None = Field(None, ge=1)
    """Attention heads of a randomly initialized student; null: as many as `model`."""
    hint: PipelineTraining | None = None
    """FitNets' first stage, `student.hint`: training of the student up to `s_layer` on the teacher's features only,
    before the whole student is trained; null: one stage. With it, feat_beta 0 gives FitNets as published."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.layers, int) and self.layers < 1:
            raise ValueError(f"layers: {self.layers} layers cannot be initialized; expected 1 or more")
        if not isinstance(self.layers, int) and (self.width or self.heads):
            raise ValueError("width and heads are for a randomly initialized student: set layers to a number")
        if self.width and self.heads and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class CnnConfig(Section):
    """A residual network, randomly initialized."""

    channels: tuple[int, ...] = (64, 128, 256)
    """Channels of each stage; a stage halves the image's side."""
    blocks: tuple[int, ...] = (2, 2, 2)
    """Residual blocks of each stage."""
    stem: int = Field(64, ge=1)
    """Channels of the first convolution."""
    block: Literal["basic", "bottleneck"] = "basic"
    """Two 3x3 convolutions, or ResNet-50's three with a narrow middle."""
    training: PipelineTraining = PipelineTraining(batch_size=64, learning_rate=1e-3)
    """How it is trained."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.channels) != len(self.blocks) or not self.channels:
            raise ValueError(f"{len(self.channels)} channels for {len(self.blocks)} blocks: give one of each per stage")
        return self


class DistillConfig(LabelsAndTeacherSection):
    """loss = alpha CE + (1 - alpha) T^2 KL + feat_beta MSE + relations; a term with weight 0 is not computed."""

    kd_T2: bool = True
    """Multiply the response term by T^2, so that the temperature does not change its weight."""
    feat_beta: float = Field(1.0, ge=0)
    """Weight of the feature loss; 0 turns it off."""
    t_layer: int | str = -2
    """Teacher's hidden state for features and relations: an index (-1: the last layer), or a layer's name."""
    s_layer: int | str = -2
    """Student's hidden state, in the same form."""
    feat_pool: Literal["cls", "mean"] = "mean"
    """One vector per text: the first token's, or the mean over its tokens."""
    feat_ln: bool = False
    """Add a LayerNorm at the end of the connector."""
    feat_normalize: bool = False
    """Scale the features of teacher and student to length 1 before comparing them, so that only directions count."""
    rel_distance: float = Field(0.0, ge=0)
    """Weight of the relation loss over distances between samples. Depends on which samples share a micro-batch."""
    rel_angle: float = Field(0.0, ge=0)
    """Weight of the relation loss over angles between samples. Depends on which samples share a micro-batch."""
    teacher: Literal["cached", "live"] = "cached"
    """Compute the teacher's outputs once for all epochs and students, or in every step; the student is the same."""

    @property
    def needs_features(self) -> bool:
        return self.feat_beta > 0 or self.rel_distance > 0 or self.rel_angle > 0

    @property
    def needs_teacher(self) -> bool:
        return self.alpha < 1 or self.needs_features


class ImageDistill(DistillConfig):
    """As for texts, on feature maps of a CNN; the teacher is live, since no augmented image occurs twice."""

    teacher: Literal["live"] = "live"
    """In every step."""


class ClassifySpec(DistillSpec):
    """Text classification: fine-tune a teacher, cache its outputs, train a student, evaluate both."""

    data: TextData = TextData()
    """Texts and labels."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher."""
    student: StudentConfig = StudentConfig()
    """The student."""
    distill: DistillConfig = DistillConfig()
    """What the student learns from."""
    training: PipelineTraining = PipelineTraining()
    """How the student is trained."""
    eval_batch_size: int = Field(64, ge=1)
    """Batch size for evaluation and caching."""
    validate_every_epoch: bool = True
    """Evaluate on the validation texts after every epoch, in a separate stage: accuracy, F1, calibration, agreement."""
    telemetry_every: int | None = Field(50, ge=0)
    """Optimizer steps between rows of `distill_power.csv`, in addition to a row at the start of each training and one
    after each validation; 0 writes only those rows; null disables the file."""

    @property
    def has_teacher(self) -> bool:
        return self.until == "teacher" or self.distill.needs_teacher or self.student.hint is not None

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        teacher = (self.teacher.training,) if self.has_teacher else ()
        return (*teacher, self.training, *([self.student.hint] if self.student.hint else []))

    @property
    def tokenizer(self) -> str:
        """Whose tokenizer splits the texts: teacher and student read the same tokens."""
        return self.teacher.source if self.has_teacher else self.student.model

    def checks(self) -> Iterator[Callable[[], object]]:
        yield from super().checks()
        yield lambda: check_labeled_text(self.data)
        yield lambda: sources.parse(self.student.model)
        if self.has_teacher:
            yield lambda: sources.parse(self.teacher.source)


class FitnetsImagesSpec(DistillSpec):
    """Image classification: train a ResNet, train a small CNN on its feature maps and responses, evaluate both."""

    data: ImageData = ImageData()
    """Images and labels."""
    teacher: CnnConfig = CnnConfig()
    """The large network; trained once for all students of the store, from seed 0."""
    student: CnnConfig = CnnConfig(channels=(16, 32, 64), blocks=(1, 1, 1), stem=16)
    """The small network."""
    hint: PipelineTraining | None = None
    """FitNets' first stage, `student.hint`: training of the student up to `s_layer` on the teacher's feature maps
    only, before the whole student is trained; null: one stage."""
    distill: ImageDistill = ImageDistill()
    """What the student learns from."""
    telemetry_every: int | None = Field(50, ge=0)
    """Optimizer steps between rows of `distill_power.csv`, in addition to a row at the start of each training and one
    after each validation; 0 writes only those rows; null disables the file."""

    @property
    def has_teacher(self) -> bool:
        return self.until == "teacher" or self.distill.needs_teacher or self.hint is not None

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        teacher = (self.teacher.training,) if self.has_teacher else ()
        return (*teacher, self.student.training, *([self.hint] if self.hint else []))

    def checks(self) -> Iterator[Callable[[], object]]:
        yield from super().checks()
        for split in SPLITS:
            yield lambda split=split: self._check_split(split)  # type: ignore[misc]

    def _check_split(self, split: SplitName) -> None:
        """That the split has images of the training classes; their files are listed, not read."""
        if not self.data.is_own:
            parse_split(getattr(self.data, split))
            return
        trained = self.data.folders.get("train", self.data.source)
        for name in dict.fromkeys((trained, self.data.folders.get(split, trained))):
            if sources.parse(name).kind != "folder":
                raise ConfigError(f"{name} is not a folder of images", "name a folder with one folder per class")
        self.data.find(split)
