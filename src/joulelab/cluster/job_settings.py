"""Resources of a job: preset, site file and command line merged into one checked model.

    defaults of the site file < built-in preset < preset of the site file < options of the command line

The site file is `slurm.yaml` in the user's configuration directory, for what all experiments share: partition, account,
environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from joulelab import lookup
from joulelab.errors import ConfigError, NotFoundError
from joulelab.meter.profile import config_folder
from joulelab.runs.spec import Section, explain, merge, read_mapping, refuse_unfit_texts

# One GPU each, with its share of the cores and memory of a typical node.
PRESETS: dict[str, dict[str, Any]] = {
    "h100": {"gpus": 1, "gpu_type": "h100", "cpus": 16, "memory": "128G", "time": "24:00:00"},
    "l40s": {"gpus": 1, "gpu_type": "l40s", "cpus": 8, "memory": "64G", "time": "12:00:00"},
}
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
_MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)


class Environment(Section):
    """Python environment of a job; by default the one that submitted it."""

    modules: tuple[str, ...] = ()
    """Modules to load first, in this order (`module load`)."""
    conda: str = ""
    """Name or folder of a conda environment."""
    venv: str = ""
    """Folder of a virtual environment."""
    setup: tuple[str, ...] = ()
    """Shell commands to run after all of these."""


def _slurm_time(value: str) -> str:
    if not _TIME.fullmatch(value):
        raise ValueError(f"expected minutes, H:MM:SS or D-HH:MM:SS, as in 90, 4:00:00 or 2-00:00:00, found '{value}'")
    return value


def _slurm_memory(value: str) -> str:
    if value and not _MEMORY.fullmatch(value):
        raise ValueError(f"expected a number and K, M, G or T, as in 64G or 512M, found '{value}'")
    return value


def _quoted(value: Any) -> Any:
    """YAML parses 4:00:00 as 14400, which is indistinguishable from a number."""
    if isinstance(value, (int, float)):
        raise ValueError(f'expected text in quotes, as in "4:00:00" or "64G", found the number {value}')
    return value


QuotedText = Annotated[str, BeforeValidator(_quoted)]
SlurmTime = Annotated[str, AfterValidator(_slurm_time), BeforeValidator(_quoted)]
SlurmMemory = Annotated[str, AfterValidator(_slurm_memory), BeforeValidator(_quoted)]


class CpuJobSettings(Section):
    """Resources of jobs without a GPU: data preparation and reports. A GPU preset does not change them."""

    cpus: int = Field(4, ge=1)
    """CPU cores."""
    memory: SlurmMemory = "8G"
    """Memory, as in `16G`; empty: the partition's default."""
    time: SlurmTime = "02:00:00"
    """Time limit: minutes, H:MM:SS or D-HH:MM:SS."""


class JobSettings(Section):
    """Resources and environment of a job."""

    partition: QuotedText = ""
    """Partition of GPU jobs; empty: the cluster's default."""
    cpu_partition: QuotedText = ""
    """Partition of CPU jobs (data, report); empty: the same as `partition`."""
    cpu_jobs: CpuJobSettings = CpuJobSettings()
    """CPUs, memory and time of CPU jobs (data, report)."""
    account: QuotedText = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Required node features."""
    time: SlurmTime = "04:00:00"
    """Time limit of each GPU job: minutes, H:MM:SS or D-HH:MM:SS."""
    gpus: int = Field(1, ge=0, le=64)
    """GPUs per node, with one process each; 0: a job without a GPU."""
    gpu_type: str = ""
    """Slurm's name of the GPU type, as in `--gpus-per-node=h100:1`; empty: any."""
    nodes: int = Field(1, ge=1, le=10_000)
    """Nodes per job."""
    ranks_per_node: int | None = Field(None, ge=1, le=64)
    """Processes per node; null: one per GPU."""
    cpus: int | None = Field(None, ge=1)
    """CPU cores per node."""
    memory: SlurmMemory = ""
    """Memory per node, as in `64G`; empty: the partition's default."""
    exclusive: bool = False
    """Allocate whole nodes, so that RAPL measures only this job."""
    warn_s: int = Field(120, ge=1, le=65_535)
    """Seconds before the time limit at which the run saves a checkpoint and stops."""
    requeue: bool = True
    """Requeue the job at the time limit and resume from the checkpoint."""
    max_restarts: int = Field(20, ge=0)
    """Maximum number of requeues."""
    max_at_once: int | None = Field(None, ge=1)
    """Maximum number of concurrent tasks of an array."""
    environment: Environment = Environment()
    """Python environment of the job."""
    hf_home: str = ""
    """`HF_HOME`: cache of models and datasets from the hub."""
    cache_dir: str = ""
    """`XDG_CACHE_HOME`: other caches."""
    scratch: str = ""
    """`TMPDIR`: fast local disk of the node."""
    export: dict[str, str] = {}
    """Additional environment variables."""
    sbatch: tuple[str, ...] = ()
    """Additional options of sbatch, each as `--option=value`."""

    @field_validator("sbatch")
    @classmethod
    def _options_of_sbatch(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((option for option in value if not option.startswith("-")), None)
        if wrong is not None:
            raise ValueError(f"expected options of sbatch, as in --mail-type=END, found '{wrong}'")
        return value

    @field_validator("export")
    @classmethod
    def _names_of_variables(cls, value: dict[str, str]) -> dict[str, str]:
        wrong = next((name for name in value if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)), None)
        if wrong is not None:
            raise ValueError(f"expected names of environment variables, as in MY_VARIABLE, found '{wrong}'")
        return value

    @property
    def ranks(self) -> int:
        """Processes on each node."""
        return self.ranks_per_node or max(1, self.gpus)


def site_file() -> Path:
    """`JOULELAB_SLURM`, else slurm.yaml in the user's configuration directory (may not exist)."""
    named = os.environ.get("JOULELAB_SLURM")
    if named and not Path(named).exists():
        raise NotFoundError(f"JOULELAB_SLURM is {named}, which does not exist", "docs/slurm.md has an example")
    if named:
        return Path(named)
    return config_folder() / "slurm.yaml"


def job_settings(preset: str | None, options: Mapping[str, Any], site: Path | None = None) -> JobSettings:
    """The merged settings; `options` were given on the command line."""
    path = site or site_file()
    site_settings = _read_site(path)
    presets = {**PRESETS, **site_settings["presets"]}
    if preset is not None and preset not in presets:
        raise lookup.unknown("preset", preset, presets, f"{path} can define more")
    layers = [site_settings["defaults"]]
    if preset is not None:
        layers += [PRESETS.get(preset, {}), site_settings["presets"].get(preset, {})]
    merged: dict[str, Any] = {}
    for layer in (*layers, options):
        merged = merge(merged, layer)
    return _checked(merged, path)


def _read_site(path: Path) -> dict[str, dict[str, Any]]:
    content = read_mapping(path) if path.exists() else {}
    unknown = set(content) - {"defaults", "presets"}
    if unknown:
        raise ConfigError(f"{path}: unknown key '{min(unknown)}'", "expected `defaults` and `presets`")
    found = {"defaults": content.get("defaults") or {}, "presets": content.get("presets") or {}}
    for name, section in found.items():
        _require_section(path, name, section)
    for name, section in found["presets"].items():
        _require_section(path, f"presets.{name}", section)
    return found


def _require_section(path: Path, name: str, section: Any) -> None:
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} is '{section}', expected `key: value` lines", "docs/slurm.md has an example")


def _checked(settings: Mapping[str, Any], path: Path) -> JobSettings:
    try:
        checked = JobSettings.model_validate_json(json.dumps(settings, default=str))
    except ValidationError as error:
        hint = f"see `joulelab submit --help`; settings may also come from {path}; nothing was submitted"
        raise ConfigError(explain(error, JobSettings).message, hint) from None
    refuse_unfit_texts(checked)
    return checked
