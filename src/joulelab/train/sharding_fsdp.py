"""Sharded models (FSDP2), their Adafactor and their checkpoints. Apart, because its torch imports take seconds.

Checkpoints use torch.distributed.checkpoint: each rank writes its shards, and any number of ranks can read them. State
that belongs to one rank, such as its random state, is stored next to it in one file per rank. torch writes `.metadata`
last; then each rank writes the checksums of its own files, and with those of all ranks the folder is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import zeros as dtensor_zeros

from joulelab.errors import JoulelabError
from joulelab.runs.artifacts import crc32, error_text
from joulelab.runs.paths import read_json, write_json
from joulelab.train.budget import Position
from joulelab.train.checkpoint import KEEP, LoopState, ModelState, none_usable, set_aside
from joulelab.train.optim import repeated_blocks
from joulelab.train.parallel import Ranks


def shard_modules(modules: Iterable[nn.Module]) -> None:
    """Shard in place. Call before the optimizer is created, so that its state is sharded too."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP cannot shard channels-last weights
        for block in repeated_blocks(module):
            fully_shard(block)
        # FSDP reshards the root module in the backward pass, which a frozen module never has.
        trained = any(parameter.requires_grad for parameter in module.parameters())
        fully_shard(module, reshard_after_forward=None if trained else True)


def gather_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Full weights of a sharded model, gathered on the CPU of the first rank; None for a model that is not sharded."""
    if not isinstance(model, FSDPModule):
        return None
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


class ShardedAdafactor(torch.optim.Adafactor):
    """torch's Adafactor over tensors that FSDP has sharded by their first dimension. torch's own step uses in-place
    operations that sharded tensors do not have; the arithmetic is the same, with the sums taken over all ranks.

    The row factors of a matrix are sharded like its rows; the column factors are the same on all ranks.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_shard(parameter, group)

    def _step_shard(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_empty_factors(parameter.grad))
        state["step"] += 1
        step, rate, dimensions = float(state["step"]), float(group["lr"]), parameter.dim()
        weight, gradient = parameter.to_local(), parameter.grad.to_local()
        small, least = group["eps"]
        small = torch.finfo(weight.dtype).eps if small is None else small
        renewed = step ** group["beta2_decay"]
        sums = [weight.square().sum().view(1)]
        if dimensions > 1:
            rows, columns = state["row_var"].to_local(), state["col_var"].to_local()
            rows.lerp_(gradient.square().mean(-1, keepdim=True), renewed)
            column_squares = gradient.square().sum(-2, keepdim=True)
            if dimensions == 2:  # the columns run over the shards
                sums += [rows.sum().view(1), column_squares.flatten()]
        # One message: the norm of the weights and, of a matrix, the sums over its rows.
        total = torch.cat(sums)
        process_group = parameter.device_mesh.get_group()
        dist.all_reduce(total, group=process_group)
        size = (total[0] / parameter.numel()).sqrt().clamp(min=least) * min(rate, step**-0.5)
        if group["weight_decay"] != 0:
            weight.mul_(1 - rate * group["weight_decay"])
        if dimensions > 1:
            height = parameter.shape[-2]
            squares = total[2:].view_as(columns) if dimensions == 2 else column_squares
            columns.lerp_(squares / height, renewed)
            row_mean = total[1] / height if dimensions == 2 else rows.mean(-2, keepdim=True)
            estimate = (rows @ columns) / row_mean.clamp(min=small)
        else:
            variance = state["variance"].to_local()
            variance.lerp_(gradient.square(), renewed)
            estimate = variance.clone()
        update = estimate.clamp_(min=small * small).rsqrt_().mul_(gradient)
        squared = update.square().sum()
        dist.all_reduce(squared, group=process_group)
        clipped = ((squared / parameter.numel()).sqrt() / group["d"]).clamp(min=1.0)
        weight.sub_(update.mul_(size / clipped))


def _empty_factors(gradient: Any) -> dict[str, Tensor]:
    state = {"step": torch.tensor(0.0)}
    if gradient.dim() < 2:
        return {**state, "variance": torch.zeros_like(gradient)}
    rows, columns = [*gradient.shape[:-1], 1], [*gradient.shape[:-2], 1, gradient.shape[-1]]
    placements = {"row_var": gradient.placements, "col_var": gradient.placements}
    if gradient.dim() == 2:
        placements["col_var"] = [Replicate()]
    for name, shape in {"row_var": rows, "col_var": columns}.items():
        state[name] = dtensor_zeros(
            shape, dtype=gradient.dtype, device_mesh=gradient.device_mesh, placements=placements[name]
        )
    return state


_METADATA = ".metadata"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedCheckpoints:
    """Checkpoints of several ranks: one folder each."""

    def __init__(self, folder: Path, ranks: Ranks, kept_at_end: int = 0) -> None:
        self.folder, self._kept_at_end = folder, kept_at_end
        self._ranks = ranks
        # The writer thread communicates while the loop does; a separate group keeps their messages apart.
        self._group = dist.new_group(backend="gloo")
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="joulelab-checksums")
        self._writing: tuple[Path, Future[None]] | None = None

    def save(self, position: Position, model_state: ModelState, loop_state: LoopState, wait: bool) -> None:
        self.finish()
        folder = self.folder / f"step-{position.step:09d}"
        if self._ranks.of_first([_is_complete(folder)])[0]:
            return  # a stop right after a checkpoint, or after a resume from it
        with self._failing_together(folder):
            if self._ranks.is_first and folder.is_dir():
                shutil.rmtree(folder)  # of an attempt that was killed while it wrote, maybe on another number of ranks
        with self._failing_together(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with self._rank_file(folder).open("wb") as file:  # given a path, torch's writer hides the system's error
                torch.save({"position": asdict(position), "light": loop_state}, file)
        state = _state_dicts(model_state)
        writing: Any = dcp.async_save(state, checkpoint_id=folder, process_group=self._group)  # type: ignore[attr-defined]
        upload = getattr(writing, "upload_completion", writing)
        self._writing = folder, self._pool.submit(self._write_sums, folder, upload)
        if wait:
            self.finish()

    def _write_sums(self, folder: Path, writing: Future[Any]) -> None:
        writing.result()
        rank = self._ranks.rank
        own = [self._rank_file(folder), *sorted(folder.glob(f"__{rank}_*"))]
        own += [folder / _METADATA] if self._ranks.is_first else []
        write_json(self._sums_file(folder), {"ranks": self._ranks.world, "crc32": {f.name: crc32(f) for f in own}})

    def load(self, model_state: ModelState, warn: Callable[[str], None]) -> tuple[Position, LoopState] | None:
        folders = self._complete_folders()
        if not folders:
            return None
        self._ranks.barrier()  # all ranks have the same list before the first rank sets one aside
        # The first rank reads all files; on a slow network file system, every rank reading all of them takes longer.
        newest = self._ranks.on_first(lambda: self._newest_intact(folders, warn))
        chosen = int(self._ranks.of_first([newest or 0])[0])
        if chosen < 0:
            raise none_usable(self.folder, folders)
        folder = folders[chosen]
        if self._ranks.is_first and folder != folders[-1]:
            warn(f"training resumes from the older checkpoint {folder.name}")
        state = _state_dicts(model_state)
        dcp.load(state, checkpoint_id=folder, process_group=self._group)  # type: ignore[attr-defined]
        set_state_dict(
            model_state.trained,
            model_state.optimizer,
            model_state_dict=state["trained"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
        own = self._rank_file(folder)
        content = torch.load(own if own.exists() else folder / "rank-00000.pt", weights_only=True)
        light = content["light"] if own.exists() else _state_of_new_rank(content["light"])
        return Position(**content["position"]), light

    def finish(self) -> None:
        if self._writing is not None:
            (folder, writing), self._writing = self._writing, None
            with self._failing_together(folder):
                writing.result()
            if self._ranks.is_first:
                for old in self._complete_folders()[: -max(KEEP, self._kept_at_end)]:
                    shutil.rmtree(old, ignore_errors=True)  # an error of this rank alone would desynchronize the ranks

    @contextmanager
    def _failing_together(self, folder: Path) -> Iterator[None]:
        """All ranks wait for each other, and raise if one of them failed: otherwise the others would wait for its part
        of the checkpoint, which is removed."""
        failure: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as error:
            failure = error
        if not self._ranks.sum([float(failure is not None)])[0]:
            return
        if self._ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(failure, CheckpointException):  # of torch; it is no Exception, and has those of all ranks
            failure = next(iter(failure.failures.values()))[0]
        raise failure or OSError(f"another rank could not write its part of {folder.name}")

    def release(self) -> None:
        pass

    def clear(self) -> None:
        self.finish()
        self._ranks.barrier()
        if self._ranks.is_first and self.folder.is_dir():
            kept = self._complete_folders()[-self._kept_at_end :] if self._kept_at_end else []
            for path in [path for path in self.folder.iterdir() if path not in kept]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not kept:
                self.folder.rmdir()

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank-{self._ranks.rank:05d}.pt"

    def _sums_file(self, folder: Path) -> Path:
        return folder / f"sums-{self._ranks.rank:05d}.json"

    def _complete_folders(self) -> list[Path]:
        """Oldest first. Earlier versions wrote no checksums; their folders count only where there are no others."""
        written = sorted(path.parent for path in self.folder.glob(f"step-*[0-9]/{_METADATA}"))
        return [folder for folder in written if _has_all_sums(folder)] or [
            folder for folder in written if not any(folder.glob("sums-*.json"))
        ]

    def _newest_intact(self, folders: list[Path], warn: Callable[[str], None]) -> int:
        """Position in the list, or -1."""
        for position in reversed(range(len(folders))):
            damage = _damage(folders[position])
            if damage is None:
                return position
            set_aside(folders[position], damage, warn)
        return -1


def _state_of_new_rank(first: LoopState) -> LoopState:
    """Of a rank that the earlier attempt did not have, from the first rank's. It keeps the random numbers that it began
    with, or both would drop the same activations of different samples, and has no share in the running loss."""
    on_gpu = first["cuda_rng"] is not None
    return {
        **first,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if on_gpu else None,
        "tally": {
            "sums": {name: torch.zeros_like(value) for name, value in first["tally"]["sums"].items()},
            "count": 0,
        },
    }


def _is_complete(folder: Path) -> bool:
    return (folder / _METADATA).exists() and _has_all_sums(folder)


def _has_all_sums(folder: Path) -> bool:
    files = sorted(folder.glob("sums-*.json"))
    try:
        return bool(files) and len(files) == read_json(files[0]).get("ranks")
    except JoulelabError:
        return True  # complete and corrupted: `_damage` reports it


def _damage(folder: Path) -> str | None:
    try:
        for file in sorted(folder.glob("sums-*.json")):
            for name, expected in read_json(file)["crc32"].items():
                if crc32(folder / name) != expected:
                    return f"the checksum of {name} does not match"
    except (JoulelabError, OSError, LookupError, AttributeError) as error:
        return error_text(error)
    return None


def _state_dicts(model_state: ModelState) -> dict[str, Any]:
    model, optimizer = get_state_dict(model_state.trained, model_state.optimizer, options=_OPTIONS)
    return {"trained": model, "optimizer": optimizer}
