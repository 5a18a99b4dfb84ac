"""Theoretical cost of a model: parameters, FLOPs per item, and memory that training keeps on the device.

FLOPs are those of matrix products, convolutions and attention by torch's FlopCounterMode: 2 per multiply-add, attention
over the whole square (a causal mask does not reduce the count), nothing for element-wise operations, no recomputation.
This is the convention of MFU (Chowdhery et al., 2022). Models are built from fake tensors, which have shapes but no
data, so a model of 7 billion parameters is counted in seconds without memory. If a model's control flow reads tensor
values, a small model is counted on a real batch, a large one not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from joulelab.errors import JoulelabError
from joulelab.zoo.objective import Workload, count_parameters, prepare
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest

Shape = list[int]
aten: Any = torch.ops.aten


class FlopCounter(FlopCounterMode):
    """torch's counter without module tracking, and with grouped convolutions counted correctly."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={aten.convolution_backward: _convolution_backward})
        self.mod_tracker: Any = _NullModuleTracker()

    @property
    def flops(self) -> int:
        return int(self.get_total_flops())


class _NullModuleTracker:
    """Replaces torch's module tracker, which fails for models with a custom backward pass (Reformer's reversible
    layers); a total needs no module names."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _convolution_backward(
    grad_shape: Shape, x_shape: Shape, w_shape: Shape, *rest: Any, out_shape: Any = None, **named: Any
) -> int:
    """The FLOPs of the forward pass for each requested gradient. torch's formula (2.13) ignores groups and overcounts
    the backward pass of ConvNeXt by a factor of four."""
    transposed, wanted = rest[4], rest[-1]
    # Each gradient, by the input and by the weight, is a convolution with as many multiply-adds as
    # the forward pass.
    forward: int = conv_flop_count(x_shape, w_shape, grad_shape, transposed=transposed)
    return sum(map(bool, wanted[:2])) * forward


class AssumedBooleans(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Answers boolean reads of fake tensors ("is any attention global?") with a fixed value."""

    def __init__(self, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        return self._answer if asks and args[0].dtype is torch.bool else func(*args, **(kwargs or {}))


# Some losses need batch statistics or a neighbor in the batch, so a batch of one does not work.
ITEMS = 2
# Graphs and molecules vary in size, so their mean needs more items.
ITEMS_IF_SIZES_VARY = 16
REAL_RUN_MAX_PARAMETERS = 50_000_000
"""Models below this size run once on a CPU within seconds."""


@dataclass(frozen=True)
class ModelCost:
    """Parameters and FLOPs of a model."""

    parameters: int
    """Trainable."""
    others: int
    """Not trained: frozen parameters, moving averages."""
    factored: int
    """Rows plus columns of the parameters: the size of Adafactor's factored second moments."""
    forward_flops: float | None = None
    """Per item."""
    training_flops: float | None = None
    """Per item, forward and backward; recomputed activations are not counted."""
    how: str = ""
    """How the FLOPs were counted, or why they were not."""


CountingMethod = Callable[[WorkloadRequest], ModelCost]


def model_cost(request: WorkloadRequest) -> ModelCost:
    """Cost for the request's size and input shape; independent of its dataset and weights."""
    # Fixed shapes have the same cost per item at any batch size, so the smallest batch that works is enough.
    varying = request.entry.family in ("graphs", "molecules")
    items = ITEMS_IF_SIZES_VARY if varying else ITEMS
    synthetic = replace(request, dataset=SYNTHETIC, split="train", weights="", batch_size=items)
    # Cheapest first. Fake tensors carry shapes and no values, so a 1.5 billion parameter model is counted in seconds
    # without its memory; a model that branches on values needs an answer, and as a last resort a real batch.
    ways: list[tuple[CountingMethod, str]] = [
        (partial(_count_on_meta, answer=False), "fake tensors"),
        (partial(_count_on_meta, answer=True), "fake tensors"),  # for consistency checks on values
        (_count_on_fake_tensors, "fake tensors"),
    ]
    if request.size.parameters < REAL_RUN_MAX_PARAMETERS:
        ways.append((_count_on_real_batch, f"a batch of {items}"))
    reasons = []
    for way, how in ways:
        try:
            return replace(way(synthetic), how=how)
        except JoulelabError:
            raise
        except Exception as error:  # models may do anything with tensor values
            reasons.append(f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0]}"[:120])
    how = f"the model's control flow depends on tensor values ({reasons[0]})"
    return ModelCost(request.size.parameters, 0, 0, how=how)


def _count_on_meta(request: WorkloadRequest, answer: bool) -> ModelCost:
    """Build on the meta device, then run on fake tensors: constructors may read tensor values."""
    with torch.device("meta"):
        workload = prepare(request)
    cost = _sizes(workload)  # before to_empty, which unshares tied tensors
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        for module in _modules(workload):
            module.to_empty(device="cpu").eval()  # stochastic depth cannot read random fake values
    batch = _first_batch(workload)
    with fake, AssumedBooleans(answer):
        return _count_flops(workload, batch, cost)


def _count_on_fake_tensors(request: WorkloadRequest) -> ModelCost:
    """For data that is generated from tensors."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        workload = prepare(request)
        return _count_flops(workload, _first_batch(workload), _sizes(workload))


def _count_on_real_batch(request: WorkloadRequest) -> ModelCost:
    workload = prepare(request)
    return _count_flops(workload, _first_batch(workload), _sizes(workload))


def _first_batch(workload: Workload) -> Any:
    return workload.batches.at(0, 0).to(torch.device("cpu"))


def _modules(workload: Workload) -> list[nn.Module]:
    return [workload.model, *workload.objective.modules().values()]


def _sizes(workload: Workload) -> ModelCost:
    parameters = [p for module in _modules(workload) for p in module.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    return ModelCost(
        parameters=count_parameters(workload.model),
        others=sum(p.numel() for p in parameters if not p.requires_grad),
        # Shazeer and Stern (2018): a matrix of n x m keeps n + m means instead of n m; vectors are not factored.
        factored=sum(p.numel() if p.ndim < 2 else p.numel() // p.shape[-1] + p.numel() // p.shape[-2] for p in trained),
    )


def _count_flops(workload: Workload, batch: Any, cost: ModelCost) -> ModelCost:
    # The counter does not know the CPU's fused attention kernels, so the unfused products are used.
    with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
        output = workload.objective(workload.model, batch, lambda name: nullcontext())
        # Read between the passes, because recomputed activations would otherwise count as forward work.
        forward = counter.flops
        output.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward untyped
    return replace(cost, forward_flops=forward / batch.samples, training_flops=counter.flops / batch.samples)


STATE_BYTES: dict[str, Callable[[ModelCost], int]] = {
    "adamw": lambda cost: 8 * cost.parameters,  # two moments in fp32
    "sgd": lambda cost: 4 * cost.parameters,  # momentum in fp32
    "adafactor": lambda cost: 4 * cost.factored,  # row and column means of the second moment
}


def training_bytes(cost: ModelCost, precision: str, optimizer: str) -> dict[str, int]:
    """Memory independent of the batch: weights and gradients in fp32; autocast adds a 16-bit copy."""
    # autocast caches a cast copy of every weight for the length of a step.
    copies = 2 * (cost.parameters + cost.others) if precision in ("bf16", "fp16") else 0
    return {
        "weights": 4 * (cost.parameters + cost.others),
        "gradients": 4 * cost.parameters,
        "optimizer state": STATE_BYTES[optimizer](cost),
        "16-bit copies of the weights": copies,
    }


def cost_summary(request: WorkloadRequest) -> dict[str, Any]:
    """The cost as plain values, with the bytes for every precision and optimizer."""
    cost = model_cost(request)
    rows = [(precision, optimizer) for precision in ("fp32", "bf16") for optimizer in STATE_BYTES]
    parts = [training_bytes(cost, precision, optimizer) for precision, optimizer in rows] if cost.factored else []
    return {
        "size": request.size_name or request.entry.default_size,
        "shape": request.shape,
        **asdict(cost),
        "parameters": request.size.parameters,
        "trained_parameters": cost.parameters,
        "bytes": [
            {"precision": precision, "optimizer": optimizer, "parts": found, "sum": sum(found.values())}
            for (precision, optimizer), found in zip(rows, parts, strict=False)
        ],
    }
