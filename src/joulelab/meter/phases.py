"""Phase marks summed up: how often, how long, how spread. A week of steps stays a few kilobytes.

Durations fall into logarithmic bins, 20 to a decade. A quantile is the mean duration in its bin: right to about 6 %,
and exact where all durations are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from joulelab.clock import NS
from joulelab.meter.marks import PhaseMark

BINS_PER_DECADE = 20
Key = tuple[int, int]  # stage number, phase number


@dataclass
class PhaseAggregate:
    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)
    bin_sums_s: dict[int, float] = field(default_factory=dict)
    """Sum of the durations in a bin; in lines of the first release its middle stands for each of them."""

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.sum_s += duration_s
        self.max_s = max(self.max_s, duration_s)
        number = math.floor(math.log10(max(duration_s, 1e-9)) * BINS_PER_DECADE)
        self.bins[number] = self.bins.get(number, 0) + 1
        self.bin_sums_s[number] = self.bin_sums_s.get(number, 0.0) + duration_s

    def merge(self, other: PhaseAggregate) -> None:
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count
            sum_s = other.bin_sums_s.get(number, count * 10 ** ((number + 0.5) / BINS_PER_DECADE))
            self.bin_sums_s[number] = self.bin_sums_s.get(number, 0.0) + sum_s

    def quantile_s(self, share: float) -> float:
        wanted, seen = share * self.count, 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                return min(self.max_s, self.bin_sums_s[number] / self.bins[number])
        return self.max_s


class PhaseBook:
    """Aggregates by stage and phase, as the recorder keeps them and as a reader of the events merges them."""

    def __init__(self) -> None:
        self.rows: dict[Key, PhaseAggregate] = {}

    def add_marks(self, marks: Iterable[PhaseMark]) -> None:
        for begin_ns, end_ns, phase, stage, _ in marks:
            row = self.rows.get((stage, phase))
            if row is None:
                row = self.rows[stage, phase] = PhaseAggregate()
            row.add((end_ns - begin_ns) / NS)

    def add_line(self, line: dict[str, Any]) -> None:
        for entry in line["rows"]:
            bins = {int(number): count for number, count in entry["bins"].items()}
            sums_s = {int(number): sum_s for number, sum_s in entry.get("bin_sums_s", {}).items()}
            aggregate = PhaseAggregate(entry["count"], entry["sum_s"], entry["max_s"], bins, sums_s)
            self.rows.setdefault((entry["stage"], entry["phase"]), PhaseAggregate()).merge(aggregate)

    def to_line(self, marks_read: int, marks_lost: int) -> dict[str, Any]:
        """`marks_read` tells a reader where in the ring to go on if the recorder was killed after this line."""
        rows = [
            {
                "stage": stage,
                "phase": phase,
                "count": row.count,
                "sum_s": round(row.sum_s, 9),
                "max_s": round(row.max_s, 9),
                "bins": {str(number): count for number, count in sorted(row.bins.items())},
                "bin_sums_s": {str(number): round(sum_s, 9) for number, sum_s in sorted(row.bin_sums_s.items())},
            }
            for (stage, phase), row in sorted(self.rows.items())
        ]
        return {"kind": "phases", "marks_read": marks_read, "marks_lost": marks_lost, "rows": rows}
