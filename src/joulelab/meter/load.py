"""Starting a load by name and learning when it began and ended, on the clock everybody shares."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from joulelab.errors import JoulelabError

LOAD_MODULE = "joulelab.train.burn"
_GRACE_S = 60.0


@dataclass
class Load:
    """What the load says of itself; `end_ns` is known once the block is left."""

    what: str
    begin_ns: int
    end_ns: int | None = None
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def burning(seconds: float, gpu_uuid: str | None = None) -> Iterator[Load]:
    """The load runs for about `seconds` from the block's begin, on the given card; the block's end waits for it."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu_uuid} if gpu_uuid else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", LOAD_MODULE, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        first = _line(process)
        if "load" not in first:
            _, errors = process.communicate(timeout=_GRACE_S)
            raise JoulelabError(
                f"the load did not start: {errors.strip().splitlines()[-1] if errors.strip() else 'it said nothing'}",
                f"try it alone: {sys.executable} -m {LOAD_MODULE} 1",
            )
        load = Load(str(first["load"]), int(first["begin_ns"]))
        yield load
        out, errors = process.communicate(timeout=seconds + _GRACE_S)
        load.end_ns = _ended(out)
        if process.returncode != 0:
            load.problems.append(f"the load ended with {process.returncode}: {errors.strip()[-300:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return _parsed(process.stdout.readline())


def _ended(output: str) -> int | None:
    ends = [fields["end_ns"] for text in output.splitlines() if "end_ns" in (fields := _parsed(text))]
    return int(ends[-1]) if ends else None


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
