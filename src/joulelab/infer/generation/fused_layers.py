"""Decoder layers with fewer launches: projections of one input as one matrix product, with the norm before them.

A decoding step of few rows takes as long as its launches. Where a layer has the usual parts (q_proj, k_proj and v_proj;
gate_proj, up_proj and down_proj; an RMSNorm before each), these are replaced while the decoder runs:

- an attention or feed-forward module gets the output of the joined projection as its input, and its own projections
  become slices of it, so that the code of the model stays as it is;
- with one row on a GPU, norm, projection and gate are one kernel (`decode_kernel.linear_row`).

Whether a model computes the same with these parts is checked by its logits (`static_decoder.check_model`), because
names do not prove what a forward method does. Joined weights are copies, refreshed when the model was trained in
between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from joulelab.train.optim import repeated_blocks

# With more weights than these a layer uses less energy by cuBLAS: its tensor cores save 65 pJ per weight on an H200,
# the kernel saves a launch and about 3 us (docs/results.md).
_MOST_WEIGHTS = 4_000_000


class _Slice(nn.Module):
    """In place of a projection whose output is a part of the input."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.begin : self.end]


class _Projection(nn.Module):
    """Linear layers of one input as one, after an RMSNorm if there is one."""

    def __init__(self, sources: Sequence[nn.Linear], norm: Any = None) -> None:
        super().__init__()
        self._sources = list(sources)
        weights = [source.weight for source in sources]
        # A single layer shares its weight.
        self.weight = weights[0].detach() if len(sources) == 1 else torch.cat([one.detach() for one in weights])
        self.bias: Tensor | None = None
        if sources[0].bias is not None:
            self.bias = torch.cat([source.bias.detach() for source in sources])
        self._versions = self._current_versions()
        self.norm = norm
        self.norm_weight: Tensor | None = None if norm is None else norm.weight
        self.epsilon = 0.0 if norm is None else float(norm.variance_epsilon)

    def _current_versions(self) -> list[int]:
        return [one._version for source in self._sources for one in (source.weight, source.bias) if one is not None]

    @torch.no_grad()
    def refresh(self) -> None:
        """In place: captured steps read these addresses."""
        versions = self._current_versions()
        if versions != self._versions:
            self._versions = versions
            if len(self._sources) > 1:
                torch.cat([source.weight for source in self._sources], out=self.weight)
            if self.bias is not None:
                torch.cat([source.bias for source in self._sources], out=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if takes_kernel(x, self.weight):
            from joulelab.infer.generation.decode_kernel import linear_row

            return linear_row(x, self.weight, self.bias, self.norm_weight, self.epsilon)
        return F.linear(x if self.norm is None else self.norm(x), self.weight, self.bias)


class _JoinedInput(nn.Module):
    """An attention or feed-forward module that reads the joined projection of its input."""

    def __init__(self, owner: nn.Module, projection: _Projection, output: _Projection | None = None) -> None:
        """`output`: the last layer of a feed-forward module with a SiLU gate."""
        super().__init__()
        self.owner, self.projection, self.output = owner, projection, output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self._joined(self.projection(args[0]), args[1:], kwargs)
        return self._joined(self.projection(kwargs.pop("hidden_states")), (), kwargs)

    def _joined(self, joined: Tensor, args: Any, kwargs: Any) -> Any:
        if self.output is not None and takes_kernel(joined, self.output.weight):
            from joulelab.infer.generation.decode_kernel import linear_row

            return linear_row(joined, self.output.weight, self.output.bias, gated=True)
        return self.owner(joined, *args, **kwargs)


def takes_kernel(x: Tensor, weight: Tensor) -> bool:
    is_small = x.numel() == x.shape[-1] and weight.numel() <= _MOST_WEIGHTS
    return x.is_cuda and is_small and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


class FusedLayers:
    """The replacements of a model's layers."""

    def __init__(self, model: Any) -> None:
        self._swaps: list[tuple[nn.Module, str, nn.Module]] = []
        self._projections: list[_Projection] = []
        for layer in repeated_blocks(model):
            self._join(layer, "self_attn", "input_layernorm", ("q_proj", "k_proj", "v_proj"), "o_proj")
            self._join(layer, "mlp", "post_attention_layernorm", ("gate_proj", "up_proj"), "down_proj")

    @property
    def present(self) -> bool:
        return bool(self._swaps)

    def _join(self, layer: Any, owner_name: str, norm_name: str, names: Sequence[str], last_name: str) -> None:
        owner = getattr(layer, owner_name, None)
        sources = [getattr(owner, name, None) for name in names]
        last = getattr(owner, last_name, None)
        # Adapters and quantized layers are subclasses, not linear layers at all, or have weights of another class.
        if owner is None or any(type(one) is not nn.Linear for one in (*sources, last)):
            return
        if any(type(one.weight) is not nn.Parameter for one in (*sources, last)):  # type: ignore[union-attr]
            return
        if len({(one.in_features, one.bias is None) for one in sources}) > 1:  # type: ignore[union-attr]
            return
        norm = getattr(layer, norm_name, None)
        is_rms = type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon")
        projection = _Projection(sources, norm if is_rms else None)  # type: ignore[arg-type]
        output = _Projection([last])  # type: ignore[list-item]
        self._projections += [projection, output]
        gated = isinstance(getattr(owner, "act_fn", None), nn.SiLU) or type(
            getattr(owner, "act_fn", None)
        ).__name__ in ("SiLU", "SiLUActivation")
        is_gated = names[0] == "gate_proj" and gated
        begin = 0
        for name, source in zip(names, sources, strict=True):
            end = begin + source.out_features  # type: ignore[union-attr]
            self._swaps.append((owner, name, _Slice(begin, end)))
            begin = end
        self._swaps.append((owner, last_name, output))
        self._swaps.append((layer, owner_name, _JoinedInput(owner, projection, output if is_gated else None)))
        if is_rms:
            self._swaps.append((layer, norm_name, nn.Identity()))

    def refresh(self) -> None:
        """Copy weights that have changed since."""
        for projection in self._projections:
            projection.refresh()

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self._swaps]
        for owner, name, replacement in self._swaps:
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)
