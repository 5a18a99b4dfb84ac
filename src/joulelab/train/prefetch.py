"""Batches made ready ahead of the step that needs them, in a thread and a stream of their own.

Which batch comes next follows from the position alone, so nothing of this is state: after a resume or a step back, what
was made ahead is dropped and made anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from joulelab.data.batches import BatchSource, TrainingBatch

B = TypeVar("B", bound=TrainingBatch)


class _Ready(NamedTuple):
    batch: Any
    copied: torch.cuda.Event | None


class Prefetcher(Generic[B]):
    """`take(number)` gives the micro-batch of that number; the following ones, `stride` apart, are made meanwhile."""

    def __init__(self, source: BatchSource[B], device: torch.device, ahead: int, stride: int = 1) -> None:
        self._source, self._device, self._ahead, self._stride = source, device, ahead, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="joulelab-input") if ahead else None
        self._queue: deque[tuple[int, Future[_Ready]]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def take(self, number: int) -> B:
        if self._pool is None:
            return self._batch(number).to(self._device)
        if not self._queue or self._queue[0][0] != number:
            self._drop()
        while len(self._queue) <= self._ahead:
            following = self._queue[-1][0] + self._stride if self._queue else number
            self._queue.append((following, self._pool.submit(self._make, following)))
        ready = self._queue.popleft()[1].result()
        if ready.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.copied)
            for tensor in _tensors(ready.batch):
                tensor.record_stream(stream)  # not to be overwritten by a later batch while a kernel still reads it
        batch: B = ready.batch
        return batch

    def close(self) -> None:
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        for _, future in self._queue:
            future.cancel()
        self._queue.clear()

    def _batch(self, number: int) -> B:
        epoch, index = divmod(number, self._source.batches_per_epoch)
        return self._source.at(epoch, index)

    def _make(self, number: int) -> _Ready:
        batch = self._batch(number)
        if self._stream is None:
            return _Ready(batch.to(self._device), None)
        pin = getattr(batch, "pin_memory", None)
        with torch.cuda.stream(self._stream):
            moved = (pin() if pin else batch).to(self._device)
            return _Ready(moved, self._stream.record_event())


def _tensors(batch: object) -> Iterator[Tensor]:
    for value in vars(batch).values():
        if isinstance(value, Tensor) and value.is_cuda:
            yield value
        elif isinstance(value, Mapping):
            yield from (inner for inner in value.values() if isinstance(inner, Tensor) and inner.is_cuda)
