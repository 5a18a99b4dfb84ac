"""The teacher's part of `classify`: fine-tune it or take one that is, judge it, let it answer once for all students."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from joulelab.data import sources
from joulelab.data.inputs import input_bill
from joulelab.distill.classify_bench import Bench
from joulelab.distill.classify_chance import require_better_than_chance, shortfall
from joulelab.distill.classify_objective import LABELS_ONLY, ClassifyObjective
from joulelab.distill.classify_quality import evaluated, predictions_name, tell
from joulelab.distill.classify_teachers import LiveTeacher, Teacher, made_ready
from joulelab.distill.classify_training import Lesson, train_on_texts
from joulelab.distill.classify_view import TextLook, hidden_index, hidden_width
from joulelab.distill.teacher_cache import open_cache, write_cache
from joulelab.distill.ticking import ticks
from joulelab.evaluate.classification import Predictions, load_predictions
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.train.optim import autocast, matrix_products
from joulelab.zoo.pretrained import load_classifier, load_tokenizer, save_hf


@dataclass(frozen=True)
class TeacherWeights:
    """A fine-tuned teacher: what to load, what it took, and whether somebody else paid for it."""

    name: str
    bill: Bill
    folder: Path | None
    reused: bool
    brought: bool = False
    """Named by the user rather than trained by us."""


def fine_tuned_teacher(bench: Bench) -> TeacherWeights:
    config = bench.spec.teacher
    if config.fine_tuned is not None:
        bill = input_bill(bench.run, "fine-tuned teacher", config.fine_tuned, "fine-tuned-teacher", role="teacher")
        folder = sources.parse(config.fine_tuned).path
        return TeacherWeights(config.fine_tuned, bill, folder, reused=True, brought=True)
    pretrained = input_bill(bench.run, "pretrained teacher", config.model, "model", role="teacher")

    def make(folder: Path) -> None:
        model = load_classifier(config.model, num_labels=bench.classes, seed=config.seed).to(bench.device)
        objective = ClassifyObjective(LABELS_ONLY)
        train_on_texts(bench, Lesson("teacher", "train", model, objective, config.training, config.seed))
        save_hf(model, load_tokenizer(config.model), folder)

    inputs = {**config.model_dump(mode="json"), "validated": bench.spec.validate_every_epoch}
    parents = [bench.data.bill, pretrained]
    made = bench.run.artifact("teacher", kind="fine-tuned-teacher", inputs=inputs, parents=parents, make=make)
    return TeacherWeights(str(made.folder), made.bill, made.folder, made.reused)


def load_teacher(bench: Bench, teacher: TeacherWeights) -> nn.Module:
    return load_classifier(teacher.name, num_labels=bench.classes, seed=0).to(bench.device)


def judged_teacher(bench: Bench, teacher: TeacherWeights) -> tuple[Predictions | None, Predictions]:
    """What it says about validation and test texts. One that was brought along must beat chance before anything else
    is spent on it; of one that was trained here and does not, a warning is enough: its user asked for little."""
    validation = None
    if teacher.brought or bench.spec.validate_every_epoch:
        validation = _answers(bench, teacher, "validation")
    if teacher.brought and validation is not None:
        require_better_than_chance(validation, teacher.name)
    test = _answers(bench, teacher, "test")
    if not teacher.reused:
        tell(bench.run, "teacher", test)
        judged, split = (test, "test") if validation is None else (validation, "validation")
        problem = shortfall(judged, "that was trained here", split)
        if problem:
            bench.run.warn(problem)
    return validation, test


def _answers(bench: Bench, teacher: TeacherWeights, split: str) -> Predictions:
    """The run that trained the teacher has evaluated it, and paid for that once: its predictions lie beside it."""
    if teacher.reused and teacher.folder is not None:
        beside = bench.run.whole_in(teacher.folder.parent / predictions_name("teacher", split))
        if beside is not None and {teacher.bill.key, bench.data.key} <= set(beside.bill.artefact.parents):
            return load_predictions(beside.folder)
    return evaluated(bench, "teacher", split, lambda: load_teacher(bench, teacher), [teacher.bill], reuse=True)


def teacher_cache(bench: Bench, teacher: TeacherWeights) -> Artifact:
    distill, precision = bench.spec.distill, bench.spec.training.precision

    def make(folder: Path) -> None:
        dataset = bench.set("train")
        in_precision = (matrix_products(precision), autocast(precision, bench.device))
        caching = bench.run.stage("teacher.logits", len(dataset), role="teacher", activity="cache")
        with caching as stage, in_precision[0], in_precision[1]:
            model = made_ready(load_teacher(bench, teacher), bench.device, precision)
            _write(bench, folder, model, ticks(bench.run, stage))

    inputs = {"t_layer": distill.t_layer, "feat_pool": distill.feat_pool, "precision": precision}
    parents = [teacher.bill, bench.data.bill]
    return bench.run.artifact("teacher-cache", kind="teacher-cache", inputs=inputs, parents=parents, make=make)


def _write(bench: Bench, folder: Path, model: nn.Module, tick: Callable[[int, int], None]) -> None:
    look = teacher_look(bench, model)
    write_cache(
        folder, model, bench.set("train"),
        look=look, batch_size=bench.spec.eval_batch_size, device=bench.device, tick=tick,
    )  # fmt: skip


def answering(bench: Bench, teacher: TeacherWeights, cache: Artifact | None) -> tuple[Teacher, int]:
    """The teacher behind one call, and the width of its features."""
    if cache is not None:
        opened = open_cache(cache.folder, bench.set("train"))
        return opened, opened.width
    training = bench.spec.training
    model = made_ready(load_teacher(bench, teacher), bench.device, training.precision, training.compile)
    look = teacher_look(bench, model)
    return LiveTeacher(model, look), hidden_width(model, look.layer)


def teacher_look(bench: Bench, model: nn.Module) -> TextLook:
    distill = bench.spec.distill
    return TextLook(hidden_index(model, distill.t_layer, "distill.t_layer"), distill.feat_pool)
