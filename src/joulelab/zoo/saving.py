"""A trained model on disk: in Hugging Face format where the model has one, else its weights as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from joulelab.zoo.pretrained import import_transformers, quiet

WEIGHTS = "model.safetensors"


def save_weights(model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """`weights` are the model's whole ones, for a model that holds only a share of each itself."""
    if hasattr(model, "save_pretrained"):
        with quiet(import_transformers()):
            model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        return
    from safetensors.torch import save_file, save_model

    if weights is not None:
        save_file({name: value.clone() for name, value in weights.items()}, str(folder / WEIGHTS))
    else:
        save_model(model, str(folder / WEIGHTS))  # a tensor that two layers share is written once


def load_weights(model: nn.Module, folder: Path) -> None:
    """Into a model of the same shape."""
    if hasattr(model, "save_pretrained"):
        kind: Any = type(model)
        with quiet(import_transformers()):
            model.load_state_dict(kind.from_pretrained(folder).state_dict())
        return
    from safetensors.torch import load_model

    load_model(model, str(folder / WEIGHTS))
