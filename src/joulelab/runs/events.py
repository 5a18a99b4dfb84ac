"""The event file of one attempt, read back: stage segments, counts, results, artefacts, phases, warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.meter.integrate import without
from joulelab.meter.marks import PhaseAggregate, PhaseBook, RingReader
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.bills import Bill
from joulelab.runs.record import StageKind, kind_by_name

Window = tuple[int, int]
STARTUP = "startup"
"""Activity of imports and of starting a device: they belong to no stage, so that `run.overhead` has them."""


def setup_name(stage: str) -> str:
    return f"{stage}.setup"


def overlap(one: Window, other: Window) -> Window | None:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else None


@dataclass
class Opening:
    """One opening of a stage inside no other, from its begin to its close."""

    begin_ns: int
    end_ns: int | None = None
    resumed: bool = False
    """It took up the work of earlier attempts; otherwise it began anew."""
    resumed_at: int | None = None
    """At which of their checkpoints (a step); None: all of their work was kept."""
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    """(how far the work was, when) at each point that a later attempt can resume from."""
    setup_counts: dict[str, int] = field(default_factory=dict)
    """What was counted in time that was setup."""
    artifact: bool = False
    """What it was opened for was finished, so that no later attempt does it again."""


@dataclass
class AttemptEvents:
    """What one attempt of the measured program said; open segments have no end yet."""

    begin_ns: int = 0
    end_ns: int | None = None
    end_status: str | None = None
    """How the attempt ended; None after a kill, and from a rank that follows another."""
    method_version: int = 1
    """Of the program that began the attempt."""
    environment: dict[str, str] = field(default_factory=dict)
    """Digests of the environment's snapshot; empty in the first release, and from a rank that follows another."""
    windows: dict[str, list[Window]] = field(default_factory=dict)
    open_stages: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, StageKind] = field(default_factory=dict)
    openings: dict[str, list[Opening]] = field(default_factory=dict)
    """Of stages that were opened inside no other one."""
    setups: list[tuple[str, str, Window]] = field(default_factory=list)
    """(stage, activity, window) of setup inside a stage."""
    statuses: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    joules: dict[str, tuple[list[str], int]] = field(default_factory=dict)
    """Results that are joules of artefacts, by their keys, shared by so many things."""
    findings: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """What trackers of the training loop found: by stage, then by tracker."""
    bills: dict[tuple[str, str | None], Bill] = field(default_factory=dict)
    """By key and use."""
    """Of what was made or used, by key: two inputs may have the same name."""
    device: str | None = None
    """Where the models of the run work (`cpu`, `cuda`); None where nothing declared it."""
    warnings: list[str] = field(default_factory=list)
    phases: dict[tuple[str, str], PhaseAggregate] = field(default_factory=dict)
    marks_lost: int = 0

    def closed_windows(self, last_ns: int) -> dict[str, list[Window]]:
        """Segments by stage; one that was open when everything ended is closed where the trace ends.

        Setup inside a stage is split from it: start-up belongs to no stage, the rest to a setup stage of its own.
        """
        windows = {stage: list(pairs) for stage, pairs in self.windows.items()}
        for stage, begin_ns in self.open_stages.items():
            windows.setdefault(stage, [])
            if last_ns > begin_ns:
                windows[stage].append((begin_ns, last_ns))
        for stage, activity, window in self.setups:
            inside = [both for one in windows.get(stage, []) if (both := overlap(one, window))]
            windows[stage] = [piece for one in windows.get(stage, []) for piece in without(one, inside)]
            if activity != STARTUP and inside:
                windows.setdefault(setup_name(stage), []).extend(inside)
        return windows


def read_events(path: Path) -> AttemptEvents:
    events = AttemptEvents()
    names: dict[tuple[str, int], str] = {}
    book = PhaseBook()
    marks_read = 0
    for line in read_lines(path):
        kind = line["kind"]
        if kind == "run":
            if line["edge"] == "begin":
                events.begin_ns = line["mono_ns"]
                events.method_version = line.get("method_version", 1)
                events.environment = line.get("environment", {})
            else:
                events.end_ns, events.end_status = line["mono_ns"], line.get("status")
        elif kind == "stage":
            _take_edge(events, line)
        elif kind == "stage_closed":
            events.statuses[line["stage"]] = line["status"]
            for opening in events.openings.get(line["stage"], [])[-1:]:
                opening.end_ns = opening.end_ns or line["mono_ns"]
        elif kind == "setup":
            stage, activity = line["stage"], line["activity"]
            events.setups.append((stage, activity, (line["begin_ns"], line["end_ns"])))
            known = events.kinds.get(setup_name(stage))
            if activity != STARTUP and (known is None or activity == "compile"):
                events.kinds[setup_name(stage)] = StageKind("setup", activity, part_of=stage)
        elif kind == "setup_counts":
            for opening in events.openings.get(line["stage"], [])[-1:]:
                opening.setup_counts.update(line["counts"])
        elif kind in ("checkpoint", "resumed"):
            _take_position(events, line)
        elif kind == "progress":
            events.counts.setdefault(line["stage"], {}).update(line["counts"])
        elif kind == "result":
            events.results[line["name"]] = line["result"]
        elif kind == "joules":
            events.joules[line["name"]] = (line["of"], line["per"])
        elif kind == "tracker":
            events.findings.setdefault(line["stage"], {})[line["name"]] = line["values"]
        elif kind == "artefact":
            bill = Bill.model_validate(line["bill"])
            events.bills[bill.key, bill.artefact.used_as] = bill
            for stage in bill.artefact.stages:
                for opening in events.openings.get(stage, []):
                    opening.artifact = True
        elif kind == "device":
            events.device = line["device"]
        elif kind == "warning":
            events.warnings.append(line["text"])
        elif kind == "name":
            names[line["of"], line["number"]] = line["name"]
        elif kind == "phases":
            book.add_line(line)
            marks_read, events.marks_lost = line["marks_read"], line["marks_lost"]
    _take_undrained(book, path, marks_read)
    for (stage, phase), aggregate in book.rows.items():
        key = (names.get(("stage", stage), ""), names.get(("phase", phase), f"phase {phase}"))
        events.phases[key] = aggregate
    return events


def _take_edge(events: AttemptEvents, line: dict[str, Any]) -> None:
    stage, mono_ns = line["stage"], line["mono_ns"]
    if line["edge"] == "begin":
        events.open_stages[stage] = mono_ns
        if "role" in line:
            events.kinds[stage] = StageKind(line["role"], line["activity"], line.get("repeat"))
            if line.get("opened"):
                events.openings.setdefault(stage, []).append(Opening(mono_ns))
        else:  # an attempt older than roles
            events.kinds.setdefault(stage, kind_by_name(stage))
    elif stage in events.open_stages:
        events.windows.setdefault(stage, []).append((events.open_stages.pop(stage), mono_ns))


def _take_position(events: AttemptEvents, line: dict[str, Any]) -> None:
    if opened := events.openings.get(line["stage"]):
        if line["kind"] == "resumed":
            opened[-1].resumed, opened[-1].resumed_at = True, line["at"]
        else:
            opened[-1].checkpoints.append((line["at"], line["mono_ns"]))


def _take_undrained(book: PhaseBook, path: Path, marks_read: int) -> None:
    """A ring that is still there was not fully drained: recorder and program were killed together."""
    ring = path.with_suffix(".ring")
    if ring.exists():
        book.add_marks(RingReader(ring, marks_read).drain())


def drain_ring(path: Path) -> None:
    """Move the marks that a killed recorder left in its ring into the event file, and remove the ring."""
    ring = path.with_suffix(".ring")
    if not ring.exists():
        return
    drained = [line for line in read_lines(path) if line["kind"] == "phases"]
    reader = RingReader(ring, drained[-1]["marks_read"] if drained else 0)
    book = PhaseBook()
    book.add_marks(reader.drain())
    if book.rows or reader.lost:
        file = LineFile(path)
        lost = reader.lost + (drained[-1]["marks_lost"] if drained else 0)
        file.append({**clock.now().fields(), **book.to_line(reader.read, lost)}, sync=True)
        file.close()
    ring.unlink()
