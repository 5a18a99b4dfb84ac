"""Layers that the settings name, looked for before anything is trained: a wrong one would be found hours later."""

from __future__ import annotations

from typing import Any

import torch

from joulelab.distill.classify_config import ClassifySpec, StudentConfig
from joulelab.distill.classify_view import hidden_index
from joulelab.zoo.pretrained import explained_load, import_transformers


def require_layers(spec: ClassifySpec) -> None:
    if not spec.has_teacher:
        return
    hidden_index(_hollow(spec.teacher.source), spec.distill.t_layer, "distill.t_layer")
    if spec.until == "student" and (spec.distill.needs_features or spec.student.hint is not None):
        student = _hollow(spec.student.init, _depth(spec.student))
        hidden_index(student, spec.distill.s_layer, "distill.s_layer")


def _depth(config: StudentConfig) -> int | None:
    if isinstance(config.layers, tuple):
        return len(config.layers)
    return config.layers if isinstance(config.layers, int) else None


def _hollow(source: str, depth: int | None = None) -> Any:
    """The model's shape without its weights: it takes no memory and next to no time."""
    transformers = import_transformers()
    config: Any = explained_load(transformers.AutoConfig, source)
    if depth is not None:
        config.num_hidden_layers = depth
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)
