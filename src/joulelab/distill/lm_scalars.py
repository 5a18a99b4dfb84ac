"""A run's metrics as TensorBoard scalars, written from metrics.jsonl after the training, which they so cannot slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from joulelab.meter.trace import read_lines

_NOT_SCALARS = ("step", "attempt", "mono_ns")


def write_scalars(metrics: Path, folder: Path, writer: Any = None) -> int:
    """How many were written; `stage/name` by step, the latest attempt's where a step was done twice."""
    if writer is None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder))
    latest: dict[tuple[str, int], float] = {}
    for line in read_lines(metrics):
        for name, value in line.items():
            if isinstance(value, int | float) and name not in _NOT_SCALARS:
                latest[f"{line.get('stage', 'run')}/{name}", int(line["step"])] = float(value)
    for (name, step), value in latest.items():
        writer.add_scalar(name, value, step)
    writer.close()
    return len(latest)
