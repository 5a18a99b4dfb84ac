"""Checkpoints: everything a resumed run needs to go on as if nothing had happened, without pickled code.

A file is complete or absent (temporary name, sync, rename), and the newest two are kept: if the machine dies while one
is written, the one before is still there.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

KEEP = 2


@dataclass(frozen=True)
class Position:
    """Where training stands: the next batch to draw, and what was done so far."""

    epoch: int = 0
    index: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0


class CheckpointFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, position: Position, state: dict[str, Any]) -> Path:
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
        return path

    def latest(self) -> tuple[Position, dict[str, Any]] | None:
        files = self._files()
        if not files:
            return None
        content = torch.load(files[-1], weights_only=True, map_location="cpu")
        return Position(**content["position"]), content["state"]

    def clear(self) -> None:
        """The finished model is an artefact; checkpoints of it are only weight on the disk."""
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))
