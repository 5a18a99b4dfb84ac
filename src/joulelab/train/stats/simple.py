"""Where the time of a step goes."""

from __future__ import annotations

import statistics
import time

from joulelab.train.stats.hooks import TrainerStats


class SimpleStats(TrainerStats):
    """Mean and quantiles of the host's time in each phase, kept in memory and told at the end."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._durations_s: dict[str, list[float]] = {}

    def start(self, phase: str) -> None:
        self._begun[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        self._durations_s.setdefault(phase, []).append(time.perf_counter() - self._begun.pop(phase))

    def log_stats(self) -> str:
        lines = [f"{'phase':<16}{'count':>7}{'mean ms':>11}{'p50 ms':>11}{'p95 ms':>11}"]
        for phase, durations in self._durations_s.items():
            p95 = statistics.quantiles(durations, n=20)[-1] if len(durations) > 1 else durations[0]
            numbers = (statistics.fmean(durations), statistics.median(durations), p95)
            lines.append(f"{phase:<16}{len(durations):>7}" + "".join(f"{1e3 * number:>11.2f}" for number in numbers))
        return "\n".join(lines)
