"""The test's side of the simulated NVML driver: build it, say what its GPUs draw and how they fail, and know the truth.

    sim = NvmlSim(library, folder / "control")
    sim.gpus = [SimGpu(wave=square(period_s=0.1, duty=0.5, low_w=80, high_w=700))]
    sim.write()                                  # again at any time, also while a child process is being served
    sim.true_energy_j(t0_ns, t1_ns)              # on CLOCK_MONOTONIC, exact
    subprocess.run(..., env={**os.environ, **sim.env()})

nvml_sim.c holds the card's behavior; a waveform is written down once and integrated here and there independently.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_sim.c")
LIBRARY = "libnvidia-ml.so.1"
CONTROL_VARIABLE = "JOULELAB_NVML_SIM"
NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN = 3, 4, 15, 999


def build(folder: Path) -> Path:
    """The compiled library; FileNotFoundError where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc) to build the simulated NVML driver with")
    library = folder / LIBRARY
    flags = ["-std=gnu11", "-O1", "-Wall", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE, "-lm"], check=True)
    return library


@dataclass(frozen=True)
class Square:
    """High for the first `duty` of each period."""

    period_s: float
    duty: float
    low_w: float
    high_w: float

    def lines(self) -> list[str]:
        return [f"square {self.period_s} {self.duty} {self.low_w} {self.high_w}"]

    def energy_j(self, t: float) -> float:
        whole, rest = divmod(t, self.period_s)
        high_s = self.period_s * self.duty
        mean_w = self.duty * self.high_w + (1 - self.duty) * self.low_w
        return whole * self.period_s * mean_w + min(rest, high_s) * self.high_w + max(0, rest - high_s) * self.low_w


@dataclass(frozen=True)
class Points:
    """Straight lines between points of (seconds, watts); held before the first and after the last."""

    points: tuple[tuple[float, float], ...]

    def lines(self) -> list[str]:
        return [f"point {t!r} {watts!r}" for t, watts in self.points]

    def energy_j(self, t: float) -> float:
        times = [point[0] for point in self.points]
        if t <= times[0]:
            return self.points[0][1] * (t - times[0])
        upto = bisect_right(times, t)
        path = [*self.points[:upto], (t, self._power_w(t, upto))]
        return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(path))

    def _power_w(self, t: float, upto: int) -> float:
        if upto == len(self.points):
            return self.points[-1][1]
        (t0, w0), (t1, w1) = self.points[upto - 1], self.points[upto]
        return w0 + (w1 - w0) * (t - t0) / (t1 - t0)


def constant(power_w: float) -> Points:
    return Points(((0.0, power_w),))


def ramp(from_w: float, to_w: float, length_s: float) -> Points:
    return Points(((0.0, from_w), (length_s, to_w)))


def square(period_s: float, duty: float, low_w: float, high_w: float) -> Square:
    return Square(period_s, duty, low_w, high_w)


@dataclass
class SimGpu:
    uuid: str = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
    wave: Square | Points = field(default_factory=lambda: constant(100.0))
    errors: dict[str, int] = field(default_factory=dict)
    """Call (all, handle, counter, samples, instant, fields, power, memory, processes, ...) -> NVML error code."""
    processes: dict[int, int] = field(default_factory=dict)
    """Process id -> bytes on the card."""
    mig_uuids: tuple[str, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    """Any number in nvml_sim.c's struct by its name there: phase_s, counter_us, limit_w, throttle, stamp_shift_s."""

    def lines(self) -> list[str]:
        return [
            f"gpu {self.uuid}",
            *(f"{name} {value}" for name, value in self.settings.items()),
            *(f"error {call} {code}" for call, code in self.errors.items()),
            *(f"process {pid} {used}" for pid, used in self.processes.items()),
            *(f"mig {uuid}" for uuid in self.mig_uuids),
            *(["mig_mode 1"] if self.mig_uuids else []),
            *self.wave.lines(),
        ]


class NvmlSim:
    def __init__(self, library: Path, control: Path) -> None:
        self.built = library
        self.control = control
        self.gpus = [SimGpu()]
        self.init_error = 0
        self.origin_ns = time.monotonic_ns()

    def write(self) -> None:
        lines = [f"origin_ns {self.origin_ns}", f"init_error {self.init_error}"]
        lines += [line for gpu in self.gpus for line in gpu.lines()]
        fresh = self.control.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.control)

    def env(self) -> dict[str, str]:
        return {CONTROL_VARIABLE: str(self.control), "LD_LIBRARY_PATH": str(self.built.parent)}

    def limit_w(self, gpu: int = 0) -> float:
        """The power limit that is set now, whichever process set it."""
        file = self.control.with_name(f"{self.control.name}.limit-{self.gpus[gpu].uuid}")
        return int(file.read_text()) / 1000 if file.exists() else 700.0

    def true_energy_j(self, start_ns: int, end_ns: int, gpu: int = 0) -> float:
        wave = self.gpus[gpu].wave
        return wave.energy_j((end_ns - self.origin_ns) / 1e9) - wave.energy_j((start_ns - self.origin_ns) / 1e9)
