"""`joulelab infer --from-log`: joules per inference out of a power log that something else wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from joulelab.errors import UsageError

_OPTION = "--idle-from"
_WAYS = f"{_OPTION} FROM..TO (seconds of the log), another log, or watts as 61W"

if TYPE_CHECKING:
    from joulelab.meter.importers.log_energy import DeviceFigures, IdleGiven
    from joulelab.meter.importers.power_log import PowerLog, TimeRule


def infer_from_log(
    file: Path,
    latency_ms: float | None,
    idle_from: str | None,
    time_zone: str | None,
    period: float | None,
    as_json: bool,
) -> None:
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.log_energy import figures, require_inference, summary_data, with_energy
    from joulelab.meter.importers.power_log import TimeRule

    if latency_ms is None:
        raise UsageError("a log tells watts, and joules per inference need its duration", "add --latency-ms 4.37")
    for option, value in (("--latency-ms", latency_ms), ("--period", period)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g} is not a number above 0")
    rule = TimeRule(time_zone, period)
    log = read_power_log(file, rule, "joules per inference")
    _require_use_of(rule, log)
    given, source = _idle(idle_from, log, rule)
    rows = [_sourced(row, source) for row in with_energy(log, figures(log, given, latency_ms / 1000))]
    require_inference(log, rows)
    _require_busy_above_idle(rows)
    if as_json:
        import json

        print(json.dumps({"file": str(file), **summary_data(log, rows)}, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.grid import to_rich
    from joulelab.report.inference_log import log_inference_grids
    from joulelab.report.log_tables import log_sentences

    print_result(*(to_rich(grid) for grid in log_inference_grids(rows)), *log_sentences(log, rows))


def _require_use_of(rule: TimeRule, log: PowerLog) -> None:
    if rule.period_s is not None and log.has_wall:
        raise UsageError("--period does nothing here: the log's readings have stamps", "leave it out")
    if rule.zone is not None and not log.has_wall:
        raise UsageError("--time-zone does nothing here: the log has no times of day", "leave it out")


def _idle(text: str | None, log: PowerLog, rule: TimeRule) -> tuple[IdleGiven, str]:
    """What --idle-from says, and how it should be told; an empty text leaves the telling to the reader of the log."""
    from joulelab.meter.importers.log_energy import IdleGiven, parse_idle

    said = IdleGiven(option=_OPTION, ways=_WAYS)
    if text is None:
        return said, ""
    if ".." in text and not Path(text).exists():
        return replace(said, window_s=parse_idle(text, log, _OPTION)), ""
    number = text.strip().removesuffix("W").removesuffix("w").strip()
    if _is_number(number):
        return replace(said, power_w=float(number)), f"given with {_OPTION}"
    if not Path(text).exists():
        raise UsageError(f"{_OPTION} '{text}' is no stretch, no power and no file", f"write {_WAYS}")
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.log_energy import device_energy

    idle = read_power_log(Path(text), rule, "an idle baseline")
    means = [mean for device in idle.devices if (mean := device_energy(device).mean_w) is not None]
    if len(means) != 1:
        raise UsageError(f"{text} tells the power of {len(means)} devices, and one idle power is wanted", "write watts")
    return replace(said, power_w=means[0]), f"mean of {text}"


def _require_busy_above_idle(rows: list[DeviceFigures]) -> None:
    """What a log says of one card may be odd; where it holds for all of them, one level is not what it is called."""
    found = [(row.energy.device, row.inference) for row in rows if row.inference is not None]
    if found and all(one.net_w <= 0 for _, one in found):
        device, one = found[0]
        raise UsageError(
            f"{device}: idle ({one.idle.power_w:.4g} W, {one.idle.source}) is not below busy "
            f"({one.busy.power_w:.4g} W, {one.busy.source}), so an inference would take no joules",
            f"name what was really idle: {_WAYS}",
        )


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _sourced(row: DeviceFigures, source: str) -> DeviceFigures:
    if not source or row.inference is None:
        return row
    idle = replace(row.inference.idle, source=source)
    return replace(row, idle=idle, inference=replace(row.inference, idle=idle))
