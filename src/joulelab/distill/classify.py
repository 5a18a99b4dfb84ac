"""The pipeline `classify`, as a story of stages: data, teacher, its answers, student, quality."""

from __future__ import annotations

from typing import cast

from joulelab.distill.classify_bench import Bench
from joulelab.distill.classify_config import ClassifySpec
from joulelab.distill.classify_data import tokenised_data
from joulelab.distill.classify_layers import require_layers
from joulelab.distill.classify_quality import evaluated, tell
from joulelab.distill.classify_student import Guidance, trained_student
from joulelab.distill.classify_teacher import answering, fine_tuned_teacher, judged_teacher, teacher_cache
from joulelab.evaluate.classification import Predictions
from joulelab.runs.context import RunContext
from joulelab.train.budget import require_joules
from joulelab.zoo.pretrained import import_models, load_classifier


def run_classify(run: RunContext) -> None:
    spec = cast(ClassifySpec, run.spec)
    require_layers(spec)
    require_joules(run, spec.teacher.training if spec.has_teacher else None, spec.training, spec.student.hint)
    bench = Bench(run, spec, tokenised_data(run, spec))
    import_models()
    guidance, teacher_says = guided(bench) if spec.has_teacher else (None, None)
    if spec.until == "student":
        student = trained_student(bench, guidance)
        found = evaluated(
            bench, "student", "test",
            lambda: load_classifier(str(student.folder), bench.classes, seed=0).to(bench.device), [student.bill],
        )  # fmt: skip
        tell(run, "student", found, teacher_says)


def guided(bench: Bench) -> tuple[Guidance | None, Predictions]:
    """A teacher that is worth listening to, and its answers; a run that only prepares it ends there."""
    teacher = fine_tuned_teacher(bench)
    validation, test = judged_teacher(bench, teacher)
    # a run that prepares a teacher leaves the cache for the students of later runs
    cache = teacher_cache(bench, teacher) if bench.spec.distill.teacher == "cached" else None
    if bench.spec.until == "teacher":
        return None, test
    answers, width = answering(bench, teacher, cache)
    parents = (cache.bill,) if cache else (teacher.bill,)
    return Guidance(answers, width, parents, validation), test
