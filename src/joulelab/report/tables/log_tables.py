"""Tables of imported power logs: one row per device and method, with every assumption below."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.figures import COVERED, relative_text
from joulelab.meter.importers.emissions_csv import CodeCarbonLog
from joulelab.meter.importers.log_energy import DeviceEnergy, DeviceFigures, Inference, Level, device_energy
from joulelab.meter.importers.power_log import PowerLog, RunLog
from joulelab.meter.sensors.cpu import FAMILY_GAIN_ERROR_REL, KNOWN_MODEL_GAIN_ERROR_REL
from joulelab.report.tables.grid import Grid, make_grid
from joulelab.report.wording import NOTHING
from joulelab.units import J_PER_KWH, duration_text, energy_text, kwh_text, percent_text, plural

TITLES = "Device!|Energy by!|Samples>|Duration>|Mean W>|Max W>|Energy>|Above idle>|Covered>"
_SHOWN_GAPS = 3
_METHODS = "trapezoid: over the power readings. counter: difference of the device's own energy counter."


def log_result(rows: Sequence[DeviceFigures]) -> str:
    """Energy of each counted device, by its counter where it has one: `gpu0: 512 J, 0.000142 kWh, 10.0 s`.

    An estimate has its label and the larger of its two scale errors, since a log does not name the CPU's model.
    """
    texts = []
    for energy in (row.energy for row in rows if row.energy.counted):
        energy_j = energy.counter_j if energy.counter_j is not None else energy.trapezoid_j
        way = "" if energy.counter_j is None else "counter"
        bound = "≥ " if energy_j is not None and _is_lower_bound(energy, way or "trapezoid") else ""
        kwh = f", {bound}{kwh_text(energy_j)}" if energy_j is not None else ""
        is_estimate = energy.component == "cpu_estimate" and energy_j is not None
        spread = "" if bound else f" ±{relative_text(FAMILY_GAIN_ERROR_REL)}"  # no interval around a lower bound
        label = f"{spread}, estimated" if is_estimate else ""
        duration = duration_text(energy.duration_s)
        texts.append(f"{energy.device}: {bound}{energy_text(energy_j)}{label}{kwh}, {duration}")
    return "; ".join(texts) or "no device in the log"


def inference_result(rows: Sequence[DeviceFigures]) -> str:
    found = [(row.energy.device, row.inference) for row in rows if row.inference is not None]
    return "; ".join(
        f"{device}: {millijoules(one.net_j)} mJ ±{_relative(one)} per inference above idle "
        f"({millijoules(one.gross_j)} mJ gross)"
        for device, one in found
    )


def _relative(one: Inference) -> str:
    return relative_text(one.net_half_width_w / abs(one.net_w)) if one.net_w else "unknown"


def codecarbon_result(log: CodeCarbonLog) -> str:
    known = [run.total_j for run in log.runs if run.total_j is not None]
    total = f"{energy_text(sum(known))}, {kwh_text(sum(known))}" if known else "energy missing"
    return f"CodeCarbon's own figure for {plural(len(log.runs), 'run')}: {total}"


def log_grid(log: PowerLog, rows: Sequence[DeviceFigures]) -> Grid:
    cells = [line for row in rows for line in _lines(row)]
    estimated = any(row.energy.component == "cpu_estimate" for row in rows)
    low, high = (relative_text(error) for error in (KNOWN_MODEL_GAIN_ERROR_REL, FAMILY_GAIN_ERROR_REL))
    note = f"{_METHODS} model: estimated from CPU time, ±{low} to ±{high}, not measured." if estimated else _METHODS
    if any(_is_lower_bound(row.energy) for row in rows):
        note += " ≥: lower bound, readings are missing."
    return make_grid(f"{log.format}: energy of each device", TITLES, cells, note)


def _lines(row: DeviceFigures) -> list[tuple[str, ...]]:
    energy = row.energy
    whole = "model (estimated)" if energy.component == "cpu_estimate" else "counter"
    ways: list[tuple[str, float | None, float | None, float]] = []
    if energy.trapezoid_j is not None:
        way = "trapezoid, gaps interpolated" if energy.interpolated else "trapezoid"
        ways.append((way, energy.trapezoid_j, row.above_idle_j, energy.seen_s))
    if energy.counter_j is not None:
        ways.append((whole, energy.counter_j, None, energy.counter_s))
    if not ways:
        ways.append(("one reading only", None, None, 0.0))
    device = energy.device if energy.counted else f"{energy.device} (inside another)"
    lines: list[tuple[str, ...]] = []
    for position, (way, energy_j, above_j, covered_s) in enumerate(ways):
        mean = _w(energy_j / covered_s if energy_j is not None and covered_s else None)
        shared = (
            (device, way, f"{energy.samples:,}", duration_text(energy.duration_s), mean, _w(energy.max_w))
            if position == 0
            else ("", way, "", "", mean, "")
        )
        covered = percent_text(min(1.0, covered_s / energy.duration_s)) if energy.duration_s and covered_s else "-"
        bound = "≥ " if energy_j is not None and _is_lower_bound(energy, way) else ""
        texts = ("-" if joules is None else f"{bound}{energy_text(joules)}" for joules in (energy_j, above_j))
        lines.append((*shared, *texts, covered))
    return lines


def _is_lower_bound(energy: DeviceEnergy, way: str = "") -> bool:
    """Gaps are not in the trapezoid; counts just before a counter restart are not in its difference."""
    by_trapezoid = way.startswith("trapezoid")
    holes = way != "counter" and energy.trapezoid_j is not None and energy.seen_s < COVERED * energy.duration_s
    return holes or (not by_trapezoid and bool(energy.counter_restarts))


def _w(power_w: float | None) -> str:
    return "-" if power_w is None else f"{power_w:.1f}"


def log_sentences(log: PowerLog, rows: Sequence[DeviceFigures]) -> list[str]:
    """Clock, gaps, idle power and peculiarities of the file."""
    sentences = [f"Times: {log.clock}."]
    for row in rows:
        sentences += [f"{row.energy.device}: {text}." for text in _device_texts(log, row)]
    sentences += [f"Note: {note}." for note in log.notes]
    if log.gaps:
        reasons = "; ".join(dict.fromkeys(gap.reason for gap in log.gaps))
        sentences.append(f"Note: the log reports {plural(len(log.gaps), 'gap')}: {reasons}.")
    return sentences


def _device_texts(log: PowerLog, row: DeviceFigures) -> list[str]:
    energy, texts = row.energy, []
    if energy.interval_s:
        texts.append(f"one reading every {energy.interval_s:.4g} s; the trapezoid misses changes in between")
    if energy.holes:
        lost_s = sum(end - begin for begin, end in energy.holes)
        shown = ", ".join(
            f"{begin - log.first_s:.1f} to {end - log.first_s:.1f} s" for begin, end in energy.holes[:_SHOWN_GAPS]
        )
        more = ", ..." if len(energy.holes) > _SHOWN_GAPS else ""
        used = "interpolated" if energy.interpolated else "not in the trapezoid (--interpolate-gaps includes them)"
        texts.append(
            f"{plural(len(energy.holes), 'gap')} of {duration_text(lost_s)} in total, {used}: {shown}{more}; "
            "a clock set forward would look the same"
        )
    if energy.counter_restarts:
        texts.append(
            f"the counter restarted {plural(energy.counter_restarts, 'time')}; energy just before a restart is missing"
        )
    if row.idle is not None and row.inference is None:
        texts.append(f"idle {row.idle.power_w:.1f} W, {row.idle.source}")
    if row.inference is not None:
        texts += _inference_texts(row.inference, log.facts.get("power_rounding_w"))
    return texts


def millijoules(energy_j: float) -> str:
    """As papers print them; with an exponent from 1e9 on."""
    energy_mj = 1000 * energy_j
    return f"{energy_mj:.2f}" if abs(energy_mj) < 1e9 else f"{energy_mj:.4g}"


def _inference_texts(found: Inference, rounding_w: float | None) -> list[str]:
    latency_ms, net, gross = 1000 * found.latency_s, millijoules(found.net_j), millijoules(found.gross_j)
    texts = [
        f"busy {_level_text(found.busy)}",
        f"idle {_level_text(found.idle)}",
        f"{found.busy.power_w:.2f} W busy - {found.idle.power_w:.2f} W idle = {found.net_w:.2f} W above idle; "
        f"x {latency_ms:g} ms = {net} mJ per inference above idle ({gross} mJ gross)",
        f"95 % interval of the power above idle: ±{found.net_half_width_w:.2f} W, without the sensor's gain error",
    ]
    if rounding_w:
        texts.append(f"power is given in steps of {rounding_w:g} W")
    return texts


def _level_text(level: Level) -> str:
    spread = f" ± {level.spread_w:.1f} W spread" if level.spread_w is not None else ""
    count = f", {level.samples} readings" if level.samples else ""
    segments = ", ".join(f"{s.from_s:g} to {s.to_s:g} s ({s.mean_w:.1f} W)" for s in level.segments[:_SHOWN_GAPS])
    more = ", ..." if len(level.segments) > _SHOWN_GAPS else ""
    where = f": {segments}{more}" if segments else ""
    return f"{level.power_w:.2f} W{spread}{count}, {level.source}{where}"


def codecarbon_grid(log: CodeCarbonLog) -> Grid:
    titles = "Run!|Project|Duration>|CPU>|GPU>|RAM>|Total>|kWh>|Mean W>|CO2e kg>"
    rows = [
        (
            run.run_id[:8],
            run.project,
            "-" if run.duration_s is None else duration_text(run.duration_s),
            *("-" if part is None else energy_text(part) for part in (run.cpu_j, run.gpu_j, run.ram_j)),
            energy_text(run.total_j),
            "-" if run.total_j is None else f"{run.total_j / J_PER_KWH:.3g}",
            _w(run.mean_power_w),
            "-" if run.emissions_kg is None else f"{run.emissions_kg:.3g}",
        )
        for run in log.runs
    ]
    return make_grid("CodeCarbon's own figures (not included in totals)", titles, rows)


def codecarbon_task_grid(log: CodeCarbonLog) -> Grid:
    """Tasks of the same name together; empty where the file has none."""
    rows = [
        (
            task.name,
            f"{task.count:,}",
            duration_text(task.duration_s),
            energy_text(task.total_j),
            _w(task.total_j / task.duration_s if task.duration_s else None),
            f"{task.emissions_kg:.4g}",
        )
        for run in log.runs
        for task in run.tasks
    ]
    return make_grid("Tasks, each with its own energy", "Task!|Rows>|Duration>|Energy>|Mean W>|CO2e kg>", rows)


def stage_log_grid(runs: Sequence[RunLog]) -> Grid:
    """One row per stage: its energy as stated, or from the readings of its time."""
    rows = []
    for run in runs:
        for stage in run.stages:
            by_component = {energy.component: energy.energy_j for energy in stage.energies}
            for device in stage.power.devices if stage.power is not None else ():
                found = device_energy(device)
                if found.best_j is not None:
                    by_component[found.component] = by_component.get(found.component, 0.0) + found.best_j
            cells = [by_component.get(name) for name in ("gpu", "cpu", "codecarbon")]
            stated_name = stage.name if stage.complete else f"{stage.name} (snapshot)"
            rows.append(
                (
                    stated_name if stage.power is None else run.name,
                    "-" if stage.power is not None else stage.role,
                    duration_text(stage.duration_s),
                    *("-" if cell is None else energy_text(cell) for cell in cells),
                    "-" if stage.tokens is None else f"{stage.tokens:,}",
                )
            )
    stated = any(stage.energies for run in runs for stage in run.stages)
    note = (
        "As stated in the files; intervals are not known. CodeCarbon's figure is separate and in no total."
        if stated
        else "From the readings of each log; the runs have the intervals."
    )
    return make_grid("Stages", "Stage!|Role!|Duration>|GPU>|CPU>|CodeCarbon>|Tokens>", rows, note)


def log_inference_grids(rows: Sequence[DeviceFigures]) -> list[Grid]:
    found = [(row.energy.device, row.inference) for row in rows if row.inference is not None]
    arithmetic = [
        (
            device,
            f"{one.busy.power_w:.2f}",
            f"{one.idle.power_w:.2f}",
            f"{one.net_w:.2f} ±{one.net_half_width_w:.2f}",
            f"{1000 * one.latency_s:g}",
            millijoules(one.net_j),
            millijoules(one.gross_j),
        )
        for device, one in found
    ]
    segments = [
        cells
        for device, one in found
        for kind, level in (("busy", one.busy), ("idle", one.idle))
        for cells in _segment_cells(device, kind, level)
    ]
    titles = "Device!|Busy W>|Idle W>|Net W>|Latency ms>|Net mJ>|Gross mJ>"
    note = "Net: (busy - idle) x latency. Gross: busy x latency. The latency is the one you passed."
    below = [device for device, one in found if one.net_w <= 0]
    if below:
        note += f" {', '.join(below)}: busy is not above idle, so net energy is meaningless."
    return [
        make_grid("Energy per inference", titles, arithmetic, note),
        make_grid("Segments used", "Device!|Level!|From s>|To s>|Mean W>|Readings>|Source", segments),
    ]


def _segment_cells(device: str, kind: str, level: Level) -> list[tuple[str, ...]]:
    if not level.segments:
        return [(device, kind, NOTHING, NOTHING, f"{level.power_w:.2f}", str(level.samples or NOTHING), level.source)]
    return [
        (device, kind, f"{s.from_s:g}", f"{s.to_s:g}", f"{s.mean_w:.2f}", str(s.samples), level.source)
        for s in level.segments
    ]
