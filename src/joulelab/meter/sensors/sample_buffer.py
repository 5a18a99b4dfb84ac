"""The driver's buffer of 20 ms power samples, taken so that each sample comes once and at the right moment.

The buffer holds about 2.4 s and stamps samples by the wall clock, which can be set by hand or by NTP; everything we
compute with is on the monotonic clock. A line therefore carries a pair of both clocks read together, and three guards
keep a stepped clock from putting power where it was not:

- When the wall clock has moved against the monotonic one since the last reading, nothing is taken until the buffer can
  hold only stamps of the new clock (`BUFFER_S`); then all of it is, so about a tenth of a second of shape is lost.
- A sample that would lie in the future, before the last one taken, or more than `OLDEST_S` back, is dropped.
- A driver that keeps on stamping by the old clock gives nothing but such samples: after `GIVE_UP_S` the buffer is
  called unusable, and the card is polled as one without a buffer.

The counter's joules are untouched by all this: only their shape between two readings is coarser meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from joulelab.meter.sensors import Line

BUFFER_S = 2.5
OLDEST_S = 10.0
GIVE_UP_S = 15.0
# NTP slews by at most 0.5 ms per second and reading the two clocks takes microseconds: more than this is a step.
STEP_S = 0.02
# Stamps are made by another clock reading than ours; this much "future" is only that.
FUTURE_S = 0.02
US = 1_000_000

Samples = list[tuple[int, int]]
"""Pairs of epoch microseconds and milliwatts."""


class SampleBuffer:
    """One card's buffer. `fetch(last_us)` asks the driver for what is newer than a stamp."""

    def __init__(self, fetch: Callable[[int], Samples], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._fetch = fetch
        self._wall_ns = wall_ns
        self._last_us = 0
        self._last_mono_us = 0
        self._wall_minus_mono_us: int | None = None
        self._wait_until_us = 0
        self._useless_since_us: int | None = None
        self.usable = True

    def read(self) -> Line:
        """The fields of one `samples` line, or none where there is nothing new."""
        wall_us, mono_ns = self._clocks()
        mono_us = mono_ns // 1000
        self._notice_step(wall_us - mono_us, mono_us)
        if mono_us < self._wait_until_us:
            return {}
        fetched = sorted(self._fetch(self._last_us))
        samples = [row for row in fetched if self._plausible(row[0] - wall_us + mono_us, mono_us)]
        self._judge(bool(fetched), bool(samples), mono_us)
        if not samples:
            return {}
        self._last_us = samples[-1][0]
        self._last_mono_us = self._last_us - wall_us + mono_us
        return {
            "wall_us": wall_us,
            "wall_us_mono_ns": mono_ns,
            "sample_us": [stamp for stamp, _ in samples],
            "sample_mw": [power for _, power in samples],
        }

    def _clocks(self) -> tuple[int, int]:
        before = time.monotonic_ns()
        wall_us = self._wall_ns() // 1000
        return wall_us, (before + time.monotonic_ns()) // 2

    def _notice_step(self, wall_minus_mono_us: int, mono_us: int) -> None:
        before, self._wall_minus_mono_us = self._wall_minus_mono_us, wall_minus_mono_us
        if before is None or abs(wall_minus_mono_us - before) < STEP_S * US:
            return
        self._wait_until_us = mono_us + int(BUFFER_S * US)
        self._last_us = 0  # a stamp of the old clock; set back by an hour, the driver would find nothing newer for one

    def _plausible(self, sample_mono_us: int, mono_us: int) -> bool:
        oldest_us = max(self._last_mono_us, mono_us - int(OLDEST_S * US))
        return oldest_us < sample_mono_us <= mono_us + FUTURE_S * US

    def _judge(self, fetched: bool, kept: bool, mono_us: int) -> None:
        if kept or not fetched:
            self._useless_since_us = None
        elif self._useless_since_us is None:
            self._useless_since_us = mono_us
        elif mono_us - self._useless_since_us > GIVE_UP_S * US:
            self.usable = False


def samples_from(nvml: Any, handle: Any) -> Callable[[int], Samples]:
    """The driver's call, made to give an empty list where it says there is nothing newer."""

    def fetch(last_us: int) -> Samples:
        try:
            _, rows = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_TOTAL_POWER_SAMPLES, last_us)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_FOUND:
                return []
            raise
        return [(int(row.timeStamp), int(row.sampleValue.uiVal)) for row in rows]

    return fetch
