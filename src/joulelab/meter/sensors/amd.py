"""AMD GPUs through amdsmi, where ROCm's package is installed: its energy accumulator and the socket's power.

The accumulator counts in steps of `counter_resolution` microjoules (15.3 on MI200 and MI300). Where a card has none, as
in virtual machines, its power is integrated. Of a card with two dies only the first reports power; the other is left
out, because its joules are in the first one's. Tested with a fake module only: not yet confirmed on an AMD card.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from typing import Any

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.meter.sensors.gpu_selection import Listed, select_gpus

UJ = 1e-6
# AMD states no accuracy; NVIDIA's boards are within 5 %, so this is twice that.
GAIN_ERROR_REL = 0.1
REFRESH_S = 0.1
NO_VALUE = 0xFFFFFFFF
# As ROCm does, the first of these that is set hides the other cards.
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def present() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("amdsmi") is not None


class AmdSensor:
    def __init__(self, config: EnergyConfig, pid: int, amdsmi: Any = None) -> None:
        self.interval_s = min(config.sample_interval_s, REFRESH_S)
        self._wanted = config.gpus
        self._amdsmi = amdsmi
        self._cards: list[_AmdCard] = []

    def open(self) -> list[Device]:
        amdsmi = self._amdsmi = self._amdsmi or _binding()
        try:
            amdsmi.amdsmi_init()
            handles = amdsmi.amdsmi_get_processor_handles()
        except amdsmi.AmdSmiException as error:
            raise SensorUnavailable(
                "gpu", f"amdsmi does not answer ({error})", "`amd-smi list` must work first"
            ) from None
        cards = [_AmdCard(amdsmi, handle, index) for index, handle in enumerate(handles)]
        by_listed = {card.listed: card for card in cards}
        visible = next((os.environ[name] for name in VISIBILITY if name in os.environ), None)
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        chosen = [by_listed[listed] for listed in select_gpus(list(by_listed), self._wanted, environ).cards]
        self._cards = [card for card in chosen if card.has_power]
        if not self._cards:
            raise SensorUnavailable("gpu", "amdsmi shows no GPU of this job that reports power", "")
        if all(card.has_counter for card in self._cards):
            self.interval_s = max(self.interval_s, 0.5)
        return [card.describe() for card in self._cards]

    def read(self) -> list[Line]:
        return [card.read() for card in self._cards]

    def close(self) -> None:
        if self._cards:
            self._amdsmi.amdsmi_shut_down()


class _AmdCard:
    def __init__(self, amdsmi: Any, handle: Any, index: int) -> None:
        self._amdsmi = amdsmi
        self._handle = handle
        uuid = str(amdsmi.amdsmi_get_gpu_device_uuid(handle))
        name = self._probe(lambda: amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]) or "AMD GPU"
        self.listed = Listed(index, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", name)
        self.has_counter = bool(self._probe(self._energy_j))
        self.has_power = bool(self._probe(self._power_w))

    def describe(self) -> Device:
        facts: dict[str, Any] = {"gpu_index": self.listed.index, "has_counter": self.has_counter}
        if not self.has_counter:
            facts["reason"] = "the card has no energy counter: its power is integrated"
        return Device(
            device=f"gpu:{self.listed.uuid}",
            component="gpu",
            name=self.listed.name,
            refresh_s=REFRESH_S,
            gain_error_rel=GAIN_ERROR_REL,
            facts=facts,
        )

    def read(self) -> Line:
        power_w = self._power_w()
        if power_w is None:
            raise ValueError(f"{self.listed.uuid} reports no power")
        amdsmi, handle = self._amdsmi, self._handle
        use = self._probe(lambda: amdsmi.amdsmi_get_gpu_activity(handle)) or {}
        memory = self._probe(lambda: amdsmi.amdsmi_get_gpu_vram_usage(handle)) or {}
        line: Line = {
            "kind": "gpu",
            "device": f"gpu:{self.listed.uuid}",
            "gpu_uuid": self.listed.uuid,
            "gpu_index": self.listed.index,
            "gpu_name": self.listed.name,
            "power_watts": power_w,
            "memory_used_MB": memory.get("vram_used"),
            "memory_total_MB": memory.get("vram_total"),
            "gpu_utilization_percent": use.get("gfx_activity"),
            "memory_utilization_percent": use.get("umc_activity"),
        }
        if self.has_counter:
            before = time.monotonic_ns()
            line["energy_counter_j"] = self._energy_j()
            line["counter_mono_ns"] = (before + time.monotonic_ns()) // 2
        return line

    def _energy_j(self) -> float:
        counter = self._amdsmi.amdsmi_get_energy_count(self._handle)
        steps = counter.get("energy_accumulator", counter.get("power"))  # its name before ROCm 6.1
        return float(steps) * float(counter["counter_resolution"]) * UJ

    def _power_w(self) -> float | None:
        """The current power on MI300 and later, the average on older cards; amdsmi marks the other one as absent."""
        info = self._amdsmi.amdsmi_get_power_info(self._handle)
        for name in ("current_socket_power", "average_socket_power", "socket_power"):
            value = info.get(name)
            if isinstance(value, int | float) and 0 < value < NO_VALUE:
                return float(value)
        return None

    def _probe(self, call: Any) -> Any:
        try:
            return call()
        except (self._amdsmi.AmdSmiException, KeyError):
            return None


def _binding() -> Any:
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError) as error:  # its loader reads ROCm's path and library
        raise SensorUnavailable(
            "gpu", f"AMD's amdsmi cannot be loaded ({error})", "pip install amdsmi, in the version of your ROCm"
        ) from None
