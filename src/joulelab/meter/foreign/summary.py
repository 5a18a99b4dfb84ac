"""A log's figures as plain data with units in the names: what `--json` prints and `summary.json` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from joulelab import clock
from joulelab.meter.foreign.busy_idle import IdleGiven, Inference, Level, idle_level, inference
from joulelab.meter.foreign.energy import DeviceEnergy, device_energy
from joulelab.meter.foreign.power_log import COLUMNS, DeviceLog, PowerLog, UnusableLog
from joulelab.units import J_PER_WH

MAX_LISTED_HOLES = 50


@dataclass(frozen=True)
class DeviceFigures:
    """All that is said about one device; figures of different devices are never put together."""

    energy: DeviceEnergy
    columns: Mapping[str, tuple[float, float]]
    """Mean and highest value of whatever else was read."""
    idle: Level | None = None
    inference: Inference | None = None

    @property
    def above_idle_j(self) -> float | None:
        """Over the time the trapezoid covers: what happened in a hole is not known."""
        if self.idle is None or self.energy.trapezoid_j is None:
            return None
        return self.energy.trapezoid_j - self.idle.power_w * self.energy.seen_s


def figures(log: PowerLog, given: IdleGiven, latency_s: float | None = None) -> list[DeviceFigures]:
    return [_figures(log, device, given, latency_s) for device in log.devices]


def _figures(log: PowerLog, device: DeviceLog, given: IdleGiven, latency_s: float | None) -> DeviceFigures:
    energy = device_energy(device)
    columns = _column_figures(device)
    if device.source.component != "gpu":
        return DeviceFigures(energy, columns)
    times, watts = device.power()
    if not len(times):
        return DeviceFigures(energy, columns)
    if latency_s is not None:
        worked = inference(times, watts, log.first_s, given, latency_s)
        return DeviceFigures(energy, columns, worked.idle, worked)
    return DeviceFigures(energy, columns, idle_level(times, watts, log.first_s, given))


def _column_figures(device: DeviceLog) -> dict[str, tuple[float, float]]:
    read_at = {name: device.series(name)[1] for name in COLUMNS if name not in ("power_watts", "energy_counter_j")}
    return {name: (float(values.mean()), float(values.max())) for name, values in read_at.items() if len(values)}


def with_energy(log: PowerLog, rows: list[DeviceFigures]) -> list[DeviceFigures]:
    """The devices whose power or energy was read; an error where there is none."""
    found = [row for row in rows if row.energy.max_w is not None or row.energy.best_j is not None]
    if not found:
        raise UnusableLog(f"this {log.format} has no reading of power or energy", "; ".join(log.notes))
    return found


def require_inference(log: PowerLog, rows: Sequence[DeviceFigures]) -> None:
    """Watts of a GPU over time are what an inference's joules are told from; without any, there is nothing to tell."""
    if any(row.inference is not None for row in rows):
        return
    found = ", ".join(dict.fromkeys(f"{row.energy.device} ({_method(row.energy)})" for row in rows))
    measured = any(row.energy.component != "cpu_estimate" for row in rows)
    raise UnusableLog(
        f"joules per inference come from a GPU's measured power, and this {log.format} has none; it has {found}"
        + ("" if measured else ": nothing in it was measured"),
        "name a log of a GPU; joulelab infer MODEL measures here, with a CPU's joules estimated by --estimate-cpu",
    )


def summary_data(log: PowerLog, rows: list[DeviceFigures]) -> dict[str, Any]:
    return {
        "format": log.format,
        "clock": log.clock,
        "notes": list(log.notes),
        "gaps": [asdict(gap) for gap in log.gaps],
        "units": "J, W, s as in the names; 1 Wh = 3600 J; times as `clock` says",
        "devices": [_device_data(log, row) for row in rows],
    }


def _device_data(log: PowerLog, row: DeviceFigures) -> dict[str, Any]:
    energy = row.energy
    data: dict[str, Any] = {
        "device": energy.device,
        "name": energy.name,
        "component": energy.component,
        "counted": energy.counted,
        "samples": energy.samples,
        "first": clock.iso(energy.first_s) if log.has_wall else None,
        "last": clock.iso(energy.last_s) if log.has_wall else None,
        "duration_s": energy.duration_s,
        "sample_interval_s": energy.interval_s,
        "mean_power_w": energy.mean_w,
        "max_power_w": energy.max_w,
        "energy_j": energy.best_j,
        "energy_method": _method(energy),
        "trapezoid": _energy_data(energy.trapezoid_j),
        "counter": _energy_data(energy.counter_j),
        "coverage": energy.seen_s / energy.duration_s if energy.interval_s and energy.duration_s else None,
        "holes_s": [list(hole) for hole in _relative(energy.holes[:MAX_LISTED_HOLES], log.first_s)],
        "counter_restarts": energy.counter_restarts,
    }
    data |= {name: {"mean": mean, "max": most} for name, (mean, most) in row.columns.items()}
    if row.idle is not None:
        data |= {"idle": asdict(row.idle), "above_idle_j": row.above_idle_j}
    if row.inference is not None:
        data["busy"] = asdict(row.inference.busy)
        data["inference"] = {
            "latency_s": row.inference.latency_s,
            "power_above_idle_w": row.inference.net_w,
            "energy_above_idle_j": row.inference.net_j,
            "energy_gross_j": row.inference.gross_j,
        }
    return data


def _method(energy: DeviceEnergy) -> str:
    if energy.best_j is None:
        return "missing"
    if energy.component == "cpu_estimate":
        return "estimated"
    return "counter" if energy.counter_j is not None else "trapezoid"


def _energy_data(energy_j: float | None) -> dict[str, float] | None:
    if energy_j is None:
        return None
    return {"energy_j": energy_j, "energy_kj": energy_j / 1000, "energy_wh": energy_j / J_PER_WH}


def _relative(holes: tuple[tuple[float, float], ...], first_s: float) -> list[tuple[float, float]]:
    return [(begin - first_s, end - first_s) for begin, end in holes]
