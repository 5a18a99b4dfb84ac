"""Language models of transformers opened between hidden states and vocabulary, so that a loss can project in chunks.

`model(ids, for_loss=True)` gives what the last projection would be applied to, and the last hidden states. The model
stays itself: same class name, same parameters, saved and loaded as before.

Shapes: B rows, T tokens, N positions (rows laid end to end, or those asked for), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from joulelab.errors import ConfigError


@dataclass(frozen=True)
class _Kind:
    decoder: str
    """Where the projection to the vocabulary stands."""
    transform: Callable[[Any, Tensor], Tensor]
    """What the head does before it."""
    positions: str
    """Where the position embeddings stand."""
    token_types: str | None = None


def _distilbert_transform(model: Any, rows_ND: Tensor) -> Tensor:
    return model.vocab_layer_norm(model.activation(model.vocab_transform(rows_ND)))  # type: ignore[no-any-return]


def _roberta_transform(model: Any, rows_ND: Tensor) -> Tensor:
    return model.lm_head.layer_norm(nn.functional.gelu(model.lm_head.dense(rows_ND)))  # type: ignore[no-any-return]


_EMBEDDINGS = "embeddings.position_embeddings"
_KINDS = {
    "bert": _Kind(
        "cls.predictions.decoder",
        lambda model, rows_ND: model.cls.predictions.transform(rows_ND),
        f"bert.{_EMBEDDINGS}",
        "bert.embeddings.token_type_embeddings",
    ),
    "distilbert": _Kind("vocab_projector", _distilbert_transform, f"distilbert.{_EMBEDDINGS}"),
    "roberta": _Kind(
        "lm_head.decoder", _roberta_transform, f"roberta.{_EMBEDDINGS}", "roberta.embeddings.token_type_embeddings"
    ),
    "gpt2": _Kind("lm_head", lambda model, rows_ND: rows_ND, "transformer.wpe"),
}


class _Opened(nn.Module):
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
    kind, own = type(model), _kind_of(model)
    model.__class__ = type(kind.__name__, (_Opened, kind), {"transform": staticmethod(own.transform)})
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model


def decoder_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, D] and bias [V] of the projection to the vocabulary, by reference."""
    decoder: Any = model.get_submodule(_kind_of(model).decoder)
    return decoder.weight, decoder.bias


def freeze_embeddings(model: nn.Module, positions: bool, token_types: bool) -> None:
    """What is frozen stays as it starts."""
    kind = _kind_of(model)
    for asked, place in ((positions, kind.positions), (token_types, kind.token_types)):
        if asked and place is None:
            raise ConfigError(f"{type(model).__name__} has no token type embeddings to freeze")
        if asked and place:
            model.get_submodule(place).requires_grad_(False)


def width_of(model: nn.Module) -> int:
    """Of the hidden states."""
    config: Any = model.config
    return int(config.hidden_size)


def _kind_of(model: nn.Module) -> _Kind:
    name = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if name not in _KINDS:
        raise ConfigError(f"a model of type '{name}' is none of {', '.join(_KINDS)}", "name another teacher or student")
    return _KINDS[name]
