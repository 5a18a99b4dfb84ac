"""Models for question answering: loaded by name, reduced to some of their layers, refused with an untrained head.

A teacher whose head is randomly initialized would teach noise without any error, so this is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import import_transformers, load_pretrained, load_tokenizer, seeded_init

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
    wrong = [layer for layer in layers if not 0 <= layer < len(stack)]
    if not layers or wrong or len(set(layers)) != len(layers):
        raise ConfigError(
            f"invalid layers {list(layers)}: the model has layers 0..{len(stack) - 1}, each can be taken once",
            f"name 1 to {len(stack)} different layers, for example [0, {len(stack) - 1}]",
        )
    setattr(parent, name, nn.ModuleList(stack[layer] for layer in layers))
    config.num_hidden_layers = len(layers)
    return model


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

    def from_pretrained(self, place: str) -> Any:
        kind = import_transformers().AutoModelForQuestionAnswering
        model, report = kind.from_pretrained(place, output_loading_info=True)
        self.missing = sorted(name for name in report["missing_keys"] if name.startswith(_HEAD))
        return model


def _stack(model: nn.Module, layers: int) -> tuple[nn.Module, str]:
    """The module that holds the list of layers, and the list's name there."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            parent, _, name = path.rpartition(".")
            return model.get_submodule(parent), name
    raise ConfigError(f"{type(model).__name__} has no list of layers to take from", "leave student.layers unset")
