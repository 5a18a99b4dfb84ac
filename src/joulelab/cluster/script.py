"""The job script as pure text: a person can read it, change it and submit it again with sbatch."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from joulelab.cluster.settings import Environment, JobSettings


@dataclass(frozen=True)
class JobScript:
    """One job, as far as its text is concerned."""

    name: str
    about: str
    """What it does, in a sentence."""
    command: str
    """One line of shell; it replaces the shell, so that the scheduler's signals reach the program."""
    log_folder: Path
    store: Path
    needs_gpu: bool = True
    array: int | None = None
    """Number of tasks, where it is an array."""
    run: Path | None = None
    """What `$run` stands for: a run's folder, or with an array a file with the folder of each task."""
    one_node: bool = False
    """Jobs that prepare or report need no more, whatever the others have."""


def script_text(job: JobScript, settings: JobSettings, python: str = sys.executable) -> str:
    lines = [
        "#!/bin/bash",
        f"# {job.about}",
        "# Written by `joulelab submit`; it can be read, changed and submitted again with sbatch.",
        *(f"#SBATCH {option}" for option in sbatch_options(job, settings)),
        "",
        "set -euo pipefail",
        *activation_lines(settings.environment, python),
        *export_lines(job, settings),
    ]
    if job.run is not None:
        place = shlex.quote(str(job.run))
        lines.append(f"run={place}" if job.array is None else f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {place})')
    return "\n".join([*lines, "", f"exec {job.command}", ""])


def sbatch_options(job: JobScript, settings: JobSettings) -> list[str]:
    nodes = 1 if job.one_node else settings.nodes
    gpus = settings.gpus if job.needs_gpu else 0
    partition = settings.partition if job.needs_gpu else settings.cpu_partition or settings.partition
    task = "%A_%a" if job.array is not None else "%j"
    options = {
        "job-name": job.name,
        "output": str(job.log_folder / f"{job.name}.{task}.log"),
        "partition": partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint if job.needs_gpu else "",
        "time": settings.time,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(settings.cpus or ""),
        "gpus-per-node": f"{settings.gpu_type}:{gpus}".lstrip(":") if gpus else "",
        "mem": settings.memory,
        "array": _array(job.array, settings.max_at_once),
        # B: only this script is told, and it tells the run; the shell has become our program by then
        "signal": f"B:TERM@{settings.warn_s}",
    }
    written = [f"--{name}={value}" for name, value in options.items() if value]
    flags = ["--exclusive"] * settings.exclusive + ["--requeue" if settings.requeue else "--no-requeue"]
    return [*written, *flags, "--open-mode=append", "--kill-on-invalid-dep=yes", *settings.sbatch]


def _array(tasks: int | None, at_once: int | None) -> str:
    if tasks is None:
        return ""
    return f"0-{tasks - 1}" + (f"%{at_once}" if at_once else "")


def activation_lines(environment: Environment, python: str = sys.executable) -> list[str]:
    """What makes `python` the right one; the same lines are tried on this machine before anything is submitted."""
    lines = []
    # conda's and modules' scripts read variables that are not set
    if environment.modules:
        lines.append(f"set +u; module load {' '.join(map(shlex.quote, environment.modules))}; set -u")
    if environment.conda:
        lines.append(
            f'set +u; eval "$(conda shell.bash hook)"; conda activate {shlex.quote(environment.conda)}; set -u'
        )
    if environment.venv:
        lines.append(f"source {shlex.quote(str(Path(environment.venv) / 'bin' / 'activate'))}")
    if not environment.conda and not environment.venv:
        lines.append(f"export PATH={shlex.quote(str(Path(python).parent))}:$PATH")
    return [*lines, *environment.setup]


def export_lines(job: JobScript, settings: JobSettings) -> list[str]:
    named = {
        "JOULELAB_RUNS": str(job.store),
        "HF_HOME": settings.hf_home,
        "XDG_CACHE_HOME": settings.cache_dir,
        "TMPDIR": settings.scratch,
        **settings.export,
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in named.items() if value]
    # Python would quietly use another place where there is no such folder
    return [*lines, 'mkdir -p "$TMPDIR"'] if settings.scratch else lines
