"""How long phases take, without waiting for the device.

On a GPU the host's clock sees only the launching. So an event is put into the device's own queue at either end of a
phase; the device stamps it when it gets there, and it is read later, when it has long been passed. Events are reused.
The work of a stream is done in order, so the oldest pair is always the first that can be read.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

# Far more than a device ever lies behind; a phase beyond it goes untimed instead of filling the memory.
MOST_PENDING = 4096


class Timed(NamedTuple):
    phase: str
    host_s: float
    device_s: float | None
    """None where host and device are one."""

    @property
    def best_s(self) -> float:
        return self.host_s if self.device_s is None else self.device_s


class PhaseClock(Protocol):
    untimed: int
    """Phases that could not be timed."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...

    def harvest(self) -> list[Timed]:
        """What has become known since the last call."""


def clock_for(device: torch.device) -> PhaseClock:
    return CudaClock() if device.type == "cuda" else HostClock()


class HostClock:
    def __init__(self) -> None:
        self.untimed = 0
        self._begun: dict[str, float] = {}
        self._done: list[Timed] = []

    def start(self, phase: str) -> None:
        self._begun[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        begun = self._begun.pop(phase, None)
        if begun is not None:
            self._done.append(Timed(phase, now - begun, None))

    def harvest(self) -> list[Timed]:
        done, self._done = self._done, []
        return done


class _Pending(NamedTuple):
    phase: str
    host_s: float
    begin: Any
    end: Any


class CudaClock:
    def __init__(self) -> None:
        self.untimed = 0
        self._free: list[Any] = []
        self._begun: dict[str, tuple[float, Any]] = {}
        self._pending: deque[_Pending] = deque()

    def start(self, phase: str) -> None:
        event = self._event()
        event.record()
        self._begun[phase] = (time.perf_counter(), event)

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        begun = self._begun.pop(phase, None)
        if begun is None:
            return
        if len(self._pending) >= MOST_PENDING:
            self.untimed += 1
            self._free.append(begun[1])
            return
        end = self._event()
        end.record()
        self._pending.append(_Pending(phase, now - begun[0], begun[1], end))

    def harvest(self) -> list[Timed]:
        done = []
        while self._pending and self._pending[0].end.query():
            phase, host_s, begin, end = self._pending.popleft()
            done.append(Timed(phase, host_s, begin.elapsed_time(end) / 1000))
            self._free += (begin, end)
        return done

    def _event(self) -> Any:
        make: Any = torch.cuda.Event  # torch leaves its methods untyped
        return self._free.pop() if self._free else make(enable_timing=True)
