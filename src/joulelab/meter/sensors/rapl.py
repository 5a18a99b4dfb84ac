"""CPU energy from the kernel's powercap tree (RAPL): one wrapping microjoule counter per domain, on Intel and AMD.

Package domains contain the core and uncore domains, and psys contains the packages, so the total is packages + dram;
the others are recorded and shown, never added. Some laptops show a package twice, through its registers and through
memory (`intel-rapl-mmio`): only one of the two counts.

The counter wraps at `max_energy_range_uj`, which differs by domain and is in the trace's header, where the reader
unwraps it. That works while at most one wrap lies between two readings, so the domains are first read at least twice
within the shortest wrap at a power no package reaches, and then, once their power is known, `READS_PER_WRAP` times
within a wrap at the highest power seen. From a gap of `max_gap_s` on a wrap may be hidden.

RAPL meters the whole node, so its joules belong to a job only if the job has the node to itself. Slurm states how many
CPUs of the node a job has, not whether it is exclusive. Fewer CPUs than the node has means that others may be there:
the joules are labeled and left out of the total. Where Slurm counts cores and the kernel hardware threads, a whole node
looks like half of one, and `energy.node_shared=no` includes the joules again.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from joulelab.clock import NS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable


def why_shared(setting: str, environ: Mapping[str, str], node_cpus: int | None = None) -> str | None:
    """The reason why RAPL's joules are not this job's alone; None where they are."""
    if setting == "no":
        return None
    if setting == "yes":
        return "energy.node_shared=yes: RAPL energy covers the whole node and includes other jobs"
    if "SLURM_JOB_ID" not in environ:
        return None
    node_cpus = node_cpus or os.cpu_count() or 0
    given = _cpus_of_job(environ)
    if given is None:
        return (
            "Slurm does not state how much of this node the job has; set energy.node_shared=no if it is the whole node"
        )
    if given < node_cpus:
        return (
            f"the Slurm job has {given} of this node's {node_cpus} CPUs, so RAPL energy includes other jobs; set "
            "energy.node_shared=no if the job is exclusive"
        )
    return None


def _cpus_of_job(environ: Mapping[str, str]) -> int | None:
    """CPUs of this job on this node. A step may hold fewer than its job, so the job's own count goes first."""
    per_node = _per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    if len(set(per_node)) == 1:
        return per_node[0]
    if per_node and node.isdigit() and int(node) < len(per_node):
        return per_node[int(node)]
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdigit() else min(per_node, default=None)


def _per_node(text: str) -> list[int]:
    """Slurm's short form: '72(x2),36' is 72, 72, 36."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


UJ = 1e-6
# Intel documents no accuracy; comparisons with wall meters on server parts agree within a few percent.
GAIN_ERROR_REL = 0.05
REFRESH_S = 0.001
# Above any package on sale (500 W rated in 2025, more in short bursts); a platform has several.
MOST_PACKAGE_W = 1000.0
SHORTEST_INTERVAL_S = 0.02
READS_PER_WRAP = 8
# /sys/class/powercap is flat; a copied tree may be nested as the kernel's own is.
PLACES = ("*/energy_uj", "*/*/energy_uj", "*/*/*/energy_uj")


@dataclass(frozen=True)
class Domain:
    folder: Path
    kind: str
    """package, core, uncore, dram or psys"""
    label: str
    """Its name in the trace, unique on this machine: package-0, package-0/dram."""
    wrap_j: float | None
    twin: bool = False
    """The same energy as another domain's, read in another way."""

    @property
    def counted(self) -> bool:
        return self.kind in ("package", "dram") and not self.twin

    def max_gap_s(self, packages: int) -> float | None:
        most_w = MOST_PACKAGE_W * (max(1, packages) if self.kind == "psys" else 1)
        # Half a wrap at the highest possible power (the Nyquist limit of a wrapping counter):
        # between two readings that far apart the counter has advanced by less than half its range,
        # so that a decrease can only be a wrap. A typical range is 262 kJ (32 bits of 61 uJ), 131 s
        # at 1,000 W.
        return None if self.wrap_j is None else self.wrap_j / most_w / 2


class RaplSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = self._configured_s = config.sample_interval_s
        self._last: tuple[int, dict[str, float]] | None = None
        self._highest_w: dict[str, float] = {}
        self._root = Path(config.rapl_root)
        self._node_shared = config.node_shared
        self._domains: list[Domain] = []
        self._unread: list[Domain] = []

    def open(self) -> list[Device]:
        domains = find_domains(self._root)
        if not domains:
            commands = () if is_virtual_machine() else LOAD_MODULE
            fix = _listed(commands) or "virtual machines rarely expose RAPL; measure CPU energy on bare metal"
            raise SensorUnavailable("cpu", f"no RAPL domains under {self._root}", fix, commands)
        self._unread = [domain for domain in domains if not _readable(domain.folder / "energy_uj")]
        # without one of the packages the total would be too small; a core domain is only shown
        needed = [domain for domain in self._unread if domain.counted]
        if needed:
            commands = readable_commands(self._root)
            reason = f"{needed[0].folder / 'energy_uj'} is not readable by this user"
            raise SensorUnavailable("cpu", reason, _listed(commands), commands)
        self._domains = [domain for domain in domains if domain not in self._unread]
        packages = sum(domain.kind == "package" and not domain.twin for domain in domains)
        gaps = [gap for domain in self._domains if (gap := domain.max_gap_s(packages)) is not None]
        self.interval_s = max(SHORTEST_INTERVAL_S, min([self.interval_s, *gaps]))
        shared = why_shared(self._node_shared, os.environ)
        return [_describe(domain, packages, shared) for domain in self._domains]

    def read(self) -> list[Line]:
        counters = {domain.label: int((domain.folder / "energy_uj").read_text()) * UJ for domain in self._domains}
        self._adapt_interval(counters)
        lines: list[Line] = [{"kind": "rapl", "device": "host", "rapl": counters}]
        for domain in self._unread:
            text = f"{domain.folder / 'energy_uj'} is not readable by this user; its energy is part of another domain's"
            lines.append({"kind": "warning", "device": f"rapl:{domain.label}", "text": text})
        self._unread = []
        return lines

    def _adapt_interval(self, counters: dict[str, float]) -> None:
        """Read as often as the smallest range needs at the power that its domain draws."""
        now_ns = time.monotonic_ns()
        if self._last is not None:
            elapsed_s, before = (now_ns - self._last[0]) / NS, self._last[1]
            for domain in self._domains:
                if domain.wrap_j is not None and elapsed_s > 0:
                    # modulo the range is the rise also across one wrap
                    rise_j = (counters[domain.label] - before[domain.label]) % domain.wrap_j
                    self._highest_w[domain.label] = max(self._highest_w.get(domain.label, 0.0), rise_j / elapsed_s)
            # the highest power so far, not the current one: the next load may come without warning
            needed = [
                domain.wrap_j / READS_PER_WRAP / max(self._highest_w[domain.label], 1.0)
                for domain in self._domains
                if domain.label in self._highest_w and domain.wrap_j is not None
            ]
            self.interval_s = max(SHORTEST_INTERVAL_S, min([self._configured_s, *needed]))
        self._last = now_ns, counters

    def close(self) -> None:
        pass


def find_domains(root: Path) -> list[Domain]:
    """All domains of a tree, packages first. One real folder is one domain, however many links lead to it."""
    folders = {path.parent.resolve(): path.parent for pattern in reversed(PLACES) for path in root.glob(pattern)}
    domains: list[Domain] = []
    for folder in sorted(folders.values(), key=lambda folder: ("mmio" in folder.name, _numbers(folder))):
        name = _text(folder / "name") or folder.name
        twin = "mmio" in folder.name and any(name in domain.label.split("/") for domain in domains)
        label = ("mmio/" if twin else "") + _label(folder, name, domains)
        if any(domain.label == label for domain in domains):
            label = f"{label}@{folder.name}"
        domains.append(Domain(folder, name.split("-")[0], label, _wrap_j(folder), twin))
    return domains


def _numbers(folder: Path) -> tuple[int, ...]:
    """intel-rapl:1:0 -> (1, 0)"""
    return tuple(int(part) for part in folder.name.split(":")[1:] if part.isdigit())


def _label(folder: Path, name: str, before: list[Domain]) -> str:
    """A sub-domain carries its parent's number (intel-rapl:1:0), which distinguishes the dram of two packages."""
    numbers = _numbers(folder)
    if len(numbers) < 2:
        return name
    parents = [domain.label for domain in before if _numbers(domain.folder) == numbers[:-1]]
    return f"{parents[0] if parents else f'package-{numbers[0]}'}/{name}"


def _wrap_j(folder: Path) -> float | None:
    text = _text(folder / "max_energy_range_uj")
    return int(text) * UJ if text and text.isdigit() else None


def _limit_w(folder: Path) -> float | None:
    """The highest of its power limits, of which the kernel enforces the long-term and the short-term one."""
    texts = [_text(path) for path in folder.glob("constraint_*_power_limit_uw")]
    return max((int(text) * UJ for text in texts if text and text.isdigit()), default=0.0) or None


def _describe(domain: Domain, packages: int, shared: str | None) -> Device:
    facts: dict[str, object] = {"max_gap_s": domain.max_gap_s(packages), "folder": str(domain.folder)}
    if limit_w := _limit_w(domain.folder):
        facts["power_limit_w"] = limit_w
    if shared:
        facts |= {"node_wide": True, "reason": shared}
    elif not domain.counted:
        facts["reason"] = "its energy is part of a package's" if domain.kind != "psys" else "it includes the packages"
    return Device(
        device=f"rapl:{domain.label}",
        component="dram" if domain.kind == "dram" else "cpu",
        name=domain.label.split("/")[-1],
        counted=domain.counted and not shared,
        wrap_j=domain.wrap_j,
        refresh_s=REFRESH_S,
        gain_error_rel=GAIN_ERROR_REL,
        facts=facts,
    )


Commands = tuple[tuple[str, str], ...]
LOAD_MODULE: Commands = (("sudo modprobe intel_rapl_msr", "load the kernel's RAPL module, for Intel and AMD"),)


def readable_commands(root: Path) -> Commands:
    """Since 2020 only root may read RAPL (CVE-2020-8694: power reveals keys); ways to allow it deliberately."""
    rule = 'SUBSYSTEM=="powercap", KERNEL=="*rapl*:*", RUN+="/bin/chmod a+r /sys%p/energy_uj"'
    python = shlex.quote(str(Path(sys.executable).resolve()))
    return (
        (f"sudo chmod a+r {shlex.quote(str(root))}/*/energy_uj", "let every user read RAPL until the next boot"),
        (
            f"echo '{rule}' | sudo tee /etc/udev/rules.d/70-rapl.rules && sudo udevadm control --reload && "
            "sudo udevadm trigger -c add -s powercap",
            "let every user read RAPL permanently",
        ),
        (f"sudo setcap cap_dac_read_search+ep {python}", "let this Python read it, for every user who runs it"),
    )


def _listed(commands: Commands) -> str:
    return "; or ".join(f"{purpose}: {command}" for command, purpose in commands)


def is_virtual_machine() -> bool:
    """The CPU reports a hypervisor."""
    return " hypervisor" in (_text(Path("/proc/cpuinfo")) or "")


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _readable(path: Path) -> bool:
    return _text(path) is not None
