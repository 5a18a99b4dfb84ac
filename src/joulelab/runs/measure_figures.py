"""Joules of named windows: read off the energy curve where their moments are known, else a share of the time around.

Pure reading of a finished run: its trace, its record and `windows.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, Frozen, missing
from joulelab.meter.integrate import COMPONENTS, component_energy
from joulelab.meter.series import Trace, load_trace
from joulelab.meter.trace import read_lines
from joulelab.runs.measure_windows import WINDOWS_FILE
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import EnergyByComponent, PhaseRecord, RunRecord, StageRecord

Way = Literal["direct", "time-share", "none"]
WHOLE = "the whole measurement"


class WindowFigure(Frozen):
    """What one name's windows took: how often, how long, and joules by the way that is named."""

    name: str
    count: int
    seconds: float
    """Sum over the windows; more than the wall time where they ran in several threads at once."""
    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float
    way: Way
    """`direct`: what the sensor says of these windows. `time-share`: of the enclosing window, by time: the weakest."""
    energy: EnergyFigure
    share_of: str | None = None

    @property
    def energy_j(self) -> float | None:
        return self.energy.energy_j


class _Lines:
    """`windows.jsonl` by name: the timed windows, what they lay in, which of them overlapped."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.timed: dict[str, list[tuple[int, int]]] = {}
        self.inside: dict[str, set[str | None]] = {}
        self.overlapping: set[str] = set()
        for line in lines:
            if "begin_ns" in line:
                self.timed.setdefault(line["name"], []).append((line["begin_ns"], line["end_ns"]))
            else:
                self.inside.setdefault(line["name"], set()).add(line["inside"])
                if line["overlaps"]:
                    self.overlapping.add(line["name"])


def window_figures(paths: RunPaths, record: RunRecord, stage: StageRecord | None) -> dict[str, WindowFigure]:
    """Every window of a finished run by name; `stage` is the one the windows lie in."""
    if stage is None or not stage.phases:
        return {}
    path = paths.folder / WINDOWS_FILE
    lines = _Lines(read_lines(path) if path.exists() else ())
    traces = paths.traces()
    trace = load_trace(traces[-1][2]) if traces else None
    found: dict[str, WindowFigure] = {}
    for name in _outer_first(stage.phases, lines):
        times = _exact(stage.phases[name], lines.timed.get(name, []))
        direct = _direct(name, times, lines, trace, record.policy) if trace is not None else None
        found[name] = _figure(name, times, "direct", direct) if direct else _shared(name, times, lines, stage, found)
    return found


def _outer_first(phases: dict[str, PhaseRecord], lines: _Lines) -> list[str]:
    """Enclosing windows before enclosed ones (they are longer in sum), so that a share finds its whole."""
    return sorted(phases, key=lambda name: -phases[name].sum_s)


def _exact(times: PhaseRecord, windows: list[tuple[int, int]]) -> PhaseRecord:
    """The quantiles of windows that were timed one by one, where marks have bins of 12 %."""
    if len(windows) != times.count:
        return times
    p50_s, p95_s = np.quantile([(end - begin) / NS for begin, end in windows], [0.5, 0.95])
    return times.model_copy(update={"p50_s": float(p50_s), "p95_s": float(p95_s)})


def _figure(name: str, times: PhaseRecord, way: Way, energy: EnergyFigure, of: str | None = None) -> WindowFigure:
    return WindowFigure(
        name=name,
        count=times.count,
        seconds=times.sum_s,
        mean_s=times.mean_s,
        p50_s=times.p50_s,
        p95_s=times.p95_s,
        max_s=times.max_s,
        way=way,
        energy=energy,
        share_of=of,
    )


def _direct(name: str, times: PhaseRecord, lines: _Lines, trace: Trace, policy: str) -> EnergyFigure | None:
    windows = lines.timed.get(name, [])
    if len(windows) != times.count:
        return None  # some were too short to be timed one by one, so the name as a whole has no joules of its own
    joined = union(windows)
    parts = EnergyByComponent(**{name: component_energy(trace, name, joined) for name in COMPONENTS})
    figure = parts.best(policy)
    if figure.energy_j is None:
        return None
    if name not in lines.overlapping:
        return figure
    return figure.model_copy(update={"reason": "windows overlapped: the time they share counts once"})


def union(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint windows covering the same time, so that joules of overlapping threads count once."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(windows):
        if joined and begin < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _shared(
    name: str, times: PhaseRecord, lines: _Lines, stage: StageRecord, found: dict[str, WindowFigure]
) -> WindowFigure:
    """The energy of what encloses these windows, in proportion to time: right only if power was even in it."""
    if name in lines.overlapping:
        reason = "too short for joules of their own, and several at once: time cannot be shared out"
        return _figure(name, times, "none", missing(reason))
    outer = lines.inside.get(name, set())
    of = next(iter(outer)) if len(outer) == 1 else None
    whole = found[of] if of in found and found[of].way == "direct" else None
    energy, seconds = (whole.energy, whole.seconds) if whole else (stage.best, stage.duration_s)
    if energy.energy_j is None:
        return _figure(name, times, "none", energy)
    share = min(1.0, times.sum_s / seconds) if seconds else 0.0
    title = whole.name if whole else WHOLE
    # nothing says how much of the energy around them was used in them: between none and all of it
    half_width_j = max(share, 1 - share) * energy.energy_j
    reason = f"a share of {title} by time, as if power had been even there; the interval is all that is possible"
    figure = energy.with_interval(share * energy.energy_j, half_width_j, "time share").model_copy(
        update={"reason": reason}
    )
    return _figure(name, times, "time-share", figure, title)
