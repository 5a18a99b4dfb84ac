"""The readings of a Parquet trace as arrays by device, taken from its columns: a day of eight cards in seconds.

What is rare in a trace (headers, gaps, its end) comes back as lines, in their order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.meter.arrow_arrays import indices, numbers_in
from joulelab.meter.trace_parquet import MISFIT, REST, read_batches

Array = NDArray[Any]
Pieces = dict[str, list[tuple[Array, Array]]]
"""Device -> pieces of (times in monotonic nanoseconds, values), in the order of the trace."""

READINGS = ("gpu", "samples", "rapl", "counters", "estimate", "host", "cores")
_RARE_COLUMNS = ["kind", "timestamp", "mono_ns", "device", REST]
_READING_COLUMNS = [
    *("kind", "mono_ns", "device", "power_watts", "energy_counter_j", "counter_mono_ns", "counter_read_s"),
    *("busy_thread_s", "sample_us", "sample_mw", "wall_us", "wall_us_mono_ns", "rapl", "counters_j", MISFIT),
]


@dataclass
class Readings:
    counters: Pieces = field(default_factory=dict)
    powers: Pieces = field(default_factory=dict)
    samples: Pieces = field(default_factory=dict)
    read_times: Pieces = field(default_factory=dict)
    stamps: list[int] = field(default_factory=list)
    """First and last stamp of each piece of the trace."""
    misfit: bool = False
    """Some line holds a word where a number belongs; then the lines must be read one by one."""


def read_rare_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that is no reading: headers, added devices, gaps, warnings, the end."""
    found = []
    for batch in read_batches(path, _RARE_COLUMNS):
        codes, kinds = _codes(batch.column("kind"))
        wanted = [number for number, kind in enumerate(kinds) if kind not in READINGS]
        rows = np.flatnonzero(np.isin(codes, wanted))
        for row in batch.take(indices(rows)).to_pylist() if len(rows) else ():
            rest = row.pop(REST)
            line = {name: value for name, value in row.items() if value is not None}
            found.append(line | (json.loads(rest) if rest else {}))
    return found


def read_readings(path: Path) -> Readings:
    found = Readings()
    for batch in read_batches(path, _READING_COLUMNS):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if columns[MISFIT].true_count:
            found.misfit = True
            return found
        _take(found, columns)
    return found


def _take(found: Readings, columns: dict[str, Any]) -> None:
    mono_ns, known = numbers_in(columns["mono_ns"], np.int64)
    if (stamps := mono_ns[known & (mono_ns != 0)]).size:
        found.stamps += [int(stamps.min()), int(stamps.max())]
    kind_codes, kinds = _codes(columns["kind"])
    device_codes, devices = _codes(columns["device"])

    def is_kind(name: str) -> Any:
        return np.equal(kind_codes, kinds.index(name) if name in kinds else len(kinds))

    power_w, has_power = numbers_in(columns["power_watts"], float)
    counter_j, has_counter = numbers_in(columns["energy_counter_j"], float)
    counter_ns, has_stamp = numbers_in(columns["counter_mono_ns"], np.int64)
    read_s = np.zeros(len(counter_j))
    if "counter_read_s" in columns:  # traces of the first release do not have it
        read_s = np.nan_to_num(numbers_in(columns["counter_read_s"], float)[0])
    busy_s, has_busy = numbers_in(columns["busy_thread_s"], float)
    gpu, estimate, samples = is_kind("gpu"), is_kind("estimate"), is_kind("samples")
    for number, device in enumerate(devices):
        mine = device_codes == number
        _add(found.powers, device, mono_ns, power_w, mine & gpu & has_power)
        counted, stamps_ns = mine & gpu & has_counter, np.where(has_stamp, counter_ns, mono_ns)
        _add(found.counters, device, stamps_ns, counter_j, counted)
        _add(found.read_times, device, stamps_ns, read_s, counted)
        _add(found.counters, device, mono_ns, busy_s, mine & estimate & has_busy)
        _take_samples(found, device, columns, np.flatnonzero(mine & samples))
    _take_map(found, columns["rapl"], np.flatnonzero(is_kind("rapl")), mono_ns, "rapl:")
    _take_map(found, columns["counters_j"], np.flatnonzero(is_kind("counters")), mono_ns, "")


def _codes(column: Any) -> tuple[Array, list[str]]:
    """A column of words as numbers into a list of them; -1 where there is none."""
    encoded = column.dictionary_encode()
    codes, known = numbers_in(encoded.indices, np.int32)
    return np.where(known, codes, -1), encoded.dictionary.to_pylist()


def _add(pieces: Pieces, device: str, times: Array, values: Array, chosen: Array) -> None:
    if chosen.any():
        pieces.setdefault(device, []).append((times[chosen], values[chosen]))


def _take_samples(found: Readings, device: str, columns: dict[str, Any], rows: Array) -> None:
    """Each line places its samples by a pair of wall and monotonic time."""
    if not len(rows):
        return
    wall_us, _ = numbers_in(columns["wall_us"], np.int64)
    wall_ns, _ = numbers_in(columns["wall_us_mono_ns"], np.int64)
    stamps, powers = columns["sample_us"].take(indices(rows)), columns["sample_mw"].take(indices(rows))
    lengths, _ = numbers_in(stamps.value_lengths(), np.int32)
    begin_ns = np.repeat(wall_ns[rows] - wall_us[rows] * 1000, lengths)
    stamps_us, _ = numbers_in(stamps.flatten(), np.int64)
    powers_mw, _ = numbers_in(powers.flatten(), np.int64)
    found.samples.setdefault(device, []).append((begin_ns + stamps_us * 1000, powers_mw / 1000))


def _take_map(found: Readings, column: Any, rows: Array, mono_ns: Array, prefix: str) -> None:
    if not len(rows):
        return
    chosen = column.take(indices(rows))
    offsets, _ = numbers_in(chosen.offsets, np.int32)
    times = np.repeat(mono_ns[rows], np.diff(offsets))
    inside = slice(int(offsets[0]), int(offsets[-1]))
    codes, names = _codes(chosen.keys)
    values, _ = numbers_in(chosen.items, float)
    for number, name in enumerate(names):
        _add(found.counters, f"{prefix}{name}", times, values[inside], codes[inside] == number)
