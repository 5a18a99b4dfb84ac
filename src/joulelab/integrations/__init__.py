"""The meter as a callback in training loops of other frameworks.

    from joulelab.integrations import JoulelabCallback           # transformers.Trainer, and TRL's trainers built on it
    from joulelab.integrations import JoulelabLightningCallback  # lightning or pytorch_lightning

Each is imported on first use, so that one framework does not require the other.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "JoulelabCallback": "joulelab.integrations.huggingface",
    "JoulelabLightningCallback": "joulelab.integrations.lightning",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'joulelab.integrations' has no attribute '{name}'")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
