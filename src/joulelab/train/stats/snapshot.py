"""All that a step changes, copied aside and put back bit for bit, so that a tracker may run steps that never were.

Copied are the parameters, gradients and buffers of everything that trains (BatchNorm's statistics and an EMA among
them, also buffers that a checkpoint leaves out), the optimiser's state and rates, the scaler of fp16, all random
numbers, and the loader's position. The copies lie in host memory: the device may be full. They are put back in place,
because an optimiser's own way of loading a state may change its number format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from joulelab.train.trainer import Trainer

Undo = Callable[[], None]


class Snapshot:
    def __init__(self, trainer: Trainer[Any]) -> None:
        self._undo: list[Undo] = [
            *(_keep_tensor(tensor) for tensor in _tensors(trainer)),
            *(_keep_gradient(parameter) for parameter in trainer.trained.parameters()),
            _keep_optimizer(trainer.optimizer),
            _keep_scaler(trainer),
            _keep_position(trainer),
            _keep_random(trainer.device),
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _tensors(trainer: Trainer[Any]) -> Iterator[Tensor]:
    yield from trainer.trained.parameters()
    yield from trainer.trained.buffers()


def _local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies on this rank."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _keep_tensor(tensor: Tensor) -> Undo:
    copy = _local(tensor.detach()).to("cpu", copy=True)

    def undo() -> None:
        _local(tensor.detach()).copy_(copy)

    return undo


def _keep_gradient(parameter: Tensor) -> Undo:
    gradient = parameter.grad
    if gradient is None:
        return lambda: setattr(parameter, "grad", None)
    fill = _keep_tensor(gradient)

    def undo() -> None:
        fill()
        parameter.grad = gradient

    return undo


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    rates = [_kept_value(group["lr"]) for group in optimizer.param_groups]
    state = {
        parameter: {name: _kept_value(value) for name, value in values.items()}
        for parameter, values in optimizer.state.items()
    }

    def undo() -> None:
        for group, kept, rate in zip(optimizer.param_groups, groups, rates, strict=True):
            group.update(kept, lr=rate())
        for parameter in list(optimizer.state):
            if parameter not in state:  # first touched by a step that never was
                del optimizer.state[parameter]
                continue
            optimizer.state[parameter] = {name: give() for name, give in state[parameter].items()}

    return undo


def _kept_value(value: Any) -> Callable[[], Any]:
    """A function that gives the value back as it is now; a tensor is the same one, filled again."""
    if not isinstance(value, Tensor):
        return lambda: value
    fill = _keep_tensor(value)

    def give() -> Tensor:
        fill()
        return value

    return give


def _keep_scaler(trainer: Trainer[Any]) -> Undo:
    scaler = getattr(trainer, "scaler", None)
    if scaler is None:
        return lambda: None
    state = scaler.state_dict()
    return lambda: scaler.load_state_dict(state)


def _keep_position(trainer: Trainer[Any]) -> Undo:
    position = trainer.position
    return lambda: trainer.rewind(position)


def _keep_random(device: torch.device) -> Undo:
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    of_cuda = torch.cuda.get_rng_state_all() if device.type == "cuda" else []

    def undo() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)

    return undo
