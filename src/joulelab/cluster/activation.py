"""The job's environment, tried here before anything waits in a queue for hours and then fails in its first second."""

from __future__ import annotations

import json
import subprocess
import sys

from joulelab import __version__
from joulelab.cluster.script import activation_lines
from joulelab.cluster.settings import Environment
from joulelab.errors import UsageError

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
