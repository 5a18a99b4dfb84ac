"""NVIDIA GPUs through NVML: the energy counter as anchor, the driver's 20 ms power buffer as the shape between anchors.

The counter (millijoules since the driver was loaded) and the power fields refresh about every 100 ms, and reading the
counter takes milliseconds, which is why this runs in the recorder and never in the measured program. `power_watts` is
the instant field (186) where the card has it: the plain power call is a 1 s average on recent generations.
"""

from __future__ import annotations

import os
import time
from typing import Any

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.units import BYTES_PER_MB

POWER_INSTANT_FIELD = 186
REFRESH_S = 0.1
# NVIDIA states +-5 % for its board sensors, and wall-meter comparisons agree (A100 -5.5 %, RTX 4090 -4.3 %).
GAIN_ERROR_REL = 0.05
# Without the 20 ms buffer the instant field is polled at its refresh period instead.
POLL_WITHOUT_BUFFER_S = 0.1


class NvmlSensor:
    def __init__(self, config: EnergyConfig, pid: int, nvml: Any = None) -> None:
        self.interval_s = config.sample_interval_s
        self._wanted = config.gpus
        self._nvml = nvml
        self._cards: list[_Card] = []

    def open(self) -> list[Device]:
        nvml = self._nvml = self._nvml or _binding()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SensorUnavailable(
                "gpu",
                f"NVML does not answer ({error})",
                "install the NVIDIA driver where there is a GPU; `nvidia-smi` must work first",
            ) from None
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cards = [_Card(nvml, handle, index) for index, handle in enumerate(handles)]
        self._cards = select_cards(cards, self._wanted, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not self._cards:
            raise SensorUnavailable("gpu", "no GPU is visible to this job", "see CUDA_VISIBLE_DEVICES and energy.gpus")
        if not all(card.has_buffer for card in self._cards):
            self.interval_s = min(self.interval_s, POLL_WITHOUT_BUFFER_S)
        return [card.describe() for card in self._cards]

    def read(self) -> list[Line]:
        return [line for card in self._cards for line in card.read()]

    def close(self) -> None:
        if self._nvml is not None and self._cards:
            self._nvml.nvmlShutdown()


def _binding() -> Any:
    try:
        import pynvml
    except ImportError:
        raise SensorUnavailable("gpu", "the package nvidia-ml-py is missing", "pip install nvidia-ml-py") from None
    return pynvml


def select_cards(cards: list[_Card], wanted: str, visible: str | None) -> list[_Card]:
    """The cards this job was given. NVML numbers all cards of the node; users and schedulers name a subset of them."""
    if wanted == "none" or (wanted == "auto" and visible is not None and visible.strip() in ("", "-1")):
        return []
    names = visible if wanted == "auto" else wanted
    if names is None:
        return cards
    return [card for name in names.split(",") for card in cards if card.answers_to(name.strip())]


class _Card:
    """One GPU: what it can tell, and one reading of it."""

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self.index = index
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.name = _text(nvml.nvmlDeviceGetName(handle))
        self._last_sample_us = 0
        self.has_counter = self._try(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) is not None
        self.has_buffer = bool(self._new_samples())
        self.has_instant = self._instant_power_w() is not None

    def answers_to(self, name: str) -> bool:
        return name == str(self.index) or (name.startswith("GPU-") and self.uuid.startswith(name))

    def describe(self) -> Device:
        limit_mw = self._try(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        return Device(
            device=f"gpu:{self.uuid}",
            component="gpu",
            name=self.name,
            refresh_s=REFRESH_S,
            gain_error_rel=GAIN_ERROR_REL,
            facts={
                "gpu_index": self.index,
                "driver": _text(self._nvml.nvmlSystemGetDriverVersion()),
                "has_counter": self.has_counter,
                "has_20ms_buffer": self.has_buffer,
                "power_field": "instant" if self.has_instant else "average",
                "power_limit_w": None if limit_mw is None else limit_mw / 1000,
            },
        )

    def read(self) -> list[Line]:
        nvml, handle = self._nvml, self._handle
        identity = {"device": f"gpu:{self.uuid}", "gpu_uuid": self.uuid, "gpu_index": self.index, "gpu_name": self.name}
        power_w = self._instant_power_w()
        if power_w is None:
            power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        use = nvml.nvmlDeviceGetUtilizationRates(handle)
        line: Line = {
            "kind": "gpu",
            **identity,
            "power_watts": power_w,
            "memory_used_MB": round(memory.used / BYTES_PER_MB, 1),
            "gpu_utilization_percent": use.gpu,
            "memory_utilization_percent": use.memory,
            "temperature_C": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_MHz": self._try(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "throttle_reasons": self._try(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        }
        if self.has_counter:
            line |= self._counter()
        lines = [line]
        if self.has_buffer and (samples := self._new_samples()):
            # stamps are epoch microseconds; this pair of clocks lets the reader place them on the monotonic clock
            lines.append(
                {
                    "kind": "samples",
                    "device": identity["device"],
                    "wall_us": time.time_ns() // 1000,
                    "wall_us_mono_ns": time.monotonic_ns(),
                    "sample_us": [stamp for stamp, _ in samples],
                    "sample_mw": [power for _, power in samples],
                }
            )
        return lines

    def _counter(self) -> Line:
        before = time.monotonic_ns()
        energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return {"energy_counter_j": energy_mj / 1000, "counter_mono_ns": (before + time.monotonic_ns()) // 2}

    def _instant_power_w(self) -> float | None:
        values = self._try(lambda: self._nvml.nvmlDeviceGetFieldValues(self._handle, [POWER_INSTANT_FIELD]))
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return float(values[0].value.uiVal) / 1000

    def _new_samples(self) -> list[tuple[int, int]]:
        answer = self._try(
            lambda: self._nvml.nvmlDeviceGetSamples(
                self._handle, self._nvml.NVML_TOTAL_POWER_SAMPLES, self._last_sample_us
            )
        )
        if answer is None:
            return []
        fresh = [(int(s.timeStamp), int(s.sampleValue.uiVal)) for s in answer[1] if s.timeStamp > self._last_sample_us]
        fresh.sort()
        if fresh:
            self._last_sample_us = fresh[-1][0]
        return fresh

    def _try(self, call: Any) -> Any:
        """A card that lacks a feature says so with an error; that is an answer, not a failure."""
        try:
            return call()
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
