"""Results of a load on a server: latency percentiles, throughput, and energy per token and per request.

All energy of the steady window, reading prompts included, is divided by the output tokens that arrived in it; and by
the input tokens, by their sum and by the finished requests. These are four ways to state one energy: they are not to be
added. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from joulelab.infer.energy import ItemWindow, Reader, energy_per_item, split_window
from joulelab.infer.serving.client_load import NS, LoadWindow, SentRequest, token_times

PERCENTILES = (50, 90, 95, 99)
UNITS = {
    "output_token": "output token",
    "input_token": "input token",
    "token": "token (input and output)",
    "request": "request",
}
"""What the energy is divided by."""
_NOT_COUNTED = {
    "output_token": "no output token arrived in the window",
    "request": "no request ended in the window",
}
_NO_INPUT_TOKENS = "the server reported no input tokens"
_BUSY_CLIENT = 0.8


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)},
    }


def counts_in(load: LoadWindow, segments: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """For each segment: output tokens as they arrived, input tokens of prompts whose answer began, requests that
    ended."""
    times, weights = token_times(load.requests)
    begun = [(one.chunk_ns[0], one.prompt_tokens) for one in load.requests if one.chunk_ns]
    known = [tokens for _, tokens in begun if tokens]
    usual = float(np.mean(known)) if known else 0.0  # of requests that had not reported their usage yet
    ended = np.sort(np.asarray([one.done_ns for one in load.requests if _is_done(one)], dtype=np.int64))
    found: dict[str, list[float]] = {unit: [] for unit in UNITS}
    for low, high in segments:
        first, last = np.searchsorted(times, [low, high])
        output = float(weights[first:last].sum())
        read = sum(tokens or usual for moment, tokens in begun if low <= moment < high)
        first, last = np.searchsorted(ended, [low, high])
        for unit, value in zip(UNITS, (output, read, output + read, float(last - first)), strict=True):
            found[unit].append(value)
    return found


def _reports_input(load: LoadWindow) -> bool:
    return any(one.prompt_tokens for one in load.requests)


def _is_done(request: SentRequest) -> bool:
    return bool(request.done_ns) and not request.error


def energies(load: LoadWindow, read: Reader) -> dict[str, tuple[Any, str]]:
    """Unit -> its energy (`ItemEnergy` as plain values, or None) and why there is none."""
    # A request may take longer than a segment, so its energy has the interval of the whole window's power instead.
    segments = split_window(load.window) or [load.window]
    counts = counts_in(load, segments)
    found: dict[str, tuple[Any, str]] = {}
    for unit in UNITS:
        if unit in ("input_token", "token") and not _reports_input(load):
            found[unit] = (None, _NO_INPUT_TOKENS)
            continue
        items: list[ItemWindow] = list(zip(segments, counts[unit], strict=True))
        if unit != "output_token":
            items = [(load.window, sum(counts[unit]))]
        energy, reason = energy_per_item(items, read)
        if not sum(counts[unit]):
            reason = _NOT_COUNTED.get(unit, "no answer began in the window")
        found[unit] = (None if energy is None else energy.model_dump(), reason)
    if found["output_token"][0] is not None:
        # Few requests begin or end in each segment; the variation of the work shows in the output tokens.
        rel = _relative(found["output_token"][0])
        for unit in ("input_token", "token", "request"):
            if (values := found[unit][0]) is not None:
                values["gross_half_width_j"] = max(values["gross_half_width_j"], rel * values["gross_j"])
    return found


def _relative(values: Mapping[str, Any]) -> float:
    return values["gross_half_width_j"] / values["gross_j"] if values["gross_j"] else 0.0


def load_values(load: LoadWindow, read: Reader | None, why_no_energy: str) -> dict[str, Any]:
    """A row of the table as plain values. Without `read`, energy is missing for the reason given."""
    low, high = load.window
    begun = [one for one in load.requests if one.chunk_ns and low <= one.chunk_ns[0] < high and not one.error]
    ended = [one for one in load.requests if _is_done(one) and low <= one.done_ns < high]
    failed = [one for one in load.requests if one.error]
    counts = {unit: sum(values) for unit, values in counts_in(load, [load.window]).items()}
    found = energies(load, read) if read is not None else dict.fromkeys(UNITS, (None, why_no_energy))
    arrived = sum(low <= one.sent_ns < high for one in load.requests)
    # Arrivals of a Poisson process vary by the root of their number; a queue that grows by more grows for ever.
    overloaded = bool(load.level.rate_per_s) and arrived - len(ended) > max(3.0, 3 * arrived**0.5)
    steady = load.steady and not overloaded
    if not steady:  # answers that ended in the window are the short ones, while the energy is that of all
        found["request"] = (None, "the load was not steady")
    per_token = [value for one in ended if (value := one.time_per_output_token_s) is not None]
    notes = []
    if not load.steady:
        notes.append("the throughput was still changing: the second half of the load is reported; raise --max-time")
    if overloaded:
        notes.append(
            f"{arrived} requests arrived in the window and {len(ended)} were answered: the server does not keep up "
            "with this rate, and latencies grow with the duration"
        )
    if load.client_cpu_share > _BUSY_CLIENT:
        notes.append(f"the client used {100 * load.client_cpu_share:.0f} % of a core and may have limited the load")
    if ended and not any(one.completion_tokens for one in ended):
        notes.append("the server reports no usage: output tokens are counted as parts of the stream")
    if load.unsent:
        notes.append(f"{load.unsent} arrivals were not sent, because too many requests were unanswered")
    if failed:
        notes.append(f"{len(failed)} of {len(load.requests)} requests failed: {failed[0].error}")
    return {
        "level": load.level.name,
        "concurrency": load.level.concurrency or None,
        "rate_per_s": load.level.rate_per_s or None,
        "steady": steady,
        "overloaded": overloaded,
        "warm_up_s": (low - load.begin_ns) / NS,
        "seconds": load.seconds,
        "begin_ns": low,
        "end_ns": high,
        "requests": len(ended),
        "failed": len(failed),
        "unsent": load.unsent,
        "mean_in_flight": mean_in_flight(load),
        "input_tokens": counts["input_token"] if _reports_input(load) else None,
        "output_tokens": counts["output_token"],
        "requests_per_s": counts["request"] / load.seconds,
        "output_tokens_per_s": counts["output_token"] / load.seconds,
        "tokens_per_s": counts["token"] / load.seconds if _reports_input(load) else None,
        "mean_input_tokens": _mean([one.prompt_tokens for one in ended if one.prompt_tokens and steady]),
        "mean_output_tokens": _mean([one.completion_tokens or len(one.chunk_ns) for one in ended if steady]),
        "time_to_first_token_s": percentiles([one.time_to_first_token_s for one in begun]),
        "time_per_output_token_s": percentiles(per_token),
        "latency_s": percentiles([one.latency_s for one in ended]),
        "client_cpu_share": load.client_cpu_share,
        "energy": {unit: values for unit, (values, _) in found.items()},
        "why_no_energy": next((reason for values, reason in found.values() if values is None), ""),
        "notes": notes,
    }


def mean_in_flight(load: LoadWindow) -> float:
    """Requests that were sent and not answered, averaged over the window."""
    low, high = load.window
    busy = sum(max(0, min(one.done_ns or high, high) - max(one.sent_ns, low)) for one in load.requests if not one.error)
    return busy / (high - low)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
