"""Quality, asked the same way of teacher and student: held-out tokens, exact answers, tasks of lm-evaluation-harness.

The teacher is asked once for all runs of a store; a student is asked about itself alone, and set beside the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from joulelab.data import sources
from joulelab.data.chat.attention import use_packed_attention
from joulelab.data.chat.encoding import DocumentStore
from joulelab.data.chat.packing import CausalBatch, PackedRows
from joulelab.data.inputs import input_bill
from joulelab.distill.causal.context import TEST, TRAIN, CausalContext
from joulelab.distill.causal.models import lm_head_weight
from joulelab.distill.runner import progress_counter
from joulelab.errors import ConfigError
from joulelab.evaluate.exact_answers import chance_level, grade_answers, read_questions
from joulelab.evaluate.harness import TaskFigure, harness_figures, import_harness, require_tasks
from joulelab.evaluate.language import HeldOutPredictions, held_out_tokens, no_better_than_guessing, unigram_loss
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.record import Result
from joulelab.runs.storage import read_json, write_json
from joulelab.train.optim import float32_matmul_precision
from joulelab.train.training_session import EvaluationPoint

ANSWERS, HARNESS = "answers.json", "harness.json"
_COUNT_CHUNK = 2**22  # a multiple of 8, as the marks of eight tokens share a byte


@dataclass(frozen=True, eq=False)
class Evaluation:
    held_out: HeldOutPredictions
    right: tuple[bool, ...]
    """Answer by answer; empty where no such task was asked for."""
    tasks: tuple[TaskFigure, ...]
    chance: float | None = None
    """Share of right answers that blind choosing would have; none where there are no choices."""

    def save(self, folder: Path) -> None:
        self.held_out.save(folder)
        write_json(folder / ANSWERS, {"right": list(self.right), "chance": self.chance})
        write_json(folder / HARNESS, {"tasks": [vars(figure) for figure in self.tasks]})

    @classmethod
    def load(cls, folder: Path) -> Evaluation:
        tasks, answers = read_json(folder / HARNESS)["tasks"], read_json(folder / ANSWERS)
        return cls(
            HeldOutPredictions.load(folder),
            tuple(answers["right"]),
            tuple(TaskFigure(**figure) for figure in tasks),
            answers.get("chance"),
        )

    def figures(self) -> dict[str, Result]:
        held = self.held_out
        found = {
            "clm_loss": Result(value=held.loss, lower_is_better=True),
            "clm_loss.perplexity": Result(value=held.perplexity, lower_is_better=True),
            "next_token": Result(value=held.right / max(1, held.tokens)),
        }
        if self.right:
            count, right = len(self.right), sum(self.right)
            found["exact_answers"] = Result(value=right / count, trials=count, successes=right)
        for task in self.tasks:
            name = f"harness.{task.task}.{task.metric}.value"
            found[name] = Result(
                value=task.value,
                trials=len(task.scores) if task.right_or_wrong else None,
                successes=round(sum(task.scores.values())) if task.right_or_wrong else None,
                lower_is_better=task.lower_is_better,
                standard_error=task.standard_error,
            )
        return found


def evaluate_model(
    bench: CausalContext, who: str, data: Artifact, load: Callable[[], nn.Module], bill: Bill, reuse: bool = False
) -> Evaluation:
    """Of a model as it was saved; `load` is called only where it must answer."""

    def make(folder: Path) -> None:
        if bench.spec.quality.harness_tasks:
            import_harness()  # importing it is no part of the bill
        precision = "fp32" if who == "teacher" else bench.spec.training.precision
        examining = bench.run.stage(f"{who}.evaluate", role=who, activity="evaluate")
        with examining as stage, float32_matmul_precision(precision):
            model = load()  # in the stage: whoever finds the answers inherits what loading took
            held_out = _held_out(bench, model, bench.rows(data, TEST), precision)
            stage.count(tokens=held_out.tokens)
        right: tuple[bool, ...] = ()
        chance: float | None = None
        tasks: tuple[TaskFigure, ...] = ()
        if bench.spec.quality.answers or bench.spec.quality.harness_tasks:
            answering = bench.run.stage(f"{who}.tasks-evaluate", role=who, activity="evaluate")
            with answering as stage, float32_matmul_precision(precision):
                right, chance = _answers(bench, model, stage)
                tasks = _harness(bench, model)
        Evaluation(held_out, right, tasks, chance).save(folder)

    spec = bench.spec
    asked: dict[str, Any] = spec.quality.model_dump(
        mode="json", exclude={"against_teacher", "answers", "harness_folder"}
    )
    answers = sources.parse(spec.quality.answers).path if spec.quality.answers else None
    task_files = _harness_folder(bench) if spec.quality.harness_tasks else None
    inputs = {
        **asked,
        "answers": None if answers is None else sources.content_hash(answers),
        "harness_files": None if task_files is None else sources.content_hash(task_files),
        "rows": spec.data.row_length,
        "precision": str(bench.teacher_precision) if who == "teacher" else spec.training.precision,
    }
    parents = [bill, data.bill]
    if spec.quality.answers:
        parents.append(input_bill(bench.run, "questions", spec.quality.answers, "text", role="data"))
    made = bench.run.artifact(f"{who}-quality", kind="quality", inputs=inputs, parents=parents, make=make, reuse=reuse)
    return Evaluation.load(made.folder)


def check_questions(bench: CausalContext) -> None:
    """What is asked when training is over is looked at before it begins: a slip would be told hours later."""
    quality = bench.spec.quality
    if quality.answers and sources.parse(quality.answers).kind != "sample":
        read_questions(quality.answers, quality.answer_items, chat=False)
    if quality.harness_tasks:
        require_tasks(quality.harness_tasks, _harness_folder(bench))


def _harness_folder(bench: CausalContext) -> Path | None:
    named = bench.spec.quality.harness_folder
    return Path(named) if named else None


def held_out_loss(bench: CausalContext, data: Artifact) -> Callable[[nn.Module, EvaluationPoint], float]:
    """For looks on the way of a training."""
    rows = bench.rows(data, TEST)

    def look(model: nn.Module, point: EvaluationPoint) -> float:
        found = _held_out(bench, model, rows, bench.spec.training.precision)
        point.stage.count(tokens=point.evaluations * found.tokens)
        return found.loss

    return look


def _answers(bench: CausalContext, model: nn.Module, stage: Stage) -> tuple[tuple[bool, ...], float | None]:
    """Which were right, and how many would be by chance."""
    quality = bench.spec.quality
    if not quality.answers:
        return (), None
    chat = bool(getattr(bench.tokenizer, "chat_template", None))
    questions = read_questions(quality.answers, quality.answer_items, chat)
    right = grade_answers(
        model, bench.tokenizer, questions,
        batch_size=bench.spec.eval_batch_size, max_new_tokens=quality.answer_tokens,
        tick=progress_counter(bench.run, stage),
    )  # fmt: skip
    return tuple(right), chance_level(questions)


def _harness(bench: CausalContext, model: nn.Module) -> tuple[TaskFigure, ...]:
    quality = bench.spec.quality
    if not quality.harness_tasks:
        return ()
    figures = harness_figures(
        model, bench.tokenizer, quality.harness_tasks,
        folder=_harness_folder(bench), limit=quality.harness_limit,
        batch_size=bench.spec.eval_batch_size, device=bench.device,
    )  # fmt: skip
    return tuple(figures)


def _held_out(bench: CausalContext, model: nn.Module, rows: PackedRows, precision: str) -> HeldOutPredictions:
    attention = use_packed_attention(model)

    def hidden_of(batch: CausalBatch) -> Any:
        return model(**attention.inputs(batch), hidden_only=True)

    return held_out_tokens(
        model, hidden_of, lm_head_weight(model).detach(), rows,
        batch_size=bench.spec.eval_batch_size, chunk=bench.spec.chunk, device=bench.device, precision=precision,
        words=bench.words, tick=lambda batch: bench.run.stop.check(),
    )  # fmt: skip


def require_better_than_unigram(bench: CausalContext, teacher: Evaluation, data: Artifact) -> None:
    """A teacher that knows no more than word frequencies teaches those at the price of a teacher."""
    by_frequency = unigram_baseline(bench, data)
    if not teacher.held_out.loss < by_frequency:
        raise ConfigError(
            f"the teacher {bench.spec.teacher.model} has a held-out loss of {teacher.held_out.loss:.3f} nats per "
            f"token; guessing by frequency alone has {by_frequency:.3f}",
            "its weights are probably untrained, or of another tokenizer: name another teacher, or take it as it is "
            "with quality.against_teacher=false",
        )


def warn_if_guessing(bench: CausalContext, student: Evaluation, data: Artifact) -> None:
    """A student is not refused, as its user may have asked for little; that it knows nothing must be seen."""
    problem = no_better_than_guessing(student.held_out.loss, unigram_baseline(bench, data))
    if problem is not None:
        bench.run.warn(problem)


def unigram_baseline(bench: CausalContext, data: Artifact) -> float:
    """Of the held-out tokens, by how often each word is to be learnt; counted once, as it takes a pass over all."""
    if data.key not in bench.guessing:
        counts_V = trained_counts(bench.documents(data, TRAIN), bench.words)
        held_out = bench.documents(data, TEST)
        documents = [held_out.document(number) for number in range(len(held_out))]
        targets = np.concatenate([document.ids[1:][document.trained[1:]] for document in documents])
        bench.guessing[data.key] = unigram_loss(counts_V, targets)
        bench.run.result("data.unigram_loss", Result(value=bench.guessing[data.key]))
    return bench.guessing[data.key]


def trained_counts(store: DocumentStore, words: int) -> NDArray[np.int64]:
    """How often each word is to be learnt; a question's words and a template's are read, and not guessed."""
    counts_V = np.zeros(words, dtype=np.int64)
    for start in range(0, store.tokens_total, _COUNT_CHUNK):
        items = slice(start, min(start + _COUNT_CHUNK, store.tokens_total))
        counts_V += np.bincount(store.tokens[items][store.bits("trained", items)], minlength=words)
    return counts_V


def report_quality(run: RunContext, who: str, found: Evaluation, teacher: Evaluation | None = None) -> None:
    figures = found.figures()
    for name, figure in figures.items():
        run.result(f"{who}.{name}", figure)
    if found.right:
        run.result(f"{who}.exact_answers.items", Result(value=float(len(found.right))))
    if found.chance is not None:
        run.result(f"{who}.exact_answers.chance", Result(value=found.chance))
    for task in found.tasks:
        run.result(f"{who}.harness.{task.task}.{task.metric}.items", Result(value=float(task.items)))
    said = f"{who}: {found.held_out.loss:.3f} nats per held-out token, perplexity {found.held_out.perplexity:.1f}"
    if found.right:
        said += f", {sum(found.right)} of {len(found.right)} exact answers"
    if found.chance is not None:
        said += f" (chance {100 * found.chance:.0f} %)"
    if teacher is not None:
        agreement = found.held_out.agreement(teacher.held_out)
        run.result(f"{who}.agreement", Result(value=agreement, trials=found.held_out.tokens))
        for name, figure in teacher.figures().items():
            if name in figures and figure.value:
                ratio, lower = figures[name].value / figure.value, figure.lower_is_better
                run.result(f"{who}.{name}.over_teacher", Result(value=ratio, lower_is_better=lower))
        said += f"; it would write the teacher's token in {100 * agreement:.1f} % of places"
    run.progress.say(said)
