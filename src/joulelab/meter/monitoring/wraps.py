"""Which readings of wrapping counters must be in the log, so that a reader sees every wrap as one fall.

Between two ticks a RAPL counter is read once a second, and most of those readings are let go. Where one fell, it and
the reading before it are written: a counter that wrapped while nobody wrote would else look as if it hardly moved.
"""

from __future__ import annotations

from joulelab.meter.sensors import Line


class WrapWatch:
    def __init__(self) -> None:
        self._last: Line = {}
        self._written = True

    def to_write(self, record: Line, due: bool) -> list[Line]:
        """The lines to write for this reading; one that is `due` is written anyway."""
        if "rapl" not in record:
            return [record] if due else []
        before = self._last.get("rapl", {})
        fell = any(counter_j < before.get(domain, 0.0) for domain, counter_j in record["rapl"].items())
        lines = [self._last] if fell and not self._written else []
        self._written = due or fell
        self._last = record
        return [*lines, record] if self._written else []
