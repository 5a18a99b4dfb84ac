"""The optimisers by name, from torch itself; biases and norms are left out of weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from joulelab.train.config import TrainingConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    rate = config.learning_rate
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.betas[0], foreach=True)  # fused has no shards
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True)
