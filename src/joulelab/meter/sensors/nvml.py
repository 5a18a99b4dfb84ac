"""NVIDIA GPUs through NVML: the energy counter as anchor, the driver's 20 ms power buffer as the shape between anchors.

The counter (millijoules since the driver was loaded) and the power fields refresh about every 100 ms, and reading the
counter takes milliseconds: it is read about once a second, less often where that would take more than `COUNTER_SHARE`
of one core, and always in this recorder, never in the measured program. `power_watts` is the instant field where the
card has it; the plain power call is a 1 s average on recent generations and is used, labelled, where nothing else is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from joulelab.clock import NS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.meter.sensors.gpu_processes import Strangers
from joulelab.meter.sensors.gpu_selection import Listed, Selection, select_gpus
from joulelab.meter.sensors.nvml_card import Card, text_of
from joulelab.units import BYTES_PER_MB

COUNTER_SHARE = 0.01
# Without the 20 ms buffer the instant field is polled at its refresh period instead.
POLL_WITHOUT_BUFFER_S = 0.1
# Readings this much further apart than asked for meet the 100 ms refresh at every phase in turn, which shows how old
# each value is (alignment.py); in step with it, their age would be one unknown number.
OUT_OF_STEP = 1.027
# The buffer goes back 2.4 s: read less often, it would leave holes.
BUFFER_HOLDS_S = 2.0
# A driver that was restarted answers only to those who ask anew.
REVIVE_EVERY_S = 5.0


class NoCardAnswers(Exception):
    """Not one of the GPUs could be read; where only some fail, each of those has a `gap` line instead."""


class NvmlSensor:
    def __init__(self, config: EnergyConfig, pid: int, nvml: Any = None) -> None:
        self.interval_s = OUT_OF_STEP * config.sample_interval_s
        self._counter_interval_s = OUT_OF_STEP * config.counter_interval_s
        self._wanted = config.gpus
        self._nvml = nvml
        self._cards: list[Card] = []
        self._strangers = Strangers(pid)
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
                "install the NVIDIA driver where there is a GPU; `nvidia-smi` must work first",
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

    def wishes(self) -> list[str]:
        """The cards this job was given, for another recorder to read; opens nothing that stays open."""
        nvml = self._nvml or _binding()
        nvml.nvmlInit()
        try:
            return [card.uuid for card in select_gpus(list(permitted_cards(nvml)), self._wanted, os.environ).cards]
        finally:
            nvml.nvmlShutdown()

    def adopt(self, uuids: Sequence[str]) -> tuple[list[Device], list[Line]]:
        """Read these cards too, which other ranks of this host were given; a line for each that cannot be opened."""
        known = {card.listed.uuid for card in self._cards}
        if known.issuperset(uuids):
            return [], []
        handles = permitted_cards(self._nvml)
        by_uuid = {listed.uuid: listed for listed in handles}
        added, lines = [], []
        for uuid in uuids:
            if uuid not in by_uuid:
                text = f"another rank's GPU {uuid} cannot be opened from here: its joules are not in this trace"
                lines.append({"kind": "warning", "device": uuid, "text": text})
            elif uuid not in known:
                added.append(Card(self._nvml, handles[by_uuid[uuid]], by_uuid[uuid], "another rank of this host"))
        self._cards += added
        self._slow_counters()
        return [card.describe(self._counter_interval_s) for card in added], lines

    def read(self) -> list[Line]:
        now_ns = time.monotonic_ns()
        # due a little early rather than one whole reading late
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
        """Puts the processes into the card's line; the warnings about strangers are further lines."""
        processes = card.processes()
        if processes is None:
            return []
        line["gpu_processes"] = [
            {"pid": pid, "gpu_memory_used_MB": None if used is None else round(used / BYTES_PER_MB, 1)}
            for pid, used in processes
        ]
        return self._strangers.warn(card.device, [pid for pid, _ in processes])

    def _set_interval(self) -> None:
        longest_s = BUFFER_HOLDS_S if all(card.has_buffer for card in self._cards) else POLL_WITHOUT_BUFFER_S
        self.interval_s = min(self.interval_s, longest_s)

    def _slow_counters(self) -> None:
        """As many cards as there are, their counters take no more than their share of a core."""
        calls_s = sum(card.counter_call_s or 0.0 for card in self._cards)
        self._counter_interval_s = max(self._counter_interval_s, round(calls_s / COUNTER_SHARE, 3))
        self._set_interval()

    def _revive(self) -> None:
        """Every card failed: ask the driver anew, by UUID, but not at every reading."""
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
        return f"no GPU fits '{names}' ({selection.source}); NVML shows {there}", "name GPUs by UUID: `nvidia-smi -L`"
    if listed:
        return f"no GPU is visible to this job ({selection.source})", "see CUDA_VISIBLE_DEVICES and energy.gpus"
    return "NVML shows no GPU that this process may open", "ask the scheduler for one; `nvidia-smi -L` must list it"


def _remark(selection: Selection) -> str:
    if not selection.unknown:
        return selection.remark
    hidden = f"'{selection.unknown[0]}' in {selection.source} fits no GPU: CUDA hides it and all that follow"
    return "; ".join(filter(None, [hidden, selection.remark]))


def _binding() -> Any:
    try:
        import pynvml
    except ImportError:
        raise SensorUnavailable("gpu", "the package nvidia-ml-py is missing", "pip install nvidia-ml-py") from None
    return pynvml
