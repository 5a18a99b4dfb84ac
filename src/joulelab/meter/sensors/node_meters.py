"""Meters outside GPU and CPU package: hwmon, Grace and Grace Hopper modules, Jetson rails, Cray nodes, and BMCs.

    hwmon    /sys/class/hwmon: energy (microjoules) or power (microwatts) of boards and chips whose driver has them.
             On Grace and Grace Hopper the ACPI power meter has one entry each for the module, for Grace (socket and
             its memory) and for the CPU rail, named by `power1_oem_info`. On Jetson the INA3221 has one per rail.
    cray     /sys/cray/pm_counters: energy counters of node, CPU, memory and accelerators, refreshed at 10 Hz.
    ipmi     `ipmitool dcmi power reading`: the BMC's reading of the node's input power.
    redfish  the same by HTTP, from the address in JOULELAB_REDFISH.

A meter of the whole node or module contains what the components' meters read. It is the component `node`, which is
shown next to the sum of components and never added to it. Other meters of a board are listed as `rail`. Only Grace's
own meter counts as `cpu`, where no RAPL exists.

Tested with recorded file trees and fakes only, not on the hardware.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.total_timeout import timed_opener

MICRO, MILLI = 1e-6, 1e-3
HWMON, CRAY = Path("/sys/class/hwmon"), Path("/sys/cray/pm_counters")
REDFISH, REDFISH_LOGIN = "JOULELAB_REDFISH", "JOULELAB_REDFISH_LOGIN"
"""Environment variables, not settings: settings are saved and shown. Login: `user:password`."""
# No maker states an accuracy for all of these: BMCs round to watts, shunts of Jetson boards have 1 to 5 %.
GAIN_ERROR_REL = 0.1
BMC_INTERVAL_S = 1.0  # a BMC averages over a second or more, and a call takes 50 to 500 ms
_UNTESTED = "tested with recorded files only"
_OTHERS = ("amdgpu", "nouveau", "coretemp", "k10temp", "acpitz", "nvme", "BAT0")  # other sensors read them, or no meter


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip("\0 \n")
    except OSError:
        return ""


class _MeterSensor:
    """Readers of joules and watts by device; counters are preferred where a device has both."""

    component, fix = "node", ""
    title: ClassVar[str]

    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s
        self._joules: dict[str, Callable[[], float | None]] = {}
        self._watts: dict[str, Callable[[], float | None]] = {}

    def open(self) -> list[Device]:
        devices = self._find()
        if not devices:
            raise SensorUnavailable(self.component, f"{self.title}: no reading", self.fix)
        return devices

    def _find(self) -> list[Device]:
        raise NotImplementedError

    def read(self) -> list[Line]:
        lines: list[Line] = []
        counters = {name: value for name, read in self._joules.items() if (value := read()) is not None}
        powers = {name: value for name, read in self._watts.items() if (value := read()) is not None}
        if counters:
            lines.append({"kind": "counters", "device": "host", "counters_j": counters})
        if powers:
            lines.append({"kind": "power", "device": "host", "powers_w": powers})
        silent = [name for name in (*self._joules, *self._watts) if name not in counters and name not in powers]
        return lines + [{"kind": "gap", "device": name, "reason": "the meter did not answer"} for name in silent]

    def close(self) -> None: ...


def _device(name: str, title: str, component: str, reason: str, refresh_s: float, **facts: Any) -> Device:
    """Meters of a node or module, and those inside another meter, are not part of a sum."""
    counted = component == "cpu" and not facts.pop("inside", False)
    return Device(
        device=name,
        component=component,
        name=title,
        counted=counted,
        refresh_s=refresh_s,
        gain_error_rel=GAIN_ERROR_REL,
        facts={"reason": f"{reason}; {_UNTESTED}", "node_wide": True, **facts},
    )


# hwmon, with Grace and Jetson


def hwmon_present() -> bool:
    return any(_meter_files(folder) for folder in _hwmon_folders())


def _hwmon_folders() -> list[Path]:
    folders = sorted(HWMON.glob("hwmon*")) if HWMON.is_dir() else []
    return [folder for folder in folders if _text(folder / "name") not in _OTHERS]


def _meter_files(folder: Path) -> list[str]:
    rails = ("curr*_input",) if _text(folder / "name") == "ina3221" else ()
    names = ("energy*_input", "power*_average", "power*_input", "device/power1_oem_info", *rails)
    return [path.name for pattern in names for path in folder.glob(pattern)]


class HwmonSensor(_MeterSensor):
    title = "hwmon"
    fix = "load the driver of the board's power meter"

    def _find(self) -> list[Device]:
        found = []
        for folder in _hwmon_folders():
            chip = _text(folder / "name") or folder.name
            grace = _text(folder / "device" / "power1_oem_info")
            if chip == "ina3221":
                found += self._rails(folder)
            elif grace:
                found.append(self._grace(folder, grace))
            else:
                found += self._plain(folder, chip)
        return found

    def _plain(self, folder: Path, chip: str) -> list[Device]:
        # the ACPI power meter of a machine reads its input; what other chips measure is not known here
        component = "node" if chip == "power_meter" else "rail"
        devices = []
        energies = {path.name[6:-6]: path for path in sorted(folder.glob("energy*_input"))}
        for number, path in energies.items():
            label = _text(folder / f"energy{number}_label") or f"energy{number}"
            name = f"hwmon:{chip}:{label}"
            self._joules[name] = lambda path=path: _scaled(_number(path), MICRO)  # type: ignore[misc]
            devices.append(_device(name, f"{chip} {label}", component, "a meter of the board", 0.1))
        for path in sorted([*folder.glob("power*_average"), *folder.glob("power*_input")]):
            number = re.sub(r"\D", "", path.name)
            label = _text(folder / f"power{number}_label") or f"power{number}"
            name = f"hwmon:{chip}:{label}"
            if number not in energies and name not in self._watts:
                self._watts[name] = lambda path=path: _scaled(_number(path), MICRO)  # type: ignore[misc]
                devices.append(_device(name, f"{chip} {label}", component, "a meter of the board", 1.0))
        return devices

    def _grace(self, folder: Path, label: str) -> Device:
        """`Module Power Socket 0`, `Grace Power Socket 0`, `CPU Power Socket 0`, `SysIO Power Socket 0`."""
        part = label.split()[0].lower()
        scope = {
            "module": ("node", "the whole module: GPU, CPU and memory; NVML's counter is inside it", False),
            "grace": ("cpu", "Grace: its socket and its memory", False),
        }.get(part, ("cpu", "a rail inside Grace", True))
        component, reason, inside = scope
        average_ms = _number(folder / "device" / "power1_average_interval") or 50.0
        name = f"hwmon:{re.sub(r'[^a-z0-9]+', '-', label.lower())}"
        self._watts[name] = lambda: _scaled(_number(folder / "device" / "power1_average"), MICRO)
        return _device(name, label, component, reason, average_ms * MILLI, inside=inside)

    def _rails(self, folder: Path) -> list[Device]:
        """Jetson: VDD_IN is the module's input; the other rails are inside it."""
        devices = []
        for path in sorted(folder.glob("in*_label")):
            number, rail = path.name[2:-6], _text(path)
            volts, amperes = folder / f"in{number}_input", folder / f"curr{number}_input"
            if not rail or rail.startswith("sum") or not amperes.exists():
                continue
            name = f"jetson:{rail}"
            whole = rail in ("VDD_IN", "VIN_SYS_5V0")
            reason = "the input of the module" if whole else "a rail inside the module"
            # millivolts times milliamperes are microwatts
            self._watts[name] = lambda volts=volts, amperes=amperes: _product(volts, amperes)  # type: ignore[misc]
            devices.append(_device(name, f"Jetson {rail}", "node" if whole else "rail", reason, 0.1))
        return devices


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _product(volts: Path, amperes: Path) -> float | None:
    millivolts, milliamperes = _number(volts), _number(amperes)
    return None if millivolts is None or milliamperes is None else millivolts * milliamperes * MICRO


# Cray


def cray_present() -> bool:
    return (CRAY / "energy").is_file()


class CraySensor(_MeterSensor):
    """Files hold `12345 J 1700000000000000 us`. The node's counter contains the others, which are listed."""

    title = "Cray pm_counters"
    fix = "the kernel of a Cray node has /sys/cray/pm_counters"

    def _find(self) -> list[Device]:
        devices = []
        for path in sorted(CRAY.glob("*energy")):
            if _number(path) is None:
                continue
            part = path.name.removesuffix("energy").strip("_")
            name = f"cray:{part or 'node'}"
            self._joules[name] = lambda path=path: _number(path)  # type: ignore[misc]
            reason = f"Cray's counter of {part or 'the node'}, all jobs included"
            devices.append(_device(name, f"Cray {part or 'node'}", "node" if not part else "rail", reason, 0.1))
        return devices


# BMCs


def ipmi_present() -> bool:
    """Whether the kernel has a device of the BMC that this user may open, and the tool is here."""
    return shutil.which("ipmitool") is not None and any(
        os.access(path, os.R_OK | os.W_OK) for path in ("/dev/ipmi0", "/dev/ipmi/0", "/dev/ipmidev/0")
    )


class _BmcSensor(_MeterSensor):
    """A node's power by its management controller, whose calls are slow."""

    device: ClassVar[str]

    def __init__(self, config: EnergyConfig, pid: int) -> None:
        super().__init__(config, pid)
        self.interval_s = max(BMC_INTERVAL_S, config.sample_interval_s)

    def _find(self) -> list[Device]:
        if self._power_w() is None:
            return []
        self._watts[self.device] = self._power_w
        return [_device(self.device, self.title, "node", "input power of the node, by its BMC", BMC_INTERVAL_S)]

    @staticmethod
    def _power_w() -> float | None:
        raise NotImplementedError


class IpmiSensor(_BmcSensor):
    device, title = "node:ipmi", "IPMI node power"
    fix = "`ipmitool dcmi power reading` must answer for this user"

    @staticmethod
    def _power_w() -> float | None:
        command = ["ipmitool", "dcmi", "power", "reading"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(r"Instantaneous power reading:\s*([\d.]+)\s*Watts", done.stdout)
        return float(found[1]) if found else None


def redfish_present() -> bool:
    return bool(os.environ.get(REDFISH))


class RedfishSensor(_BmcSensor):
    """`PowerConsumedWatts` of a Power resource, or the reading of an EnvironmentMetrics resource."""

    device, title = "node:redfish", "Redfish node power"
    fix = (
        f"set {REDFISH} to the address of a Power or EnvironmentMetrics resource, and {REDFISH_LOGIN} to user:password"
    )

    @staticmethod
    def _power_w() -> float | None:
        request = urllib.request.Request(os.environ.get(REDFISH, ""), headers={"Accept": "application/json"})
        if login := os.environ.get(REDFISH_LOGIN):
            request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        try:
            with timed_opener().open(request, timeout=5) as answer:
                return _redfish_watts(json.load(answer))
        except (OSError, ValueError):
            return None


def _redfish_watts(resource: Mapping[str, Any]) -> float | None:
    controls = [one.get("PowerConsumedWatts") for one in resource.get("PowerControl", ()) if isinstance(one, Mapping)]
    watts = next((value for value in controls if value is not None), None)
    if watts is None and isinstance(resource.get("PowerWatts"), Mapping):
        watts = resource["PowerWatts"].get("Reading")
    return float(watts) if isinstance(watts, int | float) else None
