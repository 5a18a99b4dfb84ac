"""Imports inside a stage are setup: the first run of a process pays for them, whichever method it measures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

from joulelab import clock
from joulelab.clock import NS

# Shorter imports cost less than the mark that would report them.
SHORTEST_NS = NS // 100


class _ImportTimer:
    """A finder that leaves finding to the others, and times how long the outermost import of the main thread takes."""

    def __init__(self, note: Callable[[int, int], None]) -> None:
        self._note = note
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._busy or threading.current_thread() is not threading.main_thread():
            return None
        begin_ns = clock.now().mono_ns
        self._busy = True
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._busy = False
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            self._time(spec.loader, begin_ns)
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                return spec  # type: ignore[no-any-return]  # finders of other packages are untyped
        return None

    def _time(self, loader: SourceFileLoader, begin_ns: int) -> None:
        load = loader.exec_module

        def timed(module: ModuleType) -> None:
            del loader.exec_module
            self._busy = True
            try:
                load(module)
            finally:
                self._busy = False
                end_ns = clock.now().mono_ns
                if end_ns - begin_ns >= SHORTEST_NS:
                    self._note(begin_ns, end_ns)

        loader.exec_module = timed  # type: ignore[method-assign]


@contextmanager
def import_times(note: Callable[[int, int], None]) -> Iterator[None]:
    """Report every import meanwhile that took a noticeable time as `note(begin_ns, end_ns)`."""
    timer = _ImportTimer(note)
    sys.meta_path.insert(0, timer)
    try:
        yield
    finally:
        sys.meta_path.remove(timer)
