"""The job script as pure text: a person can read it, change it and submit it again with sbatch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from joulelab import __version__
from joulelab.cluster.job_settings import Environment, JobSettings
from joulelab.errors import UsageError


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


# The job's environment, tried here before anything waits in a queue for hours and then fails in its first second.


# find_spec looks for torch without importing it: seconds, and on a login node perhaps not even possible.
_PROBE = (
    "import importlib.util, json, sys, joulelab; "
    "print(json.dumps([joulelab.__version__, sys.executable, importlib.util.find_spec('torch') is not None]))"
)
PATIENCE_S = 120.0
_SKIP = "--no-check submits without this check"


def check_activation(environment: Environment, needs_torch: bool = True, python: str = sys.executable) -> str:
    """The Python that a job will use; UsageError where there is none, or one without what the job needs."""
    lines = ["set -euo pipefail", *activation_lines(environment, python), f'python -c "{_PROBE}"']
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"the job's environment did not answer within {PATIENCE_S:.0f} s", _SKIP) from None
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"
        raise UsageError(
            f"the job's environment cannot be activated or has no joulelab: {said}",
            f"name one that works with --venv, --conda or --module, or in the site file; {_SKIP}",
        )
    version, found, has_torch = json.loads(done.stdout.strip().splitlines()[-1])
    if version != __version__:
        raise UsageError(
            f"the job's environment has joulelab {version} ({found}), this one is {__version__}",
            f"submit with the one that runs the job; {_SKIP}",
        )
    if needs_torch and not has_torch:
        raise UsageError(
            f"the job's environment ({found}) has no torch, which training needs",
            f"pip install joulelab[train] there, or name another with --venv, --conda or --module; {_SKIP}",
        )
    return str(found)
