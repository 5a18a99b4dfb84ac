"""Too little memory, told with the row it was too little for.

A GPU refuses what does not fit. A CPU's kernel promises more than it has and ends the process when the promise is
called in, so a large batch is asked about first: what one item needs is looked up, and the batch needs so many times
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from joulelab.data.batches import TensorBatch
from joulelab.errors import ConfigError, OutOfMemory
from joulelab.infer.infer_config import Case
from joulelab.infer.subject import Subject, weight_bytes
from joulelab.train.memory import is_out_of_memory
from joulelab.train.zoo_results import peak_memory_bytes
from joulelab.units import size_text

_HINT = "ask for a smaller batch, a shorter sequence or 16-bit weights"
_LARGE_BATCH = 64


@contextmanager
def explained(case: Case, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        place = "GPU's memory" if device.type == "cuda" else "memory"
        raise OutOfMemory(f"{_row(case)} does not fit into the {place}", _HINT) from error


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def row_memory_bytes(model: nn.Module, device: torch.device, before: int) -> int:
    """The model's weights and what was needed beside them, since so many bytes were allocated and the peak was started;
    other models that wait for their turn on the GPU do not count. On a CPU the most the process ever held."""
    peak = peak_memory_bytes(device)
    return weight_bytes(model) + peak - before if device.type == "cuda" else peak


def require_room(case: Case, device: torch.device, one_item: Callable[[], Subject]) -> None:
    if device.type == "cuda" or case.batch_size < _LARGE_BATCH:
        return
    needed = case.batch_size * item_bytes(one_item())
    memory = psutil.virtual_memory()
    words = f"{_row(case)} needs at least {size_text(needed)} of memory"
    if needed > memory.total:
        raise ConfigError(f"{words}, and this machine has {size_text(memory.total)}", _HINT)
    if needed > memory.available:
        raise OutOfMemory(f"{words}, and {size_text(memory.available)} are free", _HINT)


def item_bytes(subject: Subject) -> int:
    """An item and the most that one operation on it reads and writes, beside the weights."""
    values = [list(v.tensors.values()) if isinstance(v, TensorBatch) else v for v in subject.inputs]
    largest = _LargestOperation(subject.model)
    with torch.no_grad(), largest:
        subject.model(*subject.inputs)
    own = sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor))
    return (own + largest.most_bytes) // max(subject.items, 1)


class _LargestOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self.most_bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves([args, result]) if isinstance(leaf, Tensor)]
        apart = {storage.data_ptr(): storage.nbytes() for storage in storages}
        touched = sum(size for place, size in apart.items() if place not in self._weights)
        self.most_bytes = max(self.most_bytes, touched)
        return result


def _row(case: Case) -> str:
    return case.stage.removeprefix("infer.")
