"""Joules of windows in the past of a run that is still going on, from the trace its recorder writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.integrate import COMPONENTS, Window, component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.runs.record import EnergyByComponent, work_policy

# The recorder reads the driver's buffer every 0.5 to 2 s and the buffer itself runs late.
LAG_NS = int(2.2 * NS)
PATIENCE_S = 6.0
NO_METER = missing("this training runs without a meter", "train inside a run: `joulelab train`")

Reader = Callable[[Sequence[Window]], EnergyFigure]


def reader_of(meter: Meter | None, until_ns: int, device: str) -> Reader:
    """A function from windows to the joules of work on `device`, after waiting until the trace covers them."""
    if meter is None:
        return lambda windows: NO_METER
    path = meter.trace_path
    wait_for_trace(path, until_ns + LAG_NS)
    trace = load_trace(path)
    # the trace has no readings of CodeCarbon's
    policy = work_policy("gpu_only" if meter.policy == "gpu_only" else "measured", device)

    def read(windows: Sequence[Window]) -> EnergyFigure:
        """What sensors measured, else the estimate under its own label, else why there is nothing."""
        figures = {name: component_energy(trace, name, windows) for name in COMPONENTS}
        return EnergyByComponent(**figures).best(policy)

    return read


def why_no_joules(meter: Meter | None, device: str) -> str | None:
    """The reason where no sensor, and no estimate, will ever measure work on `device` here."""
    if meter is None:
        return NO_METER.reason
    trace = load_trace(meter.trace_path)
    sensors = [series for series in trace.devices if series.counted and series.component in COMPONENTS]
    if any(device != "cpu" or meter.policy == "gpu_only" or series.component != "gpu" for series in sensors):
        return None
    return reader_of(meter, 0, device)([(trace.first_ns, trace.last_ns + 1)]).reason


def wait_for_trace(trace: Path, moment_ns: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while last_stamp_ns(trace) < moment_ns and time.monotonic() < end_s:
        time.sleep(0.05)


def last_stamp_ns(trace: Path, tail_bytes: int = 1 << 16) -> int:
    """When the newest whole line was written, without reading the others."""
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - tail_bytes))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for raw in reversed(lines):
        try:
            return int(json.loads(raw)["mono_ns"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
