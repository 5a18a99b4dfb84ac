"""Loops of the benchmarks: warm-up, then an undisturbed window with the host as far ahead of the device as in training;
and the results of that window."""

from __future__ import annotations

import gc
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from joulelab.meter.integrate import component_energy
from joulelab.meter.series import Trace
from joulelab.train.trainer import SimpleTrainer

Window = tuple[int, int]
SETTLING_S = 2.0


def interrupt_on_sigterm() -> None:
    """Let `timeout --foreground`, which sends SIGTERM, end a benchmark like Ctrl-C: it reports what it has measured
    so far. Without that option the processes that compile kernels end too, and a backward pass waits for them forever.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def warm_up(trainer: SimpleTrainer[Any], device: torch.device) -> float:
    """Until compiling and the allocator have settled, some time after the third step. The loss of the first step."""
    trainer.step()
    first, _ = trainer._running_loss.pop_means(trainer.ranks)
    for _ in range(2):
        trainer.step()
    wait(device)
    end = time.monotonic() + SETTLING_S
    while time.monotonic() < end:
        trainer.step()
        wait(device)
    trainer._running_loss.pop_means(trainer.ranks)
    return first


def keep_pace(marks: list[torch.cuda.Event], device: torch.device) -> None:
    """As far ahead as a loop that logs now and then runs, and the clock still means something."""
    if device.type == "cuda":
        marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        marks[-1].record()
        if len(marks) > 4:
            marks.pop(0).synchronize()


@dataclass(frozen=True)
class Undisturbed:
    """What was trained between two synchronizations."""

    window_ns: Window
    samples: int
    tokens: int
    loss: float
    peak_gib: float | None


def undisturbed(trainer: SimpleTrainer[Any], device: torch.device, seconds: float) -> Undisturbed:
    """To be called when the trainer is warm; it is closed afterwards."""
    before, begin_ns = trainer.position, time.monotonic_ns()
    marks: list[torch.cuda.Event] = []
    while time.monotonic_ns() - begin_ns < seconds * 1e9:
        trainer.step()
        keep_pace(marks, device)
    wait(device)
    window = (begin_ns, time.monotonic_ns())
    loss, _ = trainer._running_loss.pop_means(trainer.ranks)
    trainer.close()
    samples, tokens = trainer.position.samples - before.samples, trainer.position.tokens - before.tokens
    return Undisturbed(window, samples, tokens, loss, peak_gib())


@dataclass(frozen=True)
class TokenSpeed:
    """One method, per token."""

    way: str
    about: str
    tokens: int
    window_ns: Window
    peak_gib: float | None
    loss: float | None = None
    energy_j: float | None = None

    @property
    def duration_s(self) -> float:
        return (self.window_ns[1] - self.window_ns[0]) / 1e9

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def mj_per_token(self) -> float | None:
        return None if self.energy_j is None else 1e3 * self.energy_j / self.tokens

    def with_energy(self, trace: Trace) -> TokenSpeed:
        return replace(self, energy_j=component_energy(trace, "gpu", [self.window_ns]).energy_j)

    def __str__(self) -> str:
        parts = [f"{self.way:13} {self.about}{self.tokens_per_s:,.0f} tokens/s"]
        if self.mj_per_token is None or self.energy_j is None:
            parts.append("joules missing")
        else:
            parts.append(f"{self.mj_per_token:.2f} mJ/token, {self.energy_j / self.duration_s:.0f} W")
        parts += [f"peak {self.peak_gib:.1f} GiB"] if self.peak_gib is not None else []
        parts += [f"loss {self.loss:.3f}"] if self.loss is not None else []
        return ", ".join(parts)

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "mj_per_token": self.mj_per_token}


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def free() -> None:
    """Free the memory of one method before the next."""
    gc.collect()
    torch.cuda.empty_cache()
    if "torch._inductor" in sys.modules:  # where nothing was compiled, resetting would import the compiler for seconds
        torch._dynamo.reset()
