"""One NVIDIA card: what it can tell, what it says at one moment, and what it fails to say.

A feature the card lacks is found out once, at the start, and is part of its description. A call that worked then and
fails now is a fault: the rest of the reading is kept and a `gap` line names what is missing. Without power there is no
reading at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, Literal

from joulelab.meter.sensors import Device, Line
from joulelab.meter.sensors.gpu_selection import Listed
from joulelab.meter.sensors.sample_buffer import SampleBuffer, samples_from
from joulelab.units import BYTES_PER_MB

POWER_INSTANT_FIELD = 186
REFRESH_S = 0.1
AVERAGE_WINDOW_S = 1.0
# NVIDIA states +-5 % for its board sensors, and wall-meter comparisons agree (A100 -5.5 %, RTX 4090 -4.3 %).
GAIN_ERROR_REL = 0.05
# Polled power alone misses more than the board's scale: measured on an H200 against its counter, square waves of 20 ms
# to 2 s polled at 10 Hz err by up to 25 % in the instant field (25 ms seen of every 100) and up to 8 % in the average.
INSTANT_ONLY_GAIN_ERROR_REL = 0.25
AVERAGE_ONLY_GAIN_ERROR_REL = 0.10
# The buffer's mean stood 0.4 to 1 % above the counter's on every steady load tried.
SAMPLE_BIAS_REL = 0.01
COUNTER_TRIALS = 5

PowerField = Literal["instant", "average"]
# NVML's codes for a field that card or driver does not know: invalid argument, not supported, function not found.
_FIELD_UNKNOWN = (2, 3, 13)

POWER_LIMIT = "power limit"
# Bits of nvmlDeviceGetCurrentClocksEventReasons: nvidia-smi's name, and what it means where it is throttling. Idle,
# clocks set by the user, sync boost and display clocks are states and have no second name.
THROTTLE_REASONS = {
    0x001: ("gpu_idle", ""),
    0x002: ("applications_clocks_setting", ""),
    0x004: ("sw_power_cap", POWER_LIMIT),
    0x008: ("hw_slowdown", "hardware slowdown"),
    0x010: ("sync_boost", ""),
    0x020: ("sw_thermal_slowdown", "software thermal slowdown"),
    0x040: ("hw_thermal_slowdown", "hardware thermal slowdown"),
    0x080: ("hw_power_brake_slowdown", "power brake"),
    0x100: ("display_clock_setting", ""),
}


def throttle_names(mask: int) -> list[str]:
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return [THROTTLE_REASONS.get(1 << bit, (f"bit_{bit}", ""))[0] for bit in bits]


def power_field(nvml: Any, handle: Any) -> PowerField:
    """The field that power is read from, decided once per card: `average` only where the card has no instant field.

    A card whose instant field fails for another reason has it, and its readings are missing until it answers again.
    """
    try:
        power_w(nvml, handle, "instant")
    except nvml.NVMLError as error:
        return "average" if error.value in _FIELD_UNKNOWN else "instant"
    return "instant"


def power_w(nvml: Any, handle: Any, field: PowerField) -> float:
    """Power by this field and no other: after a step the two differ by hundreds of watts. Raises NVMLError."""
    if field == "average":
        return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [POWER_INSTANT_FIELD])
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return float(value.value.uiVal) / 1000


class Card:
    def __init__(self, nvml: Any, handle: Any, listed: Listed, asked_as: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self.listed = listed
        self.device = f"gpu:{listed.uuid}"
        self._asked_as = asked_as
        self._buffer = SampleBuffer(self._fetch_samples)
        self.counter_call_s = self._time_counter()
        self.has_counter = self.counter_call_s is not None
        self.has_buffer = self._probe(self._buffer.read) not in (None, {})
        self.power_field = power_field(nvml, handle)

    def replace_handle(self, handle: Any) -> None:
        """After a driver restart the old handle is dead; the card is the same."""
        self._handle = handle

    def describe(self, counter_interval_s: float) -> Device:
        limit_mw = self._probe(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        facts: dict[str, Any] = {
            "gpu_index": self.listed.index,
            "driver": text_of(self._nvml.nvmlSystemGetDriverVersion()),
            "chosen_by": self._asked_as,
            "has_counter": self.has_counter,
            "has_20ms_buffer": self.has_buffer,
            "power_field": self.power_field,
            "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        }
        if self.counter_call_s is not None:
            facts |= {"counter_call_s": round(self.counter_call_s, 6), "counter_interval_s": counter_interval_s}
        if self.has_buffer:
            facts["sample_bias_rel"] = SAMPLE_BIAS_REL
        if self.listed.mig_uuids:
            facts |= {"shared": True, "mig_devices": list(self.listed.mig_uuids)}
        reasons = self._reasons()
        if reasons:
            facts["reason"] = "; ".join(reasons)
        return Device(
            device=self.device,
            component="gpu",
            name=self.listed.name,
            refresh_s=AVERAGE_WINDOW_S if self._only_averages() else REFRESH_S,
            gain_error_rel=self._gain_error_rel(),
            facts=facts,
        )

    def _only_averages(self) -> bool:
        return self.power_field == "average" and not self.has_counter and not self.has_buffer

    def _gain_error_rel(self) -> float:
        if self.has_counter or self.has_buffer:
            return GAIN_ERROR_REL
        return AVERAGE_ONLY_GAIN_ERROR_REL if self._only_averages() else INSTANT_ONLY_GAIN_ERROR_REL

    def _reasons(self) -> list[str]:
        """What a reader of this card's joules must know beside the number."""
        reasons = []
        if self.listed.mig_uuids:
            reasons.append("a MIG slice has no meter: these are the whole card's joules, shared with its other slices")
        if not self.has_counter:
            reasons.append("the card has no energy counter: its power is integrated")
        if self._only_averages():
            reasons.append("its power is an average over about 1 s, so short loads are smeared")
        elif not self.has_counter and not self.has_buffer:
            reasons.append("its power covers about 25 ms of every 100, and loads in step with that are misread")
        return reasons

    def read(self, with_counter: bool) -> list[Line]:
        line, problem = self._use()
        if problem is not None:
            return [problem]
        lines = [line | self._clocks()]
        if with_counter and self.has_counter:
            try:
                lines[0] |= self._counter()
            except self._nvml.NVMLError as error:
                lines.append(self._gap(f"energy counter: {error}"))
        if self.has_buffer:
            lines += self._sample_lines()
        return lines

    def read_quick(self) -> list[Line]:
        """Only calls that take microseconds; without power the other values are still there, next to the gap."""
        line, problem = self._use()
        return [line] if problem is None else [line, problem]

    def _use(self) -> tuple[Line, Line | None]:
        """Power, memory, utilization and temperature; the second line is the gap where power cannot be read."""
        nvml, handle = self._nvml, self._handle
        watts, problem = None, None
        try:
            watts = power_w(nvml, handle, self.power_field)
        except nvml.NVMLError as error:
            problem = self._gap(f"NVML: {error}")
        memory = self._probe(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = self._probe(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        line = {
            "kind": "gpu",
            "device": self.device,
            "gpu_uuid": self.listed.uuid,
            "gpu_index": self.listed.index,
            "gpu_name": self.listed.name,
            "power_watts": watts,
            "memory_used_MB": memory and round(memory.used / BYTES_PER_MB, 1),
            "memory_total_MB": memory and round(memory.total / BYTES_PER_MB, 1),
            "gpu_utilization_percent": use and use.gpu,
            "memory_utilization_percent": use and use.memory,
            "temperature_C": self._probe(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }
        return line, problem

    def _clocks(self) -> Line:
        """Clocks, and what limits them."""
        nvml, handle = self._nvml, self._handle
        limit_mw = self._probe(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        throttle = self._probe(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return {
            "sm_clock_MHz": self._probe(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_MHz": self._probe(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_limit_w": None if limit_mw is None else limit_mw / 1000,
            "throttle_reasons": throttle,
            "throttle_names": None if throttle is None else throttle_names(throttle),
        }

    def _counter(self) -> Line:
        """The value is of some moment within the call, which takes milliseconds, or seconds where the driver hangs."""
        before = time.monotonic_ns()
        energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        after = time.monotonic_ns()
        return {
            "energy_counter_j": energy_mj / 1000,
            "counter_mono_ns": (before + after) // 2,
            "counter_read_s": round((after - before) / 1e9, 6),
        }

    def _time_counter(self) -> float | None:
        """Mean seconds of one counter call; None where the card has no counter."""
        seconds = []
        for _ in range(COUNTER_TRIALS):
            before = time.monotonic_ns()
            if self._probe(self._counter) is None:
                return None
            seconds.append((time.monotonic_ns() - before) / 1e9)
        return fmean(seconds)

    def _fetch_samples(self, last_us: int) -> list[tuple[int, int]]:
        return samples_from(self._nvml, self._handle)(last_us)

    def _sample_lines(self) -> list[Line]:
        try:
            fields = self._buffer.read()
        except self._nvml.NVMLError as error:
            return [self._gap(f"20 ms samples: {error}")]
        if not self._buffer.usable:
            self.has_buffer = False
            text = "the driver's 20 ms samples are stamped by a clock that was set since; power is polled instead"
            return [{"kind": "warning", "device": self.device, "text": text}]
        return [{"kind": "samples", "device": self.device, **fields}] if fields else []

    def processes(self) -> list[tuple[int, int | None]] | None:
        """Process ids and the bytes each holds on the card; None where the driver does not tell."""
        found = self._probe(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        return None if found is None else [(int(entry.pid), entry.usedGpuMemory) for entry in found]

    def _gap(self, reason: str) -> Line:
        return {"kind": "gap", "device": self.device, "reason": reason}

    def _probe(self, call: Callable[[], Any]) -> Any:
        """For what a card may lack and a reading can do without."""
        try:
            return call()
        except self._nvml.NVMLError:
            return None


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
