"""Whether an error says that memory was refused; torch tells it of GPUs by a class, and of the host in words alone."""

from __future__ import annotations

import torch

# what torch's allocator for the host says, and what it says where the size itself is too large a number
_REFUSALS = ("DefaultCPUAllocator", "size calculation overflowed")


def is_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)
