"""FLOPs of everything that is computed while it is entered, by torch's own counter, corrected in three places."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

Shape = list[int]
aten: Any = torch.ops.aten


class FlopCounter(FlopCounterMode):
    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={aten.convolution_backward: _convolution_backward})
        self.mod_tracker: Any = _Nowhere()

    @property
    def flops(self) -> int:
        return int(self.get_total_flops())


class _Nowhere:
    """In place of torch's note of which module is at work, which trips over models with a backward pass of their own
    (Reformer's reversible layers); a sum needs no names."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _convolution_backward(
    grad_shape: Shape, x_shape: Shape, w_shape: Shape, *rest: Any, out_shape: Any = None, **named: Any
) -> int:
    """As much as forward for each gradient that is wanted. torch's own formula (2.13) forgets the groups, which makes
    the backward pass of a ConvNeXt four times too dear."""
    transposed, wanted = rest[4], rest[-1]
    forward: int = conv_flop_count(x_shape, w_shape, grad_shape, transposed=transposed)
    return sum(map(bool, wanted[:2])) * forward


class Answered(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A question put to numbers that are not there ("is any attention global?") has one answer, given in advance."""

    def __init__(self, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        return self._answer if asks and args[0].dtype is torch.bool else func(*args, **(kwargs or {}))
