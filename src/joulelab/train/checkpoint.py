"""Checkpoints: everything a resumed run needs to go on as if nothing had happened, without pickled code.

A file is complete or absent (temporary name, sync, rename), and the newest two are kept: if the machine dies while one
is written, the one before is still there. Training waits only for the copy out of the device; the disk is written to
meanwhile.
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
"""Everything but weights and optimiser: random states, tallies, budgets."""


@dataclass(frozen=True)
class ModelState:
    """What is large: the modules and their optimiser."""

    trained: nn.Module
    optimizer: torch.optim.Optimizer


class Checkpoints(Protocol):
    def save(self, position: Position, heavy: ModelState, light: LoopState, wait: bool) -> None:
        """Takes a copy and returns; with `wait` only after it is safe on the disk."""

    def load(self, heavy: ModelState) -> tuple[Position, LoopState] | None:
        """Fill the modules and the optimiser from the newest complete checkpoint, if there is one."""

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written; raises what went wrong with it."""

    def clear(self) -> None:
        """The finished model is an artefact; checkpoints of it are only weight on the disk."""


class CheckpointFolder:
    """One process, one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="joulelab-checkpoint")
        self._writing: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(self, position: Position, heavy: ModelState, light: LoopState, wait: bool) -> None:
        self.finish()  # the buffers are free again, and an earlier failure is told
        state = {"trained": heavy.trained.state_dict(), "optimizer": heavy.optimizer.state_dict(), "light": light}
        copied = self._copy(state)
        self._writing = self._pool.submit(self._write, position, copied)
        if wait:
            self.finish()

    def load(self, heavy: ModelState) -> tuple[Position, LoopState] | None:
        self.finish()
        files = self._files()
        if not files:
            return None
        content = torch.load(files[-1], weights_only=True, map_location="cpu")
        heavy.trained.load_state_dict(content["state"]["trained"])
        heavy.optimizer.load_state_dict(content["state"]["optimizer"])
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
            torch.cuda.synchronize()  # copies out of the device were only begun
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
            # page-locked memory is slow to get and fast to copy into: kept for the next checkpoint
            buffer = self._buffers[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return buffer.copy_(value, non_blocking=True)

    def _write(self, position: Position, state: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{position.step:09d}.pt"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save({"position": asdict(position), "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        for old in self._files()[:-KEEP]:
            old.unlink()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))
