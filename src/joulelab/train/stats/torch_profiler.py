"""Profile a few early steps with torch.profiler: a trace for a viewer, and the operations that took longest.

Profiling slows the profiled steps, often by half or more, and a trace of many steps grows to gigabytes. So only a few
steps early in the training are recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from joulelab.train.stats.hooks import TrackerContext, TrainerStats, unused_path

TOP = 12


class TorchProfilerStats(TrainerStats):
    def __init__(self, wait: int = 2, warmup: int = 2, active: int = 4) -> None:
        """Steps to skip, to warm the profiler up and to record; done before the tracker `energy` isolates phases."""
        self._wait, self._warmup, self._active = wait, warmup, active
        self._profiler: profile | None = None
        self._trace: Path | None = None
        self._table = ""

    def attach(self, context: TrackerContext) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"

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
        if self._context.folder is not None:
            self._trace = unused_path(self._context.folder / "torch-profiler", "trace", ".json.gz")
            profiler.export_chrome_trace(str(self._trace))

    def log_stats(self) -> str:
        if not self._table:
            return f"torch profiler: training ended within the {self._wait + self._warmup} steps before recording"
        place = f"; trace: {self._trace} (chrome://tracing, ui.perfetto.dev)" if self._trace else ""
        self._context.result("torch-profiler", {"steps": self._active, "trace": str(self._trace or "")})
        first = self._wait + self._warmup + 1
        return f"torch profiler, steps {first} to {first + self._active - 1} of this attempt{place}\n{self._table}"
