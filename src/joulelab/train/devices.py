"""Which device the settings mean."""

from __future__ import annotations

import torch

from joulelab.errors import ConfigError


def device_of(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`; a GPU that is not there is told before anything is loaded."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, and torch sees no GPU", "install a CUDA build of torch, or set device=cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
