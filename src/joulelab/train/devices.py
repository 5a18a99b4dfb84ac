"""Which device the settings mean."""

from __future__ import annotations

import torch

from joulelab import clock
from joulelab.errors import ConfigError
from joulelab.runs.context import RunContext
from joulelab.runs.events import STARTUP


def device_of(name: str, run: RunContext) -> torch.device:
    """`auto`, `cpu` or `cuda`, started and noted in the run; a GPU that is not there is told before anything is loaded.

    Starting a device takes a second, once in a process; it is start-up, whichever stage asks first.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, and torch sees no GPU", "install a CUDA build of torch, or set device=cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    run.note_device(name)
    device, begin_ns = torch.device(name), clock.now().mono_ns
    if _start(device):
        run.note_setup(STARTUP, begin_ns, clock.now().mono_ns)
    return device


_started: set[torch.device] = set()


def _start(device: torch.device) -> bool:
    """Create the CUDA context and load the libraries of matrix products; whether this call did so."""
    if device.type != "cuda" or device in _started:
        return False
    square = torch.ones(256, 256, device=device)
    (square @ square).sum().item()
    _started.add(device)
    return True
