"""Equal terms: how many tokens or joules are left for a stage, and in words what was taken off before.

All tokens that go through the student count, also those of the SFT student that dpo and self begin with. Joules count
with or without the teacher's, as the settings say; either way it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from joulelab.data.batches import BatchSource
from joulelab.data.chat.attention import PackedAttention, use_packed_attention
from joulelab.data.chat.packing import PackedRows, training_batches
from joulelab.data.inputs import input_bill
from joulelab.distill.causal.config import CausalSpec, CausalTraining
from joulelab.distill.causal.context import CausalContext
from joulelab.distill.causal.models import LoraModel, add_lora, expose_hidden_states, make_student, save_student
from joulelab.distill.causal.objective import TokenObjective
from joulelab.distill.logit_cache.kd_loss import KdLoss
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import Ancestor, Artifact, Bill, ancestry_of
from joulelab.runs.record import Result, StageRole, components_of, kinds_of
from joulelab.runs.storage import read_json, write_json
from joulelab.train.training_session import EvaluationPoint, TrainingJob, train_in_run
from joulelab.units import energy_text
from joulelab.zoo.objective import Objective
from joulelab.zoo.pretrained import load_causal_lm

BUDGET_FILE = "budget.json"
TRAINING_FILE = "training.json"
"""Beside a student: what went through it."""


@dataclass(frozen=True)
class RemainingBudget:
    tokens: int | None
    energy_j: float | None

    def limits(self, config: CausalTraining) -> CausalTraining:
        return config.model_copy(update={"max_tokens": self.tokens, "max_energy_j": self.energy_j})


def start_budget(spec: CausalSpec) -> RemainingBudget:
    """Of the SFT student that others begin with: its share, whatever the teacher takes, so that all can share it."""
    budget = spec.budget
    return RemainingBudget(
        tokens=None if budget.tokens is None else max(1, round(budget.tokens * budget.start_share)),
        energy_j=None if budget.energy_j is None else budget.energy_j * budget.start_share,
    )


def training_budget(bench: CausalContext, parents: Iterable[Bill], start: Artifact | None) -> RemainingBudget:
    """What is left for student.train. Noted in the run, so that an attempt that goes on has the same end."""
    note = bench.run.paths.folder / BUDGET_FILE
    if note.exists():
        kept = read_json(note)
        return RemainingBudget(kept["left"]["tokens"], kept["left"]["energy_j"])
    budget = bench.spec.budget
    lineage = ancestry_of([*parents, *([start.bill] if start else [])])
    teacher_j = _lineage_energy_j(bench, lineage, "teacher")
    start_j = _lineage_energy_j(bench, lineage, "student")
    start_tokens = trained_tokens(start) if start else 0
    left = RemainingBudget(
        tokens=None if budget.tokens is None else budget.tokens - start_tokens,
        energy_j=None if budget.energy_j is None else _energy_left_j(bench.spec, teacher_j, start_j),
    )
    _require_budget_left(bench.spec, left, teacher_j, start_j)
    _report_budget(bench, left, teacher_j, start_j, start_tokens)
    write_json(note, {"left": asdict(left), "teacher_energy_j": teacher_j, "start_energy_j": start_j})
    return left


def trained_tokens(student: Artifact) -> int:
    return int(read_json(student.folder / TRAINING_FILE)["tokens"])


def _energy_left_j(spec: CausalSpec, teacher_j: float | None, start_j: float | None) -> float:
    """Joules that nobody measured cannot be taken off, and taking off nothing would be a gift."""
    taken = {"SFT student": start_j, **({"teacher": teacher_j} if spec.budget.counts_teacher else {})}
    for who, taken_j in taken.items():
        if taken_j is None:
            raise ConfigError(
                f"the joules of the {who} are to be taken off the budget, and nobody measured them",
                "run that step again where a sensor measures, let estimates count "
                "(training.budget_counts_estimates=true), or give the budget in tokens",
            )
    return (spec.budget.energy_j or 0.0) - sum(taken_j or 0.0 for taken_j in taken.values())


def _lineage_energy_j(bench: CausalContext, lineage: Iterable[Ancestor], role: StageRole) -> float | None:
    """None where they are not known of all that was done; 0 where nothing was done."""
    policy, estimates = bench.spec.energy.total_energy_policy, bench.spec.training.budget_counts_estimates
    metered = [one for one in lineage if one.stages]
    figures = [components_of(one) for one in metered if any(kind.role == role for kind in kinds_of(one))]
    found = [figure.best(policy) if estimates else figure.under_policy(policy) for figure in figures]
    known = [figure.energy_j for figure in found if figure.energy_j is not None]
    return sum(known) if len(known) == len(found) else None


def _require_budget_left(
    spec: CausalSpec, left: RemainingBudget, teacher_j: float | None, start_j: float | None
) -> None:
    if left.energy_j is not None and left.energy_j <= 0:
        teacher_counts = bool(teacher_j) and spec.budget.counts_teacher
        taken = [f"the SFT student took {energy_text(start_j)}"] if start_j else []
        taken += [f"the teacher {'' if taken else 'took '}{energy_text(teacher_j)}"] if teacher_counts else []
        way_out = ", or set budget.counts_teacher=false" if teacher_counts else ", or lower budget.start_share"
        raise ConfigError(
            f"nothing is left of {energy_text(spec.budget.energy_j)}: {', '.join(taken)}", f"raise the budget{way_out}"
        )
    if left.tokens is not None and left.tokens <= 0:
        raise ConfigError("the SFT student has used up all tokens of the budget", "lower budget.start_share")


def _report_budget(
    bench: CausalContext, left: RemainingBudget, teacher_j: float | None, start_j: float | None, start_tokens: int
) -> None:
    budget, run = bench.spec.budget, bench.run
    said = []
    if left.tokens is not None:
        before = f" ({start_tokens:,} of {budget.tokens:,} went through the SFT student)" if start_tokens else ""
        said.append(f"{left.tokens:,} tokens{before}")
        run.result("budget.tokens", Result(value=float(budget.tokens or 0)))
        run.result("budget.start_tokens", Result(value=float(start_tokens)))
    if left.energy_j is not None:
        counted = "counted" if budget.counts_teacher else "not counted"
        taken = [f"SFT student {energy_text(start_j)}"] if start_tokens else []
        # in self the SFT student is the teacher, and what it took to be asked is told too
        taken += [f"teacher {energy_text(teacher_j)} {counted}"] if bench.spec.has_teacher or teacher_j != 0 else []
        before = f" ({', '.join(taken)})" if taken else ""
        said.append(f"{energy_text(left.energy_j)} of {energy_text(budget.energy_j)}{before}")
        run.result("budget.energy_j", Result(value=budget.energy_j or 0.0))
        run.result("budget.teacher_counted", Result(value=float(budget.counts_teacher)))
        run.result("budget.left_energy_j", Result(value=left.energy_j))
    run.progress.say(f"budget of student.train: {' and '.join(said)}")


# A student's training as an artefact: made or loaded, trained in the one loop, saved with what went through it.


FINAL_MODEL, FINAL_POLICY, START = "final_model", "final_policy", "sft-student"


@dataclass(frozen=True)
class StudentSetup:
    """Where a student sits: the model on its device, and how it is called with packed rows."""

    model: nn.Module
    attention: PackedAttention
    config: CausalTraining


@dataclass(frozen=True)
class TrainingData:
    """What is learnt, made when the student is there."""

    batches: BatchSource[Any]
    objective: Objective[Any]
    loss_name: str
    """Told beside the loss while it is learnt."""


@dataclass(frozen=True)
class StudentTraining:
    """One training of one student."""

    name: str
    """Of the artefact."""
    stage: str
    config: CausalTraining
    allowance: RemainingBudget
    inputs: Mapping[str, Any]
    """What makes the outcome another one, beside the student, the training and the data."""
    parents: Sequence[Bill]
    lesson: Callable[[StudentSetup], TrainingData]
    held_out: Callable[[nn.Module, EvaluationPoint], float]
    start: Artifact | None = None
    shared: bool = False
    """Whether other runs may take it instead of training their own."""
    look_stage: str = "student.validate"
    """What looks at held-out tokens on the way are billed to."""


MAX_PASSES = 20


def train_student(bench: CausalContext, course: StudentTraining) -> Artifact:
    spec = bench.spec

    def make(folder: Path) -> None:
        bench.release_teacher()
        model = _initial_model(bench, course.start)
        adapted = add_lora(model, spec.student.lora, spec.seed) if spec.student.lora else None
        desk = _set_up(bench, adapted.model if adapted else model, course)
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
    unique = {bill.key: bill for bill in [*course.parents, *_initial_weight_bills(bench, course.start)]}
    return bench.run.artifact(
        course.name,
        kind="language-student",
        inputs=inputs,
        parents=list(unique.values()),
        make=make,
        reuse=course.shared,
    )


def label_training(bench: CausalContext, rows: PackedRows) -> Callable[[StudentSetup], TrainingData]:
    def lesson(desk: StudentSetup) -> TrainingData:
        batches = training_batches(rows, desk.config.batch_size, bench.spec.seed)
        bench.run.result("data.padded_share", Result(value=rows.padded_share))
        loss = KdLoss(alpha=1.0, chunk=bench.spec.chunk, compile_mode=desk.config.compile)
        return TrainingData(batches, TokenObjective(desk.model, desk.attention, loss), "CE")

    return lesson


def load_student(folder: Path) -> nn.Module:
    return expose_hidden_states(load_causal_lm(str(folder)))


def _initial_weight_bills(bench: CausalContext, start: Artifact | None) -> list[Bill]:
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


def _initial_model(bench: CausalContext, start: Artifact | None) -> nn.Module:
    if start is not None:
        return load_student(start.folder)
    student = bench.spec.student
    whole = load_causal_lm(bench.spec.teacher.model) if student.layers or student.teacher_embeddings else None
    return make_student(student, whole, bench.tokenizer, bench.spec.seed)


def _set_up(bench: CausalContext, model: nn.Module, course: StudentTraining) -> StudentSetup:
    model = model.to(bench.device)
    return StudentSetup(model, use_packed_attention(model), course.allowance.limits(course.config))


def _train(bench: CausalContext, course: StudentTraining, desk: StudentSetup, folder: Path) -> None:
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
    _report_passes(bench, course.stage, position.drawn / lesson.batches.batches_per_epoch)
    write_json(folder / TRAINING_FILE, {"tokens": position.tokens, "steps": position.step, "final_loss": outcome.loss})


def _report_passes(bench: CausalContext, stage: str, passes: float) -> None:
    bench.run.result(f"{stage}.passes", Result(value=passes))
    if passes > MAX_PASSES:
        bench.run.warn(
            f"{stage} went over its rows {passes:.0f} times: a student learns few texts by heart, and its held-out "
            "loss rises; give it more texts, more prompts, or a smaller budget"
        )


def _save(bench: CausalContext, adapted: LoraModel | None, model: nn.Module, folder: Path) -> None:
    if adapted is not None:
        adapted.wrapped.save_pretrained(str(folder / "adapter"))
    save_student(
        adapted.merged() if adapted else model,
        bench.tokenizer,
        folder,
        state_file=bench.spec.pipeline in ("kd", "self"),
    )
