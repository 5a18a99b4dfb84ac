"""Models for question answering: loaded by name, reduced to some of their layers, refused with an untrained head.

A teacher whose head is randomly initialized would teach noise without any error, so this is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.data.batches import TensorBatch
from joulelab.data.squad.windows import model_inputs, takes_token_types
from joulelab.distill.losses import cross_entropy_sum, soft_target_kl_sum
from joulelab.distill.squad.config import QaDistill
from joulelab.errors import ConfigError
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker
from joulelab.zoo.pretrained import (
    encoder_config,
    encoder_positions,
    import_transformers,
    load_pretrained,
    load_tokenizer,
    seeded_init,
)
from joulelab.zoo.students import check_layers

_HEAD = "qa_outputs."


def load_qa_model(name: str, seed: int, require_head: bool = False) -> nn.Module:
    """An encoder with a head for start and end; a missing head is initialized from the seed, or refused."""
    loader = _Loader()
    with seeded_init(seed):
        model = load_pretrained(loader, name)
    if loader.missing and require_head:
        raise ConfigError(
            f"{name} was never trained to answer questions: its head ({', '.join(loader.missing)}) is missing",
            "name a model fine-tuned on SQuAD, or train it here with teacher.fine_tune=true",
        )
    return model.float()


def keep_layers(model: nn.Module, layers: Sequence[int] | None) -> nn.Module:
    """The same model with only these layers, in this order; embeddings and head stay."""
    if layers is None:
        return model
    config: Any = model.config
    parent, name = _stack(model, config.num_hidden_layers)
    stack: Any = getattr(parent, name)
    check_layers(layers, len(stack))
    setattr(parent, name, nn.ModuleList(stack[layer] for layer in layers))
    config.num_hidden_layers = len(layers)
    return model


def require_windows_fit(name: str, tokens: int) -> None:
    """A position without an embedding would be an index error deep inside the model."""
    positions = encoder_positions(encoder_config(name))
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"data.max_seq_length={tokens}: {name} has {positions} positions",
            f"set data.max_seq_length to at most {positions}",
        )


def require_student_layers(name: str, layers: Sequence[int] | None) -> None:
    if layers is not None:
        check_layers(layers, int(encoder_config(name).num_hidden_layers), name, "student.layers")


def require_same_tokens(teacher: str, student: str, texts: Sequence[str]) -> None:
    """Teacher and student read the same batch, so both must use the same tokens."""
    first, second = load_tokenizer(teacher), load_tokenizer(student)
    if first.get_vocab() != second.get_vocab() or any(first.tokenize(text) != second.tokenize(text) for text in texts):
        raise ConfigError(
            f"the teacher {teacher} and the student {student} split text into different tokens",
            "take a teacher and a student of one family, or set distill.alpha_ce=0",
        )


class _Loader:
    """`from_pretrained` that records which weights of the head were not in the files."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def from_pretrained(self, place: str, **options: Any) -> Any:
        kind = import_transformers().AutoModelForQuestionAnswering
        model, report = kind.from_pretrained(place, output_loading_info=True, **options)
        self.missing = sorted(name for name in report["missing_keys"] if name.startswith(_HEAD))
        return model


def _stack(model: nn.Module, layers: int) -> tuple[nn.Module, str]:
    """The module that holds the list of layers, and the list's name there."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            parent, _, name = path.rpartition(".")
            return model.get_submodule(parent), name
    raise ConfigError(f"{type(model).__name__} has no list of layers to take from", "leave student.layers unset")


# The student's loss for question answering: marked answers and the teacher's start and end distributions.
#
# Losses are sums over windows, each window the mean of its start and its end. The softmax is over the positions that
# an answer can have, the paragraph and the class token; padding and the question are excluded, as they are when an
# answer is searched.
#
# Shapes: B windows, T tokens.


ANSWERS_ONLY = QaDistill(alpha_ce=0.0, alpha_squad=1.0)
# Finite, so that two masked positions subtract to 0 and not to NaN; its exponential is 0 in float32 at any temperature
# below a million.
_MASKED_LOGIT = -1e9

Span = tuple[Tensor, Tensor]
"""Start and end: logits_BT each."""


def span_ce_sum(student: Span, spans_B2: Tensor, answerable_BT: Tensor) -> Tensor:
    start, end = (
        cross_entropy_sum(_masked(logits_BT, answerable_BT), spans_B2[:, edge])
        for edge, logits_BT in enumerate(student)
    )
    # The mean of the two as in BERT's and DistilBERT's scripts; a sum would change the effective
    # learning rate.
    return (start + end) / 2


def span_kl_sum(student: Span, teacher: Span, answerable_BT: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student)."""
    start, end = (
        soft_target_kl_sum(_masked(student_BT, answerable_BT), _masked(teacher_BT, answerable_BT), temperature)
        for student_BT, teacher_BT in zip(student, teacher, strict=True)
    )
    return (start + end) / 2


def _masked(logits_BT: Tensor, answerable_BT: Tensor) -> Tensor:
    return logits_BT.float().masked_fill(~answerable_BT, _MASKED_LOGIT)


class SpanObjective:
    """alpha_ce T^2 KL + alpha_squad CE, summed over the batch's windows; the teacher reads the same batch."""

    def __init__(self, config: QaDistill, token_types: bool, teacher: nn.Module | None = None) -> None:
        """`token_types`: whether the student takes them, which a wrapped or compiled model does not show."""
        if config.needs_teacher and teacher is None:
            raise ValueError("alpha_ce > 0 needs a teacher")
        self._config, self._token_types = config, token_types
        self._teacher = teacher.eval() if teacher is not None and config.needs_teacher else None
        self._teacher_types = self._teacher is not None and takes_token_types(self._teacher)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}  # the teacher is not trained

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        teacher: Span | None = None
        if self._teacher is not None:
            with phase("forward.teacher"), torch.no_grad():
                teacher = _span(self._teacher, batch, self._teacher_types)
        with phase("forward.student"):
            student = _span(model, batch, self._token_types)
        with phase("forward.loss"):
            terms = self._terms(student, teacher, batch)
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.count, parts)

    def _terms(self, student: Span, teacher: Span | None, batch: TensorBatch) -> dict[str, tuple[float, Tensor]]:
        config, terms = self._config, {}
        if teacher is not None:
            kl = span_kl_sum(student, teacher, batch["answerable"], config.temperature)
            terms["ce"] = (config.alpha_ce, kl)
        if config.alpha_squad > 0:
            terms["squad"] = (config.alpha_squad, span_ce_sum(student, batch["spans"], batch["answerable"]))
        return terms


def _span(model: nn.Module, batch: TensorBatch, token_types: bool) -> Span:
    output = model(**model_inputs(batch, token_types))
    return output.start_logits, output.end_logits
