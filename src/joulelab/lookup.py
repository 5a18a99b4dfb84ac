"""Names that users write, and where the code behind each one lives.

A table maps a name to "module:object" and imports the module only when the name is asked for. That keeps start-up fast,
lets a room on the left start one on the right, and makes a new pipeline, sensor or verb one file and one line here.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from joulelab.errors import NotFoundError


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None where nothing comes close."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown(kind: str, name: str, names: Iterable[str], hint: str = "") -> NotFoundError:
    known = sorted(names)
    guess = nearest(name, known)
    listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    suggestion = f"did you mean '{guess}'?" if guess else f"known: {listed or 'none'}"
    return NotFoundError(f"unknown {kind} '{name}'; {suggestion}", hint)


class Table:
    """Name -> "module:object", resolved when asked for."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def require(self, name: str) -> None:
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries)

    def resolve(self, name: str) -> Any:
        self.require(name)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)


SENSORS = Table(
    "sensor",
    {
        "nvml": "joulelab.meter.sensors.nvml:NvmlSensor",
        "rapl": "joulelab.meter.sensors.rapl:RaplSensor",
        "host": "joulelab.meter.sensors.host:HostSensor",
        "cpu-estimate": "joulelab.meter.sensors.cpu_estimate:CpuEstimateSensor",
        "amd": "joulelab.meter.sensors.amd:AmdSensor",
        "apple": "joulelab.meter.sensors.apple:AppleSensor",
        "replay": "joulelab.meter.sensors.replay:ReplaySensor",
    },
)

# A pipeline has two entries: its settings, which a login node can check without torch, and its stages.
PIPELINE_SPECS = Table(
    "pipeline",
    {
        "classify": "joulelab.distill.classify_config:ClassifySpec",
        "measure": "joulelab.runs.measure_spec:MeasureSpec",
    },
)
PIPELINES = Table(
    "pipeline",
    {
        "classify": "joulelab.distill.classify:run_classify",
        "measure": "joulelab.runs.measure_spec:refuse",
    },
)

# What runs beside the meter when asked for, as a context manager around the run.
BESIDE = Table("tool beside the meter", {"codecarbon": "joulelab.trackers.codecarbon:beside"})

TRAINER_STATS = Table(
    "trainer stats",
    {
        "no-op": "joulelab.train.stats.hooks:NoOpStats",
        "simple": "joulelab.train.stats.simple:SimpleStats",
    },
)

# The models of the zoo; what each entry says needs no framework to be read.
ZOO = Table(
    "model",
    {
        "gpt2": "joulelab.zoo.models.gpt2:MODEL",
    },
)
