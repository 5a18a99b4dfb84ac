"""The pipeline `squad`, as a story of stages: windows, teacher, student, quality."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import nn

from joulelab.data.inputs import input_bill
from joulelab.data.squad.questions import SYNTHETIC
from joulelab.data.squad.windows import (
    SquadBatches,
    WindowShape,
    iterate_in_order,
    load_questions,
    make_windows,
    open_features,
    takes_token_types,
    write_features,
)
from joulelab.distill.qa_config import SquadSpec
from joulelab.distill.qa_models import keep_layers, load_qa_model, require_same_tokens
from joulelab.distill.qa_objective import ANSWERS_ONLY, SpanObjective
from joulelab.distill.ticking import ticks
from joulelab.evaluate.squad_metrics import SearchLimits, SquadScores, find_answers, load_results, score_tokens
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.train.budget import require_joules
from joulelab.train.config import TrainingConfig
from joulelab.train.devices import device_of
from joulelab.train.optim import compile_in_place
from joulelab.train.training_session import EvaluationPoint, TrainingJob, train_in_run
from joulelab.zoo.pretrained import import_models, load_tokenizer, save_hf, weights_identity

_TEXTS_COMPARED = 20  # enough to notice two tokenizers that share a vocabulary but not the casing


def run_squad(run: RunContext) -> None:
    lab = _Lab(run, cast(SquadSpec, run.spec))
    require_joules(run, lab.spec.teacher.training if lab.spec.distill.needs_teacher else None, lab.spec.training)
    data = lab.windows()
    import_models()
    teacher = None
    if lab.spec.distill.needs_teacher:
        teacher = lab.teacher(data)
        if not teacher.reused:  # the run that made it has its scores, and paid for them once
            lab.evaluate("teacher", teacher, data)
    lab.evaluate("student", lab.student(data, teacher), data)


class _Lab:
    """One run's stages; each finds or makes one artefact."""

    def __init__(self, run: RunContext, spec: SquadSpec) -> None:
        self.run = run
        self.spec = spec
        self.device = device_of(spec.device, self.run)

    def windows(self) -> Artifact:
        data, student = self.spec.data, self.spec.student.init
        files = [file for file in dict.fromkeys((data.train_file, data.validation_file)) if file != SYNTHETIC]

        def make(folder: Path) -> None:
            with self.run.stage("data.preprocess", role="data", activity="preprocess") as stage:
                tokenizer = load_tokenizer(student)
                shape = WindowShape(data.max_seq_length, data.doc_stride, data.max_query_length)
                samples, tokens = 0, 0
                for name in ("train", "validation"):
                    questions = data.train_questions() if name == "train" else data.validation_questions()
                    found = make_windows(questions, tokenizer, shape)
                    made = write_features(
                        folder / name, questions, found, vocab_size=len(tokenizer), pad_id=tokenizer.pad_token_id
                    )
                    samples, tokens = samples + len(made), tokens + made.tokens_total
                    stage.count(samples=samples, tokens=tokens)

        inputs = {**data.model_dump(mode="json"), "tokenizer": weights_identity(student)}
        parents = [input_bill(self.run, "questions", file, "text", role="data") for file in files]
        return self.run.artifact("data", kind="squad-windows", inputs=inputs, parents=parents, make=make)

    def teacher(self, data: Artifact) -> Artifact:
        """Fine-tuned here, or taken as it is; either way a folder in Hugging Face format with its bill."""
        config = self.spec.teacher
        questions = load_questions(data.folder / "validation")[:_TEXTS_COMPARED]
        require_same_tokens(config.model, self.spec.student.init, [question.context for question in questions])

        def make(folder: Path) -> None:
            model = load_qa_model(config.model, config.seed, require_head=not config.fine_tune)
            if config.fine_tune:
                objective = SpanObjective(ANSWERS_ONLY, takes_token_types(model))
                self._train("teacher", model, data, objective, config.training, config.seed)
            save_hf(model, load_tokenizer(config.model), folder)

        inputs = config.model_dump(mode="json", include=None if config.fine_tune else {"model", "fine_tune"})
        parents = [input_bill(self.run, "pretrained teacher", config.model, "model", role="teacher")]
        if config.fine_tune:
            parents.append(data.bill)
        return self.run.artifact("teacher", kind="qa-teacher", inputs=inputs, parents=parents, make=make)

    def student(self, data: Artifact, teacher: Artifact | None) -> Artifact:
        config, seed = self.spec.student, self.spec.seed
        pretrained = input_bill(self.run, "pretrained student", config.init, "model", role="student")

        def make(folder: Path) -> None:
            model = keep_layers(load_qa_model(config.init, seed), config.layers)
            objective = SpanObjective(self.spec.distill, takes_token_types(model), self._live(teacher))
            self._train("student", model, data, objective, self.spec.training, seed)
            save_hf(model, load_tokenizer(config.init), folder)

        inputs = self.spec.model_dump(mode="json", include={"student", "distill", "training", "seed"})
        parents = [data.bill, pretrained, *([teacher.bill] if teacher else [])]
        # trained anew in every run: its joules are what the run is for
        return self.run.artifact("final_model", kind="student", inputs=inputs, parents=parents, make=make, reuse=False)

    def evaluate(self, who: str, model: Artifact, data: Artifact) -> None:
        def make(folder: Path) -> None:
            self._answers(who, model, data).save(folder)

        made = self.run.artifact(
            f"{who}-predictions",
            kind="squad-predictions",
            inputs=self.spec.evaluation.model_dump(mode="json"),
            parents=[model.bill, data.bill],
            make=make,
            reuse=False,  # what this run has trained it also evaluates itself
        )
        found = load_results(made.folder)
        for name, result in found.items():
            self.run.result(f"{who}.{name}", result)
        exact, f1 = found["exact_match"], found["f1"]
        self.run.progress.say(
            f"{who}: exact match {100 * exact.value:.1f} %, F1 {100 * f1.value:.1f} % on {exact.trials} questions"
        )

    def _answers(self, who: str, model: Artifact, data: Artifact) -> SquadScores:
        config, version_2 = self.spec.evaluation, self.spec.data.version_2
        features = open_features(data.folder / "validation")
        opened = self.run.stage(f"{who}.evaluate", len(features), again=True, role=who, activity="evaluate")
        with opened as stage:
            loaded = load_qa_model(str(model.folder), 0, require_head=True).to(self.device)
            scores = score_tokens(loaded, features, config.batch_size, self.device, ticks(self.run, stage))
            questions = load_questions(features.folder)
            limits = SearchLimits(config.n_best_size, config.max_answer_length)
            candidates = find_answers(features, questions, scores, limits)
            return SquadScores(questions, candidates, version_2, config.null_score_diff_threshold)

    def _live(self, teacher: Artifact | None) -> nn.Module | None:
        """The teacher on the device, to be asked with every batch."""
        if teacher is None:
            return None
        model = load_qa_model(str(teacher.folder), 0, require_head=True).to(self.device).requires_grad_(False)
        compile_in_place(model, self.spec.training.compile)
        return model

    def _train(
        self, who: str, model: nn.Module, data: Artifact, objective: SpanObjective, config: TrainingConfig, seed: int
    ) -> None:
        model = model.to(self.device)
        train_in_run(
            self.run,
            TrainingJob(
                stage=f"{who}.train",
                role=who,
                model=model,
                batches=SquadBatches(open_features(data.folder / "train"), config.batch_size, seed),
                objective=objective,
                config=config,
                seed=seed,
                evaluate=self._held_out(model, data),
                evaluate_stage=f"{who}.evaluate",
            ),
        )

    def _held_out(self, model: nn.Module, data: Artifact) -> Callable[[EvaluationPoint], float]:
        """Mean loss of the marked answers on the validation windows, for looks on the way."""
        objective = SpanObjective(ANSWERS_ONLY, takes_token_types(model))

        @torch.no_grad()
        def look(moment: EvaluationPoint) -> float:
            loss, count, samples, tokens = 0.0, 0, 0, 0
            for _, batch in iterate_in_order(
                open_features(data.folder / "validation"), self.spec.evaluation.batch_size
            ):
                found = objective(model, batch.to(self.device), lambda name: nullcontext())
                loss, count = loss + float(found.loss_sum), count + found.count
                samples, tokens = samples + batch.samples, tokens + batch.tokens
            moment.stage.count(samples=moment.looks * samples, tokens=moment.looks * tokens)
            return loss / count

        return look
