"""A power cap on the job's GPUs, only on request and if permitted, and removed afterwards.

A cap changes what is measured, so it is never a default: `energy.power_cap_w` requests it, the driver may refuse (it
usually requires root), and the limit in force is in the header of every trace.

The original limits are written to the run directory before the cap is set. The program restores them at its end; if
it is killed, the recorder does; if both are killed, the next process that works on the run does.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.errors import ConfigError, SensorMissing
from joulelab.meter.sensors.gpu_selection import select_gpus
from joulelab.meter.sensors.nvml import permitted_cards
from joulelab.meter.trace import LineFile, read_lines

LOCK_LIMIT_S = 30.0


@contextmanager
def power_cap(cap_w: float, gpus: str, saved: Path, nvml: Any = None) -> Iterator[None]:
    """Cap the job's GPUs inside the block and restore their limits at its end, also after an error.

    `gpus` selects them as `energy.gpus` does; `saved` is the file that keeps the original limits while the cap is set.
    """
    nvml = nvml or _pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SensorMissing(f"energy.power_cap_w: NVML does not answer ({error})", "remove the cap") from None
    try:
        cap_mw = round(1000 * cap_w)
        handles = _job_handles(nvml, gpus)
        before_mw = {uuid: nvml.nvmlDeviceGetPowerManagementLimit(handle) for uuid, handle in handles.items()}
        # Saved and synced before the first limit changes: a kill between the two would leave a
        # capped card that no one knows of.
        _save(saved, cap_mw, before_mw)
        try:
            for handle in handles.values():
                _set(nvml, handle, cap_mw)
            yield
        finally:
            restore_power_limits(saved, nvml)
    finally:
        nvml.nvmlShutdown()


def restore_power_limits(saved: Path, nvml: Any = None) -> list[str]:
    """Restore the limits that were saved before a cap was set; a sentence per GPU about what was done.

    The file is removed once nothing is left to do. A limit that was changed since is left alone, and so is
    one from before a reboot, which resets the limits.
    """
    with _alone_with(saved) as alone:
        if not alone:
            return []
        found = list(read_lines(saved))
        # Power limits do not survive a reboot or a reload of the driver.
        if not found or found[-1]["boot_id"] != clock.boot_id():
            saved.unlink()
            return []
        messages, complete = _restore(found[-1]["cap_mw"], found[-1]["limits_mw"], nvml or _pynvml())
        if complete:
            saved.unlink()
    return messages


def _restore(cap_mw: int, limits_mw: dict[str, int], nvml: Any) -> tuple[list[str], bool]:
    """Messages, and whether nothing is left to do."""
    messages, complete = [], True
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [f"The power limits of {', '.join(limits_mw)} were not restored: NVML does not answer ({error})"], False
    for uuid, limit_mw in limits_mw.items():
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            # Only if the cap is still in force: an administrator may have set another limit in the
            # meantime.
            if nvml.nvmlDeviceGetPowerManagementLimit(handle) == cap_mw != limit_mw:
                nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
                messages.append(
                    f"The power limit of {uuid} was restored from {cap_mw / 1000:g} to {limit_mw / 1000:g} W"
                )
        except nvml.NVMLError as error:
            by_hand = f"sudo nvidia-smi -i {uuid} -pl {limit_mw // 1000}"
            messages.append(f"The power limit of {uuid} was not restored ({error}); restore it with: {by_hand}")
            complete = False
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return messages, complete


@contextmanager
def _alone_with(saved: Path) -> Iterator[bool]:
    """Whether the file exists; it is locked inside the block. A recorder and the next process may restore at the same
    time, and the later of them must not undo the cap that the next process sets after that."""
    try:
        descriptor = os.open(saved, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        _lock(descriptor)
        yield saved.exists()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Wait for the lock as long as restoring takes; a holder whose driver hangs must not hang this process too."""
    end_s = time.monotonic() + LOCK_LIMIT_S
    while time.monotonic() < end_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return


def _save(saved: Path, cap_mw: int, limits_mw: dict[str, int]) -> None:
    file = LineFile(saved)
    file.append({"boot_id": clock.boot_id(), "cap_mw": cap_mw, "limits_mw": limits_mw}, sync=True)
    file.close()


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _job_handles(nvml: Any, gpus: str) -> dict[str, Any]:
    """By UUID."""
    handles = permitted_cards(nvml)
    chosen = select_gpus(list(handles), gpus, os.environ).cards
    if not chosen:
        raise SensorMissing("energy.power_cap_w: no GPU was given to this job", "remove the cap, or check energy.gpus")
    return {card.uuid: handles[card] for card in chosen}


def _set(nvml: Any, handle: Any, cap_mw: int) -> None:
    low_mw, high_mw = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    if not low_mw <= cap_mw <= high_mw:
        raise ConfigError(
            f"energy.power_cap_w: {cap_mw / 1000:g} W is outside the range of the card",
            f"give {low_mw / 1000:g} to {high_mw / 1000:g} W",
        )
    try:
        nvml.nvmlDeviceSetPowerManagementLimit(handle, cap_mw)
    except nvml.NVMLError as error:
        raise ConfigError(
            f"energy.power_cap_w: the driver refuses to set the cap ({error})",
            f"run `sudo nvidia-smi -pl {cap_mw // 1000}`, or ask the administrator of the node",
        ) from None
