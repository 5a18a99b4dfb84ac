"""Teacher and student as models: by name, from layers of the teacher, by configuration or by size.

`open_for_loss` splits a language model of transformers between hidden states and vocabulary, so that a loss can project
in chunks: `model(ids, for_loss=True)` returns the input of the last projection and the last hidden states. The model
keeps its class name and its parameters and is saved and loaded as before.

Shapes: B rows, T tokens, N positions (all rows flattened, or those selected), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from joulelab import lookup
from joulelab.distill.distilbert.config import LmStudent
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import import_transformers, load_pretrained, seeded_init
from joulelab.zoo.students import extract_student
from joulelab.zoo.tasks.token_rows import use_unpadded_attention

_TINY = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "distilbert": {"base": {}, "tiny": {"dim": 64, "n_heads": 2, "hidden_dim": 128, "n_layers": 2}},
    # 514: RoBERTa counts positions from 2
    "roberta": {
        "base": {"num_hidden_layers": 6, "max_position_embeddings": 514, "type_vocab_size": 1},
        "tiny": {**_TINY, "max_position_embeddings": 514, "type_vocab_size": 1},
    },
    "gpt2": {"base": {"n_layer": 6}, "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2}},
}
_CLASSES = {"distilbert": "DistilBertForMaskedLM", "roberta": "RobertaForMaskedLM", "gpt2": "GPT2LMHeadModel"}


def load_lm(name: str, kind: str, seed: int = 0) -> nn.Module:
    """A language model with its head; a head that the weights do not have is initialized from the seed."""
    transformers = import_transformers()
    causal = kind == "gpt2"
    loader = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    with seeded_init(seed):
        model = load_pretrained(loader, name)
    found = str(model.config.model_type)  # type: ignore[union-attr]
    if found != kind:
        raise ConfigError(f"{name} is a model of type '{found}'; expected '{kind}'", "correct its type in the settings")
    return model


def make_student(config: LmStudent, teacher: nn.Module | None, vocab_size: int, seed: int) -> nn.Module:
    """On the CPU. `teacher`: the model whose layers are taken, if the settings take layers."""
    if config.layers is not None:
        assert teacher is not None
        student: nn.Module = extract_student(teacher, config.layers, vocab_transform=config.vocab_transform, seed=seed)
        return student
    if config.model is not None:
        return load_lm(config.model, config.type, seed)
    return _from_config(config, vocab_size, seed)


def _from_config(config: LmStudent, vocab_size: int, seed: int) -> nn.Module:
    kind: Any = getattr(import_transformers(), _CLASSES[config.type])
    if config.config is not None:
        settings = kind.config_class.from_json_file(config.config)
    else:
        sizes = SIZES[config.type]
        if config.size not in sizes:
            raise lookup.unknown(f"size of {config.type}", str(config.size), sizes)
        settings = kind.config_class(vocab_size=vocab_size, **sizes[str(config.size)])
    with seeded_init(seed):
        model: nn.Module = kind(settings)
    return model


def require_comparable(student: nn.Module, teacher: nn.Module, same_width: bool) -> None:
    """A loss that compares two models needs the same vocabulary, or the same width, on both sides."""
    own, other = len(decoder_of(student)[0]), len(decoder_of(teacher)[0])
    if own != other:
        raise ConfigError(
            f"the student has {own:,} tokens and the teacher {other:,}: their distributions cannot be compared",
            "take the student from the teacher's layers, or one with the same tokenizer",
        )
    if same_width and width_of(student) != width_of(teacher):
        raise ConfigError(
            f"alpha_cos compares hidden states, but the student's width is {width_of(student)} and the teacher's "
            f"{width_of(teacher)}",
            "set distill.alpha_cos=0, or use a student of the teacher's width",
        )


def require_room(model: nn.Module, tokens: int, vocab_size: int) -> None:
    """A position or token without an embedding would be an index error deep inside the model."""
    config: Any = model.config
    positions = int(config.max_position_embeddings) - (2 if config.model_type == "roberta" else 0)
    if tokens > positions:
        raise ConfigError(
            f"{type(model).__name__} has {positions} positions; data.max_model_input_size is {tokens}",
            f"set data.max_model_input_size={positions} or less",
        )
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokens come from a vocabulary of {vocab_size:,}; {type(model).__name__} has {config.vocab_size:,}",
            "tokenize the text with the model's own tokenizer",
        )


def ready(model: nn.Module, unpadded: bool) -> nn.Module:
    """Opened for the losses; attention without masks where no row is padded."""
    if unpadded:
        use_unpadded_attention(model)
    return open_for_loss(model)


# between hidden states and vocabulary


@dataclass(frozen=True)
class _Head:
    decoder: str
    """Path of the projection to the vocabulary."""
    transform: Callable[[Any, Tensor], Tensor]
    """What the head computes before it."""
    positions: str
    """Path of the position embeddings."""
    token_types: str | None = None


def _distilbert_transform(model: Any, rows_ND: Tensor) -> Tensor:
    return model.vocab_layer_norm(model.activation(model.vocab_transform(rows_ND)))  # type: ignore[no-any-return]


def _roberta_transform(model: Any, rows_ND: Tensor) -> Tensor:
    return model.lm_head.layer_norm(nn.functional.gelu(model.lm_head.dense(rows_ND)))  # type: ignore[no-any-return]


_EMBEDDINGS = "embeddings.position_embeddings"
_HEADS = {
    "bert": _Head(
        "cls.predictions.decoder",
        lambda model, rows_ND: model.cls.predictions.transform(rows_ND),
        f"bert.{_EMBEDDINGS}",
        "bert.embeddings.token_type_embeddings",
    ),
    "distilbert": _Head("vocab_projector", _distilbert_transform, f"distilbert.{_EMBEDDINGS}"),
    "roberta": _Head(
        "lm_head.decoder", _roberta_transform, f"roberta.{_EMBEDDINGS}", "roberta.embeddings.token_type_embeddings"
    ),
    "gpt2": _Head("lm_head", lambda model, rows_ND: rows_ND, "transformer.wpe"),
}


class _OpenedModel(nn.Module):
    """Mixed into a language model of transformers."""

    transform: Callable[[Any, Tensor], Tensor]

    def forward(
        self, *args: Any, for_loss: bool = False, positions: Tensor | None = None, project: bool = True, **kwargs: Any
    ) -> Any:
        """With `for_loss`: (features_ND or None, hidden_BTD); `positions` are flat, `project=False` skips the head."""
        if not for_loss:
            return super().forward(*args, **kwargs)
        trunk: Any = self.base_model
        hidden_BTD = trunk(*args, **kwargs).last_hidden_state
        if not project:
            return None, hidden_BTD
        rows_ND = hidden_BTD.flatten(0, 1)
        if positions is not None:
            rows_ND = rows_ND.index_select(0, positions)
        return type(self).transform(self, rows_ND), hidden_BTD


def open_for_loss(model: nn.Module) -> nn.Module:
    kind, head = type(model), _head_of(model)
    model.__class__ = type(kind.__name__, (_OpenedModel, kind), {"transform": staticmethod(head.transform)})
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model


def decoder_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, D] and bias [V] of the projection to the vocabulary, by reference."""
    decoder: Any = model.get_submodule(_head_of(model).decoder)
    return decoder.weight, decoder.bias


def freeze_embeddings(model: nn.Module, positions: bool, token_types: bool) -> None:
    head = _head_of(model)
    for frozen, path in ((positions, head.positions), (token_types, head.token_types)):
        if frozen and path is None:
            raise ConfigError(f"{type(model).__name__} has no token type embeddings to freeze")
        if frozen and path:
            model.get_submodule(path).requires_grad_(False)


def width_of(model: nn.Module) -> int:
    """Of the hidden states."""
    config: Any = model.config
    return int(config.hidden_size)


def _head_of(model: nn.Module) -> _Head:
    name = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if name not in _HEADS:
        raise ConfigError(
            f"a model of type '{name}' is not supported; expected {', '.join(_HEADS)}",
            "name another teacher or student",
        )
    return _HEADS[name]
