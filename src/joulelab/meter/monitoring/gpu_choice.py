"""Whether `--gpu` can be served, asked before anything is recorded, in the exit codes operators' scripts know.

Which card a name means is the sensor's knowledge: a number counts the cards the job was given (`CUDA_VISIBLE_DEVICES`,
Slurm's variables), a UUID means the same to everyone.
"""

from __future__ import annotations

import os
from typing import Any

from joulelab.errors import DependencyMissing, SensorMissing, UsageError
from joulelab.meter.sensors.gpu_selection import Selection, select_gpus
from joulelab.meter.sensors.nvml import permitted_cards


class BadGpu(UsageError):
    """There are GPUs, but not the one that was asked for: exit code 4."""

    exit_code = 4


def choose(wanted: str) -> Selection:
    """The cards that `auto`, or names separated by commas, mean here."""
    nvml = _answering_nvml()
    try:
        listed = list(permitted_cards(nvml))
    except nvml.NVMLError as error:
        raise SensorMissing(f"the GPUs of this node cannot be listed ({error})", "look at `nvidia-smi`") from None
    finally:
        nvml.nvmlShutdown()
    given = select_gpus(listed, "auto", os.environ)
    asked = select_gpus(listed, wanted, os.environ)
    if asked.cards and not asked.unknown:
        return asked
    if not listed or (not given.cards and not given.unknown):
        reason = "NVML shows none" if not listed else f"this job was given none ({given.source})"
        raise SensorMissing(f"no GPU can be read: {reason}", "ask the scheduler for one, or leave --gpu out")
    names = ", ".join(asked.unknown or given.unknown) or wanted
    there = ", ".join(f"{position} ({card.uuid})" for position, card in enumerate(given.cards)) or "none"
    raise BadGpu(f"there is no GPU '{names}' here; {given.source}: {there}", "`auto` takes all GPUs of this job")


def _answering_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise DependencyMissing("the package nvidia-ml-py is missing", "pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SensorMissing(
            f"no GPU can be read: NVML does not answer ({error})",
            "install the NVIDIA driver where there is a GPU (`nvidia-smi` must work first), or leave --gpu out",
        ) from None
    return pynvml
