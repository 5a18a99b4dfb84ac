"""Batches together with what the teacher said about them, made by the loader ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from joulelab.data.batches import BatchSource
from joulelab.data.chat.packing import NOT_TRAINED, CausalBatch
from joulelab.distill.logit_cache.keys import Piece, pieces_of
from joulelab.distill.logit_cache.manifest import CacheManifest
from joulelab.distill.logit_cache.reader import LogitCache
from joulelab.distill.logit_cache.targets import CachedTargets, TeacherHead


def batch_pieces(batch: CausalBatch) -> list[Piece]:
    """Of a batch that is still on the host."""
    trained_BT = (batch.labels != NOT_TRAINED).numpy()
    return pieces_of(batch.ids.numpy(), trained_BT, batch.documents.numpy())


@dataclass(frozen=True, eq=False)
class TaughtBatch(CausalBatch):
    """The cache's bytes are fields of the batch itself, as the loader looks after a batch's own tensors."""

    said_fixed: Tensor
    said_records: Tensor
    manifest: CacheManifest
    head: TeacherHead | None

    @property
    def targets(self) -> CachedTargets:
        return CachedTargets(self.said_fixed, self.said_records, self.manifest, self.head)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> CausalBatch:
        changed: dict[str, Any] = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **changed)


def taught(batch: CausalBatch, cache: LogitCache) -> TaughtBatch:
    said = cache.targets([piece.key for piece in batch_pieces(batch)])
    own = {field.name: getattr(batch, field.name) for field in fields(CausalBatch)}
    return TaughtBatch(
        **own, said_fixed=said.fixed_NF, said_records=said.records_RS, manifest=said.manifest, head=said.head
    )


class TaughtBatches:
    """A source of batches for the loop, each with its teacher's answers."""

    def __init__(self, source: BatchSource[CausalBatch], cache: LogitCache) -> None:
        self._source, self._cache = source, cache

    @property
    def batches_per_epoch(self) -> int:
        return self._source.batches_per_epoch

    def at(self, epoch: int, index: int) -> TaughtBatch:
        return taught(self._source.at(epoch, index), self._cache)
