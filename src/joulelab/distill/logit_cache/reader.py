"""A cache as training reads it: memory-mapped, found by key, checked whenever it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.distill.logit_cache.manifest import CacheManifest, read_manifest
from joulelab.distill.logit_cache.shards import Bytes, Shard, open_shard, read_entry, shard_files
from joulelab.distill.logit_cache.targets import CachedTargets, TeacherHead
from joulelab.distill.logit_cache.writer import HEAD
from joulelab.errors import JoulelabError


class LogitCache:
    def __init__(self, folder: Path, manifest: CacheManifest, shards: Sequence[Shard]) -> None:
        self.folder, self.manifest, self._shards = folder, manifest, shards
        index = np.concatenate([shard.index for shard in shards])
        owner = np.repeat(np.arange(len(shards)), [len(shard.index) for shard in shards])
        order = np.argsort(index["key"], kind="stable")
        self._index, self._owner = index[order], owner[order]
        self._head: TeacherHead | None = None

    @classmethod
    def open(cls, folder: Path) -> LogitCache:
        """Reads the indices alone; entries are read when they are asked for."""
        manifest = read_manifest(folder)
        paths = shard_files(folder)
        if not paths:
            raise JoulelabError(f"the cache {folder} is empty", "run it again: the teacher is asked anew")
        return cls(folder, manifest, [open_shard(path) for path in paths])

    def __len__(self) -> int:
        """Keys; the same text written twice counts twice."""
        return len(self._index)

    @property
    def positions(self) -> int:
        return int(self._index["positions"].sum())

    @property
    def size_bytes(self) -> int:
        return sum(len(shard.bytes) for shard in self._shards)

    @property
    def bytes_per_token(self) -> float:
        """Of a trained token, with the index and all; a head that is kept once is not counted."""
        return self.size_bytes / self.positions

    def targets(self, keys: Sequence[bytes], device: torch.device | None = None) -> CachedTargets:
        """The positions of these pieces one after another."""
        places = self._places(keys)
        if (places < 0).any():
            raise JoulelabError(
                f"{(places < 0).sum()} of {len(keys)} pieces of the batch are not in the cache {self.folder}: the "
                "teacher has seen other tokens, or other ones were trained",
                "make the cache from the same documents with the same tokenizer and masks; "
                "with several writers, wait for all of them",
            )
        layout = self.manifest.layout
        entries = [
            read_entry(self._shards[self._owner[place]], self._index[place], layout) for place in places.tolist()
        ]
        fixed_NF = _joined([fixed for fixed, _ in entries], layout.fixed_bytes)
        records_RS = _joined([records for _, records in entries], layout.record_bytes)
        found = CachedTargets(fixed_NF, records_RS, self.manifest, self.head())
        return found if device is None else found.to(device)

    def head(self) -> TeacherHead | None:
        """Of a cache of hidden states: the teacher's projection to the vocabulary."""
        if self._head is None and self.manifest.how.is_exact:
            from safetensors.torch import load_file

            if not (self.folder / HEAD).is_file():
                raise JoulelabError(f"{self.folder / HEAD} is missing", "make the cache again")
            kept = load_file(self.folder / HEAD)
            self._head = TeacherHead(kept["weight"], kept.get("bias"))
        return self._head

    def _places(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Where in the index each key stands; -1: nowhere."""
        wanted: NDArray[Any] = np.array(list(keys), dtype=self._index["key"].dtype)
        places = np.searchsorted(self._index["key"], wanted).clip(max=len(self._index) - 1)
        return np.where(self._index["key"][places] == wanted, places, -1)


def _joined(parts: Sequence[Bytes], width: int) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty((0, width), dtype=np.uint8), *parts]))
