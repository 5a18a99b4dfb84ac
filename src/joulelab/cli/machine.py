"""`joulelab doctor` and `joulelab prerun`: what this machine can measure, and whether it is ready for a long run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, RunsDir, detail, note
from joulelab.errors import UsageError

if TYPE_CHECKING:
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
    from joulelab.runs.sensor_discovery import require_rapl_root
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
    """Not in a table and never wrapped, so that they can be copied; the shell ignores what follows `#`."""
    print("\nCommands")
    for one in diagnosis.commands:
        print(f"  {one.command}  # {one.purpose}")


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
        str | None, typer.Option("--expect-gpu", metavar="NAME", help='Required substring of every GPU name ("H200").')
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="Required number of GPUs.")] = None,
    min_memory_gib: Annotated[
        float | None, typer.Option("--min-memory-gib", min=0, help="Required memory of every GPU.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=600, help="Duration of the load and of each idle baseline.")
    ] = 10.0,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure idle, load, idle, and check sampling, hardware and other processes. Exit code 4 if a check fails.

    Example: joulelab prerun --expect-gpu H200 --gpus 8 --min-memory-gib 130
    """
    from joulelab.cli.console import watching
    from joulelab.meter.config import EnergyConfig
    from joulelab.runs.prerun import Expected, enforce
    from joulelab.runs.prerun import prerun as run_prerun
    from joulelab.runs.store import store_root

    energy = EnergyConfig()
    if experiment is not None:
        from joulelab.runs.spec import load_spec

        energy = load_spec(experiment).energy
    note(f"prerun: idle, load, idle, {seconds:g} s each")
    with watching() as progress:
        report = run_prerun(
            store_root(runs_dir), energy, Expected(expect_gpu, gpus, min_memory_gib), seconds, progress, strict
        )
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
