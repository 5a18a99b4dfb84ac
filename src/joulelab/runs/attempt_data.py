"""One attempt of a run as read back from its folder: trace, marks, vital signs, and the windows of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from joulelab.clock import NS, iso
from joulelab.meter.health import CoreUse, Health, load_health
from joulelab.meter.integrate import COMPONENTS, component_energy, without
from joulelab.meter.series import Trace, load_trace
from joulelab.runs.beside import CodecarbonReadings, load_codecarbon
from joulelab.runs.events import AttemptEvents, Opening, Window, overlap, read_events
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import EnergyByComponent, kind_by_name

# The phase of one step of training, after which ranks agree on what comes next.
STEP = "step"


@dataclass(frozen=True, eq=False)
class AttemptData:
    number: int
    host: str
    trace: Trace
    trace_path: Path
    events: AttemptEvents
    begin_ns: int
    end_ns: int
    windows: dict[str, list[Window]]
    codecarbon: CodecarbonReadings
    rank: int = 0
    """Of the process whose marks these are: the lowest one of the host."""
    event_files: tuple[tuple[int, Path], ...] = ()
    """(rank, file) of all processes on the host."""
    clock_offset_s: float = 0.0
    """Wall time of this host less that of the host with rank 0."""

    def energy(self, windows: list[Window]) -> EnergyByComponent:
        figures = {name: component_energy(self.trace, name, windows) for name in COMPONENTS}
        estimate = figures["cpu_estimate"]
        if estimate.energy_j is not None and (use := self.core_use(windows)) is not None:
            figures["cpu_estimate"] = estimate.model_copy(update={"crowded": use.contended})
        return EnergyByComponent(**figures, codecarbon=self.codecarbon.energy(windows))

    def core_use(self, windows: list[Window]) -> CoreUse | None:
        return self.health.core_use_during(windows)

    def started_at(self, mono_ns: int) -> str:
        return iso(mono_ns / NS + self.trace.offset_s - self.clock_offset_s)

    @cached_property
    def health(self) -> Health:
        return load_health(self.trace_path)

    @property
    def idle_stages(self) -> list[str]:
        kinds = self.events.kinds
        return [stage for stage in self.windows if stage in kinds and kinds[stage].role == "idle"]

    @property
    def idle_windows(self) -> list[Window]:
        return [window for stage in self.idle_stages for window in self.windows[stage]]

    @property
    def billed_windows(self) -> list[Window]:
        """All of the attempt but its idle baselines."""
        return without((self.begin_ns, self.end_ns), self.idle_windows)

    @property
    def overhead_windows(self) -> list[Window]:
        """What no stage claims."""
        staged = [window for windows in self.windows.values() for window in windows]
        return without((self.begin_ns, self.end_ns), staged)


def load_attempts(paths: RunPaths) -> list[AttemptData]:
    """One entry per attempt and host, in order of attempts, the host with rank 0 first."""
    files = paths.event_files()
    found = [
        _load_attempt(paths, host, number, trace, files.get((host, number), []))
        for host, number, trace in paths.traces()
    ]
    ordered = sorted(found, key=lambda attempt: (attempt.number, attempt.rank, attempt.host))
    _split_repeated(ordered)
    return with_clock_offsets(ordered)


def repeated_name(stage: str) -> str:
    return f"{stage}.repeated"


def _split_repeated(attempts: Sequence[AttemptData]) -> None:
    """Move the time whose work was lost into stages of its own, in the windows of each attempt.

    Lost is what an attempt did after the checkpoint at which the next one resumed, or all of it where the next one
    began anew; what had become an artifact is never lost. A stage inside the lost time is lost with it.
    """
    numbers = sorted({attempt.number for attempt in attempts}, reverse=True)
    for stage in dict.fromkeys(stage for attempt in attempts for stage in attempt.events.openings):
        later: Opening | None = None
        for number in numbers:
            kept: Opening | None = None
            for attempt in reversed([one for one in attempts if one.number == number]):
                for opening in attempt.events.openings.get(stage, []):
                    end_ns = opening.end_ns or attempt.end_ns
                    lost_ns = _lost_from_ns(opening, later, end_ns)
                    _move_lost(attempt, (lost_ns, end_ns))
                    if lost_ns > opening.begin_ns:
                        kept = opening
                    else:
                        opening.setup_counts.clear()
            later = kept or later  # where nothing was kept, the same resume also judges the attempts before


def _lost_from_ns(opening: Opening, later: Opening | None, end_ns: int) -> int:
    if later is None or opening.artifact:
        return end_ns
    if not later.resumed:
        return opening.begin_ns
    if later.resumed_at is None:
        return end_ns
    kept = [at_ns for at, at_ns in opening.checkpoints if at <= later.resumed_at]
    return max(kept, default=opening.begin_ns)


def _move_lost(attempt: AttemptData, lost: Window) -> None:
    for stage, windows in list(attempt.windows.items()):
        kind = attempt.events.kinds.get(stage) or kind_by_name(stage)
        inside = [both for one in windows if (both := overlap(one, lost))]
        if kind.role in ("setup", "idle") or kind.repeated or not inside:
            continue
        attempt.windows[stage] = [piece for one in windows for piece in without(one, inside)]
        attempt.windows.setdefault(repeated_name(stage), []).extend(inside)
        attempt.events.kinds[repeated_name(stage)] = kind._replace(part_of=stage, repeated=True)


def leading(attempts: Sequence[AttemptData]) -> list[AttemptData]:
    """Of each attempt the host with rank 0: what was counted, found and said is the same everywhere, and told once."""
    first: dict[int, AttemptData] = {}
    for attempt in attempts:
        first.setdefault(attempt.number, attempt)
    return list(first.values())


def _load_attempt(
    paths: RunPaths, host: str, number: int, trace_path: Path, files: list[tuple[int, Path]]
) -> AttemptData:
    trace = load_trace(trace_path)
    rank, events = (files[0][0], read_events(files[0][1])) if files else (0, AttemptEvents())
    begin_ns = events.begin_ns or trace.first_ns
    end_ns = max(begin_ns, events.end_ns or trace.last_ns)
    return AttemptData(
        number=number,
        host=host,
        trace=trace,
        trace_path=trace_path,
        events=events,
        begin_ns=begin_ns,
        end_ns=end_ns,
        windows=events.closed_windows(end_ns),
        codecarbon=load_codecarbon(paths.folder, host, number),
        rank=rank,
        event_files=tuple(files),
    )


def with_clock_offsets(attempts: Sequence[AttemptData]) -> list[AttemptData]:
    """Each host's clock against the leading one's.

    Joules need no common clock: each host's are cut out by its own marks. Times of day do. Ranks end a stage of
    training together, so the difference of those moments is the difference of the clocks.
    """
    placed = []
    leads = {attempt.number: attempt for attempt in leading(attempts)}
    for attempt in attempts:
        lead = leads[attempt.number]
        together = [] if lead is attempt else _ends_apart_s(attempt, lead)
        placed.append(replace(attempt, clock_offset_s=median(together)) if together else attempt)
    return placed


def _ends_apart_s(attempt: AttemptData, lead: AttemptData) -> list[float]:
    return [
        (windows[-1][1] / NS + attempt.trace.offset_s) - (lead.windows[stage][-1][1] / NS + lead.trace.offset_s)
        for stage, windows in attempt.windows.items()
        if windows and lead.windows.get(stage) and (stage, STEP) in attempt.events.phases
    ]


def seconds(windows: list[Window]) -> float:
    return sum(end - start for start, end in windows) / NS


def wall_seconds(parts: Sequence[tuple[AttemptData, list[Window]]]) -> float:
    """Time as a person waits for it: hosts work at the same time, attempts one after the other."""
    longest: dict[int, float] = {}
    for attempt, windows in parts:
        longest[attempt.number] = max(longest.get(attempt.number, 0.0), seconds(windows))
    return sum(longest.values())
