"""What a job asks of the cluster: preset, site file and command line merged into one checked model.

    defaults of the site file < preset that ships < preset of the site file < options of the command line

The site file is `slurm.yaml` in the user's configuration folder: the partition, the account and the environment are the
same for every experiment, and are written down once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from joulelab import lookup
from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import Section, explain, merge, read_mapping

# One GPU each, with the share of a usual node's cores and memory that goes with it.
PRESETS: dict[str, dict[str, Any]] = {
    "h100": {"gpus": 1, "gpu_type": "h100", "cpus": 16, "memory": "128G", "time": "24:00:00"},
    "l40s": {"gpus": 1, "gpu_type": "l40s", "cpus": 8, "memory": "64G", "time": "12:00:00"},
}
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
_MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)


class Environment(Section):
    """How a job gets its Python; without any of these it uses the one that submitted it."""

    modules: tuple[str, ...] = ()
    """Loaded first, in this order, with `module load`."""
    conda: str = ""
    """Name or folder of a conda environment."""
    venv: str = ""
    """Folder of a virtual environment."""
    setup: tuple[str, ...] = ()
    """Further lines of shell, run last."""


class JobSettings(Section):
    """What a job asks of the cluster."""

    partition: str = ""
    """Partition of jobs that need a GPU; empty: the cluster's default."""
    cpu_partition: str = ""
    """Partition of jobs that need none (data, report); empty: the same as the others."""
    account: str = ""
    """Whom the hours are charged to."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features the nodes must have."""
    time: str = "04:00:00"
    """Time limit of each job, as Slurm writes it: minutes, H:MM:SS or D-HH:MM:SS."""
    gpus: int = Field(1, ge=0, le=64)
    """GPUs on each node; each has a process of its own."""
    gpu_type: str = ""
    """The cluster's name of the GPU, as in `--gpus-per-node=h100:1`; empty: any."""
    nodes: int = Field(1, ge=1, le=10_000)
    """Nodes of each job."""
    ranks_per_node: int | None = Field(None, ge=1, le=64)
    """Processes on each node where there are no GPUs to count by."""
    cpus: int | None = Field(None, ge=1)
    """CPU cores on each node."""
    memory: str = ""
    """Memory of each node, as in `64G`; empty: the partition's default."""
    exclusive: bool = False
    """Take whole nodes: RAPL's joules are then this job's alone."""
    warn_s: int = Field(120, ge=1, le=65_535)
    """Seconds before the time limit at which the run is told to save and end."""
    requeue: bool = True
    """Go back to the queue after the time limit, and go on from the checkpoint."""
    max_restarts: int = Field(20, ge=0)
    """How often at most."""
    max_at_once: int | None = Field(None, ge=1)
    """Tasks of an array that run at the same time."""
    environment: Environment = Environment()
    """How the job gets its Python."""
    hf_home: str = ""
    """`HF_HOME`: where models and datasets of the hub are kept."""
    cache_dir: str = ""
    """`XDG_CACHE_HOME`: caches of everything else."""
    scratch: str = ""
    """`TMPDIR`: fast local disk of the node."""
    export: dict[str, str] = {}
    """Further variables of the job's environment."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each as `--option=value`."""

    @field_validator("time", "memory", "partition", "cpu_partition", "account", mode="before")
    @classmethod
    def _text_in_quotes(cls, value: Any) -> Any:
        """YAML reads 4:00:00 as 14400, and there is no telling it from a number."""
        if isinstance(value, (int, float)):
            raise ValueError(f'expected text in quotes, as in "4:00:00" or "64G", found the number {value}')
        return value

    @field_validator("time")
    @classmethod
    def _time_as_slurm_writes_it(cls, value: str) -> str:
        if not _TIME.fullmatch(value):
            raise ValueError(
                f"expected minutes, H:MM:SS or D-HH:MM:SS, as in 90, 4:00:00 or 2-00:00:00, found '{value}'"
            )
        return value

    @field_validator("memory")
    @classmethod
    def _memory_as_slurm_writes_it(cls, value: str) -> str:
        if value and not _MEMORY.fullmatch(value):
            raise ValueError(f"expected a number and K, M, G or T, as in 64G or 512M, found '{value}'")
        return value

    @field_validator("sbatch")
    @classmethod
    def _options_of_sbatch(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((option for option in value if not option.startswith("-")), None)
        if wrong is not None:
            raise ValueError(f"expected options of sbatch, as in --mail-type=END, found '{wrong}'")
        return value

    @property
    def ranks(self) -> int:
        """Processes on each node."""
        return self.ranks_per_node or max(1, self.gpus)


def site_file() -> Path:
    """What `JOULELAB_SLURM` names, else slurm.yaml in the user's configuration folder, which need not exist."""
    named = os.environ.get("JOULELAB_SLURM")
    if named and not Path(named).exists():
        raise NotFoundError(f"JOULELAB_SLURM names {named}, and there is no such file", "docs/slurm.md has one")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "joulelab" / "slurm.yaml"


def job_settings(preset: str | None, asked: Mapping[str, Any], site: Path | None = None) -> JobSettings:
    """The merged settings; `asked` are the options of the command line that were given."""
    path = site or site_file()
    written = _read_site(path)
    presets = {**PRESETS, **written["presets"]}
    if preset is not None and preset not in presets:
        raise lookup.unknown("preset", preset, presets, f"{path} can define more")
    layers = [written["defaults"]]
    if preset is not None:
        layers += [PRESETS.get(preset, {}), written["presets"].get(preset, {})]
    merged: dict[str, Any] = {}
    for layer in (*layers, asked):
        merged = merge(merged, layer)
    return _checked(merged, path)


def _read_site(path: Path) -> dict[str, dict[str, Any]]:
    content = read_mapping(path) if path.exists() else {}
    unknown = set(content) - {"defaults", "presets"}
    if unknown:
        raise ConfigError(f"{path}: unknown key '{min(unknown)}'", "a site file has `defaults` and `presets`")
    found = {"defaults": content.get("defaults") or {}, "presets": content.get("presets") or {}}
    for name, section in found.items():
        _require_section(path, name, section)
    for name, section in found["presets"].items():
        _require_section(path, f"presets.{name}", section)
    return found


def _require_section(path: Path, name: str, section: Any) -> None:
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: {name} holds '{section}', expected `key: value` lines", "docs/slurm.md shows a file"
        )


def _checked(settings: Mapping[str, Any], path: Path) -> JobSettings:
    try:
        return JobSettings.model_validate_json(json.dumps(settings, default=str))
    except ValidationError as error:
        hint = f"`joulelab submit --help` lists the options; {path} may set them too; nothing was submitted"
        raise ConfigError(explain(error, JobSettings).message, hint) from None
