"""Causal language models opened between hidden states and vocabulary, so that a loss can project in chunks.

`model(ids, hidden_only=True)` gives what the last projection would be applied to. The model stays itself: same class
name, same parameters, saved and loaded as before.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from joulelab.errors import ConfigError

_SCALES = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""What some models do to their logits after the projection, and the value that does nothing."""


class _Opened(nn.Module):
    """Mixed into a language model of transformers."""

    def forward(self, *args: Any, hidden_only: bool = False, **kwargs: Any) -> Any:
        """With `hidden_only`: hidden_BTD, after the last norm."""
        if not hidden_only:
            return super().forward(*args, **kwargs)
        trunk: Any = self.base_model
        return trunk(*args, **{**kwargs, "use_cache": False}).last_hidden_state


def open_for_loss(model: nn.Module) -> nn.Module:
    """In place; a model whose logits are more than a projection is refused, as its loss would be another one."""
    if isinstance(model, _Opened):
        return model
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for name, nothing in _SCALES.items():
        value = getattr(model.config, name, nothing)
        if value not in (None, nothing):
            raise ConfigError(
                f"{type(model).__name__} changes its logits after the projection ({name}={value})",
                "name a model of another family: Llama, OLMo, Qwen, Mistral, SmolLM",
            )
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__} has no plain projection to its vocabulary", "name a causal model")
    model.__class__ = type(type(model).__name__, (_Opened, type(model)), {})
    return model


def head_of(model: nn.Module) -> Tensor:
    """Weight [V, D] of the projection to the vocabulary, by reference."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    weight: Tensor = head.weight
    return weight
