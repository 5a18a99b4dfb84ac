"""Checkpoints: everything a resumed run needs to continue bit for bit, without pickled code.

A file is complete or absent (temporary name, fsync, rename). The newest two are kept, so that one survives if the
machine fails during a write. Training waits only for the copy from the device to host memory; a thread writes the file.

A flipped bit would otherwise be trained on without a sign of it, so the CRC32 of a file is part of its name, which the
rename makes final together with the content. A checkpoint that does not match is set aside, and the older one is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joulelab.errors import CorruptedFile
from joulelab.runs.artifacts import crc32, error_text
from joulelab.train.budget import Position

KEEP = 2
CORRUPTED = ".corrupted"
"""Suffix of a checkpoint that was set aside."""
LoopState = dict[str, Any]
"""Everything except weights and optimizer: random states, running loss, budget."""


@dataclass(frozen=True)
class ModelState:
    """The trained modules and their optimizer."""

    trained: nn.Module
    optimizer: torch.optim.Optimizer


class Checkpoints(Protocol):
    def save(self, position: Position, model_state: ModelState, loop_state: LoopState, wait: bool) -> None:
        """Copy the state and return; with `wait`, return after it is on disk."""

    def load(self, model_state: ModelState, warn: Callable[[str], None]) -> tuple[Position, LoopState] | None:
        """Load the newest intact checkpoint into the modules and the optimizer; None if there are no checkpoints."""

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises if writing failed."""

    def release(self) -> None:
        """Free the memory for copies of the state: the training has ended, and nothing is being written."""

    def clear(self) -> None:
        """Delete the checkpoints that are not to be kept; the finished model is an artifact."""


class CheckpointFolder:
    """Checkpoints of a single process: one file each."""

    def __init__(self, folder: Path, kept_at_end: int = 0) -> None:
        """`kept_at_end` of the newest stay when the training is finished."""
        self.folder, self._kept_at_end = folder, kept_at_end
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="joulelab-checkpoint")
        self._writing: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(self, position: Position, model_state: ModelState, loop_state: LoopState, wait: bool) -> None:
        self.finish()  # frees the buffers, and raises if the previous write failed
        state = {
            "trained": model_state.trained.state_dict(),
            "optimizer": model_state.optimizer.state_dict(),
            "light": loop_state,
        }
        copied = self._copy(state)
        self._writing = self._pool.submit(self._write, position, copied)
        if wait:
            self.finish()

    def load(self, model_state: ModelState, warn: Callable[[str], None]) -> tuple[Position, LoopState] | None:
        self.finish()
        files = self._files()
        for path in reversed(files):
            content = self._intact_content(path, warn)
            if content is not None:
                model_state.trained.load_state_dict(content["state"]["trained"])
                model_state.optimizer.load_state_dict(content["state"]["optimizer"])
                if path != files[-1]:
                    warn(f"training resumes from the older checkpoint {path.name}")
                return Position(**content["position"]), content["state"]["light"]
        if files:
            raise none_usable(self.folder, files)
        return None

    def _intact_content(self, path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
        damage = None if matches_its_sum(path) else "its checksum does not match"
        if damage is None:
            try:
                # `weights_only` refuses pickled code. On the CPU first: loading to the device would hold
                # the weights twice there.
                content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
                return content
            except MemoryError:
                raise
            except Exception as error:  # a file of an earlier version, without a checksum, or one made by hand
                damage = error_text(error).splitlines()[0]
                if "weights_only" in damage:  # torch's own message advises to let the file run code
                    damage = "it contains more than tensors and plain values"
        set_aside(path, damage, warn)
        return None

    def finish(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def release(self) -> None:
        self._buffers.clear()

    def clear(self) -> None:
        self.finish()
        finished = self._files()
        no_longer_needed = finished[: max(0, len(finished) - self._kept_at_end)]
        for path in (*no_longer_needed, *self.folder.glob(f"step-*{CORRUPTED}"), *self.folder.glob("step-*.tmp")):
            path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _copy(self, state: Any) -> Any:
        copied = self._copied(state, "")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are asynchronous
        return copied

    def _copied(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._copied_tensor(value.detach(), name)
        if isinstance(value, Mapping):
            return {key: self._copied(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(inner, f"{name}.{place}") for place, inner in enumerate(value))
        return value

    def _copied_tensor(self, value: Tensor, name: str) -> Tensor:
        if not value.is_cuda:
            return value.clone()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            # Page-locked memory is slow to allocate and fast to copy into; reused by the next checkpoint.
            buffer = self._buffers[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return buffer.copy_(value, non_blocking=True)

    def _write(self, position: Position, state: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{position.step:09d}"
        path = save_summed({"position": asdict(position), "state": state}, self.folder, name)
        # Only after the new file is complete under its name.
        others = [old for old in self._files() if old != path]
        for old in others:
            if old in others[: 1 - max(KEEP, self._kept_at_end)] or old.name.startswith(name):
                old.unlink()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))


def save_summed(content: dict[Any, Any], folder: Path, name: str) -> Path:
    """Write NAME.<checksum>.pt, which is complete or absent."""
    temporary = folder / f"{name}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            # Before the rename: file systems may write the new name before the data, and after a power failure the
            # complete-looking file would be empty (ext4's delayed allocation is the known case).
            os.fsync(file.fileno())
        return temporary.replace(folder / f"{name}.{crc32(temporary):08x}.pt")
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it would take the space of the next one
        raise


def matches_its_sum(path: Path) -> bool:
    """Whether a file has the checksum in its name; true for one of an earlier version, which has none."""
    _, separator, digits = path.stem.partition(".")
    return not separator or int(digits, 16) == crc32(path)


def set_aside(path: Path, damage: str, warn: Callable[[str], None]) -> None:
    """Rename a corrupted checkpoint, so that it neither counts as one of those to keep nor is tried again."""
    warn(f"checkpoint {path.name} is corrupted ({damage}) and is not used; an older one is tried")
    path.replace(path.with_name(path.name + CORRUPTED))


def none_usable(folder: Path, tried: Sequence[Path]) -> CorruptedFile:
    return CorruptedFile(
        f"no checkpoint of {folder.name} can be read: {', '.join(path.name for path in tried)} "
        f"{'is' if len(tried) == 1 else 'are'} corrupted",
        f"resume once more to train {folder.name} from its beginning; the energy used so far stays in the record",
    )
