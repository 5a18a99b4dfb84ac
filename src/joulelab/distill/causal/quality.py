"""Evaluation of teacher and student in the same way: held-out tokens, exact answers, tasks of lm-evaluation-harness.

The teacher is evaluated once for all runs of a store. A student is evaluated in its own run and compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from joulelab.data import sources
from joulelab.data.chat.encoding import DocumentStore, vocab_size_of
from joulelab.data.chat.packing import CausalBatch, PackedRows, pack
from joulelab.data.chat.token_alignment import TokenBytes
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.models import (
    TEST,
    TRAIN,
    VALIDATION,
    CausalContext,
    lm_head_weight,
    load_student,
    packed_attention,
)
from joulelab.distill.causal.teacher import StartingStudent
from joulelab.distill.runner import StageSpec
from joulelab.errors import ConfigError
from joulelab.evaluate.exact_answers import grade_answers, graded_items, read_questions
from joulelab.evaluate.harness import TaskFigure, harness_figures, import_harness, require_tasks
from joulelab.evaluate.language import HeldOutPredictions, held_out_tokens, no_better_than_guessing, unigram_loss
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import Result
from joulelab.stats import wilson
from joulelab.train.optim import float32_matmul_precision
from joulelab.train.parallel import gathered
from joulelab.train.training_session import EvaluationPoint

ANSWERS, HARNESS = "answers.json", "harness.json"
_OF_TOKENS = ("clm_loss", "clm_loss.perplexity", "next_token")
"""Figures per token, which two tokenizers do not share."""
_COUNT_CHUNK = 2**22  # tokens; a multiple of 8, because the trained mask is stored in bits


@dataclass(frozen=True, eq=False)
class Evaluation:
    held_out: HeldOutPredictions
    right: tuple[bool, ...]
    """For each answer; empty if no task with exact answers was set."""
    tasks: tuple[TaskFigure, ...]
    chance: float | None = None
    """Share of right answers by random choice; None without choices."""
    items: tuple[dict[str, Any], ...] = ()
    """Question, expected and given answer of each."""
    held_out_bytes: int | None = None
    """Bytes of the held-out text, if teacher and student have different tokenizers: loss per token is then a different
    quantity for each, and loss per byte is not."""

    def save(self, folder: Path) -> None:
        self.held_out.save(folder)
        answers = {"right": list(self.right), "chance": self.chance, "items": list(self.items)}
        write_json(folder / ANSWERS, {**answers, "held_out_bytes": self.held_out_bytes})
        write_json(folder / HARNESS, {"tasks": [vars(figure) for figure in self.tasks]})

    @classmethod
    def load(cls, folder: Path) -> Evaluation:
        tasks, answers = read_json(folder / HARNESS)["tasks"], read_json(folder / ANSWERS)
        return cls(
            HeldOutPredictions.load(folder),
            tuple(answers["right"]),
            tuple(TaskFigure(**figure) for figure in tasks),
            answers.get("chance"),
            tuple(answers.get("items", ())),
            answers.get("held_out_bytes"),
        )

    @property
    def bits_per_byte(self) -> float | None:
        if not self.held_out_bytes:
            return None
        return self.held_out.loss * self.held_out.tokens / self.held_out_bytes / math.log(2)

    def results(self) -> dict[str, Result]:
        held_out = self.held_out
        results = {
            "clm_loss": Result(value=held_out.loss, lower_is_better=True),
            "clm_loss.perplexity": Result(value=held_out.perplexity, lower_is_better=True),
            "next_token": Result(value=held_out.right / max(1, held_out.tokens)),
        }
        if self.bits_per_byte is not None:
            results["bits_per_byte"] = Result(value=self.bits_per_byte, lower_is_better=True)
        if self.right:
            count, right = len(self.right), sum(self.right)
            results["exact_answers"] = Result(value=right / count, trials=count, successes=right)
        for task in self.tasks:
            results[f"harness.{task.task}.{task.metric}.value"] = task.result()
        return results


def evaluate_model(
    context: CausalContext, role: str, data: Artifact, load: Callable[[], nn.Module], bill: Bill, reuse: bool = False
) -> Evaluation:
    """Evaluate a saved model; `load` is called only if there is no evaluation of it yet.

    The held-out loss comes first: a teacher that it rules out is not asked any questions.
    """
    spec, quality, runner = context.spec, context.spec.quality, context.runner
    tokenizer = context.teacher_tokenizer if role == "teacher" else context.tokenizer

    def make(folder: Path) -> None:
        if quality.harness_tasks:
            import_harness()  # outside the stage: its import is not billed
        precision = "fp32" if role == "teacher" else spec.training.precision
        with (
            runner.stage(StageSpec(f"{role}.evaluate", role, "evaluate")) as stage,
            float32_matmul_precision(precision),
        ):
            model = load()  # inside the stage: runs that reuse the evaluation inherit the energy of loading
            held_out = _held_out(context, model, _test_rows(context, data), precision, tokenizer)
            stage.count(tokens=held_out.tokens)
        if role == "teacher":
            require_better_than_unigram(context, held_out, data)
        answers: dict[str, Any] = {}
        tasks: list[TaskFigure] = []
        if quality.answers:
            with (
                runner.stage(StageSpec(f"{role}.tasks-evaluate", role, "evaluate")) as stage,
                float32_matmul_precision(precision),
            ):
                answers = _exact_answers(context, model, stage, tokenizer)
        for task in quality.harness_tasks:
            with (
                runner.stage(StageSpec(f"{role}.{task}-evaluate", role, "evaluate")) as stage,
                float32_matmul_precision(precision),
            ):
                found = _harness(context, model, task, tokenizer)
                stage.count(samples=max((figure.items for figure in found), default=0))
            tasks += found
        right, items = tuple(answers.get("right", ())), tuple(answers.get("items", ()))
        size = held_out_bytes(context, data, tokenizer)
        Evaluation(held_out, right, tuple(tasks), answers.get("chance"), items, size).save(folder)

    settings: dict[str, Any] = quality.model_dump(mode="json", exclude={"against_teacher", "answers", "harness_folder"})
    answers = sources.parse(quality.answers).path if quality.answers else None
    task_files = _harness_folder(spec) if quality.harness_tasks else None
    inputs = {
        **settings,
        "answers": None if answers is None else sources.content_hash(answers),
        "harness_files": None if task_files is None else sources.content_hash(task_files),
        "rows": spec.data.row_length,
        "precision": context.teacher_precision_key if role == "teacher" else spec.training.precision,
    }
    parents = [bill, data.bill]
    if quality.answers:
        parents.append(runner.input_bill("questions", quality.answers, "text", role="data"))
    made = runner.artifact(f"{role}-quality", make, kind="quality", inputs=inputs, parents=parents, reuse=reuse)
    return Evaluation.load(made.folder)


def held_out_loss(context: CausalContext, data: Artifact) -> Callable[[nn.Module, EvaluationPoint], float]:
    """For evaluations during training: on validation documents, where the user has some."""
    rows = context.rows(data, VALIDATION if (data.folder / VALIDATION).is_dir() else TEST)

    def evaluate(model: nn.Module, point: EvaluationPoint) -> float:
        predictions = _held_out(context, model, rows, context.spec.training.precision, context.tokenizer)
        point.stage.count(tokens=point.evaluations * predictions.tokens)
        return predictions.loss

    return evaluate


def check_questions(spec: CausalSpec) -> None:
    """Read the questions of the evaluation before training, so that an error in them does not show up hours later."""
    quality = spec.quality
    if quality.answers and sources.parse(quality.answers).kind != "sample":
        read_questions(quality.answers, quality.answer_items, chat=False)
    if quality.harness_tasks:
        require_tasks(quality.harness_tasks, _harness_folder(spec))


def _harness_folder(spec: CausalSpec) -> Path | None:
    folder = spec.quality.harness_folder
    return Path(folder) if folder else None


def held_out_bytes(context: CausalContext, data: Artifact, tokenizer: Any) -> int | None:
    """None if teacher and student have the same tokenizer."""
    if context.teacher_tokenizer is context.tokenizer:
        return None
    tokens, documents = TokenBytes.of(tokenizer), context.documents(data, TEST)
    return sum(tokens.text_bytes(documents.document(number)) for number in range(len(documents)))


def _test_rows(context: CausalContext, data: Artifact) -> PackedRows:
    """Documents in the tokens of another tokenizer may be longer than a row; they are not split."""
    documents = context.documents(data, TEST)
    longest = int(documents.lengths.max()) if context.teacher_tokenizer is not context.tokenizer else 0
    return pack(documents, max(context.spec.data.row_length, longest), seed=0)


def _exact_answers(context: CausalContext, model: nn.Module, stage: Stage, tokenizer: Any) -> dict[str, Any]:
    """As `joulelab evaluate --data` stores them."""
    quality = context.spec.quality
    assert quality.answers is not None
    chat = bool(getattr(tokenizer, "chat_template", None))
    questions = read_questions(quality.answers, quality.answer_items, chat)
    graded = grade_answers(
        model, tokenizer, questions,
        max_new_tokens=quality.answer_tokens, tick=context.runner.counter(stage), grader=quality.grader,
    )  # fmt: skip
    return graded_items(questions, graded)


def _harness(context: CausalContext, model: nn.Module, task: str, tokenizer: Any) -> list[TaskFigure]:
    quality = context.spec.quality
    return harness_figures(
        model, tokenizer, [task],
        folder=_harness_folder(context.spec), limit=quality.harness_limit,
        batch_size=context.spec.eval_batch_size, device=context.device,
        chat=quality.harness_chat_template and bool(getattr(tokenizer, "chat_template", None)),
    )  # fmt: skip


def _held_out(
    context: CausalContext, model: nn.Module, rows: PackedRows, precision: str, tokenizer: Any
) -> HeldOutPredictions:
    attention = packed_attention(model)

    def hidden_of(batch: CausalBatch) -> Any:
        return model(**attention.inputs(batch), hidden_only=True)

    return held_out_tokens(
        model, hidden_of, gathered(lm_head_weight(model)).detach(), rows,
        batch_size=context.spec.eval_batch_size, chunk=context.spec.chunk, device=context.device, precision=precision,
        words=vocab_size_of(tokenizer), tick=lambda batch: context.run.stop.check(),
    )  # fmt: skip


# the unigram baseline: the loss of guessing by token frequency


def require_better_than_unigram(context: CausalContext, teacher: HeldOutPredictions, data: Artifact) -> None:
    """A teacher that knows token frequencies only would teach these at the energy of a teacher."""
    baseline = unigram_baseline(context, data)
    if not teacher.loss < baseline:
        raise ConfigError(
            f"the teacher {context.spec.teacher.model} has a held-out loss of {teacher.loss:.3f} nats per "
            f"token; guessing by token frequency has {baseline:.3f}",
            "its weights are probably untrained, or belong to another tokenizer: use another teacher, or skip this "
            "check with quality.against_teacher=false",
        )


def warn_if_guessing(context: CausalContext, student: Evaluation, data: Artifact) -> None:
    """A student is not refused, because the budget may be small on purpose; but the record has to show it."""
    problem = no_better_than_guessing(student.held_out.loss, unigram_baseline(context, data))
    if problem is not None:
        context.run.warn(problem)
    flag_chance_answers(context, "student", student)


def flag_chance_answers(context: CausalContext, role: str, own: Evaluation) -> None:
    """A warning if the exact answers are not significantly better than random choices."""
    if own.chance is None or not own.right:
        return
    interval = wilson(sum(own.right), len(own.right))
    if interval.low <= own.chance:
        context.run.warn(
            f"the {role} is at chance level in exact answers: {sum(own.right)} of {len(own.right)} correct (95 % "
            f"interval {100 * interval.low:.1f} to {100 * interval.high:.1f} %), random choices give "
            f"{100 * own.chance:.1f} %"
        )


def unigram_baseline(context: CausalContext, data: Artifact, name: str = "data.unigram_loss") -> float:
    """Held-out loss of the training tokens' frequencies; computed once, because it reads all tokens."""
    if data.key not in context.unigram_losses:
        store, held_out = context.documents(data, TRAIN), context.documents(data, TEST)
        counts_V = trained_counts(store, store.attributes["vocab_size"])
        documents = [held_out.document(number) for number in range(len(held_out))]
        targets = np.concatenate([document.ids[1:][document.trained[1:]] for document in documents])
        context.unigram_losses[data.key] = unigram_loss(counts_V, targets)
        if store.attributes["tokenizer"] == context.spec.tokenizer:  # not in the tokens of another teacher
            context.runner.report(name, context.unigram_losses[data.key])
    return context.unigram_losses[data.key]


def trained_counts(store: DocumentStore, vocabulary: int) -> NDArray[np.int64]:
    """How often each token is a target; tokens of questions and templates are not predicted."""
    counts_V = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, store.tokens_total, _COUNT_CHUNK):
        items = slice(start, min(start + _COUNT_CHUNK, store.tokens_total))
        counts_V += np.bincount(store.tokens[items][store.bits("trained", items)], minlength=vocabulary)
    return counts_V


def report_start(
    context: CausalContext, data: Artifact, start: StartingStudent, own: Evaluation, teacher: Evaluation | None
) -> None:
    """Loss and agreement of the student that training started from: whether the method itself has improved them."""
    before = _held_out_in_stage(
        context, "start", data, lambda: load_student(start.source).to(context.device), [start.bill, data.bill]
    )
    context.runner.report("student.start.clm_loss", before.loss, lower_is_better=True)
    change = own.held_out.loss - before.loss
    text = (
        f"student: {abs(change):.3f} nats per held-out token {'below' if change < 0 else 'above'} the student that it "
        f"started from ({before.loss:.3f} nats"
    )
    if teacher is not None and own.bits_per_byte is None:
        agreement = before.agreement(teacher.held_out)
        context.runner.report("student.start.agreement", agreement)
        text += f", agreement with the teacher {100 * agreement:.1f} %"
    context.run.progress.write(f"{text})")


def report_completions(
    context: CausalContext, completions: Artifact, load: Callable[[], nn.Module], student: Bill
) -> None:
    """The student's loss on completions of the teacher that it was not trained on: what it has learned of the teacher,
    also where the teacher's texts differ from the data."""
    if not (completions.folder / TEST).is_dir():
        return
    loss = _held_out_in_stage(context, "completions", completions, load, [student, completions.bill]).loss
    unigram = unigram_baseline(context, completions, "synthetic.unigram_loss")
    context.runner.report("student.completions.clm_loss", loss, lower_is_better=True)
    context.run.progress.write(
        f"student: {loss:.3f} nats per token of the teacher's held-out completions (unigram baseline {unigram:.3f})"
    )


def _held_out_in_stage(
    context: CausalContext, name: str, texts: Artifact, load: Callable[[], nn.Module], parents: list[Bill]
) -> HeldOutPredictions:
    """Predictions on the test documents of `texts`, in the stage student.NAME-evaluate."""
    precision = context.spec.training.precision

    def work(folder: Path, stage: Stage) -> None:
        with float32_matmul_precision(precision):
            held_out = _held_out(context, load(), context.rows(texts, TEST), precision, context.tokenizer)
        stage.count(tokens=held_out.tokens)
        held_out.save(folder)

    made = context.runner.make(
        f"{name}-quality", StageSpec(f"student.{name}-evaluate", "student", "evaluate"), work, kind="quality",
        inputs={"rows": context.spec.data.row_length, "precision": precision}, parents=parents, reuse=False,
    )  # fmt: skip
    return HeldOutPredictions.load(made.folder)


def report_quality(
    run: RunContext, role: str, own: Evaluation, teacher: Evaluation | None = None, *, unigram: float
) -> None:
    """`unigram` is the loss of guessing by token frequency, printed next to the model's own."""
    results = own.results()
    for name, result in results.items():
        run.result(f"{role}.{name}", result)
    if own.right:
        run.result(f"{role}.exact_answers.items", Result(value=float(len(own.right))))
    if own.chance is not None:
        run.result(f"{role}.exact_answers.chance", Result(value=own.chance))
    for task in own.tasks:
        run.result(f"{role}.harness.{task.task}.{task.metric}.items", Result(value=float(task.items)))
    held_out = own.held_out
    text = (
        f"{role}: {held_out.loss:.3f} nats per held-out token (unigram baseline {unigram:.3f}), perplexity "
        f"{held_out.perplexity:.1f}"
    )
    if own.right:
        text += f", {sum(own.right)} of {len(own.right)} exact answers"
    if own.chance is not None:
        text += f" (chance {100 * own.chance:.0f} %)"
    if teacher is not None:
        for name, result in teacher.results().items():
            is_of_tokens = own.bits_per_byte is not None and name in _OF_TOKENS
            if name in results and result.value and not is_of_tokens:
                ratio, lower = results[name].value / result.value, result.lower_is_better
                run.result(f"{role}.{name}.over_teacher", Result(value=ratio, lower_is_better=lower))
        if own.bits_per_byte is None or teacher.bits_per_byte is None:
            agreement = own.held_out.agreement(teacher.held_out)
            run.result(f"{role}.agreement", Result(value=agreement, trials=own.held_out.tokens))
            text += f"; most likely token equals the teacher's at {100 * agreement:.1f} % of positions"
        else:
            text += f"; {own.bits_per_byte:.3f} bits per byte, the teacher {teacher.bits_per_byte:.3f}"
    run.progress.write(text)
