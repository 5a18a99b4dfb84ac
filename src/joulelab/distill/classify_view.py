"""What the losses look at in a model: its answer, and the features of one layer where they are asked for.

Text and images differ only here. A layer is named by its place among the hidden states (0 is what enters the first
layer, -1 the last layer's output), or by its module's name, such as `encoder.layer.3` or `encoder.stages.1`.

Shapes: B batch, C classes, H width; maps of a CNN are [B, C, H, W].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from joulelab.data.batches import Batch, TensorBatch
from joulelab.distill.pooling import pool
from joulelab.errors import ConfigError

_EMBEDDINGS = ("embeddings", "embedder")


@dataclass(frozen=True)
class View:
    logits_BC: Tensor
    features: Tensor | None
    """[B, H] of a text model, [B, C, H, W] of a CNN."""


class Look(Protocol):
    """One model's way of being looked at."""

    def __call__(self, model: nn.Module, batch: Any, features: bool) -> View: ...


@dataclass(frozen=True)
class TextLook:
    layer: int
    how: str

    def __call__(self, model: nn.Module, batch: Batch, features: bool) -> View:
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=features)
        pooled_BH = pool(output.hidden_states[self.layer], batch.attention_mask, self.how) if features else None
        # a body without a head, as the hint stage trains it, answers nothing yet
        return View(output.logits if hasattr(output, "logits") else output[0], pooled_BH)


@dataclass(frozen=True)
class ImageLook:
    layer: int

    def __call__(self, model: nn.Module, batch: TensorBatch, features: bool) -> View:
        output = model(pixel_values=batch["pixels"], output_hidden_states=features)
        maps_BCHW = output.hidden_states[self.layer] if features else None
        return View(output.logits if hasattr(output, "logits") else output[0], maps_BCHW)


def hidden_index(model: nn.Module, layer: int | str, whose: str) -> int:
    """The layer's place among the hidden states, counted from the front; what is not there is named with what is."""
    states = 1 + len(layer_list(model))
    if isinstance(layer, str):
        return _named(model, layer, whose)
    if not -states <= layer < states:
        raise ConfigError(
            f"{whose}={layer}: the model has {states} hidden states, its embeddings and {states - 1} layers",
            f"choose {-states} to {states - 1}, or a layer's name",
        )
    return layer % states


def _named(model: nn.Module, name: str, whose: str) -> int:
    place, layers = layer_place(model), layer_list(model)
    numbers = {f"{place}.{number}": number + 1 for number in range(len(layers))}
    for known, number in numbers.items():
        # `layer.3`, `encoder.layer.3` and `bert.encoder.layer.3` all mean the same module
        if f".{known}".endswith(f".{name}") or name.endswith(f".{known}"):
            return number
    if name.rsplit(".", 1)[-1] in _EMBEDDINGS:
        return 0
    listed = ", ".join(list(numbers)[:3])
    raise ConfigError(
        f"{whose}='{name}': no layer of the model is called that", f"its layers: embeddings, {listed}, ..."
    )


def layer_place(model: nn.Module) -> str:
    """Where the body keeps its list of layers: the first list of modules, seen from outside."""
    body: Any = getattr(model, "base_model", model)
    found = next((name for name, module in body.named_modules() if isinstance(module, nn.ModuleList)), None)
    if found is None:
        raise ConfigError(f"{type(model).__name__} has no list of layers to choose from", "use another architecture")
    return str(found)


def layer_list(model: nn.Module) -> nn.ModuleList:
    body: Any = getattr(model, "base_model", model)
    found: nn.ModuleList = body.get_submodule(layer_place(model))
    return found


def hidden_width(model: nn.Module, index: int) -> int:
    """Width of a hidden state: the same in all layers of a transformer, the stage's channels in a CNN."""
    config: Any = model.config
    sizes = getattr(config, "hidden_sizes", None)
    if sizes is None:
        return int(config.hidden_size)
    return int(config.embedding_size if index == 0 else sizes[index - 1])
