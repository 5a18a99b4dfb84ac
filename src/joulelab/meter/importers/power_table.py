"""CSV tables with power columns: `timestamp,gpu_0_power_w,...,total_power_w`, and per-step tables of training scripts.

A per-step table has `gpu_power_w`, often `gpu_energy_mj`, and `elapsed_sec` or a time stamp. Whether its energy column
is cumulative and which unit it has is decided by power x time (`power_log.gather`), because names are not reliable.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence

from joulelab.meter.importers.power_log import Findings, PowerLog, Row, Source, TimeRule, UnusableLog, gather, number
from joulelab.units import plural

FORMAT = "CSV with power columns"
_STAMPS = ("timestamp", "time", "ts", "datetime")
_ELAPSED = ("elapsed_sec", "elapsed_s", "elapsed_seconds", "elapsed")
_POWER = re.compile(r"gpu_?(\d*)_?power(?:_draw)?_(mw|w|watts)$")
_TOTAL = re.compile(r"(?:total_|gpu_total_)?power_(mw|w)$")
# `power` as of other tools; without a unit, watts are assumed and stated.
_PLAIN = re.compile(r"power(?:\s*[\[(](mw|w|watts?)[\])])?$")
_ENERGY = re.compile(r"gpu_?(\d*)_?energy_(uj|mj|j|kj|wh|kwh)$")
# The total column is a sum over the cards; a larger difference means that a card is missing from the columns.
_SAME_W = 0.5


def _names(line: str) -> list[str]:
    return [cell.strip().lower() for cell in line.split(",")]


def looks_like(lines: Sequence[str]) -> bool:
    names = _names(lines[0])
    timed = any(name in names for name in (*_STAMPS, *_ELAPSED))
    return timed and any(form.fullmatch(name) for form in (_POWER, _TOTAL, _PLAIN) for name in names)


def read(lines: Sequence[str], rule: TimeRule) -> PowerLog:
    names = _names(lines[0])
    found = Findings(FORMAT)
    powers = {name: match for name in names if (match := _POWER.fullmatch(name))}
    totals = {
        name: match for name in names if not powers and (match := _TOTAL.fullmatch(name) or _PLAIN.fullmatch(name))
    }
    energies = {match[1]: (name, match[2]) for name in names if (match := _ENERGY.fullmatch(name))}
    if len({unit for _, unit in energies.values()}) > 1:
        raise UnusableLog("the energy columns have different units", "use one unit for all of them")
    found.energy_unit = next((unit for _, unit in energies.values()), None)
    columns = {
        (match[1] if match.re is _POWER else ""): (name, 1e-3 if match[match.lastindex or 0] == "mw" else 1.0)
        for name, match in (powers or totals).items()
    }
    if totals:
        name, match = next(iter(totals.items()))
        if match.re is _TOTAL:
            found.notes.append(f"{name} is the sum over the GPUs, taken as one device")
        else:
            unit = "milliwatts" if match[1] == "mw" else "watts"
            found.notes.append(f"column '{name}' is read as the power of one GPU in {unit}")
    stamp = next((name for name in _STAMPS if name in names), None)
    elapsed = next((name for name in _ELAPSED if name in names), None)
    if elapsed is not None:
        found.elapsed_clock = f"seconds since the start ({elapsed})"
        found.starts_at_zero = True
    rows = list(_rows(lines, names, columns, energies, stamp, elapsed, found))
    return gather(rows, rule, found)


def _rows(
    lines: Sequence[str],
    names: list[str],
    columns: dict[str, tuple[str, float]],
    energies: dict[str, tuple[str, str]],
    stamp: str | None,
    elapsed: str | None,
    found: Findings,
) -> Iterator[Row]:
    torn = powerless = 0
    apart_w = 0.0
    for cells in csv.reader(lines[1:], skipinitialspace=True):
        if len(cells) != len(names) or _names(",".join(cells)) == names:  # a header again: appended by a later start
            torn += bool(cells) and len(cells) != len(names)
            continue
        row = dict(zip(names, cells, strict=True))
        watts = {
            gpu: value * scale for gpu, (name, scale) in columns.items() if (value := number(row[name])) is not None
        }
        powerless += len(columns) - len(watts)
        stated_w = number(row.get("total_power_w"))
        if stated_w is not None and watts:
            apart_w = max(apart_w, abs(stated_w - sum(watts.values())))
        for gpu in columns:
            values = {"power_watts": watts[gpu]} if gpu in watts else {}
            if gpu in energies and (joules := number(row[energies[gpu][0]])) is not None:
                values["energy_counter_j"] = joules
            source = Source(f"gpu:{gpu or 0}", f"GPU {gpu}".strip(), index=int(gpu or 0))
            if elapsed is not None:
                yield Row(source, values, seconds=number(row[elapsed]))
            else:
                yield Row(source, values, stamp=row[stamp] if stamp else None)
    if torn:
        found.notes.append(f"{torn} lines do not match the header and were skipped")
    if powerless:
        found.notes.append(f"{plural(powerless, 'cell')} without a power value")
    if apart_w > _SAME_W:
        found.notes.append(
            f"total_power_w differs from the sum over the GPUs by up to {apart_w:.1f} W; the GPUs are used"
        )
