"""Log-probabilities of both answers of every pair under one model, in one forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.data.batches import TensorBatch
from joulelab.data.chat.attention import NAME as PACKED
from joulelab.distill.causal.heads import head_of
from joulelab.distill.preferences.pair_rows import PairRows
from joulelab.distill.preferences.pairs import Pair
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.errors import ConfigError

_APART = "compute prompts twice instead: preferences.shared_prompt=false"
_SAME_SHARE = 0.02
"""Of the hidden states; half precision rounds by less, and seeing the other answer changes more."""


def answer_log_probabilities(called: nn.Module, model: nn.Module, batch: TensorBatch, how: Projecting) -> Tensor:
    """[pairs, 2], summed over an answer's tokens. `called` is the model or what the loop wrapped around it."""
    logs_N = how(_predicting(called, model, batch), head_of(model), batch["targets"])
    sums = logs_N.new_zeros(2 * batch.samples).index_add(0, batch["owners"], logs_N)
    return sums.view(-1, 2)


@torch.no_grad()
def require_shared_prompt(model: nn.Module) -> None:
    """Tried on seven tokens rather than looked up: an answer's hidden states must be those of a row of its own."""
    pair = Pair(*(np.array(ids) for ids in ([1, 2, 3], [4, 5], [6, 7])))
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        shared_ND, apart_ND = (
            _predicting(model, model, PairRows(shared, aligned=8).batch([pair]).to(device)).float()
            for shared in (True, False)
        )
    finally:
        model.train(was_training)
    if (shared_ND - apart_ND).norm() > _SAME_SHARE * apart_ND.norm():
        raise ConfigError(
            f"{type(model).__name__} computes two answers behind one prompt otherwise than each alone", _APART
        )


def _predicting(called: nn.Module, model: nn.Module, batch: TensorBatch) -> Tensor:
    """The hidden states that answers' tokens are predicted from."""
    hidden_BTD: Tensor = called(**model_inputs(model, batch), hidden_only=True)
    return hidden_BTD.flatten(0, 1).index_select(0, batch["places"])


def model_inputs(model: nn.Module, batch: TensorBatch) -> dict[str, Tensor]:
    """Plain rows need neither mask nor positions: their padding stands behind everything that is looked at."""
    if "attention_mask" not in batch.tensors:
        return {"input_ids": batch["input_ids"]}
    mask_B1TT = _as_wanted(model, batch["attention_mask"])
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask_B1TT}


def _as_wanted(model: nn.Module, visible_B1TT: Tensor) -> Tensor:
    """Our mask is handed to attention as it is, so it has to say what that attention understands."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and window < visible_B1TT.shape[-1]:
        raise ConfigError(
            f"rows of {visible_B1TT.shape[-1]} tokens, and the model sees {window} of them at a time: a shared prompt "
            "would be seen too far",
            _APART,
        )
    kind = config._attn_implementation
    if kind in ("sdpa", PACKED):
        return visible_B1TT
    if kind == "eager":
        added = torch.zeros_like(visible_B1TT, dtype=torch.float32)
        return added.masked_fill(~visible_B1TT, torch.finfo(torch.float32).min)
    raise ConfigError(f"attention '{kind}' takes no mask of ours for a shared prompt", f"use sdpa; or {_APART}")


def switch_dropout_off(model: nn.Module) -> nn.Module:
    """In place. The reference's figures are cached without dropout; a policy with it would begin away from them."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model
