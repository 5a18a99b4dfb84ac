"""A run while it runs, from the shared folder alone: what it does, how fast, and how far it still is.

Nothing is asked of the node it runs on. The figures lag by a second or so, and idle baselines are in the joules so far;
what ends up in the record is computed afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.clock import NS
from joulelab.meter.monitor.tally import LiveTraces
from joulelab.meter.trace import read_lines
from joulelab.runs.json_file import read_json
from joulelab.runs.lock import is_held
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord

# Speeds are taken over the last lines of metrics: long enough to be steady, short enough to show a change.
SPEED_LINES = 20
_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class LiveRun:
    run_id: str
    label: str
    status: str
    stage: str = ""
    attempt: int = 0
    hosts: tuple[str, ...] = ()
    energy_j: float | None = None
    power_w: float | None = None
    estimated: bool = False
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    fraction: float | None = None
    """Of the stage's budget, spent."""
    loss: float | None = None
    left_s: float | None = None
    """Time that the stage still needs at its present speed."""
    left_j: float | None = None
    """Joules that it still needs at its present power."""
    why: str = ""
    """What ended it, where it did not end well."""

    @property
    def over(self) -> bool:
        return self.status in ("done", "failed", "truncated")


class RunWatcher:
    """Looks at one folder again and again."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        self._traces = LiveTraces()

    def look(self) -> LiveRun:
        record = RunRecord.model_validate(read_json(self.paths.record))
        status = record.status
        if status == "running" and not is_held(self.paths.folder):
            record = RunRecord.model_validate(read_json(self.paths.record))  # it may have ended in between
            status = "truncated" if record.status == "running" else record.status
        if status != "running":
            return _ended(record, status)
        closed = max((attempt.number for attempt in record.attempts), default=0)
        present = [(host, number, path) for host, number, path in self.paths.traces() if number > closed]
        reading = self._traces.read(path for _, _, path in present)
        before_j = record.totals.best.energy_j if record.totals else None
        speed = read_speed(last_lines(self.paths.metrics))
        return LiveRun(
            run_id=record.run_id,
            label=record.label,
            status=status,
            stage=self._stage(present),
            attempt=max((number for _, number, _ in present), default=closed),
            hosts=tuple(sorted({host for host, _, _ in present})),
            energy_j=_sum(before_j, reading.energy_j),
            power_w=reading.power_w,
            estimated=reading.estimated,
            tokens_per_s=speed.tokens_per_s,
            samples_per_s=speed.samples_per_s,
            fraction=speed.fraction,
            loss=speed.loss,
            left_s=speed.left_s,
            left_j=speed.left_s * reading.power_w if speed.left_s is not None and reading.power_w else None,
        )

    def _stage(self, present: Sequence[tuple[str, int, Path]]) -> str:
        """The stage that was begun last by the first rank."""
        files = self.paths.event_files()
        found = [files[host, number][0] for host, number, _ in present if files.get((host, number))]
        if not found:
            return ""
        open_stages: list[str] = []
        for line in read_lines(min(found)[1]):
            if line.get("kind") == "stage":
                if line["edge"] == "begin":
                    open_stages.append(line["stage"])
                elif line["stage"] in open_stages:
                    open_stages.remove(line["stage"])
        return open_stages[-1] if open_stages else "between stages"


def _ended(record: RunRecord, status: str) -> LiveRun:
    totals = record.totals
    return LiveRun(
        run_id=record.run_id,
        label=record.label,
        status=status,
        attempt=max((attempt.number for attempt in record.attempts), default=0),
        hosts=tuple(sorted({attempt.host for attempt in record.attempts})),
        energy_j=totals.best.energy_j if totals else None,
        estimated=bool(totals and totals.best.method == "estimated"),
        why=record.error.message if record.error else "",
    )


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    fraction: float | None = None
    loss: float | None = None
    left_s: float | None = None


def read_speed(lines: Sequence[dict[str, Any]]) -> Speed:
    """From the last lines that one stage wrote in one attempt: their clock is one, and nothing lies between them."""
    told = [line for line in lines if "loss" in line]
    if not told:
        return Speed()
    last = told[-1]
    same = [line for line in told if (line.get("stage"), line["attempt"]) == (last.get("stage"), last["attempt"])]
    first = same[-SPEED_LINES:][0]
    span_s = (last["mono_ns"] - first["mono_ns"]) / NS
    fraction = last.get("fraction")
    if span_s <= 0:
        return Speed(fraction=fraction, loss=last["loss"])
    advance = fraction - first["fraction"] if fraction is not None and "fraction" in first else 0.0
    return Speed(
        tokens_per_s=_rate(first, last, "tokens", span_s),
        samples_per_s=_rate(first, last, "samples", span_s),
        fraction=fraction,
        loss=last["loss"],
        left_s=max(0.0, 1.0 - fraction) * span_s / advance if fraction is not None and advance > 0 else None,
    )


def _rate(first: dict[str, Any], last: dict[str, Any], what: str, span_s: float) -> float | None:
    rise = last.get(what, 0) - first.get(what, 0)
    return rise / span_s if rise > 0 else None


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The end of a file of lines: a week of metrics is read no faster for knowing its beginning."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(start)
        raw = file.read().split(b"\n")
    whole = raw[1:-1] if start else raw[:-1]
    found = []
    for line in whole:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _sum(before_j: float | None, now_j: float | None) -> float | None:
    return None if before_j is None and now_j is None else (before_j or 0.0) + (now_j or 0.0)
