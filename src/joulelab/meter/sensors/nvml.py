"""NVIDIA GPUs through NVML: the energy counter as anchor, the driver's 20 ms power buffer as the shape between anchors.

The counter (millijoules since the driver was loaded) and the power fields refresh about every 100 ms, and reading the
counter takes milliseconds: it is read about once a second, less often where that would take more than `COUNTER_SHARE`
of one core, and only in the recorder, not in the measured program. `power_watts` is the instant field where the card
has it; the plain power call is a 1 s average on recent generations and is used, labeled, where nothing else exists.

A feature that a card lacks is detected once, at the start, and is part of its description. A call that worked then and
fails now is a fault: the rest of the reading is kept and a `gap` line names what is missing. Without power there is no
reading at all.

The driver's buffer holds about 2.4 s of samples and stamps them by the wall clock, which people and NTP set; energy is
computed on the monotonic clock. A line therefore carries a pair of both clocks read together, and three guards keep a
clock step from putting power where it was not:

- When the wall clock has moved against the monotonic one since the last reading, nothing is taken until the buffer can
  hold only stamps of the new clock (`BUFFER_S`); then all of it is, so about a tenth of a second of shape is lost.
- A sample in the future, before the last one taken, or more than `OLDEST_S` back is dropped.
- A driver that keeps stamping by the old clock yields only such samples: each reading then has a `gap` line, and after
  `GIVE_UP_S` the buffer is unusable and the card is polled like one without a buffer.

The counter's joules are not affected by this: only their shape between two readings is coarser meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import Any, Literal

from joulelab.clock import NS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import OPEN_LIMIT_S, Device, Line, SensorUnavailable, within
from joulelab.meter.sensors.gpu_selection import Listed, Selection, select_gpus
from joulelab.meter.sensors.processes import OtherProcesses
from joulelab.units import BYTES_PER_MB

BUFFER_S = 2.5
OLDEST_S = 10.0
# After this long without a usable sample the trace names the reason, because the interval of the energy is wider there.
SILENT_S = 1.0
GIVE_UP_S = 15.0
# NTP slews by at most 0.5 ms per second and reading the two clocks takes microseconds: more than this is a step.
STEP_S = 0.02
# Stamps are made by another clock reading than ours; this much "future" is only that.
FUTURE_S = 0.02
US = 1_000_000

Samples = list[tuple[int, int]]
"""Pairs of epoch microseconds and milliwatts."""


class SampleBuffer:
    """One card's buffer. `fetch(last_us)` asks the driver for what is newer than a stamp."""

    def __init__(self, fetch: Callable[[int], Samples], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._fetch = fetch
        self._wall_ns = wall_ns
        self._last_us = 0
        self._last_mono_us = 0
        self._wall_minus_mono_us: int | None = None
        self._wait_until_us = 0
        self._useless_since_us: int | None = None
        self._kept_mono_us: int | None = None
        self.problem = ""
        """Why there was no usable sample for `SILENT_S`; empty if there was one."""
        self.usable = True

    def read(self) -> Line:
        """The fields of one `samples` line, or none where there is nothing new."""
        wall_us, mono_ns = self._clocks()
        mono_us = mono_ns // 1000
        self._notice_step(wall_us - mono_us, mono_us)
        if mono_us < self._wait_until_us:
            return {}
        fetched = sorted(self._fetch(self._last_us))
        samples = [row for row in fetched if self._plausible(row[0] - wall_us + mono_us, mono_us)]
        self._judge(bool(fetched), bool(samples), mono_us)
        if not samples:
            return {}
        self._last_us = samples[-1][0]
        self._last_mono_us = self._last_us - wall_us + mono_us
        return {
            "wall_us": wall_us,
            "wall_us_mono_ns": mono_ns,
            "sample_us": [stamp for stamp, _ in samples],
            "sample_mw": [power for _, power in samples],
        }

    def _clocks(self) -> tuple[int, int]:
        before = time.monotonic_ns()
        wall_us = self._wall_ns() // 1000
        # The middle of two monotonic readings around the wall clock's: the pair is exact to half
        # the time between them, below a microsecond unless the process is preempted in between.
        return wall_us, (before + time.monotonic_ns()) // 2

    def _notice_step(self, wall_minus_mono_us: int, mono_us: int) -> None:
        before, self._wall_minus_mono_us = self._wall_minus_mono_us, wall_minus_mono_us
        if before is None or abs(wall_minus_mono_us - before) < STEP_S * US:
            return
        self._wait_until_us = mono_us + int(BUFFER_S * US)
        self._last_us = 0  # a stamp of the old clock; set back by an hour, the driver would find nothing newer for one

    def _plausible(self, sample_mono_us: int, mono_us: int) -> bool:
        oldest_us = max(self._last_mono_us, mono_us - int(OLDEST_S * US))
        return oldest_us < sample_mono_us <= mono_us + FUTURE_S * US

    def _judge(self, fetched: bool, kept: bool, mono_us: int) -> None:
        if kept or not fetched:
            self._useless_since_us = None
        elif self._useless_since_us is None:
            self._useless_since_us = mono_us
        elif mono_us - self._useless_since_us > GIVE_UP_S * US:
            self.usable = False
        if kept or self._kept_mono_us is None:
            self._kept_mono_us = mono_us
        silent = mono_us - self._kept_mono_us > SILENT_S * US
        cause = "timestamped by a clock other than this machine's" if fetched else "no new ones from the driver"
        self.problem = f"20 ms samples: {cause}" if silent else ""


def samples_from(nvml: Any, handle: Any) -> Callable[[int], Samples]:
    """The driver's call, with an empty list where the driver reports that nothing is newer."""

    def fetch(last_us: int) -> Samples:
        try:
            # The driver returns the samples newer than `last_us`, stamped in microseconds of the
            # wall clock, in milliwatts: on an H200 up to 119 of them, 20 ms apart.
            _, rows = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_TOTAL_POWER_SAMPLES, last_us)
        except nvml.NVMLError as error:
            # The buffer has nothing newer, which is not an error here.
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_FOUND:
                return []
            raise
        return [(int(row.timeStamp), int(row.sampleValue.uiVal)) for row in rows]

    return fetch


# NVML_FI_DEV_POWER_INSTANT of nvml.h; by number, because older versions of the Python binding do
# not name it. nvmlDeviceGetPowerUsage is the average over 1 s on Ampere (except GA100) and later.
POWER_INSTANT_FIELD = 186
# Measured on an H200 (docs/results.md): power fields 99.9 ms, energy counter 102.6 ms. Reading
# faster returns the same value.
REFRESH_S = 0.1
AVERAGE_WINDOW_S = 1.0
# NVIDIA states +-5 % for its board sensors, and wall-meter comparisons agree (A100 -5.5 %, RTX 4090 -4.3 %).
GAIN_ERROR_REL = 0.05
# Polled power alone misses more than the board's scale: measured on an H200 against its counter, square waves of 20 ms
# to 2 s polled at 10 Hz err by up to 25 % in the instant field (25 ms seen of every 100) and up to 8 % in the average.
INSTANT_ONLY_GAIN_ERROR_REL = 0.25
AVERAGE_ONLY_GAIN_ERROR_REL = 0.10
# The buffer's mean was 0.4 to 1 % above the counter's on every steady load that was tried.
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
    def __init__(self, nvml: Any, handle: Any, listed: Listed, selected_by: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self.listed = listed
        self.device = f"gpu:{listed.uuid}"
        self._selected_by = selected_by
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
            "chosen_by": self._selected_by,
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
        """Limitations that are printed with this card's energy."""
        reasons = []
        if self.listed.mig_uuids:
            reasons.append("a MIG slice has no meter: this is the energy of the whole card and all its slices")
        if not self.has_counter:
            reasons.append("the card has no energy counter: its power is integrated")
        if self._only_averages():
            reasons.append("its power is an average over about 1 s, so short loads are smeared")
        elif not self.has_counter and not self.has_buffer:
            reasons.append("its power covers about 25 ms of every 100 ms, so loads in phase with it are misread")
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
            text = "the driver's 20 ms samples are timestamped by a clock that was changed; power is polled instead"
            return [{"kind": "warning", "device": self.device, "text": text}]
        if self._buffer.problem:
            return [self._gap(self._buffer.problem)]
        return [{"kind": "samples", "device": self.device, **fields}] if fields else []

    def processes(self) -> list[tuple[int, int | None]] | None:
        """Process ids and the bytes each holds on the card; None if the driver does not list them."""
        found = self._probe(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        return None if found is None else [(int(entry.pid), entry.usedGpuMemory) for entry in found]

    def _gap(self, reason: str) -> Line:
        return {"kind": "gap", "device": self.device, "reason": reason}

    def _probe(self, call: Callable[[], Any]) -> Any:
        """For values that a card may lack and a reading can do without."""
        try:
            return call()
        except self._nvml.NVMLError:
            return None


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


COUNTER_SHARE = 0.01
# Without the 20 ms buffer the instant field is polled at its refresh period instead.
POLL_WITHOUT_BUFFER_S = 0.1
# Readings this much further apart than configured drift through every phase of the 100 ms refresh, which reveals how
# old each value is (alignment.py); in step with the refresh, their age would be one unknown number.
OUT_OF_STEP = 1.027
# The buffer holds 2.4 s: read less often, it would leave gaps.
BUFFER_HOLDS_S = 2.0
# After a restart of the driver, NVML has to be initialized again.
REVIVE_EVERY_S = 5.0


class NoCardAnswers(Exception):
    """None of the GPUs could be read; if only some fail, each of those has a `gap` line instead."""


class NvmlSensor:
    def __init__(self, config: EnergyConfig, pid: int, nvml: Any = None) -> None:
        self.interval_s = OUT_OF_STEP * config.sample_interval_s
        self._counter_interval_s = OUT_OF_STEP * config.counter_interval_s
        self._wanted = config.gpus
        self._nvml = nvml
        self._cards: list[Card] = []
        self._other_processes = OtherProcesses(pid, config.process_ids)
        self._counter_due_ns = 0
        self._revive_due_ns = 0
        self._remark = ""

    def open(self) -> list[Device]:
        nvml = self._nvml = self._nvml or _binding()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SensorUnavailable(
                "gpu",
                f"NVML does not answer ({error})",
                "install the NVIDIA driver if this machine has a GPU; `nvidia-smi` must work first",
            ) from None
        handles = permitted_cards(nvml)
        selection = select_gpus(list(handles), self._wanted, os.environ)
        if not selection.cards or (selection.unknown and self._wanted != "auto"):
            nvml.nvmlShutdown()
            raise SensorUnavailable("gpu", *_why_none(selection, list(handles)))
        self._remark = _remark(selection)
        self._cards = [Card(nvml, handles[listed], listed, selection.source) for listed in selection.cards]
        self._slow_counters()
        return [card.describe(self._counter_interval_s) for card in self._cards]

    def requested_gpus(self) -> list[str]:
        """UUIDs of the cards this job was given, for another recorder to read; leaves nothing open."""
        nvml = self._nvml or _binding()
        nvml.nvmlInit()
        try:
            return [card.uuid for card in select_gpus(list(permitted_cards(nvml)), self._wanted, os.environ).cards]
        finally:
            nvml.nvmlShutdown()

    def add_gpus(self, uuids: Sequence[str]) -> tuple[list[Device], list[Line]]:
        """Also read these cards of other ranks on this host; a warning line for each that cannot be opened."""
        known = {card.listed.uuid for card in self._cards}
        if known.issuperset(uuids):
            return [], []
        handles = permitted_cards(self._nvml)
        by_uuid = {listed.uuid: listed for listed in handles}
        added, lines = [], []
        for uuid in uuids:
            if uuid not in by_uuid:
                text = f"another rank's GPU {uuid} cannot be opened from here: its energy is not in this trace"
                lines.append({"kind": "warning", "device": uuid, "text": text})
            elif uuid not in known:
                added.append(Card(self._nvml, handles[by_uuid[uuid]], by_uuid[uuid], "another rank of this host"))
        self._cards += added
        self._slow_counters()
        return [card.describe(self._counter_interval_s) for card in added], lines

    def read(self) -> list[Line]:
        now_ns = time.monotonic_ns()
        # rather a little early than one whole reading late
        return self._read(now_ns + self.interval_s * NS / 4 >= self._counter_due_ns)

    def read_edge(self) -> list[Line]:
        """The first or the last reading of a recording: with the counters, whether they are due or not."""
        return self._read(with_counter=True)

    def read_quick(self) -> list[Line]:
        """Inside the measured program, where a reading must take microseconds: neither counter nor samples."""
        return [line for card in self._cards for line in card.read_quick()]

    def _read(self, with_counter: bool) -> list[Line]:
        if with_counter:
            self._counter_due_ns = time.monotonic_ns() + int(self._counter_interval_s * NS)
        lines: list[Line] = []
        for card in self._cards:
            reading = card.read(with_counter)
            lines += reading
            if with_counter and reading[0]["kind"] == "gpu":
                lines += self._watch_processes(card, reading[0])
        if self._remark:
            lines.append({"kind": "warning", "device": self._cards[0].device, "text": self._remark})
            self._remark = ""
        self._set_interval()
        if not any(line["kind"] == "gpu" for line in lines):
            self._revive()
            raise NoCardAnswers("; ".join(f"{line['device']}: {line['reason']}" for line in lines if "reason" in line))
        return lines

    def _watch_processes(self, card: Card, line: Line) -> list[Line]:
        """Add the processes to the card's line; warnings about other processes are returned."""
        processes = card.processes()
        if processes is None:
            return []
        line["gpu_processes"] = [
            {"pid": pid, "gpu_memory_used_MB": None if used is None else round(used / BYTES_PER_MB, 1)}
            for pid, used in processes
        ]
        return self._other_processes.warn(card.device, [pid for pid, _ in processes])

    def _set_interval(self) -> None:
        longest_s = BUFFER_HOLDS_S if all(card.has_buffer for card in self._cards) else POLL_WITHOUT_BUFFER_S
        self.interval_s = min(self.interval_s, longest_s)

    def _slow_counters(self) -> None:
        """However many cards there are, reading their counters takes at most `COUNTER_SHARE` of a core."""
        # A counter call takes 2.5 to 3.2 ms on an H200 and up to 17 ms, a thousand times a power
        # call: eight cards read once a second would use 2.5 % of a core.
        calls_s = sum(card.counter_call_s or 0.0 for card in self._cards)
        self._counter_interval_s = max(self._counter_interval_s, round(calls_s / COUNTER_SHARE, 3))
        self._set_interval()

    def _revive(self) -> None:
        """Every card failed: initialize NVML again and look the cards up by UUID, but not at every reading."""
        now_ns = time.monotonic_ns()
        if now_ns < self._revive_due_ns:
            return
        self._revive_due_ns = now_ns + int(REVIVE_EVERY_S * NS)
        nvml = self._nvml
        self.close()
        try:
            nvml.nvmlInit()
            for card in self._cards:
                card.replace_handle(nvml.nvmlDeviceGetHandleByUUID(card.listed.uuid))
        except nvml.NVMLError:
            return

    def close(self) -> None:
        if self._nvml is not None and self._cards:
            with suppress(self._nvml.NVMLError):  # not open, as after a driver that did not come back at once
                self._nvml.nvmlShutdown()


@contextmanager
def opened_cards(nvml: Any = None) -> Iterator[tuple[Any, dict[Listed, Any]]]:
    """NVML, and the cards that this process may open with their handles; no cards if the driver does not answer."""
    nvml = nvml or _binding()
    try:
        within(OPEN_LIMIT_S, nvml.nvmlInit)
    except (nvml.NVMLError, TimeoutError):
        yield nvml, {}
        return
    try:
        yield nvml, permitted_cards(nvml)
    finally:
        nvml.nvmlShutdown()


def compute_pids(nvml: Any, handle: Any) -> set[int]:
    """Processes that compute on a card; empty if the driver does not list them."""
    return {int(one.pid) for one in _ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()}


def permitted_cards(nvml: Any) -> dict[Listed, Any]:
    """The cards this process may open, with their handles; a cgroup hides the others or forbids them one by one."""
    handles: dict[Listed, Any] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError:
            continue
        minor = _ask(nvml, lambda handle=handle: nvml.nvmlDeviceGetMinorNumber(handle))
        handles[Listed(index, text_of(uuid), text_of(name), minor, _slices(nvml, handle))] = handle
    return handles


def _slices(nvml: Any, handle: Any) -> tuple[str, ...]:
    mode = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mode is None or mode[0] == 0:
        return ()
    places = _ask(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    slices = [_ask(nvml, lambda i=i: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)) for i in range(places)]
    uuids = [_ask(nvml, lambda part=part: nvml.nvmlDeviceGetUUID(part)) for part in slices if part is not None]
    return tuple(text_of(uuid) for uuid in uuids if uuid is not None)


def _ask(nvml: Any, call: Any) -> Any:
    try:
        return call()
    except nvml.NVMLError:
        return None


def _why_none(selection: Selection, listed: list[Listed]) -> tuple[str, str]:
    there = ", ".join(f"{card.index} ({card.uuid})" for card in listed) or "none"
    if selection.unknown:
        names = ", ".join(selection.unknown)
        return (
            f"no GPU matches '{names}' ({selection.source}); NVML shows {there}",
            "name GPUs by UUID: `nvidia-smi -L`",
        )
    if listed:
        return f"no GPU is visible to this job ({selection.source})", "see CUDA_VISIBLE_DEVICES and energy.gpus"
    return (
        "NVML shows no GPU that this process may open",
        "request one from the scheduler; `nvidia-smi -L` must list it",
    )


def _remark(selection: Selection) -> str:
    if not selection.unknown:
        return selection.remark
    hidden = f"'{selection.unknown[0]}' in {selection.source} matches no GPU: CUDA hides it and all listed after it"
    return "; ".join(filter(None, [hidden, selection.remark]))


_INSTALL = ("pip install nvidia-ml-py", (("pip install nvidia-ml-py", "install the Python bindings of NVML"),))


def _binding() -> Any:
    try:
        import pynvml
    except ImportError:
        raise SensorUnavailable("gpu", "the package nvidia-ml-py is missing", *_INSTALL) from None
    return pynvml
