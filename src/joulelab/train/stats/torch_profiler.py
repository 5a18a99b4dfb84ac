"""A look into a few steps with torch's own profiler: a trace for a viewer, and the operations that took longest.

Profiling slows the profiled steps, often by half and more, and a trace of many steps grows to gigabytes. So a few steps
early in the training are recorded, and then the profiler is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from joulelab.train.stats.hooks import TrackerContext, TrainerStats, unused_path

TOP = 12


class TorchProfilerStats(TrainerStats):
    def __init__(self, wait: int = 2, warmup: int = 2, active: int = 4) -> None:
        """Steps left alone, steps to warm the profiler up, steps recorded: over before `energy` takes steps apart."""
        self._wait, self._warmup, self._active = wait, warmup, active
        self._profiler: profile | None = None
        self._trace: Path | None = None
        self._table = ""

    def attach(self, bench: TrackerContext) -> None:
        self._bench = bench
        self._on_gpu = bench.device.type == "cuda"

    def start_train(self) -> None:
        self._left = self._wait + self._warmup + self._active
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=self._wait, warmup=self._warmup, active=self._active, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profiler.start()

    def log_step(self, step: int) -> None:
        if self._profiler is None:
            return
        self._left -= 1
        if self._left == 0:
            self._end()
        else:
            self._profiler.step()

    def stop_train(self) -> None:
        self._end()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _keep(self, profiler: Any) -> None:
        by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        self._table = profiler.key_averages().table(sort_by=by, row_limit=TOP, max_name_column_width=48)
        if self._bench.folder is not None:
            self._trace = unused_path(self._bench.folder / "torch-profiler", "trace", ".json.gz")
            profiler.export_chrome_trace(str(self._trace))

    def log_stats(self) -> str:
        if not self._table:
            return f"torch profiler: training ended before the {self._wait + self._warmup} steps it waits were over"
        place = f"; its trace is {self._trace} (chrome://tracing, ui.perfetto.dev)" if self._trace else ""
        self._bench.result("torch-profiler", {"steps": self._active, "trace": str(self._trace or "")})
        first = self._wait + self._warmup + 1
        return f"torch profiler, steps {first} to {first + self._active - 1} of this attempt{place}\n{self._table}"
