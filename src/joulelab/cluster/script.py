"""The text of a job script, which can be read, edited and resubmitted with sbatch; a check of its environment."""

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
    """What determines the text of a job script."""

    name: str
    about: str
    """Description of the job, one sentence."""
    command: str
    """One shell command; it is exec'ed, so that the scheduler's signals reach the program."""
    log_folder: Path
    store: Path
    needs_gpu: bool = True
    array: int | None = None
    """Number of tasks of an array job."""
    run: Path | None = None
    """Value of `$run`: a run directory; for an array a file with the run directory of each task."""
    one_node: bool = False
    """Use a single node, for jobs that prepare data or write a report."""
    measured: bool = True
    """False for a report, which needs no separate node."""
    restartable: bool = True
    """Whether the job can be requeued; a measured program would start again from the beginning."""


def script_text(job: JobScript, settings: JobSettings, python: str = sys.executable) -> str:
    lines = [
        "#!/bin/bash",
        f"# {job.about}",
        "# Written by `joulelab submit`. You can edit it and submit it again with sbatch.",
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
    limits = settings if job.needs_gpu else settings.cpu_jobs
    partition = settings.partition if job.needs_gpu else settings.cpu_partition or settings.partition
    task = "%A_%a" if job.array is not None else "%j"
    options = {
        "job-name": job.name,
        "output": f"{str(job.log_folder).replace('%', '%%')}/{job.name}.{task}.log",
        "partition": partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint if job.needs_gpu else "",
        "time": limits.time,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(limits.cpus or ""),
        "gpus-per-node": f"{settings.gpu_type}:{gpus}".lstrip(":") if gpus else "",
        "mem": limits.memory,
        "array": _array(job.array, settings.max_at_once),
        # B: signal only this script; the shell has been replaced by our program, which forwards it
        "signal": f"B:TERM@{settings.warn_s}",
    }
    # sbatch splits these lines at spaces and reads quotes as a shell does
    written = [shlex.quote(f"--{name}={value}") for name, value in options.items() if value]
    flags = ["--exclusive"] if settings.exclusive and job.measured else []
    flags.append("--requeue" if settings.requeue and job.restartable else "--no-requeue")
    return [*written, *flags, "--open-mode=append", "--kill-on-invalid-dep=yes", *settings.sbatch]


def _array(tasks: int | None, at_once: int | None) -> str:
    if tasks is None:
        return ""
    return f"0-{tasks - 1}" + (f"%{at_once}" if at_once else "")


def activation_lines(environment: Environment, python: str = sys.executable) -> list[str]:
    """Shell lines that activate the environment; `check_activation` runs them before submission."""
    lines = []
    # scripts of conda and modules read unset variables
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
    # Python silently falls back to another directory if TMPDIR does not exist
    return [*lines, 'mkdir -p "$TMPDIR"'] if settings.scratch else lines


# find_spec finds torch without importing it, which takes seconds and may fail on a login node.
_PROBE = (
    "import importlib.util, json, sys, joulelab; "
    "print(json.dumps([joulelab.__version__, sys.executable, importlib.util.find_spec('torch') is not None]))"
)
TIMEOUT_S = 120.0
_SKIP = "--no-check submits without this check"


def check_activation(environment: Environment, needs_torch: bool = True, python: str = sys.executable) -> str:
    """Path of the Python that the job will use; UsageError if it is missing or lacks joulelab or torch."""
    lines = ["set -euo pipefail", *activation_lines(environment, python), f'python -c "{_PROBE}"']
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"the job's environment did not answer within {TIMEOUT_S:.0f} s", _SKIP) from None
    if done.returncode != 0:
        output = "\n".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"
        raise UsageError(
            f"the job's environment cannot be activated or has no joulelab: {output}",
            f"set --venv, --conda or --module, or the site file; {_SKIP}",
        )
    version, found, has_torch = json.loads(done.stdout.strip().splitlines()[-1])
    if version != __version__:
        raise UsageError(
            f"the job's environment has joulelab {version} ({found}), but this is {__version__}",
            f"submit from the environment of the job; {_SKIP}",
        )
    if needs_torch and not has_torch:
        raise UsageError(
            f"the job's environment ({found}) has no torch, which training needs",
            f"install joulelab with its extra train there, or set --venv, --conda or --module; {_SKIP}",
        )
    return str(found)
