"""A student's training as an artefact: made or loaded, trained in the one loop, saved with what went through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from joulelab.data.batches import BatchSource
from joulelab.data.chat.attention import PackedAttention, use_packed_attention
from joulelab.data.chat.packing import PackedRows, training_batches
from joulelab.data.inputs import input_bill
from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.budgets import TRAINED, Allowance
from joulelab.distill.causal.config import CausalTraining
from joulelab.distill.causal.heads import open_for_loss
from joulelab.distill.causal.models import Adapted, make_student, save_student, with_adapters
from joulelab.distill.causal.objectives import TokenObjective
from joulelab.distill.logit_cache.loss import KdLoss
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.record import Result
from joulelab.runs.storage import write_json
from joulelab.train.training_session import EvaluationPoint, TrainingJob, train_in_run
from joulelab.zoo.objective import Objective
from joulelab.zoo.pretrained import load_causal_lm

FINAL_MODEL, FINAL_POLICY, START = "final_model", "final_policy", "sft-student"


@dataclass(frozen=True)
class Desk:
    """Where a student sits: the model on its device, and how it is called with packed rows."""

    model: nn.Module
    attention: PackedAttention
    config: CausalTraining


@dataclass(frozen=True)
class Lesson:
    """What is learnt, made when the student is there."""

    batches: BatchSource[Any]
    objective: Objective[Any]
    loss_name: str
    """Told beside the loss while it is learnt."""


@dataclass(frozen=True)
class Course:
    """One training of one student."""

    name: str
    """Of the artefact."""
    stage: str
    config: CausalTraining
    allowance: Allowance
    inputs: Mapping[str, Any]
    """What makes the outcome another one, beside the student, the training and the data."""
    parents: Sequence[Bill]
    lesson: Callable[[Desk], Lesson]
    held_out: Callable[[nn.Module, EvaluationPoint], float]
    start: Artifact | None = None
    shared: bool = False
    """Whether other runs may take it instead of training their own."""
    look_stage: str = "student.validate"
    """What looks at held-out tokens on the way are billed to."""


MANY_PASSES = 20


def trained(bench: Bench, course: Course) -> Artifact:
    spec = bench.spec

    def make(folder: Path) -> None:
        bench.release_teacher()
        model = _seated(bench, course.start)
        adapted = with_adapters(model, spec.student.lora, spec.seed) if spec.student.lora else None
        desk = _desk(bench, adapted.model if adapted else model, course)
        _train(bench, course, desk, folder)
        _save(bench, adapted, desk.model, folder)

    inputs = {
        **spec.model_dump(mode="json", include={"student", "seed", "chunk"}),
        "rows": spec.data.row_length,
        "training": course.config.model_dump(mode="json"),
        "tokens": course.allowance.tokens,
        "energy_j": course.allowance.energy_j,
        "tokenizer": bench.tokenizer_identity,
        **course.inputs,
    }
    unique = {bill.key: bill for bill in [*course.parents, *_origin(bench, course.start)]}
    return bench.run.artifact(
        course.name,
        kind="language-student",
        inputs=inputs,
        parents=list(unique.values()),
        make=make,
        reuse=course.shared,
    )


def sft_lesson(bench: Bench, rows: PackedRows) -> Callable[[Desk], Lesson]:
    def lesson(desk: Desk) -> Lesson:
        batches = training_batches(rows, desk.config.batch_size, bench.spec.seed)
        bench.run.result("data.padded_share", Result(value=rows.padded_share))
        loss = KdLoss(alpha=1.0, chunk=bench.spec.chunk, compile_mode=desk.config.compile)
        return Lesson(batches, TokenObjective(desk.model, desk.attention, loss), "CE")

    return lesson


def load_student(folder: Path) -> nn.Module:
    return open_for_loss(load_causal_lm(str(folder)))


def _origin(bench: Bench, start: Artifact | None) -> list[Bill]:
    """Where its first weights came from: whoever paid for them stands in the bill, also where nobody knows how much."""
    student = bench.spec.student
    if start is not None:
        return [start.bill]
    if student.model is not None:
        return [input_bill(bench.run, "student's weights", student.model, "model", role="student")]
    if student.layers is not None or student.teacher_embeddings:
        # layers of the run's own teacher: its training stays the teacher's, as it does where the run trains the teacher
        return [input_bill(bench.run, "teacher", bench.spec.teacher.model, "model", role="teacher")]
    return []


def _seated(bench: Bench, start: Artifact | None) -> nn.Module:
    if start is not None:
        return load_student(start.folder)
    student = bench.spec.student
    whole = load_causal_lm(bench.spec.teacher.model) if student.layers or student.teacher_embeddings else None
    return make_student(student, whole, bench.tokenizer, bench.spec.seed)


def _desk(bench: Bench, model: nn.Module, course: Course) -> Desk:
    model = model.to(bench.device)
    return Desk(model, use_packed_attention(model), course.allowance.limits(course.config))


def _train(bench: Bench, course: Course, desk: Desk, folder: Path) -> None:
    lesson = course.lesson(desk)
    parameters = sum(weight.numel() for weight in desk.model.parameters())
    bench.run.result("student.parameters", Result(value=float(parameters)))
    outcome = train_in_run(
        bench.run,
        TrainingJob(
            stage=course.stage,
            role="student",
            model=desk.model,
            batches=lesson.batches,
            objective=lesson.objective,
            config=desk.config,
            seed=bench.spec.seed,
            evaluate=lambda moment: course.held_out(desk.model, moment),
            evaluate_stage=course.look_stage,
            evaluate_activity="validate",
            ranks=bench.ranks,
            loss_name=lesson.loss_name,
        ),
    )
    position = outcome.position
    _tell_passes(bench, course.stage, position.drawn / lesson.batches.batches_per_epoch)
    write_json(folder / TRAINED, {"tokens": position.tokens, "steps": position.step, "final_loss": outcome.loss})


def _tell_passes(bench: Bench, stage: str, passes: float) -> None:
    bench.run.result(f"{stage}.passes", Result(value=passes))
    if passes > MANY_PASSES:
        bench.run.warn(
            f"{stage} went over its rows {passes:.0f} times: a student learns few texts by heart, and its held-out "
            "loss rises; give it more texts, more prompts, or a smaller budget"
        )


def _save(bench: Bench, adapted: Adapted | None, model: nn.Module, folder: Path) -> None:
    if adapted is not None:
        adapted.wrapped.save_pretrained(str(folder / "adapter"))
    save_student(
        adapted.merged() if adapted else model,
        bench.tokenizer,
        folder,
        state_file=bench.spec.pipeline in ("kd", "self"),
    )
