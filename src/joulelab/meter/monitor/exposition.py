"""The tally for Prometheus: the endpoint of `monitor`, and of the recorder for `run` and `measure`.

The families are made once per tick and served by prometheus-client from its own thread, as text or, where the client
asks for it, as OpenMetrics. A separate registry is used: the process-wide one would add the metrics of this process.
Names carry base units (watts, joules, bytes, celsius, ratio) as Prometheus asks; a reading whose sensor fails is left
out rather than repeated. Energy of a node's own meter and estimates have separate names: neither may be added to
that of the components.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from joulelab import lookup
from joulelab.errors import UsageError
from joulelab.meter.monitor.tally import DeviceTally, Tally
from joulelab.units import BYTES_PER_MB

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
    "joulelab_process_gpu_memory_used_bytes": (
        "gpu_memory_used_MB",
        BYTES_PER_MB,
        "GPU memory of the process and its children.",
    ),
}


def parse_address(text: str) -> tuple[str, int]:
    """`PORT` on this machine only, or `HOST:PORT`; an IPv6 address has brackets, as in `[::]:9101`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(
            f"'{text}' is not an address for metrics", "expected PORT or HOST:PORT, for example 9101 or 0.0.0.0:9101"
        )
    return host.strip("[]") or HOST, int(port)


def require_free(text: str) -> None:
    """Raise if the metrics cannot be served at this address, before anything else is done."""
    lookup.require_packages("the metrics endpoint", "prometheus_client")
    host, port = parse_address(text)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        raise _cannot_serve(text, error) from None


def _cannot_serve(text: str, error: Exception) -> UsageError:
    return UsageError(f"cannot serve Prometheus on {text}: {error}", "choose another address with --prometheus")


def families(tally: Tally) -> Iterator[Any]:
    """Metric families of prometheus-client."""
    devices = list(tally.devices.values())
    gpus = [one for one in devices if one.device.component == "gpu"]
    for name, (field, factor, about) in _GPU_GAUGES.items():
        readable = [gpu for gpu in gpus if gpu.latest.get(field) is not None]
        yield from _gauge(name, about, [(_gpu_labels(gpu), gpu.latest[field] * factor) for gpu in readable])
    about = "Energy of the GPU since recording began, by the method in the label."
    rows = [({**_gpu_labels(gpu), "method": gpu.method}, gpu.energy_j) for gpu in gpus]
    yield from _counter("joulelab_gpu_energy_joules", about, rows)
    others: dict[str, list[DeviceTally]] = {"cpu": [], "cpu_estimate": [], "node": []}
    for one in devices:
        if one not in gpus:
            others.setdefault(one.device.component, others["cpu"]).append(one)
    about = "Energy of a CPU or memory domain since recording began; add only domains with counted=true."
    rows = [
        ({"domain": one.device.device.removeprefix("rapl:"), "counted": str(one.device.counted).lower()}, one.energy_j)
        for one in others["cpu"]
    ]
    yield from _counter("joulelab_cpu_energy_joules", about, rows)
    for component, name, about in (
        ("cpu_estimate", "joulelab_cpu_estimated_energy_joules", "CPU energy estimated from CPU time; not measured."),
        ("node", "joulelab_node_energy_joules", "Energy by the node's own meter, which includes all components."),
    ):
        rows = [({"device": one.device.device}, one.energy_j) for one in others[component] if one.has_reading]
        yield from _counter(name, about, rows)
    rows = [({"device": one.device.device}, one.power_w) for one in others["node"] if one.power_w is not None]
    yield from _gauge("joulelab_node_power_watts", "Power by the node's own meter.", rows)
    cpu = tally.host.get("cpu_utilization_percent")
    about = "Share of the machine's CPU time in use."
    yield from _gauge("joulelab_cpu_utilization_ratio", about, [] if cpu is None else [({}, cpu / 100)])
    process = tally.process or {}
    for name, (field, factor, about) in _PROCESS_GAUGES.items():
        value = process.get(field)
        labels = {"pid": str(process.get("pid"))}
        yield from _gauge(name, about, [] if value is None else [(labels, float(value) * factor)])
    if tally.run_id:
        yield from _gauge("joulelab_run_info", "The run that is recorded.", [({"run_id": tally.run_id}, 1.0)])
    yield from _counter("joulelab_monitor_ticks", "Ticks recorded.", [({}, float(tally.ticks))])
    errors = [({"sensor": sensor}, float(count)) for sensor, count in tally.errors.items()]
    yield from _counter("joulelab_monitor_sensor_errors", "Readings that failed.", errors)
    name, about = "joulelab_monitor_last_tick_timestamp_seconds", "When the last tick was recorded, Unix time."
    yield from _gauge(name, about, [({}, tally.wall_s)])


_Rows = Sequence[tuple[dict[str, str], float]]


def _gauge(name: str, about: str, rows: _Rows) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    yield from _filled(GaugeMetricFamily, name, about, rows)


def _counter(name: str, about: str, rows: _Rows) -> Iterator[Any]:
    """The name gets the suffix `_total`."""
    from prometheus_client.core import CounterMetricFamily

    yield from _filled(CounterMetricFamily, name, about, rows)


def _filled(kind: Any, name: str, about: str, rows: _Rows) -> Iterator[Any]:
    if rows:
        family = kind(name, about, labels=list(rows[0][0]))
        for labels, value in rows:
            family.add_metric(list(labels.values()), value)
        yield family


def _gpu_labels(gpu: DeviceTally) -> dict[str, str]:
    index = gpu.device.facts.get("gpu_index", gpu.latest.get("gpu_index", ""))
    return {"gpu": str(index), "uuid": gpu.device.device.removeprefix("gpu:"), "name": gpu.device.name}


class PrometheusPage:
    """`GET /metrics` in a separate thread; the families are made once per tick, so a slow client delays nothing."""

    def __init__(self, address: str) -> None:
        lookup.require_packages("the metrics endpoint", "prometheus_client")
        from prometheus_client import CollectorRegistry, start_http_server

        self._families: list[Any] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        host, port = parse_address(address)
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise _cannot_serve(address, error) from None
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def describe(self) -> Iterable[Any]:
        """Called on registration, when there is no reading yet."""
        return ()

    def collect(self) -> Iterable[Any]:
        return self._families

    def show(self, tally: Tally) -> None:
        self._families = list(families(tally))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
