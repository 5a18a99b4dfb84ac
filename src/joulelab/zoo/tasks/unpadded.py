"""What rows without padding spare the models of transformers: masks that hide nothing, and checks that stop a GPU.

Rows here are cut to one length, so no token is ever hidden from another for being padding. Told so, attention runs in
torch's fused kernels; left to itself, transformers makes such masks under torch.compile (5.17 for every encoder), and
a mask rules the fast kernels out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.pretrained import import_transformers

NAME = "joulelab_unpadded"


def use_unpadded_attention(model: nn.Module) -> None:
    """For models that take their attention by name; the few with one of their own keep it."""
    if getattr(model, "_supports_sdpa", False):
        # No way to make masks is registered under this name, and so none are made.
        import_transformers().AttentionInterface.register(NAME, _attend)
        model.set_attn_implementation(NAME)  # type: ignore[operator]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if getattr(module, "is_decoder", False) and not module.is_causal:
        kwargs["position_bias"] = None  # T5's decoder looks at its encoder with a bias of zeros
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **kwargs)
    return attended


def drop_no_layers(model: nn.Module) -> None:
    """OPT and BART draw a number for every layer to decide whether to skip it, with a chance of 0. Reading that number
    cuts a compiled model into pieces, so their stacks of layers are told that they are not in training."""
    stacks: list[Any] = [module for module in model.modules() if getattr(module, "layerdrop", None) == 0.0]
    for module in stacks:
        kind = type(module)
        module.__class__ = type(kind.__name__, (_NeverTraining, kind), {})
        module.train(module.training)
        if hasattr(module, "layernorm_embedding"):
            module.layernorm_embedding.register_forward_hook(_Dropout(module.dropout))


class _NeverTraining(nn.Module):
    """The layers inside are in training or not as usual."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.training = False
        return self


class _Dropout:
    """What BART's stacks do themselves after their embeddings, if in training."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, self._share, module.training)
