"""The tally as Prometheus text, served on localhost only.

The text format takes a dozen lines to write and has been stable since 2014: a client library would add a dependency and
a global registry for no gain. Names carry base units (watts, joules, bytes, celsius, ratio) as Prometheus asks; a
reading whose sensor fails is left out rather than repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from joulelab.errors import UsageError
from joulelab.meter.monitor.tally import DeviceTally, Tally
from joulelab.units import BYTES_PER_MB

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOST = "127.0.0.1"
# metric: (field of the record, factor to the base unit, help)
_GPU_GAUGES = {
    "joulelab_gpu_power_watts": ("power_watts", 1.0, "Power of the GPU board, as its driver reports it."),
    "joulelab_gpu_utilization_ratio": ("gpu_utilization_percent", 0.01, "Share of time a kernel was running."),
    "joulelab_gpu_memory_utilization_ratio": ("memory_utilization_percent", 0.01, "Share of time memory was accessed."),
    "joulelab_gpu_memory_used_bytes": ("memory_used_MB", BYTES_PER_MB, "GPU memory in use."),
    "joulelab_gpu_temperature_celsius": ("temperature_C", 1.0, "Temperature of the GPU."),
}
_PROCESS_GAUGES = {
    "joulelab_process_cpu_utilization_ratio": ("cpu_utilization_percent", 0.01, "CPU use; 1 is one busy thread."),
    "joulelab_process_resident_memory_bytes": ("memory_rss_MB", BYTES_PER_MB, "RSS of the process and its children."),
    "joulelab_process_gpu_memory_used_bytes": ("gpu_memory_used_MB", BYTES_PER_MB, "GPU memory they hold."),
}


def exposition(tally: Tally) -> str:
    return "".join(f"{line}\n" for line in _lines(tally))


def _lines(tally: Tally) -> Iterator[str]:
    gpus = [joules for joules in tally.devices.values() if joules.device.component == "gpu"]
    for name, (field, factor, about) in _GPU_GAUGES.items():
        readable = [gpu for gpu in gpus if gpu.latest.get(field) is not None]
        rows = [(_gpu_labels(gpu), gpu.latest[field] * factor) for gpu in readable]
        yield from _family(name, "gauge", about, rows)
    yield from _family(
        "joulelab_gpu_energy_joules_total",
        "counter",
        "Energy of the GPU since the monitor began, by the method in the label.",
        [({**_gpu_labels(gpu), "method": gpu.method}, gpu.energy_j) for gpu in gpus],
    )
    yield from _family(
        "joulelab_cpu_energy_joules_total",
        "counter",
        "Energy of a RAPL domain since the monitor began; only counted domains may be added.",
        [
            (
                {"domain": joules.device.device.removeprefix("rapl:"), "counted": str(joules.device.counted).lower()},
                joules.energy_j,
            )
            for joules in tally.devices.values()
            if joules.device.component != "gpu"
        ],
    )
    cpu = tally.host.get("cpu_utilization_percent")
    about = "Share of the machine's CPU time in use."
    yield from _family("joulelab_cpu_utilization_ratio", "gauge", about, [] if cpu is None else [({}, cpu / 100)])
    process = tally.process or {}
    for name, (field, factor, about) in _PROCESS_GAUGES.items():
        value = process.get(field)
        labels = {"pid": str(process.get("pid"))}
        yield from _family(name, "gauge", about, [] if value is None else [(labels, float(value) * factor)])
    yield from _family("joulelab_monitor_ticks_total", "counter", "Ticks recorded.", [({}, float(tally.ticks))])
    errors = [({"sensor": sensor}, float(count)) for sensor, count in tally.errors.items()]
    yield from _family("joulelab_monitor_sensor_errors_total", "counter", "Readings that failed.", errors)
    name, about = "joulelab_monitor_last_tick_timestamp_seconds", "When the last tick was recorded, Unix time."
    yield from _family(name, "gauge", about, [({}, tally.wall_s)])


def _family(name: str, kind: str, about: str, rows: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    if not rows:
        return
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _gpu_labels(gpu: DeviceTally) -> dict[str, str]:
    index = gpu.device.facts.get("gpu_index", gpu.latest.get("gpu_index", ""))
    return {"gpu": str(index), "uuid": gpu.device.device.removeprefix("gpu:"), "name": gpu.device.name}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class PrometheusPage:
    """`GET /metrics` in a separate thread; the text is made once per tick, so a slow client delays nothing."""

    def __init__(self, port: int) -> None:
        self._text = ""
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(lambda: self._text))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot serve Prometheus on {HOST}:{port}: {error}", "choose another port with --prometheus"
            ) from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def show(self, tally: Tally) -> None:
        self._text = exposition(tally)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            found = self.path.split("?")[0] in ("/", "/metrics")
            body = (text() if found else "see /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the log line per request, which would hide the monitor's own messages."""

    return Handler
