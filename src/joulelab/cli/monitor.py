"""`joulelab monitor`: a log of power, memory and utilization of any program, in the fields that operators parse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.errors import SensorMissing, UsageError
from joulelab.units import duration_text, power_text

if TYPE_CHECKING:
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.monitor.operator_log import Monitor
    from joulelab.meter.monitor.tally import DeviceTally, Tally
    from joulelab.meter.sampling import SensorReader
    from joulelab.report.tables.grid import Grid

SHORTEST_INTERVAL_S = 0.02
# The longest interval that sensors accept; a longer one applies to the monitor's records only.
LONGEST_SENSOR_INTERVAL_S = 60.0


def monitor(
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="auto|INDEX|UUID[,...]",
            help="Which GPUs; an index counts within CUDA_VISIBLE_DEVICES where that is set. "
            "`none` for the CPU alone. [default: 0, and the CPU alone where there is no GPU]",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between records; fractions too.")] = 5.0,
    log_path: Annotated[
        Path, typer.Option("--log_path", "--log-path", "--outfile", "--out", help="The JSONL file to append to.")
    ] = Path("logs/power_log.jsonl"),
    pid: Annotated[int | None, typer.Option("--pid", min=1, help="Also record this process and its children.")] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", help="End after so many seconds (default: at SIGINT or SIGTERM).")
    ] = None,
    rapl_root: Annotated[str, typer.Option("--rapl-root", help="Where the RAPL tree is.")] = "/sys/class/powercap",
    live: Annotated[bool, typer.Option("--live", help="Show watts, joules and use while it runs (stderr).")] = False,
    prometheus: Annotated[
        int | None, typer.Option("--prometheus", metavar="PORT", help="Serve metrics on 127.0.0.1:PORT/metrics.")
    ] = None,
) -> None:
    """Record power, memory and use of GPUs and CPU at a fixed cadence, until SIGINT, SIGTERM or --duration.

    Exit codes: 0 ended as asked, 2 a dependency is missing or an option is wrong, 3 no GPU though one was asked for,
    4 no such GPU.

    Examples:

      joulelab monitor --gpu 0 --interval 1 --outfile telemetry.jsonl &

      joulelab monitor --gpu auto --pid 4711 --live
    """
    _check(interval, duration)
    from joulelab.runs.sensor_discovery import require_rapl_root

    require_rapl_root(rapl_root)
    from contextlib import ExitStack

    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.monitor.exposition import PrometheusPage
    from joulelab.meter.monitor.operator_log import LogFile, Monitor, Settings, StopSignals

    sensor_interval_s = min(interval, LONGEST_SENSOR_INTERVAL_S)
    config = EnergyConfig(
        sample_interval_s=sensor_interval_s,
        counter_interval_s=max(1.0, sensor_interval_s),
        gpus=_gpus(gpu),
        rapl_root=rapl_root,
    )
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        page = PrometheusPage(prometheus) if prometheus is not None else None
        if page is not None:
            stack.callback(page.close)
            say(f"metrics on http://127.0.0.1:{page.port}/metrics")
        log = LogFile(log_path, say)
        stack.callback(log.close)
        watched = Monitor(Settings(interval, duration, pid), _readers(config, pid), log, say)
        _open(watched, demanded=gpu not in (None, "none"))
        stack.callback(watched.close)
        say(f"recording every {interval:g} s to {log_path}; SIGINT or SIGTERM ends it")
        view = _view() if live else None
        if view is not None:
            stack.enter_context(view)

        def watch(tally: Tally) -> None:
            if page is not None:
                page.show(tally)
            if view is not None:
                view.show(tally)

        reason = watched.run(stop.wait, watch)
    say(f"ended ({reason}) after {watched.tally.ticks} records per device in {log_path}")


def say(text: str) -> None:
    print(f"joulelab monitor: {text}", file=sys.stderr, flush=True)


def _check(interval: float, duration: float | None) -> None:
    if not SHORTEST_INTERVAL_S <= interval <= 86_400:
        raise UsageError(
            f"--interval {interval:g} is not between {SHORTEST_INTERVAL_S:g} and 86400 seconds",
            "power and counters refresh every 100 ms on NVIDIA cards; 1 to 5 s are usual",
        )
    if duration is not None and not 0 < duration < float("inf"):
        raise UsageError(f"--duration {duration:g} is not a number of seconds above 0")


def _gpus(wanted: str | None) -> str:
    """The GPUs as the sensor wants them. Only GPUs that were asked for may end the monitor by being absent."""
    if wanted == "none":
        return "none"
    from joulelab.errors import JoulelabError
    from joulelab.meter.config import are_gpu_names
    from joulelab.meter.monitor.operator_log import choose

    try:
        chosen = choose(wanted or "0")
    except JoulelabError as error:
        if _other_maker() and are_gpu_names(wanted or "0"):
            return wanted or "0"
        if wanted is not None:
            raise
        say(f"{error.message}; recording the CPU alone")
        return "none"
    for card in chosen.cards:
        say(f"GPU {card.index} of the node: {card.name} ({card.uuid})")
    return ",".join(card.uuid for card in chosen.cards)


def _readers(config: EnergyConfig, pid: int | None) -> list[SensorReader]:
    import os
    from functools import partial

    from joulelab.lookup import SENSORS
    from joulelab.meter.sampling import SensorReader

    names = ["host", "rapl"]
    if config.gpus != "none":
        names.append(_other_maker() or "nvml")
    classes = {name: SENSORS.resolve(name) for name in names}
    return [
        SensorReader(name, partial(make, config, pid or os.getpid()), reopen=True, report=say)
        for name, make in classes.items()
    ]


def _other_maker() -> str | None:
    """The sensor for GPUs of another maker, where its library is there and no NVIDIA driver answers."""
    from joulelab.errors import JoulelabError
    from joulelab.meter.monitor.operator_log import choose
    from joulelab.meter.sensors import amd

    if not amd.present():
        return None
    try:
        choose("auto")
    except JoulelabError:
        return "amd"
    return None


def _open(watched: Monitor, demanded: bool) -> None:
    for unavailable in watched.open():
        if unavailable.component == "gpu" and demanded:
            raise SensorMissing(f"no GPU can be read: {unavailable.reason}", unavailable.fix)
        fix = f" ({unavailable.fix})" if unavailable.fix else ""
        say(f"no energy of the {unavailable.component}: {unavailable.reason}{fix}")


def _view() -> PlainView | ScreenView:
    """The `--live` view on stderr: a table that stays in place on a terminal, plain lines elsewhere."""
    return ScreenView() if sys.stderr.isatty() else PlainView()


TITLES = "Device!|Power>|Energy so far>|Method!|GPU use>|Memory>|Temperature>|Power over time!"


def live_grid(tally: Tally, elapsed_s: float) -> Grid:
    from joulelab.report.tables.grid import make_grid

    rows = [_row(joules) for joules in tally.devices.values() if joules.device.counted]
    return make_grid(f"joulelab monitor, {duration_text(elapsed_s)}", TITLES, rows, _host_text(tally))


def _row(joules: DeviceTally) -> tuple[str, ...]:
    from joulelab.meter.figures import amount_text, method_text
    from joulelab.meter.monitor.tally import sparkline

    latest = joules.latest
    gpu = joules.device.component == "gpu"
    index = joules.device.facts.get("gpu_index", "")
    name = f"GPU {index} {joules.device.name}" if gpu else joules.device.device
    return (
        name,
        power_text(joules.power_w) if joules.power_w is not None else "-",
        amount_text(joules.figure),
        method_text(joules.figure),
        _with_unit(latest.get("gpu_utilization_percent"), "%"),
        _with_unit(latest.get("memory_used_MB"), "MiB"),
        _with_unit(latest.get("temperature_C"), "°C"),
        sparkline(joules.history_w),
    )


def _with_unit(value: Any, unit: str) -> str:
    return "-" if value is None else f"{value:,.0f} {unit}"


def _host_text(tally: Tally) -> str:
    parts = [f"CPU {_with_unit(tally.host.get('cpu_utilization_percent'), '%')}"]
    if tally.process is not None:
        cpu = _with_unit(tally.process["cpu_utilization_percent"], "%")
        rss = _with_unit(tally.process["memory_rss_MB"], "MiB")
        parts.append(f"process {tally.process['pid']} with children: CPU {cpu}, memory {rss}")
    if tally.errors:
        parts.append("errors: " + ", ".join(f"{sensor} {count}" for sensor, count in tally.errors.items()))
    return "; ".join(parts)


class PlainView:
    """A line per device and tick: what a job's log or a pipe should hold."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, tally: Tally) -> None:
        for joules in tally.devices.values():
            if joules.device.counted:
                name, power, energy, method, use, memory, *_ = _row(joules)
                text = f"{name}: {power}, {energy} so far, {method}"
                print(text if use == "-" else f"{text}, use {use}, memory {memory}", file=sys.stderr)
        print(_host_text(tally), file=sys.stderr, flush=True)


class ScreenView:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._begun_s: float | None = None

    def __enter__(self) -> ScreenView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, tally: Tally) -> None:
        from joulelab.report.tables.grid import to_rich

        self._begun_s = self._begun_s or tally.wall_s
        self._live.update(to_rich(live_grid(tally, tally.wall_s - self._begun_s)), refresh=True)
