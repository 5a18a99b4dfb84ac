"""Students cut out of their teacher: some of its layers, all of its embeddings, and a head of their own.

A student that starts from its teacher's layers starts from joules that are already paid for, and it is the same kind of
model, so that whatever feeds the one feeds the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import drawn_from, import_transformers

# Model type -> where the encoder keeps its list of layers.
_LAYERS_OF = {
    "bert": "encoder.layer",
    "roberta": "encoder.layer",
    "xlm-roberta": "encoder.layer",
    "distilbert": "transformer.layer",
}


def take_layers(model: torch.nn.Module, layers: Sequence[int], seed: int) -> torch.nn.Module:
    """A classifier on the CPU with only these layers of `model`, in this order; its head is drawn from the seed."""
    place = _place_of_layers(model)
    encoder: Any = model.base_model
    teacher_layers: Any = encoder.get_submodule(place)
    _check(layers, len(teacher_layers))
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)  # type: ignore[union-attr]
    with drawn_from(seed):
        student: Any = import_transformers().AutoModelForSequenceClassification.from_config(config)
    _copy(encoder, student.base_model, place, layers)
    return student.eval()  # type: ignore[no-any-return]


def _copy(teacher: Any, student: Any, place: str, layers: Sequence[int]) -> None:
    """Embeddings, pooler and the chosen layers, under the numbers they have in the student."""
    weights = {name: value for name, value in teacher.state_dict().items() if not name.startswith(place + ".")}
    for number, layer in enumerate(layers):
        for name, value in teacher.get_submodule(f"{place}.{layer}").state_dict().items():
            weights[f"{place}.{number}.{name}"] = value
    own = student.state_dict()
    # RoBERTa classifiers have no pooler; a bare encoder they are cut from may have one.
    student.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=True)


def _place_of_layers(model: torch.nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in _LAYERS_OF:
        raise ConfigError(
            f"layers cannot be taken from a model of type '{kind}'; expected one of {', '.join(_LAYERS_OF)}",
            "use a teacher of one of these families, or name the student's own weights",
        )
    return _LAYERS_OF[kind]


def _check(layers: Sequence[int], count: int) -> None:
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if not layers or wrong or len(set(layers)) != len(layers):
        raise ConfigError(
            f"layers {list(layers)} cannot be taken: the model has layers 0..{count - 1}, each can be taken once",
            f"name 1 to {count} different layers, for example [0, {count - 1}]",
        )
