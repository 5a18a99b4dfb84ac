"""`joulelab doctor`, `prerun` and `monitor`: what a machine can measure, whether it is ready, its power over time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, Prometheus, RunsDir, detail, note
from joulelab.errors import SensorMissing, UsageError
from joulelab.units import duration_text, power_text

if TYPE_CHECKING:
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.monitor.operator_log import Monitor
    from joulelab.meter.monitor.tally import DeviceTally, Tally
    from joulelab.meter.sampling import SensorReader
    from joulelab.report.tables.grid import Grid
    from joulelab.runs.doctor import Diagnosis
    from joulelab.runs.prerun import PrerunReport


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Characterize the sensors and save a profile of this machine.")
    ] = False,
    rapl_root: Annotated[
        Path | None, typer.Option("--rapl-root", help="RAPL tree to use instead of /sys/class/powercap.")
    ] = None,
    require: Annotated[
        str | None, typer.Option("--require", metavar="measured", help="Exit with code 3 if nothing can be measured.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Check which sensors work on this machine and how to fix the others."""
    if require not in (None, "measured"):
        raise UsageError(f"--require {require}: expected `measured`", "leave it out to list all sensors")
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.profile import save_profile
    from joulelab.runs.doctor import calibrate as measure_sensors
    from joulelab.runs.doctor import demand, diagnose
    from joulelab.runs.environment import require_rapl_root
    from joulelab.runs.store import store_root

    config = EnergyConfig() if rapl_root is None else EnergyConfig(rapl_root=str(rapl_root))
    require_rapl_root(config.rapl_root)
    note("checking sensors, disk and recorder (about 4 s)")
    diagnosis = diagnose(config, store_root(runs_dir))
    if calibrate:
        note("calibrating (half a minute per GPU, under load)")
        profile = measure_sensors(config, diagnosis)
        print(f"profile: {save_profile(profile)}", file=sys.stderr)
        diagnosis = diagnosis.model_copy(update={"profile": profile})
    if as_json:
        print(diagnosis.model_dump_json(indent=2))
    else:
        from joulelab.cli.console import print_answer

        found = grids(diagnosis)
        brief = [found[0], *([warnings_grid(diagnosis)] if any(not one.ok for one in diagnosis.findings) else [])]
        print_answer(
            doctor_line(diagnosis), found if detail() == "verbose" else brief, more="sensors, machine and versions"
        )
        if detail() != "quiet":
            print_commands(diagnosis)
    if require == "measured":
        demand(diagnosis)


def doctor_line(diagnosis: Diagnosis) -> str:
    """`Energy on host: gpu measured, cpu estimated, dram missing`."""
    states = ", ".join(f"{component.component} {component.status}" for component in diagnosis.components)
    return f"Energy on {diagnosis.host}: {states}"


def print_commands(diagnosis: Diagnosis) -> None:
    """Not in a table and never wrapped, so that they can be copied; the shell ignores a line after `#`."""
    print("\nCommands")
    for one in diagnosis.commands:
        print(f"  # {one.purpose}\n  {one.command}")


def warnings_grid(diagnosis: Diagnosis) -> Grid:
    from joulelab.report.tables.grid import make_grid

    rows = [(finding.what, finding.text) for finding in diagnosis.findings if not finding.ok]
    return make_grid("Warnings", "Check!|Finding", rows)


def grids(diagnosis: Diagnosis) -> list[Grid]:
    from joulelab.report.tables.grid import make_grid

    states = [(s.component, s.status, s.by, s.why, s.fix or "-") for s in diagnosis.components]
    found = [make_grid("", "Component!|Status!|Sensor|Details|Fix", states)]
    if diagnosis.devices:
        found.append(make_grid("Sensors", "Device|Name|In total!|Readings", _device_rows(diagnosis)))
    rows = [("ok" if finding.ok else "warn", finding.what, finding.text) for finding in diagnosis.findings]
    found.append(make_grid("Machine", "!|Check!|Finding", rows))
    found.append(make_grid("Versions", "Package!|Version", list(diagnosis.versions.items())))
    if diagnosis.profile is not None:
        found.append(profile_grid(diagnosis))
    return found


def _device_rows(diagnosis: Diagnosis) -> list[tuple[str, str, str, str]]:
    known = ("device", "component", "name", "counted")
    return [
        (
            str(facts["device"]),
            str(facts["name"]),
            "yes" if facts["counted"] else "no",
            ", ".join(f"{key} {value}" for key, value in facts.items() if key not in known and value is not None),
        )
        for facts in diagnosis.devices
    ]


def profile_grid(diagnosis: Diagnosis) -> Grid:
    from joulelab.report.tables.grid import make_grid

    profile = diagnosis.profile
    assert profile is not None
    rows = [("created", profile.made_at), ("load", profile.load or "none")]
    for device in profile.devices:
        for what, period in device.refresh_s.items():
            text = "unknown: too few changes" if period is None else f"every {1000 * period:.1f} ms"
            rows.append((f"{device.name}, refresh of {what}", text))
        for what, cost in device.call_cost.items():
            text = f"{1e6 * cost.median_s:.0f} us, p99 {1e6 * cost.p99_s:.0f} us"
            rows.append((f"{device.name}, time to read {what}", text))
        for what, window in device.averaging_window_s.items():
            text = (
                "unknown: no step in the load"
                if window is None
                else f"{window:.2f} s"
                if window > 0.15
                else "at most 0.1 s"
            )
            rows.append((f"{device.name}, averaging window of {what}", text))
        if device.agreement_rel is not None:
            rows.append((f"{device.name}, integral relative to counter", f"{100 * device.agreement_rel:+.1f} %"))
        for state in device.idle:
            clock = "" if state.sm_clock_MHz is None else f" at about {state.sm_clock_MHz:.0f} MHz"
            text = f"{state.power_w:.1f} ± {state.spread_w:.1f} W{clock} for {state.duration_s:.0f} s"
            rows.append((f"{device.name}, idle", text))
    if profile.fsync_s is not None:
        rows.append(("durable write (fsync)", f"{1000 * profile.fsync_s.median_s:.2f} ms"))
    if profile.recorder_cpu_share is not None:
        rows.append(("recorder CPU use", f"{100 * profile.recorder_cpu_share:.2f} % of one core"))
    rows += [("note", note) for note in profile.notes]
    return make_grid(f"Profile {profile.profile_id}", "Property|Value", rows)


def prerun(
    experiment: Annotated[
        str | None, typer.Argument(help="Use the energy settings of this experiment (default: the meter's).")
    ] = None,
    expect_gpu: Annotated[
        str | None,
        typer.Option("--expect-gpu", metavar="NAME", help='Words that every GPU name must contain ("H200").'),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="Required number of GPUs.")] = None,
    min_memory_gib: Annotated[
        float | None, typer.Option("--min-memory-gib", min=0, help="Required memory of every GPU.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=600, help="Duration of the load and of each idle baseline.")
    ] = 10.0,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Run directory.", show_default=False)] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure idle, load, idle, and check sampling, hardware and other processes. Exit code 4 if a check fails.

    Example: joulelab prerun --expect-gpu H200 --gpus 8 --min-memory-gib 130
    """
    from joulelab.cli.console import watching
    from joulelab.meter.config import EnergyConfig
    from joulelab.runs.prerun import enforce
    from joulelab.runs.prerun import prerun as run_prerun
    from joulelab.runs.spec import HardwareAssertions, load_spec
    from joulelab.runs.store import store_root

    energy, expected = EnergyConfig(), HardwareAssertions()
    if experiment is not None:
        spec = load_spec(experiment)
        energy, expected = spec.energy, spec.hardware
    if run_dir is not None:
        from joulelab.runs.paths import require_no_runs

        require_no_runs(run_dir)
    note(f"prerun: idle, load, idle, {seconds:g} s each")
    options = {"gpu_name": expect_gpu, "gpu_count": gpus, "min_gpu_memory_gib": min_memory_gib}
    expected = expected.model_copy(update={name: value for name, value in options.items() if value is not None})
    with watching() as progress:
        report = run_prerun(store_root(runs_dir), energy, expected, seconds, progress, strict, run_dir)
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        from joulelab.cli.console import print_answer

        print_answer(prerun_verdict(report), [report_grid(report)])
    enforce(report)


def report_grid(report: PrerunReport) -> Grid:
    from joulelab.report.tables.grid import make_grid

    results = {True: "ok", None: "-"}
    rows = [
        (check.name, results.get(check.ok, "FAILED" if check.required else "warning"), check.text)
        for check in report.checks
    ]
    return make_grid(f"Prerun {report.run_id}", "Check!|Result!|Finding", rows)


def prerun_verdict(report: PrerunReport) -> str:
    if not report.passed:
        return "Not ready: see the failed checks."
    if report.grade == "C":
        return "All checks passed, but measurements here are grade C: see `joulelab doctor`."
    return "Ready to measure."


# `joulelab monitor`: log power, memory and utilization, in the fields that operators' scripts parse.


SHORTEST_INTERVAL_S = 0.02
# Longest interval that the sensors support; for a longer one only the monitor waits longer.
LONGEST_SENSOR_INTERVAL_S = 60.0


def monitor(
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="auto|INDEX|UUID[,...]",
            help="GPUs to log; indices count within CUDA_VISIBLE_DEVICES if it is set. `none` logs only the CPU. "
            "[default: 0, or only the CPU if there is no GPU]",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between records (may be fractional).")] = 5.0,
    log_path: Annotated[
        Path, typer.Option("--log_path", "--log-path", "--outfile", "--out", help="JSONL file to append to.")
    ] = Path("logs/power_log.jsonl"),
    pid: Annotated[int | None, typer.Option("--pid", min=1, help="Also log this process and its children.")] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", help="Stop after this many seconds (default: at SIGINT or SIGTERM).")
    ] = None,
    rapl_root: Annotated[str, typer.Option("--rapl-root", help="Path of the RAPL tree.")] = "/sys/class/powercap",
    plain: Annotated[
        bool, typer.Option("--plain", help="Write sample lines only, without header, gap and end lines.")
    ] = False,
    live: Annotated[bool, typer.Option("--live", help="Show power, energy and utilization on stderr.")] = False,
    prometheus: Prometheus = None,
) -> None:
    """Log power, memory and utilization of GPUs and CPU at a fixed interval, until SIGINT, SIGTERM or --duration.

    Exit codes: 0 stopped as requested, 2 missing dependency or invalid option, 3 no GPU although one was requested,
    4 no such GPU.

    Examples:

      joulelab monitor --gpu 0 --interval 1 --outfile telemetry.jsonl &

      joulelab monitor --gpu auto --pid 4711 --live
    """
    _check(interval, duration)
    from joulelab.runs.environment import require_rapl_root

    require_rapl_root(rapl_root)
    from contextlib import ExitStack

    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.monitor.exposition import PrometheusPage, require_free
    from joulelab.meter.monitor.operator_log import LogFile, Monitor, Settings, StopSignals

    if prometheus is not None:
        require_free(prometheus)
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
            report(f"metrics on {page.url}")
        log = LogFile(log_path, report)
        stack.callback(log.close)
        watched = Monitor(Settings(interval, duration, pid, plain), _readers(config, pid), log, report)
        _open(watched, requested=gpu not in (None, "none"))
        stack.callback(watched.close)
        report(f"recording every {interval:g} s to {log_path}; stop with SIGINT or SIGTERM")
        view = _view() if live else None
        if view is not None:
            stack.enter_context(view)

        def watch(tally: Tally) -> None:
            if page is not None:
                page.show(tally)
            if view is not None:
                view.show(tally)

        reason = watched.run(stop.wait, watch)
    report(f"stopped ({reason}) after {watched.tally.ticks} records per device in {log_path}")


def report(text: str) -> None:
    print(f"joulelab monitor: {text}", file=sys.stderr, flush=True)


def _check(interval: float, duration: float | None) -> None:
    if not SHORTEST_INTERVAL_S <= interval <= 86_400:
        raise UsageError(
            f"--interval {interval:g} is not between {SHORTEST_INTERVAL_S:g} and 86400 seconds",
            "NVIDIA GPUs refresh power and counters every 100 ms; 1 to 5 s is usual",
        )
    if duration is not None and not 0 < duration < float("inf"):
        raise UsageError(f"--duration {duration:g}: expected seconds above 0")


def _gpus(wanted: str | None) -> str:
    """The GPU selection for the sensor. A missing GPU is an error only if it was requested."""
    if wanted == "none":
        return "none"
    from joulelab.errors import JoulelabError
    from joulelab.meter.config import are_gpu_names
    from joulelab.meter.monitor.operator_log import choose

    try:
        chosen = choose(wanted or "0")
    except JoulelabError as error:
        if _amd_sensor() and are_gpu_names(wanted or "0"):
            return wanted or "0"
        if wanted is not None:
            raise
        report(f"{error.message}; logging only the CPU")
        return "none"
    for card in chosen.cards:
        report(f"GPU {card.index} of the node: {card.name} ({card.uuid})")
    return ",".join(card.uuid for card in chosen.cards)


def _readers(config: EnergyConfig, pid: int | None) -> list[SensorReader]:
    import os
    from functools import partial

    from joulelab.lookup import SENSORS
    from joulelab.meter.sampling import SensorReader

    names = ["host", "rapl"]
    if config.gpus != "none":
        names.append(_amd_sensor() or "nvml")
    classes = {name: SENSORS.resolve(name) for name in names}
    return [
        SensorReader(name, partial(make, config, pid or os.getpid()), reopen=True, report=report)
        for name, make in classes.items()
    ]


def _amd_sensor() -> str | None:
    """Name of the AMD sensor if its library is present and no NVIDIA driver answers."""
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


def _open(watched: Monitor, requested: bool) -> None:
    for missing in watched.open():
        if missing.component == "gpu" and requested:
            raise SensorMissing(f"no GPU can be read: {missing.reason}", missing.fix)
        fix = f" ({missing.fix})" if missing.fix else ""
        report(f"no {missing.component} energy: {missing.reason}{fix}")


def _view() -> PlainView | ScreenView:
    return ScreenView() if sys.stderr.isatty() else PlainView()


# `--live`: a table updated in place on a terminal, plain lines elsewhere, on stderr.

TITLES = "Device!|Power>|Energy so far>|Method!|GPU util>|Memory>|Temperature>|Power over time!"


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
    """One line per device and tick, for job logs and pipes."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, tally: Tally) -> None:
        for joules in tally.devices.values():
            if joules.device.counted:
                name, power, energy, method, use, memory, *_ = _row(joules)
                text = f"{name}: {power}, {energy} so far, {method}"
                print(text if use == "-" else f"{text}, utilization {use}, memory {memory}", file=sys.stderr)
        print(_host_text(tally), file=sys.stderr, flush=True)


class ScreenView:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._start_s: float | None = None

    def __enter__(self) -> ScreenView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, tally: Tally) -> None:
        from joulelab.report.tables.grid import to_rich

        self._start_s = self._start_s or tally.wall_s
        self._live.update(to_rich(live_grid(tally, tally.wall_s - self._start_s)), refresh=True)
