"""When a card was held back, read from the trace: by its own columns where it has some, else line by line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.meter.health import throttle_reasons_text
from joulelab.meter.parquet import SUFFIX, numbers_in, read_batches
from joulelab.meter.trace import read_lines

Stretch = tuple[int, int, str]
"""From, to (monotonic nanoseconds), and why."""


def throttled(path: Path, interval_s: float) -> list[Stretch]:
    """Stretches of throttling, readings closer than a few intervals joined."""
    found = []
    for reason, moments in _moments(path).items():
        stamps = np.unique(np.concatenate(moments))
        breaks = np.flatnonzero(np.diff(stamps) > 3e9 * interval_s)
        starts, ends = stamps[[0, *(breaks + 1)]], stamps[[*breaks, -1]]
        last_ns = int(1e9 * interval_s)  # a reading stands for the time up to the next one
        found += [(int(start), int(end) + last_ns, reason) for start, end in zip(starts, ends, strict=True)]
    return found


def _moments(path: Path) -> dict[str, list[NDArray[np.int64]]]:
    """Reason -> when it was read, in pieces."""
    found: dict[str, list[NDArray[np.int64]]] = {}
    if path.suffix != SUFFIX:
        for line in read_lines(path):
            if line.get("kind") == "gpu" and line.get("throttle_reasons"):
                for reason in throttle_reasons_text(line["throttle_reasons"]):
                    found.setdefault(reason, []).append(np.array([line["mono_ns"]], dtype=np.int64))
        return found
    for batch in read_batches(path, ["mono_ns", "throttle_reasons"]):
        times, bits = (numbers_in(column, np.int64)[0] for column in batch.columns)
        for word in np.unique(bits[bits != 0]):
            for reason in throttle_reasons_text(int(word)):
                found.setdefault(reason, []).append(times[bits == word])
    return found
