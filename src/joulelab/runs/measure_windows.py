"""Named windows inside a measured block: nested, re-entrant, from any thread, about two microseconds each.

The meter's phase marks have a single writer and are not re-entrant. Here each open window has a mark of its own from a
pool, a lock makes the threads one writer, and what is open is kept per thread and coroutine, which also tells which
window lies in which. Marks become times (count, sum, quantiles) that survive a kill. A window of `TIMED_S` or more is
also written to `windows.jsonl` with its two moments, so that its joules can be read off the energy curve.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from contextvars import ContextVar
from time import monotonic_ns
from typing import Any

from joulelab.clock import NS
from joulelab.meter.marks import Phase
from joulelab.meter.session import Meter
from joulelab.meter.trace import LineFile
from joulelab.runs.paths import RunPaths

# Half of the driver's 20 ms samples, the finest signal there is: what is shorter has a share of time only.
TIMED_S = 0.01
_TIMED_NS = int(TIMED_S * NS)
WINDOWS_FILE = "windows.jsonl"


class Windows:
    """All windows of one measurement. Closed, or in a forked child, they do nothing: marks belong to one process."""

    def __init__(self, meter: Meter, paths: RunPaths) -> None:
        self.open = True
        self.lock = threading.Lock()
        self._meter = meter
        self._lines = LineFile(paths.folder / WINDOWS_FILE)
        self._by_name: dict[str, Window] = {}
        _in_forked_children(self)

    def window(self, name: str) -> Window:
        found = self._by_name.get(name)
        if found is not None:
            return found
        with self.lock:
            if name not in self._by_name:
                phase = self._meter.phase(name) if self.open else None
                self._by_name[name] = Window(self, name, phase)
        return self._by_name[name]

    def first_seen(self, name: str, inside: str | None, overlaps: bool) -> None:
        self._append({"name": name, "inside": inside, "overlaps": overlaps})

    def timed(self, name: str, begin_ns: int, end_ns: int) -> None:
        self._append({"name": name, "begin_ns": begin_ns, "end_ns": end_ns})

    def _append(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the window its own joules and the program nothing
            self._lines.append(line)  # one write(): survives a kill of the program

    def close(self) -> None:
        with self.lock:
            self.open = False
            self._lines.close()


class Window:
    """`with window:` as often as wanted, also inside itself (then the outermost counts) and in several threads."""

    __slots__ = ("_all", "_free", "_last_end_ns", "_lock", "_phase", "_seen", "name")

    def __init__(self, all_windows: Windows, name: str, phase: Phase | None) -> None:
        self.name = name
        self._all = all_windows
        self._phase = phase
        self._free: list[Phase] = []
        self._lock = all_windows.lock
        self._last_end_ns = 0
        self._seen: set[tuple[str | None, bool]] = set()

    def __enter__(self) -> Window:
        try:
            phase: Phase | None = self._free.pop()
        except IndexError:
            phase = copy.copy(self._phase)
        _innermost.set((self, phase, monotonic_ns(), _innermost.get()))
        if phase is not None:
            phase.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        end_ns = monotonic_ns()
        frame = _innermost.get()
        if frame is None or frame[0] is not self:
            frame = _taken_out(self, frame)
            if frame is None:
                return
        else:
            _innermost.set(frame[3])
        _, phase, begin_ns, outer = frame
        if phase is None or not self._all.open:
            return
        inside: str | None = None
        while outer is not None:
            if outer[0] is self:
                return  # inside itself a window counts once, as the outermost: its time must not be counted twice
            if inside is None and outer[0]._all is self._all:
                inside = outer[0].name
            outer = outer[3]
        with self._lock:
            if not self._all.open:
                return
            phase.__exit__()
            seen = (inside, begin_ns < self._last_end_ns)
            self._last_end_ns = max(self._last_end_ns, end_ns)
            if seen not in self._seen:
                self._seen.add(seen)
                self._all.first_seen(self.name, *seen)
            if end_ns - begin_ns >= _TIMED_NS:
                self._all.timed(self.name, begin_ns, end_ns)
        self._free.append(phase)


# window, its mark, when it began, the frame around it
_Frame = tuple[Window, Phase | None, int, Any]
# What is open here and now. Threads and coroutines each have their own, and a coroutine sees what it was started in.
_innermost: ContextVar[_Frame | None] = ContextVar("joulelab_window", default=None)


def _taken_out(window: Window, frame: _Frame | None) -> _Frame | None:
    """The window's latest frame, from under others: generators may leave windows in another order than they entered.

    None where it was entered in another thread or coroutine: there is no honest duration then.
    """
    above: list[_Frame] = []
    while frame is not None and frame[0] is not window:
        above.append(frame)
        frame = frame[3]
    if frame is not None:
        rest = frame[3]
        for window_above, phase, begin_ns, _ in reversed(above):
            rest = (window_above, phase, begin_ns, rest)
        _innermost.set(rest)
    return frame


def _in_forked_children(windows: Windows) -> None:
    """A forked child (a data loader's worker) shares the mapped marks; two writers would overwrite each other."""
    known = weakref.ref(windows)

    def forget() -> None:
        if (found := known()) is not None:
            found.open = False
            found.lock = threading.Lock()

    os.register_at_fork(after_in_child=forget)
