"""Rows of any reader to one log: by device, in time, without duplicates, with everything odd about them noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joulelab.meter.foreign.power_log import COLUMNS, Array, DeviceLog, LogGap, PowerLog, Row, Source
from joulelab.meter.foreign.times import StampReader, put_in_order, stamp_reader
from joulelab.units import duration_text


@dataclass(frozen=True)
class TimeRule:
    """What the user says about times."""

    zone: str | None = None
    period_s: float | None = None


@dataclass
class Findings:
    """What a reader found besides rows."""

    format: str
    notes: list[str] = field(default_factory=list)
    gaps: list[LogGap] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    elapsed_clock: str = ""
    """Set where the times are not of day: says what they are."""


def gather(rows: Iterable[Row], rule: TimeRule, found: Findings) -> PowerLog:
    by_device: dict[str, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row.source.device, []).append(row)
    stamps = stamp_reader(rule.zone)
    devices, notes = [], list(found.notes)
    for name, device_rows in by_device.items():
        device, own = _device(device_rows, stamps)
        notes += [f"{name}: {note}" for note in own]
        if len(device.times_s):
            devices.append(device)
    notes += stamps.notes()
    sound = sum(1 for rows_of in by_device.values() for row in rows_of if row.seconds is not None)
    return PowerLog(
        format=found.format,
        clock=found.elapsed_clock or _clock_text(stamps, sound),
        has_wall=not found.elapsed_clock,
        devices=tuple(devices),
        notes=tuple(notes),
        gaps=tuple(found.gaps),
        facts=found.facts,
    )


def _clock_text(stamps: StampReader, sound: int) -> str:
    if not sound:
        return stamps.clock_text()
    ours = "the recorder's monotonic clock, placed by its header's wall clock"
    return f"{ours}; for older records: {stamps.clock_text()}" if stamps.naive + stamps.aware else ours


def _device(rows: Sequence[Row], stamps: StampReader) -> tuple[DeviceLog, list[str]]:
    unique = list({_identity(row): row for row in rows}.values())
    notes = [f"{len(rows) - len(unique)} records stand in the file twice"] if len(unique) < len(rows) else []
    times, kept = _seconds(unique, stamps, notes)
    order = np.argsort(times, kind="stable")
    columns = {name: _column(kept, name)[order] for name in COLUMNS if any(name in row.values for row in kept)}
    return _without_equal_times(kept[0].source if kept else rows[0].source, times[order], columns, notes), notes


def _identity(row: Row) -> tuple[Any, ...]:
    """Records without any time are never the same: equal readings are the rule for them."""
    when = row.seconds if row.seconds is not None else row.stamp
    return (when if when is not None else id(row), *sorted(row.values.items(), key=lambda item: item[0]))


def _seconds(rows: Sequence[Row], stamps: StampReader, notes: list[str]) -> tuple[Array, list[Row]]:
    sound = [row for row in rows if row.seconds is not None]
    others, seconds = [], []
    previous = None
    for row in rows:
        if row.seconds is None and (at := stamps.seconds(row.stamp, previous)) is not None:
            others.append(row)
            seconds.append(at)
            previous = at
    ordered = put_in_order(seconds)
    if ordered.late:
        notes.append(f"{ordered.late} records came late and were put in their place")
    for step_s in ordered.steps_s:
        notes.append(
            f"the clock went back by {duration_text(-step_s)} during the log: times after it are moved on, "
            "and across it one usual step is assumed"
        )
    return np.concatenate([np.array([row.seconds for row in sound], dtype=float), ordered.seconds]), [*sound, *others]


def _column(rows: Sequence[Row], name: str) -> Array:
    return np.array([row.values.get(name, np.nan) for row in rows], dtype=float)


def _without_equal_times(source: Source, times: Array, columns: Mapping[str, Array], notes: list[str]) -> DeviceLog:
    """Stamps in whole seconds repeat when sampling was faster: their mean is that second's value."""
    unique, where = np.unique(times, return_inverse=True)
    if len(unique) == len(times):
        return DeviceLog(source, times, dict(columns))
    notes.append(f"{len(times) - len(unique)} records share a stamp with the one before; their mean is taken")
    merged = {}
    for name, values in columns.items():
        known = ~np.isnan(values)
        counts = np.bincount(where[known], minlength=len(unique))
        sums = np.bincount(where[known], weights=values[known], minlength=len(unique))
        merged[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return DeviceLog(source, unique, merged)
