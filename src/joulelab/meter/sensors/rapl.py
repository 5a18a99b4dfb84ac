"""CPU joules from the kernel's powercap tree (RAPL): one wrapping microjoule counter per domain.

Package domains hold the core and uncore domains, and psys holds the packages, so the total is packages + dram; the rest
is recorded and shown, never added. The counter wraps at `max_energy_range_uj`, which differs by domain and goes into
the trace's header, where the reader unwraps it.
"""

from __future__ import annotations

from pathlib import Path

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable

UJ = 1e-6
# Intel documents no accuracy; comparisons against wall meters on server parts lie within a few percent.
GAIN_ERROR_REL = 0.05


class RaplSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s
        self._root = Path(config.rapl_root)
        self._counters: dict[str, Path] = {}

    def open(self) -> list[Device]:
        folders = sorted(path.parent for path in self._root.glob("*/energy_uj"))
        # powercap lists every domain flat and some kernels nest them too; one real path is one domain
        unique = {folder.resolve(): folder for folder in folders}
        if not unique:
            raise SensorUnavailable(
                "cpu",
                f"no RAPL domains under {self._root}",
                "virtual machines rarely expose RAPL; on bare metal load the intel_rapl_common kernel module",
            )
        unreadable = [folder for folder in unique.values() if not _readable(folder / "energy_uj")]
        if unreadable:
            raise SensorUnavailable(
                "cpu",
                f"{unreadable[0] / 'energy_uj'} is not readable for this user",
                f"sudo chmod a+r {self._root}/*/energy_uj (until the next boot), "
                "or give Python the capability CAP_DAC_READ_SEARCH",
            )
        return [self._describe(folder) for folder in unique.values()]

    def _describe(self, folder: Path) -> Device:
        domain = (folder / "name").read_text().strip()
        # sub-domains carry their parent's number (intel-rapl:1:0), which tells two packages' dram apart
        parent = folder.name.split(":")[1] if folder.name.count(":") == 2 else None
        name = domain if parent is None else f"package-{parent}/{domain}"
        self._counters[name] = folder / "energy_uj"
        kind = domain.split("-")[0]
        return Device(
            device=f"rapl:{name}",
            component="dram" if kind == "dram" else "cpu",
            name=domain,
            counted=kind in ("package", "dram"),
            wrap_j=int((folder / "max_energy_range_uj").read_text()) * UJ,
            refresh_s=0.001,
            gain_error_rel=GAIN_ERROR_REL,
        )

    def read(self) -> list[Line]:
        counters = {name: int(path.read_text()) * UJ for name, path in self._counters.items()}
        return [{"kind": "rapl", "device": "host", "rapl": counters}]

    def close(self) -> None:
        pass


def _readable(path: Path) -> bool:
    try:
        path.read_text()
    except OSError:
        return False
    return True
