"""The pipeline `distilbert`: tokens, teacher, student, and the held-out loss of both.

    data.preprocess -> teacher.train (if configured) -> teacher.evaluate -> student.train -> student.evaluate

A model is evaluated before its training, during it, and at the end; all of this is billed to `<role>.evaluate`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.data import sources
from joulelab.data.masking import counts_file
from joulelab.distill.chunked import TermWeights, VocabularyLoss
from joulelab.distill.distilbert.config import OF_TEACHER, DistilbertSpec, LmDistillation, LmTraining
from joulelab.distill.distilbert.data import (
    Corpus,
    HeldOut,
    LmBatch,
    LmBatches,
    duplicates,
    held_out_batches,
    make_task,
    open_corpus,
    own_documents,
    sequences_of,
    write_corpus,
)
from joulelab.distill.distilbert.objective import (
    FrozenTeacher,
    LmObjective,
    Scales,
    decoder_of,
    freeze_embeddings,
    lm_config,
    load_lm,
    make_student,
    ready,
    require_comparable,
    require_comparable_configs,
    require_room,
    student_config,
)
from joulelab.distill.losses import NO_TARGET
from joulelab.distill.runner import PREPROCESS, Runner, evaluation_stage, run_recipe
from joulelab.errors import ConfigError, refuse_all
from joulelab.evaluate.language import no_better_than_guessing, token_loss, unigram_loss
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext, Stage
from joulelab.train.fp8_products import check_products
from joulelab.train.optim import compile_in_place
from joulelab.train.training_session import EvaluationPoint, TrainingJob
from joulelab.zoo.pretrained import load_tokenizer, save_hf, weights_identity

_HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_QUALITY = "quality.json"


def run_distilbert(run: RunContext) -> None:
    run_recipe(run, DistilbertRecipe)


def model_checks(spec: DistilbertSpec) -> Iterator[Callable[[], object]]:
    """Check what the models' configurations show, before a run starts."""
    if spec.until == "data":
        return
    tokens = spec.data.max_model_input_size
    if spec.has_teacher:
        yield lambda: require_room(lm_config(spec.teacher.model, spec.teacher.type), spec.teacher.model, tokens, 0)
    if spec.until == "train":
        yield lambda: _check_student(spec)
        yield lambda: check_products(spec.device, spec.trainings)


def _check_student(spec: DistilbertSpec) -> None:
    student, teacher = spec.student, spec.teacher
    source = teacher.model if student.layers_of == OF_TEACHER else student.layers_of
    layers_from = lm_config(source, teacher.type) if student.layers is not None else None
    compares = spec.distill.needs_teacher
    large = lm_config(teacher.model, teacher.type) if compares else None
    vocab_size = int(large.vocab_size) if large is not None else 0
    config = student_config(student, layers_from, vocab_size)
    require_room(config, "the student", spec.data.max_model_input_size, 0)
    if large is not None:
        require_comparable_configs(config, large, same_width=spec.distill.alpha_cos > 0)


@dataclass(frozen=True)
class PretrainedLm:
    """Weights in a folder or by name, with their energy bill."""

    name: str
    bill: Bill
    kind: str
    """bert, roberta or gpt2."""

    def load(self, seed: int = 0) -> nn.Module:
        """A language head that the weights do not have is initialized from the seed."""
        return load_lm(self.name, self.kind, seed)


class DistilbertRecipe:
    def __init__(self, runner: Runner[DistilbertSpec]) -> None:
        self.runner = runner
        self.run = runner.run
        self.spec = runner.spec
        self._tokens: Artifact | None = None
        self._last_quality: dict[str, HeldOutLoss] = {}
        """The last evaluation of each training, which is of the weights that were saved."""

    def check(self) -> None:
        refuse_all(model_checks(self.spec))

    # data

    def data(self) -> Artifact:
        data, teacher = self.spec.data, self.spec.teacher
        parents = [self.runner.input_bill(name, file, "text", role="data") for name, file in data.inputs().items()]
        counts = counts_file(Path(data.token_counts)) if data.token_counts else None
        if counts is not None:
            parents.append(self.runner.input_bill("token counts", str(counts), "counts", role="data"))

        def write(folder: Path, stage: Stage) -> None:
            def count(samples: int, tokens: int) -> None:
                stage.count(samples=samples, tokens=tokens)

            write_corpus(folder, data, teacher.model, teacher.type, count)

        inputs = {
            **data.model_dump(include={"source", "split", "validation_size"}),
            "counts": sources.content_hash(counts) if counts is not None else "",
            "tokenizer": weights_identity(teacher.model),
        }
        own = own_documents(data)
        if own or data.text_column is not None:
            inputs |= {"splits": own, "text_column": data.text_column}  # artifacts of earlier releases have none
        self._tokens = self.runner.make("data", PREPROCESS, write, kind="token-store", inputs=inputs, parents=parents)
        if data.is_own:
            self._report_splits(self._tokens, own)
        return self._tokens

    def _report_splits(self, tokens: Artifact, own: Mapping[str, object]) -> None:
        corpus = self.corpus
        test = corpus.test or corpus.validation
        notes = []
        if "validation" not in own:
            held_out = len(corpus.validation.documents)
            notes.append(f"{self.spec.data.trained_on}: no validation text; {held_out:,} documents are held out evenly")
        sizes = {"train": len(corpus.train), "test": len(test.documents)}
        if corpus.test is not None:
            sizes = {"train": len(corpus.train), "validation": len(corpus.validation.documents), **sizes}
        self.runner.report_data(sizes, notes, duplicates(tokens.folder))

    @cached_property
    def corpus(self) -> Corpus:
        assert self._tokens is not None
        return open_corpus(self._tokens.folder, self.spec.data)

    @cached_property
    def evaluator(self) -> Evaluator:
        """On validation text, for evaluations during training."""
        return self._evaluator(self.corpus.validation)

    @cached_property
    def test_evaluator(self) -> Evaluator:
        """On test text, where the user has some; its quality is reported."""
        return self.evaluator if self.corpus.test is None else self._evaluator(self.corpus.test)

    def _evaluator(self, held_out: HeldOut) -> Evaluator:
        spec = self.spec
        batches = held_out_batches(self.corpus, held_out, spec.data, spec.distill, spec.eval_batch_size)
        return Evaluator(
            batches, self.corpus, self.runner.device, spec.training.precision, spec.chunk, self.run.progress.advance
        )

    # teacher

    def teacher(self, data: Artifact) -> PretrainedLm:
        teacher = self._prepare_teacher(data)
        quality = self._report_quality("teacher", teacher, data)
        require_trained_teacher(quality, teacher.name)
        return teacher

    def _prepare_teacher(self, data: Artifact) -> PretrainedLm:
        config = self.spec.teacher
        pretrained = self.runner.input_bill("pretrained teacher", config.model, "model", role="teacher")
        if config.training is None:
            return PretrainedLm(config.model, pretrained, config.type)
        training, tokens_only = config.training, _tokens_only(self.spec.distill)

        def job() -> TrainingJob:
            model = self._prepared(load_lm(config.model, config.type, config.seed))
            return self._job("teacher", model, None, tokens_only, training, config.seed)

        inputs = {
            "teacher": config.model_dump(mode="json"),
            "data": self.spec.data.model_dump(mode="json", exclude={"source", "split"}),
            "masks": tokens_only.model_dump(mode="json"),
        }
        trained = self.runner.train_model(
            "teacher", job, self._save,
            kind="language-teacher", inputs=inputs, parents=[data.bill, pretrained], reuse=True,
        )  # fmt: skip
        return PretrainedLm(str(trained.folder), trained.bill, config.type)

    # student

    def student(self, data: Artifact, teacher: PretrainedLm | None) -> Artifact:
        spec = self.spec
        start = self._layer_source(teacher)

        def job() -> TrainingJob:
            large = teacher.load() if teacher is not None and spec.distill.needs_teacher else None
            whole = start.load(spec.seed) if start is not None else None
            vocab_size = self.corpus.store.vocab_size if large is None else int(large.config.vocab_size)  # type: ignore
            model = make_student(spec.student, whole, vocab_size, spec.seed)
            del whole
            if large is not None:
                require_comparable(model, large, same_width=spec.distill.alpha_cos > 0)
            freeze_embeddings(model, spec.distill.freeze_pos_embs, spec.distill.freeze_token_type_embds)
            model = self._prepared(model)
            frozen = self._freeze(large) if large is not None else None
            return self._job("student", model, frozen, spec.distill, spec.training, spec.seed)

        parents = [data.bill, *(source.bill for source in (teacher, start) if source is not None)]
        if spec.student.model is not None:
            parents.append(self.runner.input_bill("student's weights", spec.student.model, "model", role="student"))
        inputs = spec.model_dump(mode="json", include={"student", "distill", "training", "seed", "data", "chunk"})
        return self.runner.train_model("final_model", job, self._save, kind="student", inputs=inputs, parents=parents)

    def _layer_source(self, teacher: PretrainedLm | None) -> PretrainedLm | None:
        """The model whose layers the student takes; None if it starts from something else."""
        student = self.spec.student
        if student.layers is None:
            return None
        if student.layers_of == OF_TEACHER:
            return teacher
        bill = self.runner.input_bill("student's layers", student.layers_of, "model", role="student")
        return PretrainedLm(student.layers_of, bill, self.spec.teacher.type)

    def _freeze(self, model: nn.Module) -> FrozenTeacher:
        config = self.spec.training
        dtype = _HALF_PRECISION.get(config.precision) if self.spec.teacher.half_weights else None
        frozen = FrozenTeacher(self._prepared(model), dtype)
        compile_in_place(frozen.model, config.compile)
        return frozen

    # training

    def _job(
        self,
        role: str,
        model: nn.Module,
        teacher: FrozenTeacher | None,
        distill: LmDistillation,
        config: LmTraining,
        seed: int,
    ) -> TrainingJob:
        sequences = sequences_of(self.corpus.store, self.corpus.train, self.spec.data)
        task = make_task(self.corpus, distill, distill.everywhere)
        batches = LmBatches(sequences, task, config.batch_size, seed, self.spec.data.group_by_size)
        scales = Scales.of(distill, task.targets_share(batches.lengths))
        if not (self.run.paths.checkpoints / f"{role}.train").exists():
            self._evaluate(role, lambda: model, f"{role}.{self._metric}.start")
        self.runner.report(f"{role}.train.padded_share", batches.padded_share)

        def evaluate(point: EvaluationPoint) -> float:
            quality = self._last_quality[role] = self.evaluator.evaluate(model)
            point.stage.count(tokens=(1 + point.evaluations) * quality.tokens)  # one was before the first step
            return quality.loss

        return TrainingJob(
            stage=f"{role}.train",
            role=role,
            model=model,
            batches=batches,
            objective=LmObjective(model, teacher, scales, self.spec.chunk, config.compile),
            config=config,
            seed=seed,
            evaluate=evaluate,
            evaluate_stage=f"{role}.evaluate",
        )

    def _prepared(self, model: nn.Module) -> nn.Module:
        config, tokens = model.config, self.spec.data.max_model_input_size
        require_room(config, type(model).__name__, tokens, self.corpus.store.vocab_size)
        return ready(model, unpadded=self.spec.data.packing).to(self.runner.device)

    def _save(self, model: nn.Module, folder: Path) -> None:
        """On every rank: the first rank's folder is the run's, the others' are temporary."""
        save_hf(model, load_tokenizer(self.spec.teacher.model), folder)

    # evaluation

    def evaluate(self, data: Artifact, student: Artifact, teacher: PretrainedLm | None) -> None:
        quality = self._report_quality("student", self._trained(student), data)
        problem = no_better_than_guessing(quality.loss, quality.unigram)
        if problem is not None:
            self.run.warn(problem)

    def _trained(self, student: Artifact) -> PretrainedLm:
        return PretrainedLm(str(student.folder), student.bill, self.spec.student.type)

    def load_student(self, data: Artifact, student: Artifact) -> nn.Module:
        return self._prepared(self._trained(student).load())

    def _report_quality(self, role: str, model: PretrainedLm, data: Artifact) -> HeldOutLoss:
        """Report the quality of a trained or named model; a teacher that several students share is evaluated once."""
        spec = self.spec

        def make(folder: Path) -> None:
            quality = self._last_quality.get(role)
            if quality is None or self.corpus.test is not None:
                load, name = (lambda: self._prepared(model.load())), f"{role}.{self._metric}"
                quality = self._evaluate(role, load, name, self.test_evaluator)
            quality.save(folder)

        inputs = {
            "data": spec.data.model_dump(mode="json"),
            "masks": _tokens_only(spec.distill).model_dump(mode="json"),
            "precision": spec.training.precision,
        }
        made = self.runner.artifact(
            f"{role}-quality", make,
            kind="quality", inputs=inputs, parents=[model.bill, data.bill], reuse=role == "teacher",
        )  # fmt: skip
        quality = HeldOutLoss.load(made.folder)
        self._report(f"{role}.{self._metric}", quality)
        perplexity = "" if spec.distill.mlm else f", perplexity {quality.perplexity:.1f}"
        self.run.progress.write(
            f"{role}: {quality.loss:.3f} nats per held-out token{perplexity} (unigram baseline {quality.unigram:.3f})"
        )
        return quality

    def _evaluate(
        self, role: str, load: Callable[[], nn.Module], name: str, evaluator: Evaluator | None = None
    ) -> HeldOutLoss:
        """Loading is part of the stage, so that a run that reuses the result inherits its energy too."""
        chosen = evaluator or self.evaluator
        with self.runner.stage(evaluation_stage(role), chosen.batches.batches_per_epoch) as stage:
            quality = chosen.evaluate(load())
            stage.count(tokens=stage.counts.get("tokens", 0) + quality.tokens)
        self._report(name, quality)
        return quality

    def _report(self, name: str, quality: HeldOutLoss) -> None:
        self.runner.report(name, quality.loss, lower_is_better=True)
        if not self.spec.distill.mlm:
            self.runner.report(f"{name}.perplexity", quality.perplexity, lower_is_better=True)
        self.runner.report("data.unigram_loss", quality.unigram)

    @property
    def _metric(self) -> str:
        return "mlm_loss" if self.spec.distill.mlm else "clm_loss"


def _tokens_only(distill: LmDistillation) -> LmDistillation:
    """The same masks, with the tokens as the only targets."""
    off = {"alpha_ce": 0.0, "alpha_mse": 0.0, "alpha_cos": 0.0, "restrict_ce_to_mask": False}
    trained = {"freeze_pos_embs": False, "freeze_token_type_embds": False}
    tokens = {"alpha_mlm": float(distill.mlm), "alpha_clm": float(not distill.mlm)}
    return distill.model_copy(update={**off, **trained, **tokens})


@dataclass(frozen=True)
class HeldOutLoss:
    loss: float
    """Mean cross-entropy of the held-out tokens, in nats."""
    perplexity: float
    tokens: int
    unigram: float
    """The loss of predicting by token frequency alone."""

    def save(self, folder: Path) -> None:
        (folder / _QUALITY).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> HeldOutLoss:
        return cls(**json.loads((folder / _QUALITY).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Evaluator:
    """Held-out batches and how they are computed; the same for teacher and student."""

    batches: LmBatches
    corpus: Corpus
    device: torch.device
    precision: str
    chunk: int
    advance: Callable[[int], None] = lambda batches: None
    """Called with the number of batches done."""

    def evaluate(self, model: nn.Module) -> HeldOutLoss:
        """`model` is on the device and opened for losses."""
        loss, done = VocabularyLoss(TermWeights(ce=1.0), self.chunk), 0

        def loss_of(batch: LmBatch) -> tuple[Tensor, int]:
            features_ND, _ = model(**batch.inputs, for_loss=True, positions=batch.rows)
            total, _ = loss(features_ND, *decoder_of(model), batch.positions)
            return total, batch.predicted

        def count(batch: LmBatch) -> None:
            nonlocal done
            done += 1
            self.advance(done)

        found = token_loss(model, self.batches, loss_of, self.device, self.precision, count)
        return HeldOutLoss(found.mean, found.perplexity, found.tokens, self.unigram)

    @cached_property
    def unigram(self) -> float:
        every = range(self.batches.batches_per_epoch)
        targets = np.concatenate([self.batches.at(0, index)["targets"].numpy() for index in every])
        recipe = self.batches.task.recipe
        weights_V = None if recipe is None else recipe.weights_V  # rare tokens are masked more often
        return unigram_loss(self.corpus.counts_V, targets[targets != NO_TARGET], weights_V)


def require_trained_teacher(teacher: HeldOutLoss, name: str) -> None:
    """A teacher no better than token frequencies would teach those, with the energy of a teacher."""
    if not teacher.loss < teacher.unigram:
        raise ConfigError(
            f"the teacher {name} has a validation loss of {teacher.loss:.3f} nats per token; predicting by token "
            f"frequency alone has {teacher.unigram:.3f}",
            "its language head is probably untrained: train it first with teacher.training, or name another teacher",
        )
