"""Which stretches of time were training and nothing else: what joules per step may be divided from.

Whatever keeps the loop from its next step (a checkpoint, an evaluation, a tracker's own measurement) ends a stretch,
whether its hooks tell of it or the time between two steps does.
The host knows when it has handed a step over, not when the device has done it. It does know at the log lines, where it
waits for the losses; so a stretch that is interrupted ends at the last hook at which the device was caught up with.
Between two pieces of one stretch the device lies behind by about the same, which cancels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from joulelab.clock import NS

Window = tuple[int, int]
INTERRUPTIONS = ("checkpoint", "aside")
# Longer than a line of metrics takes, shorter than anything worth setting apart.
PAUSE_NS = NS // 10
# Long against the sensor's refresh (100 ms), so that pieces can be compared with one another.
PIECE_NS = 5 * NS
MOST_PIECES = 64


@dataclass(frozen=True)
class Piece:
    windows: tuple[Window, ...]
    steps: int

    @property
    def duration_s(self) -> float:
        return sum(end - begin for begin, end in self.windows) / NS


class Stretches:
    """Told of steps as they happen. `pieces` are cut to a few seconds each, and longer ones when there are many."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.pieces: list[Piece] = []
        self._now_ns = now_ns
        self._piece_ns = PIECE_NS
        self._begin_ns: int | None = None
        self._last_ns = 0
        self._steps = 0

    def start_step(self) -> None:
        now = self._now_ns()
        if self._begin_ns is not None and now - self._last_ns > PAUSE_NS:
            self.interrupt()
        if self._begin_ns is None:
            self._begin_ns = now

    def stop_step(self) -> None:
        if self._begin_ns is None:
            return
        self._steps += 1
        self.touch()
        if self._last_ns - self._begin_ns >= self._piece_ns:
            end = self._last_ns
            self.interrupt()
            self._begin_ns = end

    def touch(self) -> None:
        """Training has lasted until now: the host waited here for the device."""
        self._last_ns = self._now_ns()

    def interrupt(self) -> None:
        """What comes next is not training."""
        if self._begin_ns is not None and self._steps and self._last_ns > self._begin_ns:
            self.pieces.append(Piece(((self._begin_ns, self._last_ns),), self._steps))
            if len(self.pieces) > MOST_PIECES:
                self._merge()
        self._begin_ns, self._steps = None, 0

    def _merge(self) -> None:
        pairs = zip(self.pieces[::2], self.pieces[1::2], strict=False)
        odd = self.pieces[-1:] if len(self.pieces) % 2 else []
        self.pieces = [*(_joined(a, b) for a, b in pairs), *odd]
        self._piece_ns *= 2


def _joined(a: Piece, b: Piece) -> Piece:
    if a.windows[-1][1] == b.windows[0][0]:
        seam = (a.windows[-1][0], b.windows[0][1])
        return Piece((*a.windows[:-1], seam, *b.windows[1:]), a.steps + b.steps)
    return Piece(a.windows + b.windows, a.steps + b.steps)
