"""`joulelab doctor`: which sensors work on this machine, and how to fix the others; optionally calibrates them."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import joulelab
from joulelab import clock
from joulelab.errors import JoulelabError, SensorMissing
from joulelab.meter.calibrate import calibrate_gpus, calibrate_rapl, clock_cost, fsync_cost, recorder_cpu_share
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import Frozen
from joulelab.meter.profile import CallCost, MachineProfile, load_profile, with_id
from joulelab.meter.sensors import Device
from joulelab.meter.sensors.cpu import processor_name
from joulelab.runs import environment
from joulelab.runs.environment import DiscoveredSensors, discover_sensors
from joulelab.runs.record import MEASURED_COMPONENTS

_PACKAGES = ("nvidia-ml-py", "psutil", "numpy", "pydantic", "torch", "codecarbon")
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


class ComponentState(Frozen):
    component: str
    status: Literal["measured", "estimated", "missing"]
    by: str
    why: str
    fix: str = ""


class Finding(Frozen):
    """A property of this machine; `ok` is false if something should be done about it."""

    what: str
    ok: bool
    text: str


class Command(Frozen):
    """A shell command that works as it is printed."""

    command: str
    purpose: str


class Diagnosis(Frozen):
    host: str
    made_at: str
    components: tuple[ComponentState, ...]
    devices: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    findings: tuple[Finding, ...]
    fsync: CallCost | None
    clock: CallCost | None
    recorder_cpu_share: float | None
    profile: MachineProfile | None = None
    commands: tuple[Command, ...] = ()
    """What to type next: a first measurement, and fixes of what is missing."""

    @property
    def measurable(self) -> bool:
        """A node meter alone does not count: it includes what others do on the node."""
        return any(one.status == "measured" for one in self.components if one.component in MEASURED_COMPONENTS)


def diagnose(config: EnergyConfig, store: Path, seconds: float = 3.0) -> Diagnosis:
    """Run all checks; takes `seconds` to measure the recorder's own CPU use."""
    sensors = discover_sensors(config.model_copy(update={"estimate_cpu": True}))
    folder = _existing(store)
    fsync, share = fsync_cost(folder), _recorder_share(config, seconds)
    return Diagnosis(
        host=platform.node(),
        made_at=clock.iso(clock.now().wall_s),
        components=component_states(sensors),
        devices=tuple(_device_facts(device) for device in sensors.devices if device.component != "cpu_estimate"),
        versions=versions(sensors),
        findings=tuple(findings(sensors, folder, fsync, share)),
        fsync=fsync,
        clock=clock_cost(),
        recorder_cpu_share=share,
        profile=load_profile(),
        commands=commands(sensors),
    )


def commands(sensors: DiscoveredSensors) -> tuple[Command, ...]:
    """A measurement on this machine, then the fixes that the sensors suggest, and a calibration where there is none."""
    python = "python3" if shutil.which("python3") else shlex.quote(sys.executable)
    program = f'{python} -c "sum(range(10**8))"'
    energy = "measured" if sensors.measured else "estimated"
    found = [
        Command(command=f"joulelab measure -- {program}", purpose=f"measure a first program; its energy is {energy}")
    ]
    if not sensors.measured:
        machine = f"joulelab measure --scope machine -- {program}"
        found.append(Command(command=machine, purpose="the same with an estimate of the whole machine"))
    for absent in sensors.missing:
        found += [Command(command=command, purpose=purpose) for command, purpose in absent.commands]
    if sensors.measured and load_profile() is None:
        found.append(
            Command(command="joulelab doctor --calibrate", purpose="create a profile of the sensors (needed only once)")
        )
    return tuple(found)


def demand(diagnosis: Diagnosis) -> None:
    """`--require measured`: raise (exit code 3) if nothing can be measured."""
    if not diagnosis.measurable:
        reasons = "; ".join(f"{state.component}: {state.why}" for state in diagnosis.components)
        raise SensorMissing(f"no sensor works on this machine ({reasons})", "see the fixes in the table above")


def component_states(sensors: DiscoveredSensors) -> tuple[ComponentState, ...]:
    return (*(_state(component, sensors) for component in MEASURED_COMPONENTS), *_node_states(sensors))


def _node_states(sensors: DiscoveredSensors) -> list[ComponentState]:
    """One row per meter of the whole node or module, and per one that should answer but does not. Most machines have
    neither, and then no row."""
    found = [
        ComponentState(
            component="node",
            status="measured",
            by=device.name,
            why=f"{_properties(device)}; shown next to the sum, never added to it",
        )
        for device in sensors.devices
        if device.component == "node"
    ]
    return found + [
        ComponentState(component="node", status="missing", by="-", why=absent.reason, fix=absent.fix)
        for absent in sensors.missing
        if absent.component == "node"
    ]


def _state(component: str, sensors: DiscoveredSensors) -> ComponentState:
    devices = [device for device in sensors.devices if device.component == component]
    counted = [device for device in devices if device.counted]
    if counted:
        names = ", ".join(device.name for device in counted)
        return ComponentState(component=component, status="measured", by=names, why=_properties(counted[0]))
    why, fix = _why_missing(component, devices, sensors)
    estimate = sensors.estimate
    if component == "cpu" and estimate is not None:
        watts = estimate.facts["w_per_thread"]
        model = f"CPU time x {watts:.1f} W per thread, ±{100 * (estimate.gain_error_rel or 0):.0f} %"
        return ComponentState(component=component, status="estimated", by=model, why=why, fix=fix)
    return ComponentState(component=component, status="missing", by="-", why=why, fix=fix)


def _properties(device: Device) -> str:
    refresh = f"refreshes every {1000 * device.refresh_s:g} ms" if device.refresh_s else "refresh period unknown"
    scale = f", gain ±{100 * device.gain_error_rel:g} %" if device.gain_error_rel else ""
    remark = f"; {device.facts['reason']}" if device.facts.get("reason") else ""
    return f"{refresh}{scale}{remark}"


def _why_missing(component: str, uncounted: list[Device], sensors: DiscoveredSensors) -> tuple[str, str]:
    if uncounted:
        return str(uncounted[0].facts.get("reason", "its sensor covers more than this job")), ""
    # DRAM is part of RAPL: what hides the CPU's counters hides it too
    names = (component, "cpu") if component == "dram" else (component,)
    for absent in sensors.missing:
        if absent.component in names:
            return absent.reason, absent.fix
    return "no sensor was found", ""


def _device_facts(device: Device) -> dict[str, Any]:
    return {
        "device": device.device,
        "component": device.component,
        "name": device.name,
        "counted": device.counted,
        "refresh_s": device.refresh_s,
        "gain_error_rel": device.gain_error_rel,
        **device.facts,
    }


def versions(sensors: DiscoveredSensors) -> dict[str, str]:
    found = {"joulelab": joulelab.__version__, "python": sys.version.split()[0], "system": platform.platform()}
    drivers = {str(device.facts["driver"]) for device in sensors.devices if "driver" in device.facts}
    if drivers:
        found["GPU driver"] = ", ".join(sorted(drivers))
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def findings(sensors: DiscoveredSensors, folder: Path, fsync: CallCost | None, share: float | None) -> list[Finding]:
    writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and not str(folder).startswith("/proc")
    found = [Finding(what="store", ok=writable, text=f"{folder} is {'writable' if writable else 'not writable'}")]
    if fsync is not None:
        text = f"an fsynced line takes {1000 * fsync.median_s:.2f} ms (p99 {1000 * fsync.p99_s:.2f} ms)"
        found.append(Finding(what="disk", ok=fsync.median_s < 0.05, text=text))
    if share is None:
        found.append(Finding(what="recorder", ok=False, text="its CPU use could not be measured"))
    else:
        # CPU time is counted in ticks of 10 ms; less than one tick reads as 0
        text = (
            f"uses {100 * share:.2f} % of one core at default settings" if share else "uses less than 0.4 % of one core"
        )
        found.append(Finding(what="recorder", ok=share <= 0.02, text=text))
    source = _CLOCK_SOURCE.read_text().strip() if _CLOCK_SOURCE.exists() else "unknown"
    found.append(Finding(what="clock", ok=True, text=f"monotonic, kernel clock source {source}"))
    gpus, nodes = environment.gpus(), sorted(Path("/dev").glob("nvidia[0-9]*"))
    unreadable = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if unreadable:
        text = f"{', '.join(unreadable)} cannot be opened by this user; join the group that owns them"
        found.append(Finding(what="permissions", ok=False, text=text))
    metered = sum(device.component == "gpu" and device.counted for device in sensors.devices)
    found.append(_gpu_finding(len(gpus), metered))
    found.append(_profile_finding(sensors))
    return found


def _gpu_finding(known: int, metered: int) -> Finding:
    """A job may be allocated some GPUs of a node; GPUs of other vendors are unknown to NVIDIA's driver."""
    if known:
        text = f"{known} known to the driver, {metered} of them metered"
    else:
        text = f"{metered} metered" if metered else "none: no NVIDIA driver answers, and no other GPU is metered"
    return Finding(what="GPUs", ok=metered > 0, text=text)


def _profile_finding(sensors: DiscoveredSensors) -> Finding:
    profile = load_profile()
    if profile is None:
        text = "none for this machine: `joulelab doctor --calibrate` creates one, which results then cite"
        return Finding(what="profile", ok=True, text=text)
    drivers = {str(device.facts["driver"]) for device in sensors.devices if "driver" in device.facts}
    if profile.driver and drivers and profile.driver not in drivers:
        text = f"{profile.profile_id} is for driver {profile.driver}, now {', '.join(drivers)}: calibrate again"
        return Finding(what="profile", ok=False, text=text)
    return Finding(what="profile", ok=True, text=profile.profile_id)


def _recorder_share(config: EnergyConfig, seconds: float) -> float | None:
    try:
        return recorder_cpu_share(config, seconds)
    except (JoulelabError, OSError):
        return None


def _existing(store: Path) -> Path:
    """The store, or its nearest existing parent."""
    folder = store.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def calibrate(config: EnergyConfig, diagnosis: Diagnosis) -> MachineProfile:
    """Measure the properties of the sensors; takes about half a minute per GPU, under load."""
    notes: list[str] = []
    sensors = discover_sensors(config)
    cards, load = calibrate_gpus(list(sensors.devices), notes)
    if not cards:
        notes.append("no NVIDIA GPU to calibrate")
    return with_id(
        MachineProfile(
            host=diagnosis.host,
            made_at=clock.iso(clock.now().wall_s),
            joulelab=joulelab.__version__,
            python=diagnosis.versions["python"],
            processor=processor_name(),
            driver=diagnosis.versions.get("GPU driver"),
            load=load,
            devices=(*cards, *calibrate_rapl(config, notes)),
            fsync_s=diagnosis.fsync,
            recorder_cpu_share=diagnosis.recorder_cpu_share,
            notes=tuple(notes),
        )
    )
