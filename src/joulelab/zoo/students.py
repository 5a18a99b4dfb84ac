"""Students initialized from layers of their teacher: classifiers with a new head, and language models.

The student is the same type of model as the teacher, so both take the same inputs.

BERT's student is a DistilBERT, which has other parameter names and no token-type embeddings; the students of RoBERTa
and GPT-2 are shorter models of the same class. Distillation uses one segment, so BERT's token-type embedding 0 is a
constant at every position and is added to the position embeddings. With all layers kept, the student computes the same
function.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import import_transformers, seeded_init
from joulelab.zoo.registry import default_layers

# Model type -> where the encoder keeps its list of layers.
_LAYERS_OF = {
    "bert": "encoder.layer",
    "roberta": "encoder.layer",
    "xlm-roberta": "encoder.layer",
    "distilbert": "transformer.layer",
}


def take_layers(model: torch.nn.Module, layers: Sequence[int], seed: int) -> torch.nn.Module:
    """A classifier on the CPU with only these layers of `model`, in this order; its head is randomly initialized."""
    place = _layers_path(model)
    encoder: Any = model.base_model
    teacher_layers: Any = encoder.get_submodule(place)
    check_layers(layers, len(teacher_layers))
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)  # type: ignore[union-attr]
    with seeded_init(seed):
        student: Any = import_transformers().AutoModelForSequenceClassification.from_config(config)
    _copy_layers(encoder, student.base_model, place, layers)
    return student.eval()  # type: ignore[no-any-return]


def _copy_layers(teacher: Any, student: Any, place: str, layers: Sequence[int]) -> None:
    """Embeddings, pooler and the chosen layers, under the numbers they have in the student."""
    weights = {name: value for name, value in teacher.state_dict().items() if not name.startswith(place + ".")}
    for number, layer in enumerate(layers):
        for name, value in teacher.get_submodule(f"{place}.{layer}").state_dict().items():
            weights[f"{place}.{number}.{name}"] = value
    own = student.state_dict()
    # RoBERTa classifiers have no pooler; a bare encoder they are cut from may have one.
    student.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=True)


def _layers_path(model: torch.nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in _LAYERS_OF:
        raise ConfigError(
            f"layers cannot be taken from a model of type '{kind}'; expected one of {', '.join(_LAYERS_OF)}",
            "use a teacher of one of these families, or name the student's own weights",
        )
    return _LAYERS_OF[kind]


# Model type -> path of its layers, and the part of its head that `vocab_transform` refers to.
_LAYER_PREFIXES = {"bert": "bert.encoder.layer.", "roberta": "roberta.encoder.layer.", "gpt2": "transformer.h."}
_TRANSFORM_OF: Mapping[str, tuple[str, ...]] = {
    "bert": ("cls.predictions.transform.",),
    "roberta": ("lm_head.dense.", "lm_head.layer_norm."),
    "gpt2": (),
}
TEACHER_CLASSES = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "gpt2": "GPT2LMHeadModel"}

# BERT's name -> DistilBERT's, inside a layer and outside of the layers.
_LAYER_NAMES = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
_OUTER_NAMES = {
    "bert.embeddings.word_embeddings": "distilbert.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings": "distilbert.embeddings.position_embeddings",
    "bert.embeddings.LayerNorm": "distilbert.embeddings.LayerNorm",
    "cls.predictions.transform.dense": "vocab_transform",
    "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
    "cls.predictions.decoder": "vocab_projector",
}


def extract_student(
    teacher_model: torch.nn.Module, layers: Sequence[int], vocab_transform: bool = True, seed: int = 0
) -> torch.nn.Module:
    """A student on the CPU with these layers of the teacher, in this order.

    Without `vocab_transform` the dense layer between the last hidden state and the vocabulary is randomly initialized;
    GPT-2 has none.
    """
    kind = _model_type(teacher_model)
    check_layers(layers, layer_count(teacher_model), once=False)
    weights = _select_weights(teacher_model.state_dict(), kind, layers, vocab_transform)
    with seeded_init(seed):
        student = _make_student(teacher_model, kind, len(layers))
    _load_student(student, _to_distilbert_names(weights) if kind == "bert" else weights, vocab_transform)
    return student.eval()


def layer_count(teacher_model: torch.nn.Module) -> int:
    config: Any = teacher_model.config
    return int(config.num_hidden_layers)


def check_layers(
    layers: Sequence[int], count: int, model: str = "the model", setting: str = "layers", once: bool = True
) -> None:
    """That a model with `count` layers has these, each taken once; `model` and `setting` are its names in the error."""
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if not layers or wrong or (once and len(set(layers)) != len(layers)):
        raise ConfigError(
            f"{setting} {list(layers)} cannot be taken: {model} has layers 0..{count - 1}"
            + (", each can be taken once" if once else ""),
            f"name 1 to {count} {'different ' if once else ''}layers, for example {list(default_layers(count))}",
        )


def _model_type(model: torch.nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in _LAYER_PREFIXES:
        raise ConfigError(
            f"no student can be taken from a model of type '{kind}'", f"expected one of {', '.join(_LAYER_PREFIXES)}"
        )
    if model.get_output_embeddings() is None:  # type: ignore[operator]
        raise ConfigError(
            f"{type(model).__name__} has no head that predicts words", f"load it as {TEACHER_CLASSES[kind]}"
        )
    return str(kind)


def _select_weights(
    weights: Mapping[str, Tensor], kind: str, layers: Sequence[int], vocab_transform: bool
) -> dict[str, Tensor]:
    """Under the teacher's names, the layers renumbered."""
    place, left_out = _LAYER_PREFIXES[kind], () if vocab_transform else _TRANSFORM_OF[kind]
    chosen = {
        name: value for name, value in weights.items() if not name.startswith(place) and not name.startswith(left_out)
    }
    for number, layer in enumerate(layers):
        prefix = f"{place}{layer}."
        for name, value in weights.items():
            if name.startswith(prefix):
                chosen[f"{place}{number}.{name.removeprefix(prefix)}"] = value
    return chosen


def _to_distilbert_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that DistilBERT lacks (pooler, next-sentence head, token types) are dropped."""
    renamed = {}
    for name, value in weights.items():
        module, _, leaf = name.rpartition(".")
        new = _new_module_name(module)
        if new is not None:
            renamed[f"{new}.{leaf}"] = value
    types = weights["bert.embeddings.token_type_embeddings.weight"]
    positions = "distilbert.embeddings.position_embeddings.weight"
    # Not to the word embeddings: they are tied to the output layer, which must not contain the constant.
    renamed[positions] = renamed[positions] + types[0]
    return renamed


def _new_module_name(module: str) -> str | None:
    place = _LAYER_PREFIXES["bert"]
    if not module.startswith(place):
        return _OUTER_NAMES.get(module)
    number, _, inner = module.removeprefix(place).partition(".")
    return f"distilbert.transformer.layer.{number}.{_LAYER_NAMES[inner]}"


def _make_student(teacher: torch.nn.Module, kind: str, layers: int) -> torch.nn.Module:
    config: Any = copy.deepcopy(teacher.config)
    if kind == "bert":
        transformers = import_transformers()
        student: torch.nn.Module = transformers.DistilBertForMaskedLM(_distilbert_config(transformers, config, layers))
        return student
    config.num_hidden_layers = layers
    made: torch.nn.Module = type(teacher)(config)
    return made


def _distilbert_config(transformers: Any, bert: Any, layers: int) -> Any:
    return transformers.DistilBertConfig(
        vocab_size=bert.vocab_size,
        max_position_embeddings=bert.max_position_embeddings,
        n_layers=layers,
        n_heads=bert.num_attention_heads,
        dim=bert.hidden_size,
        hidden_dim=bert.intermediate_size,
        activation=bert.hidden_act,
        dropout=bert.hidden_dropout_prob,
        attention_dropout=bert.attention_probs_dropout_prob,
        initializer_range=bert.initializer_range,
        pad_token_id=bert.pad_token_id,
        tie_word_embeddings=bert.tie_word_embeddings,
    )


def _load_student(student: torch.nn.Module, weights: Mapping[str, Tensor], vocab_transform: bool) -> None:
    """All weights must match; only the vocabulary transform may be newly initialized."""
    loaded = student.load_state_dict(dict(weights), strict=False)
    own = () if vocab_transform else ("vocab_transform.", "vocab_layer_norm.", "lm_head.dense.", "lm_head.layer_norm.")
    missing = [name for name in loaded.missing_keys if not name.startswith(own)]
    if missing or loaded.unexpected_keys:
        raise ConfigError(
            f"the teacher does not fit its student: missing {missing[:3]}, unexpected {loaded.unexpected_keys[:3]}",
            "this model needs another version of transformers",
        )
    student.tie_weights()  # type: ignore[operator]
