"""A row's figures as plain values for the record; how the GPU was while they came about."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from joulelab.infer.energy import Reader, mean_power_w
from joulelab.infer.infer_config import Case
from joulelab.infer.precisions import peak_name
from joulelab.infer.timing import Latency, Round
from joulelab.meter.health import load_health, throttle_shares
from joulelab.train.peak_flops import peak_flops


def row_values(
    case: Case, item: str, items: int, latency: Latency, rounds: Sequence[Round], read: Reader
) -> dict[str, Any]:
    """The latency is a median; items per second are a mean over the windows, as watts and joules are."""
    calls, seconds = sum(found.calls for found in rounds), sum(found.duration_s for found in rounds)
    return {
        **asdict(case),
        "item": item,
        "items_per_call": items,
        "latency": asdict(latency),
        "items_per_s": items * calls / seconds,
        "calls": calls,
        "seconds": seconds,
        "rounds": [
            {
                "begin_ns": one.begin_ns,
                "end_ns": one.end_ns,
                "calls": one.calls,
                "median_s": one.median_s,
                "power_w": mean_power_w(one.window, read),
            }
            for one in rounds
        ],
    }


def machine_state(trace: Path, windows: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Clocks, temperature and what held the card back: a figure without them is hard to repeat."""
    states = load_health(trace).during(windows)

    def told(name: str) -> dict[str, float] | None:
        values = [getattr(state, name) for state in states if getattr(state, name) is not None]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None

    return {
        "sm_utilisation_percent": told("utilization_percent"),
        "sm_clock_mhz": told("sm_clock_mhz"),
        "temperature_c": told("temperature_c"),
        "throttled": throttle_shares(states) if states else {},
        "readings": len(states),
    }


def mfu_of(
    flops: float | None, how: str, items_per_s: float, dtype: str, device: torch.device
) -> tuple[float | None, str]:
    """Share of the data sheet's peak, or why it is not known."""
    if device.type != "cuda":
        return None, "no peak is known for a CPU"
    if flops is None:
        return None, f"FLOPs {how}"
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, peak_name(dtype))
    if peak is None:
        return None, f"no peak of the {name} in {dtype} is known here (train/peak_flops.py)"
    return flops * items_per_s / peak, ""
