"""Filling a cache: shard by shard, resumable at any point, and by several writers at once.

A writer asks which keys are missing, computes those and adds them. What a killed writer had not yet put into a shard is
computed again, and nothing else. Several writers each take a share of the rows (`runs.shares`) and write shards of
their own, into one folder or into several that are merged.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from joulelab.distill.logit_cache.asking import kept_keys
from joulelab.distill.logit_cache.keys import first_of_each
from joulelab.distill.logit_cache.manifest import CacheManifest, read_manifest, write_manifest
from joulelab.distill.logit_cache.packing import EncodedTargets
from joulelab.distill.logit_cache.shards import SUFFIX, Entry, pack_entry, shard_files, write_shard
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.runs.sharding import ALL, Shard

HEAD = "head.safetensors"
_MOST_THREADS = 16


@dataclass(frozen=True)
class Pace:
    """When a shard is closed: what a kill costs at most, against many small files."""

    bytes: int = 64 * 2**20
    seconds: float = 60.0


USUAL_PACE = Pace()


class CacheWriter:
    """Use it in a `with`; what was added is on the disk at its end, also at an end by an error."""

    def __init__(
        self,
        folder: Path,
        manifest: CacheManifest,
        share: Shard = ALL,
        pace: Pace = USUAL_PACE,
        elsewhere: Set[bytes] = frozenset(),
    ) -> None:
        """`elsewhere`: keys that another writer keeps."""
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, manifest)
        self.folder, self.manifest, self._share, self._pace = folder, manifest, share, pace
        self._there = kept_keys([folder]) | elsewhere
        # zlib lets go of the interpreter; a small teacher on a GPU says more in a second than a few threads can pack
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, usable_cores()), thread_name_prefix="joulelab-cache")
        self._waiting: list[Future[Entry]] = []
        self._waiting_bytes = 0
        self._written_s = time.monotonic()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._pool.shutdown()

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Places of the keys that are not there yet; of equal ones the first."""
        return [place for place in first_of_each(keys) if keys[place] not in self._there]

    def add(self, keys: Sequence[bytes], targets: EncodedTargets) -> None:
        """What is there already is left as it is."""
        kept, layout = list(targets.per_piece()), self.manifest.layout
        for place in self.missing(keys):
            self._there.add(keys[place])
            self._waiting.append(self._pool.submit(pack_entry, keys[place], *kept[place], layout))
            self._waiting_bytes += sum(part.size for part in kept[place])
        if self._waiting_bytes >= self._pace.bytes or time.monotonic() - self._written_s >= self._pace.seconds:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            # a name of its own: another writer, or this one in another life, never meets it
            name = f"{self._share.number:04d}-of-{self._share.of:04d}-{time.time_ns():x}-{secrets.token_hex(4)}{SUFFIX}"
            write_shard(self.folder / name, [entry.result() for entry in self._waiting])
        self._waiting, self._waiting_bytes, self._written_s = [], 0, time.monotonic()


def keep_head(folder: Path, weight_VE: Tensor) -> None:
    """Hidden states alone are no distribution; the teacher's projection goes with them, once."""
    if (folder / HEAD).exists():
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{HEAD}.{secrets.token_hex(4)}.tmp"
    save_file({"weight": weight_VE.detach().cpu().contiguous()}, temporary)
    temporary.replace(folder / HEAD)


def merge_caches(sources: Sequence[Path], target: Path) -> None:
    """Put what several writers made apart into one folder; files are linked where the disk allows it."""
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        write_manifest(target, read_manifest(source))
        for path in [*shard_files(source), *source.glob(HEAD)]:
            _link(path, target / path.name)


def _link(source: Path, target: Path) -> None:
    with suppress(FileExistsError):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # another disk
            shutil.copyfile(source, target)
