"""What a trace contains besides energy: clocks, temperature, throttling, CPU contention, late readings, warnings.

None of it enters an energy figure; it shows how far to trust one, and in which state the machine was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.meter.figures import Frozen
from joulelab.meter.sensors.nvml import THROTTLE_REASONS
from joulelab.meter.trace import read_lines

# Other processes on a tenth of the cores do not matter while cores are idle; without idle cores they slow the program.
CONTENTION_SHARE = 0.10
IDLE_SHARE = 0.25


class CoreUse(Frozen):
    """Mean over some time, in hardware threads that the program was allowed to use."""

    cores: int
    others_cores: float
    """Used by other programs, or by other virtual machines of the same hardware."""
    idle_cores: float

    @property
    def contended(self) -> bool:
        # Other processes matter only if the program had to share: with idle cores left it could have used those.
        return self.others_cores >= CONTENTION_SHARE * self.cores and self.idle_cores <= IDLE_SHARE * self.cores

    @property
    def text(self) -> str:
        return f"other processes used {self.others_cores:.2g} of {self.cores} CPU core{'s' if self.cores > 1 else ''}"


def core_use(line: dict[str, Any]) -> CoreUse:
    """From a line of a trace."""
    return CoreUse(**{name: line[name] for name in CoreUse.model_fields})


def mean_use(readings: Sequence[CoreUse]) -> CoreUse | None:
    if not readings:
        return None
    others = sum(reading.others_cores for reading in readings) / len(readings)
    idle = sum(reading.idle_cores for reading in readings) / len(readings)
    return CoreUse(cores=readings[-1].cores, others_cores=others, idle_cores=idle)


def most_contended(uses: Sequence[CoreUse | None]) -> CoreUse | None:
    """The worst of several hosts or attempts: contention on one of them affects their common work."""
    known = [use for use in uses if use is not None]
    return max(known, key=lambda use: (use.contended, use.others_cores / use.cores), default=None)


Window = tuple[int, int]


@dataclass(frozen=True)
class GpuState:
    mono_ns: int
    device: str
    power_w: float | None
    sm_clock_mhz: float | None
    temperature_c: float | None
    utilization_percent: float | None
    throttling: tuple[str, ...]


@dataclass(frozen=True)
class Health:
    gpus: tuple[GpuState, ...]
    warnings: tuple[tuple[int, str], ...]
    """(monotonic ns, text) of warnings by sensors and recorder."""
    ticks: dict[str, tuple[int, ...]]
    """Monotonic ns of each kind of line: the actual cadence."""
    late_s: tuple[float, ...]
    """Lateness of the readings that were more than an interval late."""
    cores: tuple[tuple[int, CoreUse], ...] = ()
    """(monotonic ns, use of the cores in about a second before)."""

    def during(self, windows: Sequence[Window]) -> list[GpuState]:
        inside = _Inside(windows)
        return [state for state in self.gpus if inside(state.mono_ns)]

    def core_use_during(self, windows: Sequence[Window]) -> CoreUse | None:
        """None without readings, as in older traces and in windows shorter than a second."""
        inside = _Inside(windows)
        return mean_use([use for stamp, use in self.cores if inside(stamp)])

    def warnings_during(self, windows: Sequence[Window]) -> list[str]:
        inside = _Inside(windows)
        return list(dict.fromkeys(text for stamp, text in self.warnings if inside(stamp)))


class _Inside:
    """Whether a time is in one of several disjoint windows; a stage may have thousands of them."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = sorted(windows)
        self._starts = [start for start, _ in self._windows]

    def __call__(self, stamp: int) -> bool:
        # windows are disjoint, so only the last one that starts at or before the time can contain it
        number = bisect_right(self._starts, stamp)
        return number > 0 and stamp <= self._windows[number - 1][1]


def load_health(path: Path) -> Health:
    return collect_health(read_lines(path))


def collect_health(lines: Iterable[dict[str, Any]]) -> Health:
    gpus: list[GpuState] = []
    warnings: list[tuple[int, str]] = []
    ticks: dict[str, list[int]] = {}
    late: list[float] = []
    cores: list[tuple[int, CoreUse]] = []
    for line in lines:
        kind, mono_ns = str(line.get("kind")), int(line.get("mono_ns", 0))
        if kind == "gpu":
            gpus.append(_gpu_state(line, mono_ns))
        elif kind == "warning":
            warnings.append((mono_ns, str(line.get("text") or line.get("reason") or "unspecified sensor warning")))
        elif kind == "cores":
            cores.append((mono_ns, core_use(line)))
        if kind in ("gpu", "rapl", "host", "estimate"):
            ticks.setdefault(f"{kind} {line.get('device', '')}".strip(), []).append(mono_ns)
        if "late_s" in line:
            late.append(float(line["late_s"]))
    cadence = {name: tuple(stamps) for name, stamps in ticks.items()}
    return Health(tuple(gpus), tuple(warnings), cadence, tuple(late), tuple(cores))


def _gpu_state(line: dict[str, Any], mono_ns: int) -> GpuState:
    return GpuState(
        mono_ns=mono_ns,
        device=str(line.get("device", "")),
        power_w=line.get("power_watts"),
        sm_clock_mhz=line.get("sm_clock_MHz"),
        temperature_c=line.get("temperature_C"),
        utilization_percent=line.get("gpu_utilization_percent"),
        throttling=throttle_reasons_text(line.get("throttle_reasons")),
    )


def throttle_reasons_text(reasons: object) -> tuple[str, ...]:
    """Throttle reasons as text, from NVML's bits or from a sensor that reports text."""
    if isinstance(reasons, int):
        return tuple(text for bit, (_, text) in THROTTLE_REASONS.items() if text and reasons & bit)
    if isinstance(reasons, list | tuple):
        return tuple(str(reason) for reason in reasons)
    return ()


def throttle_shares(states: Sequence[GpuState]) -> dict[str, float]:
    """Share of the readings in which the card was throttled, by reason."""
    counts: dict[str, int] = {}
    for state in states:
        for reason in state.throttling:
            counts[reason] = counts.get(reason, 0) + 1
    return {reason: count / len(states) for reason, count in counts.items()}
