"""What a power curve alone would hide: stretches in which readings failed, and in which a card was held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from joulelab.clock import NS
from joulelab.report.attempt_traces import AttemptTrace
from joulelab.report.throttling import throttled
from joulelab.units import duration_text

Event = dict[str, Any]
# What lies closer together than this share of the time axis cannot be told apart, and is drawn as one.
INVISIBLE = 1 / 800
# Readings fail one by one; failures no further apart than this many readings are one gap.
_SAME_GAP = 3


def found_events(traces: Sequence[AttemptTrace], length_s: float) -> list[Event]:
    """Gaps and stretches of throttling with `t` and `until` on the run's time axis, and how many readings failed."""
    found: list[Event] = []
    for placed in traces:
        found += _gaps(placed)
        if any(series.component == "gpu" for series in placed.trace.devices):
            for start, end, reason in throttled(placed.path, placed.trace.interval_s):
                where = {"t": placed.seconds(start), "until": placed.seconds(end)}
                found.append({**where, "what": "throttling", "why": reason, "times": 1})
    return _merged(found, length_s * INVISIBLE)


def _gaps(placed: AttemptTrace) -> list[Event]:
    """From the first reading that failed to the next that would have been due: one gap however often it was tried."""
    interval_s = placed.trace.interval_s
    found = []
    for gap in placed.trace.gaps:
        begin, end = placed.seconds(gap.mono_ns), placed.seconds(gap.mono_ns + interval_s * NS)
        found.append({"t": begin, "until": end, "what": "gap", "why": f"{gap.device}: {gap.reason}", "times": 1})
    return _merged(found, _SAME_GAP * interval_s)


def _merged(events: Sequence[Event], closer_than_s: float) -> list[Event]:
    merged: list[Event] = []
    for event in sorted(events, key=lambda event: (event["what"], event["why"], event["t"])):
        last = merged[-1] if merged else {}
        same = (last.get("what"), last.get("why")) == (event["what"], event["why"])
        if same and event["t"] - last["until"] < closer_than_s:
            last["until"], last["times"] = max(last["until"], event["until"]), last["times"] + event["times"]
        else:
            merged.append(dict(event))
    return merged


def in_parts(curves: Sequence[Event], events: Sequence[Event]) -> None:
    """Numbers the parts of every curve: a line must not lead across a gap in which nothing was read."""
    gaps = [(event["t"], event["until"]) for event in events if event["what"] == "gap"]
    by_line: dict[tuple[str, int], list[Event]] = {}
    for point in curves:
        by_line.setdefault((point["device"], point["attempt"]), []).append(point)
    for points in by_line.values():
        empty = [end for begin, end in gaps if not any(begin < point["t"] < end for point in points)]
        for point in points:
            point["part"] = sum(end <= point["t"] for end in empty)


def told(events: Sequence[Event]) -> list[str]:
    texts = []
    gaps = [event for event in events if event["what"] == "gap"]
    if gaps:
        reasons = "; ".join(dict.fromkeys(event["why"] for event in gaps))
        length_s = sum(event["until"] - event["t"] for event in gaps)
        count = f"{len(gaps)} gap{'' if len(gaps) == 1 else 's'}"
        texts.append(f"Between dotted lines: {count} in the readings, {duration_text(length_s)} in all ({reasons}).")
    held = [event for event in events if event["what"] == "throttling"]
    if held:
        reasons = ", ".join(dict.fromkeys(event["why"] for event in held))
        held_s = sum(event["until"] - event["t"] for event in held)
        texts.append(f"The strip below marks {duration_text(held_s)} in which a card was held back ({reasons}).")
    return texts


def event_layers(data: dict[str, list[Event]], x: Any, height: int) -> list[Any]:
    """Gaps between two upright dotted lines, throttling as a strip along the bottom."""
    layers: list[Any] = []
    tooltip = ["what:N", "why:N", alt.Tooltip("times:Q", title="readings failed")]
    if "gaps" in data:
        gaps = alt.Chart(alt.NamedData("gaps"))
        layers.append(gaps.mark_rect(color="#808080", opacity=0.3).encode(x=x, x2="until:Q", tooltip=tooltip))
        for edge in ("t", "until"):
            dotted = gaps.mark_rule(strokeDash=[1, 3], strokeWidth=1.5)
            layers.append(dotted.encode(x=alt.X(f"{edge}:Q"), tooltip=tooltip))
    if "throttling" in data:
        strip = alt.Chart(alt.NamedData("throttling")).mark_rect(color="#D55E00", opacity=0.9)
        places = {"y": alt.value(height - 6), "y2": alt.value(height)}
        layers.append(strip.encode(x=x, x2="until:Q", tooltip=["what:N", "why:N"], **places))
    return layers
