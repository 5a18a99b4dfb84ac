"""The machine of a run: which sensors work, checked before it starts, and a snapshot of hardware, driver, packages,
commit and job. Secrets are redacted."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

import joulelab
from joulelab import clock, lookup
from joulelab.errors import DeviceMissing, InvalidMeasurement, SensorMissing, UsageError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.profile import profile_id
from joulelab.meter.sampling import SensorReader, open_sensors
from joulelab.meter.sensors import Device, SensorUnavailable
from joulelab.meter.sensors.cpu import allowed_cores, processor_name
from joulelab.meter.sensors.nvml import opened_cards
from joulelab.meter.session import fallback_sensors_for, sensors_for
from joulelab.redaction import redact, redact_command
from joulelab.runs.paths import RunPaths, read_json
from joulelab.runs.record import MEASURED_COMPONENTS
from joulelab.runs.spec import HardwareAssertions

# Variables are stored by name, because one that is not listed may hold anything. Whole prefixes are listed only for
# libraries whose variables are tuning options.
_VARIABLES = re.compile(
    r"""(?x)
    (?:OMP|MKL|OPENBLAS|NCCL|PYTORCH|KMP|GOMP)_\w+
    | CUDA_(?:VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING|CACHE_DISABLE|MPS_ACTIVE_THREAD_PERCENTAGE)
    | CUBLAS_WORKSPACE_CONFIG | NVIDIA_(?:VISIBLE_DEVICES|DRIVER_CAPABILITIES|TF32_OVERRIDE)
    | (?:ROCR|HIP)_VISIBLE_DEVICES | HSA_OVERRIDE_GFX_VERSION | GPU_DEVICE_ORDINAL
    | TORCH_(?:HOME|COMPILE_DEBUG|CUDNN_V8_API_ENABLED|NCCL_ASYNC_ERROR_HANDLING|NUM_THREADS)
    | TORCHINDUCTOR_(?:CACHE_DIR|MAX_AUTOTUNE)
    | HF_(?:HOME|ENDPOINT|HUB_(?:OFFLINE|CACHE|ENABLE_HF_TRANSFER)|DATASETS_(?:CACHE|OFFLINE))
    | TRANSFORMERS_(?:OFFLINE|CACHE) | TOKENIZERS_PARALLELISM | WANDB_(?:MODE|PROJECT) | MLFLOW_EXPERIMENT_NAME
    | JOULELAB_(?:RUNS|CACHE|CONFIG|SLURM) | RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_WORLD_SIZE | MASTER_(?:ADDR|PORT)
    | SLURMD_NODENAME
    | SLURM_JOB(?:_?ID|_(?:NAME|PARTITION|QOS|ACCOUNT|NODELIST|NUM_NODES|GPUS|CPUS_PER_NODE|USER|UID))
    | SLURM_JOB_(?:START|END)_TIME
    | SLURM_(?:ARRAY_(?:JOB_ID|TASK_ID|TASK_COUNT)|CLUSTER_NAME|RESTART_COUNT|SUBMIT_(?:HOST|DIR)|TOPOLOGY_ADDR)
    | SLURM_(?:NNODES|NODELIST|NODEID|NTASKS(?:_PER_NODE)?|NPROCS|PROCID|LOCALID|TASKS_PER_NODE|STEP_?ID|STEP_GPUS)
    | SLURM_(?:GPUS(?:_(?:ON|PER)_(?:NODE|TASK))?|CPUS_(?:ON_NODE|PER_TASK)|MEM_PER_(?:CPU|GPU|NODE)|CPU_BIND|HINT)
    | SLURM_(?:DISTRIBUTION|THREADS_PER_CORE|CPU_FREQ_REQ)
    """
)


GIT_LIMIT_S = 20.0


def snapshot() -> dict[str, Any]:
    return {
        "taken_at": clock.iso(clock.now().wall_s),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "command": list(redact_command(sys.argv)),
        "joulelab": joulelab.__version__,
        "joulelab_code": package_commit(Path(joulelab.__file__)),
        "machine_profile": profile_id(),
        "cpu": {
            "model": processor_name(),
            "threads": os.cpu_count(),
            "usable_threads": len(allowed_cores(os.getpid())),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "gpus": gpus(),
        "packages": packages(),
        "code": commit(Path.cwd()),
        "slurm": {name: value for name, value in variables().items() if name.startswith("SLURM")},
        "variables": variables(),
    }


_SECTIONS: dict[str, type] = {"cpu": dict, "packages": dict, "code": dict, "joulelab_code": dict, "gpus": list}
_SECTIONS |= {"slurm": dict, "variables": dict, "command": list, "machine_profile": str}


def read_snapshot(paths: RunPaths) -> dict[str, Any]:
    """The snapshot of a run, empty if it has none. Sections of another type than `snapshot` writes, as in a file that
    was edited, are left out, so that readers can rely on the types."""
    if not paths.environment.exists():
        return {}
    facts = read_json(paths.environment)
    facts = {name: value for name, value in facts.items() if isinstance(value, _SECTIONS.get(name, object))}
    if "gpus" in facts:
        facts["gpus"] = [card for card in facts["gpus"] if isinstance(card, dict)]
    return facts


def digests(facts: dict[str, Any]) -> dict[str, str]:
    """Shortened SHA-256 of every entry of a snapshot; the event file keeps them, so that later edits are detected."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16] for key, value in facts.items()
    }


def node_name() -> str:
    """Host name in trace files; inside a Slurm job, Slurm's node name."""
    return (os.environ.get("SLURMD_NODENAME") if "SLURM_JOB_ID" in os.environ else None) or platform.node()


def variables() -> dict[str, str]:
    """Environment variables that configure GPUs, threads, caches and schedulers, without secrets in them."""
    return {name: redact(name, value) for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


@cache
def packages() -> dict[str, str]:
    """Installed packages. Cached: it reads hundreds of files, and the members of a group share the process."""
    listed = [dist.metadata for dist in metadata.distributions()]
    versions = {about["Name"]: about["Version"] for about in listed if about["Name"]}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def commit(folder: Path) -> dict[str, Any]:
    """Commit and dirty state of the repository that contains `folder`; None outside a repository."""
    if shutil.which("git") is None:
        return {"commit": None, "dirty": None}
    head = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if status is None else bool(status)}


def package_commit(module: Path) -> dict[str, Any]:
    """Like `commit`, for a package that is a git checkout. A package installed into a directory of another repository
    is not tracked by it, and that repository's commit says nothing about the package."""
    if shutil.which("git") is None or _git(module.parent, "ls-files", "--error-unmatch", module.name) is None:
        return {"commit": None, "dirty": None}
    return commit(module.parent)


def _git(folder: Path, *arguments: str) -> str | None:
    """None if git reports an error, cannot be started, or takes too long, as in a large repository on a slow disk."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=GIT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def free_gpu_bytes() -> int | None:
    """Free memory of the GPU with the most of it, among those visible to this process; None if it is unknown."""
    free = []
    with opened_cards() as (nvml, cards):
        for handle in cards.values():
            with suppress(nvml.NVMLError):
                free.append(int(nvml.nvmlDeviceGetMemoryInfo(handle).free))
    return max(free, default=None)


def free_memory_bytes() -> int:
    """Memory that this process can still allocate: what the machine has free, within the limit of its cgroup (the
    memory of a Slurm job or container)."""
    free = [psutil.virtual_memory().available]
    for folder in _memory_cgroups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        with suppress(OSError, ValueError):  # another version of cgroups, or `max`: no limit
            current = (folder / "memory.max").exists()
            limit, used = ("memory.max", "memory.current") if current else _CGROUP_1
            unused = int((folder / limit).read_text()) - int((folder / used).read_text())
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            free.append(max(0, unused + (int(cached.group(1)) if cached else 0)))
    return min(free)


_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _memory_cgroups(root: Path, own: Path) -> list[Path]:
    """Folders of this process's memory cgroup (version 1 or 2) and of those above it."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if controllers in ("", "memory"):
            top = root / controllers
            folder = top / name.lstrip("/")
            found += [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]
    return found


def require_mac(device: str) -> None:
    """Refuse device=mps on other machines, without importing torch."""
    if device == "mps" and sys.platform != "darwin":
        raise DeviceMissing(
            "device=mps was requested but this is not a Mac", "set device=auto, device=cpu or device=cuda"
        )


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA or ROCm build, without importing it; True if that cannot be told."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return True
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return True
    builds = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text, re.MULTILINE)
    return not builds or any(build != "None" for build in builds)


def uses_gpu(device: str) -> bool:
    """Whether work on `device` (auto, cpu, cuda, mps) runs on an NVIDIA GPU; no framework is imported."""
    return device not in ("cpu", "mps") and bool(gpus()) and torch_has_cuda()


_BF16_CAPABILITY = (8, 0)


def has_bf16_cores(device: str) -> bool:
    """Whether work on `device` runs on GPUs whose tensor cores compute in bfloat16 (Ampere and newer)."""
    if not uses_gpu(device):
        return False
    with opened_cards() as (nvml, cards):
        try:
            found = [tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in cards.values()]
        except nvml.NVMLError:
            return False
    return all(capability >= _BF16_CAPABILITY for capability in found)


def gpus() -> list[dict[str, Any]]:
    """GPUs visible to this process; a lost card, or one that a cgroup hides, must not end the run."""
    readable = []
    with opened_cards() as (nvml, cards):
        for card, handle in cards.items():
            with suppress(nvml.NVMLError):
                facts = {"index": card.index, "uuid": card.uuid, "name": card.name}
                memory_bytes, driver = nvml.nvmlDeviceGetMemoryInfo(handle).total, nvml.nvmlSystemGetDriverVersion()
                readable.append({**facts, "memory_bytes": int(memory_bytes), "driver": driver})
    return readable


GIB = 1024.0**3


def hardware_answers(gpus: Sequence[dict[str, Any]], expected: HardwareAssertions) -> list[tuple[str, bool, str]]:
    """For each assertion: what it is about, whether it holds, and both values."""
    names = [str(gpu.get("name", "?")) for gpu in gpus]
    answers = []
    if expected.gpu_name is not None:
        others = [name for name in names if not _names_hardware(expected.gpu_name, name)]
        found = ", ".join(dict.fromkeys(names)) or "no GPU"
        answers.append(("GPU name", bool(names) and not others, f"expected {expected.gpu_name}, found {found}"))
    if expected.gpu_count is not None:
        text = f"expected {expected.gpu_count} GPUs, found {len(gpus)}"
        answers.append(("GPU count", len(gpus) == expected.gpu_count, text))
    if expected.min_gpu_memory_gib is not None:
        smallest = min((float(gpu.get("memory_bytes", 0)) / GIB for gpu in gpus), default=0.0)
        text = f"expected at least {expected.min_gpu_memory_gib:g} GiB on every GPU, the smallest has {smallest:.1f}"
        answers.append(("GPU memory", bool(gpus) and smallest >= expected.min_gpu_memory_gib, text))
    if expected.cpu_name is not None:
        own = processor_name()
        text = f"expected {expected.cpu_name}, found {own}"
        answers.append(("CPU name", _names_hardware(expected.cpu_name, own), text))
    return answers


def _names_hardware(expected: str, name: str) -> bool:
    """Whole words: `H200` matches `NVIDIA H200`, `A10` does not match `NVIDIA A100`."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(expected)}(?![A-Za-z0-9])", name, re.IGNORECASE) is not None


def demand_hardware(expected: HardwareAssertions) -> None:
    """Refuse a run on other hardware than its settings require (exit code 4)."""
    if expected == type(expected)():
        return
    wrong = [f"{name}: {text}" for name, holds, text in hardware_answers(gpus(), expected) if not holds]
    if wrong:
        raise InvalidMeasurement(
            f"this machine does not meet the settings under `hardware`: {'; '.join(wrong)}; nothing was started",
            "run it on matching hardware, or remove these settings",
        )


@dataclass(frozen=True)
class DiscoveredSensors:
    """Devices that can be read, and components that cannot, with reason and fix."""

    devices: tuple[Device, ...]
    missing: tuple[SensorUnavailable, ...]

    @property
    def measured(self) -> tuple[Device, ...]:
        return tuple(d for d in self.devices if d.counted and d.component in MEASURED_COMPONENTS)

    @property
    def estimate(self) -> Device | None:
        return next((device for device in self.devices if device.component == "cpu_estimate"), None)


def discover_sensors(config: EnergyConfig) -> DiscoveredSensors:
    """Open every sensor that the settings select, and close it again."""
    readers, fallback = (
        [SensorReader(name, partial(lookup.SENSORS.resolve(name), config, os.getpid())) for name in names]
        for names in (sensors_for(config), fallback_sensors_for(config))
    )
    opened, devices, missing = open_sensors(readers, fallback)
    for reader in opened:
        reader.close()
    return DiscoveredSensors(tuple(devices), tuple(missing))


def require_rapl_root(root: str) -> None:
    """The default path may be absent, as on most virtual machines; one that the user set must exist."""
    if root != EnergyConfig().rapl_root and not Path(root).is_dir():
        raise UsageError(
            f"energy.rapl_root (--rapl-root): expected a directory with a RAPL tree, found no directory at {root}",
            f"omit it to read the kernel's own tree, {EnergyConfig().rapl_root}",
        )


def demand_sensors(config: EnergyConfig) -> None:
    """Refuse a run (exit code 3) if a named GPU cannot be read, or if measured energy is required but unavailable."""
    require_rapl_root(config.rapl_root)
    if config.require == "measured" and config.total_energy_policy == "machine":
        raise UsageError(
            "--scope machine (energy.total_energy_policy=machine) is an estimate; --require measured refuses estimates",
            "leave one of them out",
        )
    gpus_named = config.gpus not in ("auto", "none")
    if config.require != "measured" and not gpus_named:
        return
    sensors = discover_sensors(config)
    if gpus_named and not any(device.component == "gpu" for device in sensors.devices):
        reason = next((absent.reason for absent in sensors.missing if absent.component == "gpu"), "no such GPU")
        raise SensorMissing(
            f"the requested GPUs '{config.gpus}' cannot be read: {reason}; nothing was started",
            "`joulelab doctor` lists the GPUs of this machine; `auto` selects those of the job",
        )
    if config.require != "measured" or sensors.measured:
        return
    reasons = "; ".join(f"{absent.component}: {absent.reason}" for absent in sensors.missing)
    fixes = "; ".join(absent.fix for absent in sensors.missing if absent.fix)
    raise SensorMissing(
        f"measured energy is required but no sensor works on this machine ({reasons}); nothing was started",
        fixes or "run `joulelab doctor` for details",
    )


def sensors_line(estimate_cpu: bool) -> str:
    """The same in one sentence."""
    sensors = discover_sensors(EnergyConfig(estimate_cpu=estimate_cpu))
    if sensors.measured:
        return f"Measured: {', '.join(dict.fromkeys(device.name for device in sensors.measured))}."
    if sensors.estimate is None:
        return "No energy sensor works on this machine: see `joulelab doctor`."
    return "Energy is estimated from CPU time: no energy sensor works on this machine (see `joulelab doctor`)."


def discovery_text(estimate_cpu: bool) -> str:
    """Which components are measured, which are estimated by which model, and why the rest is missing."""
    sensors = discover_sensors(EnergyConfig(estimate_cpu=estimate_cpu))
    lines = [f"  {absent.component:<4} not measured: {absent.reason}" for absent in sensors.missing]
    lines += [f"  {device.component:<4} measured: {device.name} ({device.device})" for device in sensors.measured]
    if sensors.measured:
        return "\n".join(["Energy sensors of this run:", *lines])
    estimate = sensors.estimate
    if estimate is None:
        return "\n".join(["No energy sensor works on this machine:", *lines])
    watts, source = estimate.facts["w_per_thread"], estimate.facts["source"]
    return "\n".join(
        [
            "Energy below is ESTIMATED, not measured: no energy sensor works on this machine.",
            *lines,
            f"  Model: CPU time of the run x {watts:.1f} W per hardware thread ({estimate.name}: {source}).",
            f"  Scale uncertain by ±{100 * (estimate.gain_error_rel or 0):.0f} %. The factor is the same for all runs",
            "  on this machine, so ratios between runs are much more precise than absolute values, unless other",
            "  processes use the same cores; the record reports such CPU contention.",
        ]
    )
