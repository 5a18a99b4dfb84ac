"""The pipeline `fitnets-images`: hints as FitNets had them, maps of a CNN that a 1x1 convolution translates.

teacher.train -> teacher.evaluate -> student.hint (where asked) -> student.train -> student.evaluate
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from joulelab.data import sources
from joulelab.data.batches import ShuffledRows
from joulelab.data.images import FolderImages
from joulelab.data.inputs import input_bill
from joulelab.data.splits import parse_split
from joulelab.data.synthetic import SyntheticImages
from joulelab.distill.classify_config import DistillConfig
from joulelab.distill.classify_objective import ClassifyObjective, HintObjective
from joulelab.distill.classify_quality import tell
from joulelab.distill.classify_student import body_up_to
from joulelab.distill.classify_teachers import LiveTeacher, made_ready
from joulelab.distill.classify_training import Lesson, Validation, train
from joulelab.distill.classify_view import ImageLook, hidden_index, hidden_width
from joulelab.distill.connectors import make_regressor
from joulelab.distill.fitnets_images_config import SYNTHETIC, CnnConfig, FitnetsImagesSpec
from joulelab.evaluate.classification import Predictions, load_predictions, predict_images
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext
from joulelab.train.budget import require_joules
from joulelab.train.config import TrainingConfig
from joulelab.train.devices import device_of
from joulelab.zoo.objective import Objective
from joulelab.zoo.pretrained import import_transformers, load_weights, save_weights, seeded_init
from joulelab.zoo.tasks.image_classification import Images

LABELS_ONLY = DistillConfig(kd_alpha=1.0, feat_beta=0.0)
TEACHER_SEED = 0  # its own, so that all students of a comparison share one teacher


def run_fitnets_images(run: RunContext) -> None:
    spec = cast(FitnetsImagesSpec, run.spec)
    lab = _Lab(run, spec)
    require_joules(run, spec.teacher.training if spec.has_teacher else None, spec.student.training)
    teacher, said = None, None
    if spec.has_teacher:
        teacher = lab.trained_teacher()
        said = lab.evaluated("teacher", spec.teacher, teacher)
        tell(run, "teacher", said)
    student = lab.trained_student(teacher)
    tell(run, "student", lab.evaluated("student", spec.student, student), said)


@dataclass(frozen=True)
class _Lab:
    """One run's stages; each finds or makes one artefact."""

    run: RunContext
    spec: FitnetsImagesSpec

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.spec.device, self.run)

    @cached_property
    def train_images(self) -> Images:
        return self._open(self.spec.data.train, augment=True)

    def trained_teacher(self) -> Artifact:
        config = self.spec.teacher

        def make(folder: Path) -> None:
            model = self._build(config, TEACHER_SEED)
            self._train("teacher", "train", model, ClassifyObjective(LABELS_ONLY, look=ImageLook(-1)), config.training)
            save_weights(model, folder)

        inputs = {"data": self.spec.data.model_dump(), "model": config.model_dump(mode="json")}
        parents = self._data_bills()
        return self.run.artifact("teacher", kind="image-teacher", inputs=inputs, parents=parents, make=make)

    def trained_student(self, teacher: Artifact | None) -> Artifact:
        spec = self.spec

        def make(folder: Path) -> None:
            model = self._build(spec.student, spec.seed)
            if teacher is None:
                objective = ClassifyObjective(spec.distill, look=ImageLook(-1))
            else:
                objective = self._objective(model, teacher)
            self._train("student", "train", model, objective, spec.student.training)
            save_weights(model, folder)

        inputs = spec.model_dump(mode="json", include={"data", "student", "hint", "distill", "seed"})
        parents = [*self._data_bills(), *([teacher.bill] if teacher else [])]
        # trained anew in every run: its joules are what the run is for
        return self.run.artifact("final_model", kind="student", inputs=inputs, parents=parents, make=make, reuse=False)

    def _objective(self, model: nn.Module, teacher: Artifact) -> ClassifyObjective:
        """The whole student's objective, once its hint stage is over where there is one."""
        spec, distill = self.spec, self.spec.distill
        large = self._build(spec.teacher, TEACHER_SEED)
        load_weights(large, teacher.folder)
        made_ready(large, self.device, spec.student.training.precision, spec.student.training.compile)
        seen = ImageLook(hidden_index(large, distill.t_layer, "distill.t_layer"))
        own = ImageLook(hidden_index(model, distill.s_layer, "distill.s_layer"))
        widths = hidden_width(model, own.layer), hidden_width(large, seen.layer)
        with seeded_init(spec.seed):
            regressor = make_regressor(*widths, distill.feat_ln).to(self.device)
        answering = LiveTeacher(large, seen)
        if spec.hint is not None:
            with body_up_to(model, own.layer) as body:
                self._train("student", "hint", body, HintObjective(distill, answering, regressor, own), spec.hint)
        return ClassifyObjective(distill, answering, regressor if distill.feat_beta > 0 else None, own)

    def evaluated(self, who: str, config: CnnConfig, made: Artifact) -> Predictions:
        """On the test images; the teacher's answers are shared by all its students."""

        def make(folder: Path) -> None:
            with self.run.stage(f"{who}.evaluate", role=who, activity="evaluate") as stage:
                model = self._build(config, 0)
                load_weights(model, made.folder)
                found = predict_images(model.to(self.device), self._open(self.spec.data.test), self.device)
                stage.count(samples=len(found.labels))
            found.save(folder)

        parents = [made.bill, *self._data_bills()]
        inputs = {"test": self.spec.data.test}
        name = f"{who}-predictions"
        kept = self.run.artifact(
            name, kind="predictions", inputs=inputs, parents=parents, make=make, reuse=who == "teacher"
        )
        return load_predictions(kept.folder)

    def _train(self, who: str, what: str, model: nn.Module, objective: Objective[Any], config: TrainingConfig) -> None:
        seed = TEACHER_SEED if who == "teacher" else self.spec.seed
        batches = ShuffledRows(self.train_images.rows, config.batch_size, seed, self.train_images.batch)
        held_out = self._open(self.spec.data.validation)
        looks = Validation(lambda: predict_images(model, held_out, self.device), every_epoch=True)
        lesson = Lesson(who, what, model, objective, config, seed)
        train(self.run, lesson, batches, looks if what == "train" else None)

    def _build(self, config: CnnConfig, seed: int) -> nn.Module:
        transformers = import_transformers()
        settings = transformers.ResNetConfig(
            num_labels=self.train_images.classes,
            embedding_size=config.stem,
            hidden_sizes=list(config.channels),
            depths=list(config.blocks),
            layer_type=config.block,
        )
        with seeded_init(seed):
            model: nn.Module = transformers.ResNetForImageClassification(settings)
        return model.to(self.device)

    def _open(self, split: str, augment: bool = False) -> Images:
        data = self.spec.data
        if data.source == SYNTHETIC:
            return SyntheticImages(data.classes, data.side, parse_split(split))
        place = sources.parse(data.source).path
        assert place is not None  # preflight has looked
        return FolderImages(place, data.side, parse_split(split), augment)

    def _data_bills(self) -> list[Bill]:
        data = self.spec.data
        made_here = data.source == SYNTHETIC
        return [] if made_here else [input_bill(self.run, "images", data.source, "images", role="data")]
