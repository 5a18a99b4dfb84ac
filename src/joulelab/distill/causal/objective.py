"""What a student's training differentiates: labels, a teacher's distributions, or preferences.

Labels and distributions share one objective, so that sft and kd differ in their targets only.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from joulelab.data.batches import BatchSource
from joulelab.data.chat.packing import CausalBatch, PackedAttention, PackedRows, training_batches
from joulelab.distill.causal.config import CausalTraining
from joulelab.distill.causal.cross_tokenizer import (
    PairedBatch,
    paired_batches,
    teacher_tokenizer_identity,
    tokenizer_pair,
)
from joulelab.distill.causal.generated_data import REFERENCE_FILE
from joulelab.distill.causal.generators import TeacherSource
from joulelab.distill.causal.models import TRAIN, CausalContext, lm_head_weight
from joulelab.distill.causal.teacher import live_teacher
from joulelab.distill.logit_cache.cache_store import LogitCache
from joulelab.distill.logit_cache.kd_loss import AnyTargets, DenseTargets, KdLoss
from joulelab.distill.logit_cache.teacher_outputs import DistillationBatch, DistillationBatches, with_targets
from joulelab.distill.preferences.pairs import PairBatches, PairLayout, PairStore
from joulelab.distill.preferences.preference_loss import (
    PreferenceObjective,
    ReferenceLogProbabilities,
    TargetLogProbabilities,
    disable_dropout,
)
from joulelab.runs.artifacts import Artifact
from joulelab.train.trainer import StepPreparation
from joulelab.train.training_session import StageOpener
from joulelab.zoo.objective import Objective, ObjectiveOutput, PhaseMaker

Targets = AnyTargets


@dataclass(frozen=True)
class StudentSetup:
    """A student on its device, how it is called with packed rows, and its training settings."""

    model: nn.Module
    attention: PackedAttention
    config: CausalTraining


@dataclass(frozen=True)
class TrainingData:
    """Batches and the objective over them."""

    batches: BatchSource[Any]
    objective: Objective[Any]
    loss_name: str
    """Shown with the loss during training."""
    config: CausalTraining | None = None
    """The settings of the training, if the data needs others than the student's setup has."""
    preparation: Callable[[StageOpener], StepPreparation] | None = None
    """Makes the work between steps that produces the batches; None: they exist before training."""
    close: Callable[[], None] = lambda: None
    """Called when the training has ended."""


def label_data(context: CausalContext, rows: PackedRows, setup: StudentSetup) -> TrainingData:
    """Cross-entropy on the rows' own tokens."""
    batches = training_batches(rows, setup.config.batch_size, context.spec.seed)
    context.runner.report("data.padded_share", rows.padded_share)
    loss = KdLoss(alpha=1.0, chunk=context.spec.chunk, compile_mode=setup.config.compile)
    return TrainingData(batches, TokenObjective(setup.model, setup.attention, loss), "CE")


def distillation_data(
    context: CausalContext,
    rows: PackedRows,
    teacher: TeacherSource,
    cache: Artifact | None,
    setup: StudentSetup,
    teacher_data: Artifact | None = None,
) -> TrainingData:
    """Cross-entropy and the divergence from the teacher: from its cache, or (None) from the live model. `teacher_data`
    has the documents in the teacher's tokens, which may be others."""
    distill, config = context.spec.distill, setup.config
    batches = training_batches(rows, config.batch_size, context.spec.seed)
    loss = KdLoss(distill.alpha, distill.temperature, distill.divergence, context.spec.chunk, config.compile)
    context.runner.report("data.padded_share", rows.padded_share)
    if teacher_data is not None and tokenizer_pair(context) is not None:
        return _aligned_data(context, rows, teacher, cache, setup, teacher_data, loss)
    if cache is None:
        targets = live_teacher(context, teacher, config.compile).targets
        return TrainingData(batches, TokenObjective(setup.model, setup.attention, loss, targets), distill.loss_name)
    logits = LogitCache.open(cache.folder)
    logits.manifest.require(
        temperature=distill.temperature, divergence=distill.divergence, tokenizer_sha256=context.tokenizer_identity
    )
    objective = TokenObjective(setup.model, setup.attention, loss, _cached_targets)
    return TrainingData(DistillationBatches(batches, logits), objective, distill.loss_name)


def _aligned_data(
    context: CausalContext,
    rows: PackedRows,
    teacher: TeacherSource,
    cache: Artifact | None,
    setup: StudentSetup,
    teacher_data: Artifact,
    loss: KdLoss,
) -> TrainingData:
    """Against a teacher with another tokenizer."""
    pair, config, seed = tokenizer_pair(context), setup.config, context.spec.seed
    assert pair is not None
    documents, name = context.documents(teacher_data, TRAIN), pair.loss_name(context.spec.distill.loss_name)
    if cache is None:
        live = live_teacher(context, teacher)

        def targets(batch: CausalBatch) -> Targets:
            assert isinstance(batch, PairedBatch)
            return pair.targets(batch, live.targets(batch.teacher))

        batches = paired_batches(pair, rows, documents, config.batch_size, seed)
        return TrainingData(batches, TokenObjective(setup.model, setup.attention, loss, targets), name)
    logits = LogitCache.open(cache.folder)
    logits.manifest.require(
        temperature=context.spec.distill.temperature, divergence=context.spec.distill.divergence,
        tokenizer_sha256=teacher_tokenizer_identity(context),
    )  # fmt: skip

    def cached_targets(batch: CausalBatch) -> Targets:
        assert isinstance(batch, PairedBatch) and isinstance(batch.teacher, DistillationBatch)
        dense = batch.teacher.targets.decoded()
        assert isinstance(dense, DenseTargets)
        return pair.targets(batch, dense)

    batches = paired_batches(
        pair, rows, documents, config.batch_size, seed,
        lambda batch: replace(batch, teacher=with_targets(batch.teacher, logits)),
    )  # fmt: skip
    return TrainingData(batches, TokenObjective(setup.model, setup.attention, loss, cached_targets), name)


def _cached_targets(batch: CausalBatch) -> Targets:
    """The loader has looked them up."""
    targets: Targets = batch.targets  # type: ignore[attr-defined]
    return targets


def preference_data(
    context: CausalContext, pairs: Artifact, reference: Artifact, start_key: str, setup: StudentSetup
) -> TrainingData:
    """A preference loss over pairs, against the log-probabilities of the initial student."""
    preferences, config = context.spec.preferences, setup.config
    logs = ReferenceLogProbabilities.open(reference.folder / REFERENCE_FILE, start_key)
    layout = PairLayout(preferences.shared_prompt)
    batches = PairBatches(PairStore.open(pairs.folder), config.batch_size, context.spec.seed, logs, layout)
    log_probabilities = TargetLogProbabilities(context.spec.chunk, compile_mode=config.compile)
    student = disable_dropout(setup.model)
    objective = PreferenceObjective(student, preferences.loss, preferences.beta, log_probabilities)
    return TrainingData(batches, objective, preferences.loss_name)


class TokenObjective:
    """alpha CE + (1 - alpha) T^2 KL over the trained tokens; head and loss in chunks, never all logits at once."""

    def __init__(
        self,
        model: nn.Module,
        attention: PackedAttention,
        loss: KdLoss,
        targets: Callable[[CausalBatch], Targets] | None = None,
    ) -> None:
        """`model` is the bare model, whose head is read; the loop may call a wrapped one. `targets` gives the teacher's
        targets of a batch; None: labels only."""
        self._model, self._attention, self._loss, self._targets = model, attention, loss, targets

    def __call__(self, model: nn.Module, batch: CausalBatch, phase: PhaseMaker) -> ObjectiveOutput:
        targets = None
        if self._targets is not None:
            with phase("forward.teacher"):
                targets = self._targets(batch)
        with phase("forward.student"):
            hidden_BTD = model(**self._attention.inputs(batch), hidden_only=True)
        with phase("forward.loss"):
            sums = self._loss(hidden_BTD, lm_head_weight(self._model), targets, batch.labels, count=batch.count)
        parts = {} if self._targets is None else {"ce": sums.ce, "kl": sums.kl}
        return ObjectiveOutput(sums.loss, batch.count, parts)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None: ...
