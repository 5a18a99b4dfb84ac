"""One tick's readings as records: the operators' field names first, ours after them.

A GPU is one record per tick. The driver's 20 ms samples, and readings taken between ticks, are kept as their mean: a
log that is read line by line has no room for fifty lines a second. The host has a record of its own where it has RAPL
counters, or where no GPU carries its CPU use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from joulelab import clock
from joulelab.meter.monitoring.tracked import TrackedProcess, gpu_memory_by_process
from joulelab.meter.sensors import Line

OPERATORS_FIELDS = (
    "gpu_index",
    "gpu_name",
    "power_watts",
    "memory_used_MB",
    "gpu_utilization_percent",
    "memory_utilization_percent",
    "temperature_C",
)


@dataclass
class BetweenTicks:
    """The watts read since the last tick, by device."""

    watts: dict[str, list[float]] = field(default_factory=dict)

    def take(self, lines: Sequence[Line]) -> None:
        sampled = {line["device"] for line in lines if line["kind"] == "samples"}
        for line in lines:
            watts = self.watts.setdefault(line["device"], [])
            if line["kind"] == "samples":
                watts += [power_mw / 1000 for power_mw in line["sample_mw"]]
            elif line["kind"] == "gpu" and line["device"] not in sampled and line.get("power_watts") is not None:
                watts.append(line["power_watts"])

    def mean_power(self, device: str) -> dict[str, float]:
        watts = self.watts.get(device, [])
        return {"power_mean_watts": round(sum(watts) / len(watts), 3)} if len(watts) > 1 else {}


def rapl_counters(lines: Sequence[Line]) -> dict[str, float]:
    return {domain: value for line in lines if line["kind"] == "rapl" for domain, value in line["rapl"].items()}


def make_records(
    lines: Sequence[Line],
    between: BetweenTicks,
    tracked: TrackedProcess | None,
    extra: dict[str, Any],
) -> list[Line]:
    """`extra` goes onto each record: whose session it is and how late the tick was."""
    host = next((line for line in lines if line["kind"] == "host"), {})
    stamp = clock.now().fields()
    cpu = {"cpu_utilization_percent": host.get("cpu_utilization_percent")}
    records = []
    for line in lines:
        if line["kind"] != "gpu":
            continue
        ours = {key: value for key, value in line.items() if key not in OPERATORS_FIELDS and key != "kind"}
        process = {} if tracked is None else {"process": tracked.block(gpu_memory_by_process(line))}
        operators = {key: line.get(key) for key in OPERATORS_FIELDS}
        mean = between.mean_power(line["device"])
        records.append({"kind": "gpu", **stamp, **operators, **cpu, **process, **ours, **mean, **extra})
    counters = rapl_counters(lines)
    if counters or not records:
        process = {"process": tracked.block({})} if tracked is not None and not records else {}
        rapl = {"rapl": counters} if counters else {}
        memory = {key: value for key, value in host.items() if key not in ("kind", "device", *cpu)}
        kind = "rapl" if counters else "host"
        records.append({"kind": kind, **stamp, "device": "host", **cpu, **memory, **process, **rapl, **extra})
    return records
