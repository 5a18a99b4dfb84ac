"""The pipeline `squad`: windows, teacher, student, exact match and F1.

data.preprocess -> teacher.train -> teacher.evaluate -> student.train -> student.evaluate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from joulelab.data.squad.windows import (
    SquadBatches,
    SquadFeatures,
    iterate_in_order,
    load_questions,
    open_features,
    takes_token_types,
)
from joulelab.distill.runner import Runner, run_recipe
from joulelab.distill.squad.config import SquadSpec
from joulelab.distill.squad.data import prepare_windows
from joulelab.distill.squad.objective import (
    ANSWERS_ONLY,
    SpanObjective,
    keep_layers,
    load_qa_model,
    require_same_tokens,
    require_student_layers,
    require_windows_fit,
)
from joulelab.errors import refuse_all
from joulelab.evaluate.squad_metrics import SearchLimits, SquadScores, find_answers, load_results, score_tokens
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext, Stage
from joulelab.train.config import TrainingConfig
from joulelab.train.fp8_products import check_products
from joulelab.train.optim import compile_in_place
from joulelab.train.training_session import EvaluationPoint, TrainingJob
from joulelab.zoo.pretrained import load_tokenizer, save_hf

_TEXTS_COMPARED = 20  # enough to find two tokenizers that share a vocabulary but not the casing


def run_squad(run: RunContext) -> None:
    run_recipe(run, SquadRecipe)


def model_checks(spec: SquadSpec) -> Iterator[Callable[[], object]]:
    """Check what the models' configurations and tokenizers show, before a run starts."""
    student, teacher = spec.student.model, spec.teacher.model
    for model in dict.fromkeys([student, *([teacher] if spec.has_teacher else [])]):
        yield lambda model=model: require_windows_fit(model, spec.data.max_seq_length)  # type: ignore[misc]
    yield lambda: require_student_layers(student, spec.student.layers)
    yield lambda: check_products(spec.device, spec.trainings)
    if spec.has_teacher:
        yield lambda: require_same_tokens(teacher, student, [])


class SquadRecipe:
    def __init__(self, runner: Runner[SquadSpec]) -> None:
        self.runner = runner
        self.spec = runner.spec

    def check(self) -> None:
        refuse_all(model_checks(self.spec))

    def data(self) -> Artifact:
        return prepare_windows(self.runner)

    def teacher(self, data: Artifact) -> Artifact:
        """Fine-tuned here, or copied as it is: either way a folder in Hugging Face format with its bill."""
        config = self.spec.teacher
        questions = load_questions(data.folder / "validation")[:_TEXTS_COMPARED]
        require_same_tokens(config.model, self.spec.student.model, [question.context for question in questions])
        pretrained = self.runner.input_bill("pretrained teacher", config.model, "model", role="teacher")
        if config.fine_tune:
            teacher = self._fine_tuned(data, [pretrained, data.bill])
        else:
            inputs = config.model_dump(mode="json", include={"model", "fine_tune"})
            teacher = self.runner.artifact(
                "teacher", self._copy_teacher, kind="qa-teacher", inputs=inputs, parents=[pretrained]
            )
        if not teacher.reused:  # the run that made it has its scores
            self._report_scores("teacher", data, teacher)
        return teacher

    def _fine_tuned(self, data: Artifact, parents: list[Bill]) -> Artifact:
        config = self.spec.teacher

        def job() -> TrainingJob:
            model = load_qa_model(config.model, config.seed)
            objective = SpanObjective(ANSWERS_ONLY, takes_token_types(model))
            return self._job("teacher", model, data, objective, config.training, config.seed)

        return self.runner.train_model(
            "teacher", job, lambda model, folder: save_hf(model, load_tokenizer(config.model), folder),
            kind="qa-teacher", inputs=config.model_dump(mode="json"), parents=parents, reuse=True,
        )  # fmt: skip

    def _copy_teacher(self, folder: Path) -> None:
        config = self.spec.teacher
        save_hf(load_qa_model(config.model, config.seed, require_head=True), load_tokenizer(config.model), folder)

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        config, seed = self.spec.student, self.spec.seed

        def job() -> TrainingJob:
            model = keep_layers(load_qa_model(config.model, seed), config.layers)
            live = self._live_teacher(teacher) if teacher is not None else None
            objective = SpanObjective(self.spec.distill, takes_token_types(model), live)
            return self._job("student", model, data, objective, self.spec.training, seed)

        return self.runner.train_model(
            "final_model", job, lambda model, folder: save_hf(model, load_tokenizer(config.model), folder),
            kind="student",
            inputs=self.spec.model_dump(mode="json", include={"student", "distill", "training", "seed"}),
            parents=[
                data.bill,
                self.runner.input_bill("pretrained student", config.model, "model", role="student"),
                *([teacher.bill] if teacher else []),
            ],
        )  # fmt: skip

    def _live_teacher(self, teacher: Artifact) -> nn.Module:
        model = self._load(teacher).requires_grad_(False)
        compile_in_place(model, self.spec.training.compile)
        return model

    def _job(
        self, role: str, model: nn.Module, data: Artifact, objective: SpanObjective, config: TrainingConfig, seed: int
    ) -> TrainingJob:
        model = model.to(self.runner.device)
        return TrainingJob(
            stage=f"{role}.train",
            role=role,
            model=model,
            batches=SquadBatches(open_features(data.folder / "train"), config.batch_size, seed),
            objective=objective,
            config=config,
            seed=seed,
            evaluate=self._held_out_loss(model, data),
            evaluate_stage=f"{role}.evaluate",
        )

    def _held_out_loss(self, model: nn.Module, data: Artifact) -> Callable[[EvaluationPoint], float]:
        """Mean loss of the marked answers on the validation windows, for evaluations during training."""
        objective = SpanObjective(ANSWERS_ONLY, takes_token_types(model))

        @torch.no_grad()
        def evaluate(point: EvaluationPoint) -> float:
            loss, count, samples, tokens = 0.0, 0, 0, 0
            for _, batch in iterate_in_order(open_features(data.folder / "validation"), self.spec.eval_batch_size):
                output = objective(model, batch.to(self.runner.device), lambda name: nullcontext())
                loss, count = loss + float(output.loss_sum), count + output.count
                samples, tokens = samples + batch.samples, tokens + batch.tokens
            point.stage.count(samples=point.evaluations * samples, tokens=point.evaluations * tokens)
            return loss / count

        return evaluate

    def evaluate(self, data: Artifact, student: Artifact, teacher: Artifact | None) -> None:
        self._report_scores("student", data, student)

    def _report_scores(self, role: str, data: Artifact, model: Artifact) -> None:
        features = open_features(data.folder / self.spec.data.splits[-1])
        made = self.runner.evaluate(
            f"{role}-predictions", role, lambda stage: self._scores(model, features, stage),
            kind="squad-predictions",
            inputs=self.spec.evaluation.model_dump(mode="json"),
            parents=[model.bill, data.bill],
            total=lambda: len(features),
        )  # fmt: skip
        results = load_results(made.folder)
        for name, result in results.items():
            self.runner.run.result(f"{role}.{name}", result)
        exact, f1 = results["exact_match"], results["f1"]
        if self.spec.data.is_own and not exact.successes:
            self.runner.run.warn(
                f"the {role} answers 0 of {exact.trials} held-out questions correctly: it has learned nothing"
            )
        self.runner.run.progress.write(
            f"{role}: exact match {100 * exact.value:.1f} %, F1 {100 * f1.value:.1f} % on {exact.trials} questions"
        )

    def load_student(self, data: Artifact, student: Artifact) -> nn.Module:
        return self._load(student)

    def _load(self, model: Artifact) -> nn.Module:
        return load_qa_model(str(model.folder), 0, require_head=True).to(self.runner.device)

    def _scores(self, model: Artifact, features: SquadFeatures, stage: Stage) -> SquadScores:
        config, device = self.spec.evaluation, self.runner.device
        scores = score_tokens(
            self._load(model), features, self.spec.eval_batch_size, device, self.runner.counter(stage)
        )
        questions = load_questions(features.folder)
        limits = SearchLimits(config.n_best_size, config.max_answer_length)
        candidates = find_answers(features, questions, scores, limits)
        return SquadScores(questions, candidates, self.spec.data.version_2, config.null_score_diff_threshold)
