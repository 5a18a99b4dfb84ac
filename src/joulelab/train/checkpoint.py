"""Checkpoints: everything a resumed run needs to continue bit for bit, without pickled code.

A file is complete or absent (temporary name, fsync, rename). The newest two are kept, so that one survives if the
machine fails during a write. Training waits only for the copy from the device to host memory; a thread writes the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joulelab.train.budget import Position

KEEP = 2
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

    def load(self, model_state: ModelState) -> tuple[Position, LoopState] | None:
        """Load the newest complete checkpoint into the modules and the optimizer, if there is one."""

    def finish(self) -> None:
        """Wait for a checkpoint that is being written; raises if writing failed."""

    def clear(self) -> None:
        """Delete all checkpoints; the finished model is an artifact."""


class CheckpointFolder:
    """Checkpoints of a single process: one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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

    def load(self, model_state: ModelState) -> tuple[Position, LoopState] | None:
        self.finish()
        files = self._files()
        if not files:
            return None
        # `weights_only` refuses pickled code. On the CPU first: loading to the device would hold
        # the weights twice there.
        content = torch.load(files[-1], weights_only=True, map_location="cpu")
        model_state.trained.load_state_dict(content["state"]["trained"])
        model_state.optimizer.load_state_dict(content["state"]["optimizer"])
        return Position(**content["position"]), content["state"]["light"]

    def finish(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def clear(self) -> None:
        self.finish()
        for path in self._files():
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
        path = self.folder / f"step-{position.step:09d}.pt"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save({"position": asdict(position), "state": state}, file)
            file.flush()
            # Before the rename: file systems may write the new name before the data, and after a
            # power failure the complete-looking file would be empty (ext4's delayed allocation is
            # the known case).
            os.fsync(file.fileno())
        temporary.replace(path)
        # Only after the new file is complete under its name.
        for old in self._files()[:-KEEP]:
            old.unlink()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))
