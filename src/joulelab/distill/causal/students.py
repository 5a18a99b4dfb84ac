"""A student's training as an artifact, and its budget.

Budget. All pipelines of a comparison get the same tokens or joules. All tokens that the student processes count, those
of the SFT student that dpo and self start from included. Joules count with or without the teacher's, as the settings
say; the output states which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.data.chat.packing import use_packed_attention
from joulelab.distill.causal.config import CausalSpec, CausalTraining
from joulelab.distill.causal.models import (
    CausalContext,
    LoraModel,
    add_lora,
    load_student,
    make_student,
    save_student,
    unsharded_model,
    weight_dtype,
)
from joulelab.distill.causal.objective import StudentSetup, TrainingData
from joulelab.distill.causal.teacher import StartingStudent
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import Ancestor, Artifact, Bill, ancestry_of
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import StageRole, components_of, kinds_of
from joulelab.train.bf16_weights import cast_weights
from joulelab.train.parallel import has_process_group
from joulelab.train.training_session import EvaluationPoint, TrainingJob
from joulelab.units import energy_text
from joulelab.zoo.pretrained import load_causal_lm

FINAL_MODEL, FINAL_POLICY, SFT_STUDENT = "final_model", "final_policy", "sft-student"
BUDGET_FILE = "budget.json"
TRAINING_FILE = "training.json"
"""In a student's folder: what it was trained on."""
MAX_PASSES = 20


# training


def trained_start(student: Artifact) -> StartingStudent:
    """The SFT student that this run or another one has trained."""
    trained = read_json(student.folder / TRAINING_FILE)
    made_by = f"artifact {SFT_STUDENT} of run {student.bill.artifact.made_by}"
    tokens, energy_j = int(trained["tokens"]), trained.get("budget_energy_j")
    return StartingStudent(str(student.folder), student.key, student.bill, tokens, made_by, energy_j)


@dataclass(frozen=True)
class StudentTraining:
    """One training of one student."""

    name: str
    """Of the artifact."""
    stage: str
    config: CausalTraining
    budget: RemainingBudget
    inputs: Mapping[str, Any]
    """What decides the outcome, besides the student, the training settings and the data."""
    parents: Sequence[Bill]
    make_data: Callable[[StudentSetup], TrainingData]
    held_out_loss: Callable[[nn.Module, EvaluationPoint], float]
    start: StartingStudent | None = None
    """The student to start from; None: as the settings say."""
    shared: bool = False
    """Whether other runs may reuse it instead of training their own."""
    validate_stage: str = "student.validate"
    """The stage of evaluations during training."""


def train_student(context: CausalContext, training: StudentTraining) -> Artifact:
    spec = context.spec

    def make(folder: Path) -> None:
        context.release_teacher()
        model = _initial_model(context, training.start, weight_dtype(training.config))
        lora = add_lora(model, spec.student.lora, spec.seed) if spec.student.lora else None
        model = (lora.model if lora else model).to(context.device)
        setup = StudentSetup(model, use_packed_attention(model), training.budget.limit(training.config))
        _train(context, training, setup, folder)
        _save(context, lora, setup.model, folder)

    inputs = {
        **spec.model_dump(mode="json", include={"student", "seed", "chunk"}),
        "rows": spec.data.row_length,
        "training": training.config.model_dump(mode="json"),
        "tokens": training.budget.tokens,
        "energy_j": training.budget.energy_j,
        "tokenizer": context.tokenizer_identity,
        **training.inputs,
        **(context.runner.ranks_of(training.name) if training.shared else {}),
    }
    parents = {bill.key: bill for bill in [*training.parents, *_initial_weight_bills(context, training.start)]}
    return context.runner.artifact(
        training.name,
        make,
        kind="language-student",
        inputs=inputs,
        parents=list(parents.values()),
        reuse=training.shared,
    )


def _initial_weight_bills(context: CausalContext, start: StartingStudent | None) -> list[Bill]:
    """The energy of the initial weights belongs to the student's lineage, also if it is unknown."""
    student = context.spec.student
    if start is not None:
        return [start.bill]
    if student.model is not None:
        return [context.runner.input_bill("student's weights", student.model, "model", role="student")]
    if student.layers is not None or student.teacher_embeddings:
        # layers of the run's own teacher: its training keeps the role of a teacher, as if this run had trained it
        return [context.runner.input_bill("teacher", context.spec.teacher.model, "model", role="teacher")]
    return []


def _initial_model(context: CausalContext, start: StartingStudent | None, dtype: torch.dtype) -> nn.Module:
    """In the dtype of the training already: a float32 copy of a large student may not fit into memory."""
    if start is not None:
        return cast_weights(load_student(start.source), dtype)
    student = context.spec.student
    needs_teacher = student.layers or student.teacher_embeddings
    teacher = load_causal_lm(context.spec.teacher.model) if needs_teacher else None
    return cast_weights(make_student(student, teacher, context.tokenizer, context.spec.seed), dtype)


def _train(context: CausalContext, training: StudentTraining, setup: StudentSetup, folder: Path) -> None:
    data = training.make_data(setup)
    parameters = sum(weight.numel() for weight in setup.model.parameters())
    context.runner.report("student.parameters", float(parameters))
    outcome = context.runner.train(
        TrainingJob(
            stage=training.stage,
            role="student",
            model=setup.model,
            batches=data.batches,
            objective=data.objective,
            config=data.config or setup.config,
            seed=context.spec.seed,
            evaluate=lambda point: training.held_out_loss(setup.model, point),
            evaluate_stage=training.validate_stage,
            evaluate_activity="validate",
            loss_name=data.loss_name,
            preparation=data.preparation,
        ),
    )
    data.close()
    position = outcome.position
    _report_passes(context, training.stage, position.drawn / data.batches.batches_per_epoch)
    trained = {"tokens": position.tokens, "steps": position.step, "final_loss": outcome.loss}
    if outcome.budget_energy_j is not None:
        trained["budget_energy_j"] = outcome.budget_energy_j
    write_json(folder / TRAINING_FILE, trained)


def _report_passes(context: CausalContext, stage: str, passes: float) -> None:
    context.runner.report(f"{stage}.passes", passes)
    if passes > MAX_PASSES:
        context.run.warn(
            f"{stage} made {passes:.0f} passes over its rows: a student memorizes a small set, and its held-out loss "
            "rises; use more texts, more prompts, or a smaller budget"
        )


def _save(context: CausalContext, lora: LoraModel | None, model: nn.Module, folder: Path) -> None:
    state_file = context.spec.pipeline in ("kd", "self")
    weights = _gathered_weights(context, model)
    if weights is not None:
        _save_sharded(context, model, weights, folder, state_file)
        return
    if lora is not None:
        lora.wrapped.save_pretrained(str(folder / "adapter"))
    save_student(lora.merged() if lora else model, context.tokenizer, folder, state_file)


def _gathered_weights(context: CausalContext, model: nn.Module) -> dict[str, Tensor] | None:
    """All weights of a sharded student, on the first rank; None for a student that is not sharded."""
    if context.runner.ranks.world == 1 and not has_process_group():
        return None
    from joulelab.train.sharding_fsdp import gather_weights  # torch.distributed, seconds to import

    return gather_weights(model)


def _save_sharded(
    context: CausalContext, model: nn.Module, weights: dict[str, Tensor], folder: Path, state_file: bool
) -> None:
    """The first rank has the weights and writes them; the others refer to its files, instead of one copy each."""
    ranks = context.runner.ranks
    ranks.on_first(lambda: save_student(unsharded_model(model, weights), context.tokenizer, folder, state_file))
    if not ranks.is_first:
        for file in (context.run.paths.artifacts / folder.name).iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file.resolve())
    ranks.barrier()  # afterwards the first rank adds other files


# budget


@dataclass(frozen=True)
class RemainingBudget:
    """Tokens and joules that are left for one training; None: no limit."""

    tokens: int | None
    energy_j: float | None

    def limit(self, config: CausalTraining) -> CausalTraining:
        return config.model_copy(update={"max_tokens": self.tokens, "max_energy_j": self.energy_j})


def start_budget(spec: CausalSpec) -> RemainingBudget:
    """For the SFT student that others start from: its share, whatever the teacher uses, so that all can share it."""
    budget = spec.budget
    return RemainingBudget(
        tokens=None if budget.tokens is None else max(1, round(budget.tokens * budget.start_share)),
        energy_j=None if budget.energy_j is None else budget.energy_j * budget.start_share,
    )


def training_budget(context: CausalContext, parents: Iterable[Bill], start: StartingStudent | None) -> RemainingBudget:
    """What is left for student.train. Written to the run, so that a resumed attempt ends at the same point. Ranks read
    the meter at different times, so all use the first rank's numbers."""
    ranks, none = context.runner.ranks, -1.0
    left = _remaining_budget(context, parents, start) if ranks.is_first else RemainingBudget(None, None)
    tokens, energy_j = ranks.of_first([none if limit is None else limit for limit in (left.tokens, left.energy_j)])
    return RemainingBudget(None if tokens == none else int(tokens), None if energy_j == none else energy_j)


def _remaining_budget(
    context: CausalContext, parents: Iterable[Bill], start: StartingStudent | None
) -> RemainingBudget:
    file = context.run.paths.folder / BUDGET_FILE
    # The energy of earlier stages is known more exactly when a run is resumed; a budget computed
    # again would end the training at another step.
    if file.exists():
        left = read_json(file)["left"]
        return RemainingBudget(left["tokens"], left["energy_j"])
    budget = context.spec.budget
    lineage = ancestry_of([*parents, *([start.bill] if start else [])])
    teacher_j = _lineage_energy_j(context, lineage, "teacher")
    # what a named student has used earlier is on the bill, but not part of this budget
    start_j: float | None = 0.0
    if start is not None and start.budget_energy_j is not None:
        start_j = start.budget_energy_j
    elif context.spec.sft_first:
        start_j = _lineage_energy_j(context, lineage, "student")
    start_tokens = start.tokens if start else 0
    remaining = RemainingBudget(
        tokens=None if budget.tokens is None else budget.tokens - start_tokens,
        energy_j=None if budget.energy_j is None else _energy_left_j(context.spec, teacher_j, start_j),
    )
    _require_budget_left(context.spec, remaining, teacher_j, start_j)
    _report_budget(context, remaining, teacher_j, start_j, start_tokens)
    write_json(file, {"left": asdict(remaining), "teacher_energy_j": teacher_j, "start_energy_j": start_j})
    return remaining


def _energy_left_j(spec: CausalSpec, teacher_j: float | None, start_j: float | None) -> float:
    """Unknown energy cannot be subtracted, and subtracting 0 instead would favor the run."""
    used = {"SFT student": start_j, **({"teacher": teacher_j} if spec.budget.counts_teacher else {})}
    for who, used_j in used.items():
        if used_j is None:
            raise ConfigError(
                f"the energy of the {who} counts toward the budget but was not measured",
                "run that phase again on a machine with a sensor, let estimates count "
                "(training.budget_counts_estimates=true), or give the budget in tokens",
            )
    return (spec.budget.energy_j or 0.0) - sum(used_j or 0.0 for used_j in used.values())


def _lineage_energy_j(context: CausalContext, lineage: Iterable[Ancestor], role: StageRole) -> float | None:
    """None if part of it is unknown; 0 if there was no work."""
    spec = context.spec
    policy, estimates = spec.energy.total_energy_policy, spec.training.budget_counts_estimates
    metered = [one for one in lineage if one.stages]
    figures = [components_of(one) for one in metered if any(kind.role == role for kind in kinds_of(one))]
    totals = [figure.best(policy) if estimates else figure.under_policy(policy) for figure in figures]
    known = [total.energy_j for total in totals if total.energy_j is not None]
    return sum(known) if len(known) == len(totals) else None


def _require_budget_left(
    spec: CausalSpec, remaining: RemainingBudget, teacher_j: float | None, start_j: float | None
) -> None:
    if remaining.energy_j is not None and remaining.energy_j <= 0:
        teacher_counts = bool(teacher_j) and spec.budget.counts_teacher
        used = [f"the SFT student used {energy_text(start_j)}"] if start_j else []
        used += [f"the teacher {'' if used else 'used '}{energy_text(teacher_j)}"] if teacher_counts else []
        hint = ", or set budget.counts_teacher=false" if teacher_counts else ", or lower budget.start_share"
        raise ConfigError(
            f"nothing is left of the budget of {energy_text(spec.budget.energy_j)}: {', '.join(used)}",
            f"raise the budget{hint}",
        )
    if remaining.tokens is not None and remaining.tokens <= 0:
        raise ConfigError(
            f"the SFT student has used all {spec.budget.tokens:,} tokens of the budget",
            "raise budget.tokens, or lower budget.start_share; a step is never split",
        )


def _report_budget(
    context: CausalContext,
    remaining: RemainingBudget,
    teacher_j: float | None,
    start_j: float | None,
    start_tokens: int,
) -> None:
    budget, report = context.spec.budget, context.runner.report
    parts = []
    if remaining.tokens is not None:
        before = f" ({start_tokens:,} of {budget.tokens:,} used by the SFT student)" if start_tokens else ""
        parts.append(f"{remaining.tokens:,} tokens{before}")
        report("budget.tokens", float(budget.tokens or 0))
        report("budget.start_tokens", float(start_tokens))
    if remaining.energy_j is not None:
        counted = "counted" if budget.counts_teacher else "not counted"
        used = [f"SFT student {energy_text(start_j)}"] if start_tokens else []
        # in self the SFT student is the teacher, and the energy of its cache is shown too
        has_teacher = context.spec.has_teacher or teacher_j != 0
        used += [f"teacher {energy_text(teacher_j)} {counted}"] if has_teacher else []
        before = f" ({', '.join(used)})" if used else ""
        parts.append(f"{energy_text(remaining.energy_j)} of {energy_text(budget.energy_j)}{before}")
        report("budget.energy_j", budget.energy_j or 0.0)
        report("budget.teacher_counted", float(budget.counts_teacher))
        report("budget.left_energy_j", remaining.energy_j)
    context.run.progress.write(f"budget of student.train: {' and '.join(parts)}")
