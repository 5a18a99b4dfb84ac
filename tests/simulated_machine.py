"""A machine whose time passes only when a test says so, at 100 W: what a stage used is known to the last joule."""

import json

import pytest

from joulelab import clock
from joulelab.clock import NS
from joulelab.meter import marks, session
from joulelab.meter.trace import header
from joulelab.runs import attempt

POWER_W = 100.0
_EVERY_NS = NS // 10


class SimulatedMachine:
    def __init__(self):
        self.now_ns = 1_000 * NS
        self.meters = []

    def work(self, seconds):
        """Let time pass; whoever runs meanwhile is billed 100 J a second."""
        end_ns = self.now_ns + round(seconds * NS)
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + _EVERY_NS)
            for meter in self.meters:
                meter.read(self.now_ns)

    def stamp(self):
        return clock.Stamp(self.now_ns, 1.7e9 + self.now_ns / NS)


@pytest.fixture
def machine(monkeypatch):
    found = SimulatedMachine()

    class SimulatedMeter(session.Meter):
        """Marks as the real one writes them; the readings come from the machine instead of a recorder."""

        def start(self):
            self._trace_path.parent.mkdir(parents=True, exist_ok=True)
            self._events.append(header(), sync=True)
            self.started_ns = self.begin_ns = found.now_ns
            device = {"device": "gpu:GPU-sim", "component": "gpu", "name": "simulated", "counted": True, "wrap_j": None}
            device |= {"refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {}}
            first = {**header(), "mono_ns": found.now_ns, "interval_s": 0.1, "wall_minus_mono_s": 1.7e9}
            self._write({**first, "devices": [device], "missing": []})
            self.read(found.now_ns)
            found.meters.append(self)

        def read(self, now_ns):
            line = {"kind": "gpu", "mono_ns": now_ns, "device": "gpu:GPU-sim", "power_watts": POWER_W}
            self._write({**line, "energy_counter_j": POWER_W * (now_ns - self.begin_ns) / NS})

        def stop(self):
            found.meters.remove(self)
            self._write({"kind": "end", "mono_ns": found.now_ns, "reason": "stop"})
            self._events.close()

        def _write(self, line):
            with self._trace_path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    monkeypatch.setattr(clock, "now", found.stamp)
    monkeypatch.setattr(marks, "monotonic_ns", lambda: found.now_ns)
    monkeypatch.setattr(attempt, "Meter", SimulatedMeter)
    return found
