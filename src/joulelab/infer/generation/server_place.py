"""Does a server compute on this node, so that this node's meter has its joules?

It does if its address is one of this machine's, and a process of this machine listens there that does the work itself.
A tunnel or a proxy listens here and computes elsewhere as far as can be told, so its joules are not claimed. Where the
server computes on GPUs, those have to be among the metered ones. In doubt the joules are reported missing: a figure
without the teacher in it would look like a cheap teacher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from joulelab.errors import ConfigError
from joulelab.meter.sensors.gpu_selection import select_gpus
from joulelab.meter.sensors.nvml import permitted_cards

FORWARDERS = frozenset({"ssh", "sshd", "autossh", "socat", "kubectl", "haproxy", "nginx", "envoy", "rinetd", "stunnel"})
_EVERYWHERE = ("0.0.0.0", "::", "*")


@dataclass(frozen=True)
class ServerPlace:
    here: bool
    reason: str
    """What was seen, in words."""
    pids: tuple[int, ...] = ()
    """Who listens, as far as this user may see."""


def address_of(base_url: str) -> tuple[str, int]:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"'{base_url}' is no address of a server", "for example http://localhost:8000/v1")
    try:
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"'{base_url}': {error}", "for example http://localhost:8000/v1") from None


def place_of(base_url: str) -> ServerPlace:
    host, port = address_of(base_url)
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        return ServerPlace(False, f"{host} cannot be resolved here: {error}")
    strange = found - _own_addresses()
    if strange:
        return ServerPlace(False, f"{host} is {', '.join(sorted(strange))}, which is no address of this machine")
    return judge_listeners(port, _listeners(port, found))


def judge_listeners(port: int, names: dict[int | None, str]) -> ServerPlace:
    """`names` of those who listen at the port, by process id; None stands for processes this user may not see."""
    pids = tuple(pid for pid in names if pid is not None)
    if not names:
        return ServerPlace(False, f"no process of this machine listens at port {port}")
    forwarding = sorted(set(names.values()) & FORWARDERS)
    if forwarding:
        return ServerPlace(False, f"{', '.join(forwarding)} listens at port {port} and passes the work on", pids)
    who = ", ".join(sorted(f"{name} (pid {pid})" for pid, name in names.items() if pid is not None))
    return ServerPlace(True, f"{who or 'a process of another user'} listens at port {port} of this machine", pids)


def unmetered_gpus(pids: Collection[int], wanted: str = "auto", nvml: Any = None) -> list[str]:
    """GPUs on which the server or a process it started computes and which are not metered; none without NVML.

    `wanted` is `energy.gpus`.
    """
    nvml = nvml or _binding()
    if nvml is None or not pids:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = permitted_cards(nvml)
        metered = set(select_gpus(list(handles), wanted, os.environ).cards)
        server = _with_children(pids)
        return [
            card.uuid
            for card, handle in handles.items()
            if card not in metered and server & {int(one.pid) for one in _computing(nvml, handle)}
        ]
    finally:
        nvml.nvmlShutdown()


def _own_addresses() -> set[str]:
    own = {address.address.split("%")[0] for some in psutil.net_if_addrs().values() for address in some}
    return own | {"127.0.0.1", "::1"}


def _listeners(port: int, addresses: Collection[str]) -> dict[int | None, str]:
    names: dict[int | None, str] = {}
    for connection in psutil.net_connections("tcp"):
        where = connection.laddr
        if connection.status != psutil.CONN_LISTEN or not where or where.port != port:
            continue
        if where.ip in addresses or where.ip in _EVERYWHERE:
            names[connection.pid] = _name(connection.pid)
    return names


def _name(pid: int | None) -> str:
    try:
        return psutil.Process(pid).name() if pid is not None else ""
    except psutil.Error:
        return ""


def _with_children(pids: Iterable[int]) -> set[int]:
    """A server's engine is often a process of its own."""
    found = set(pids)
    for pid in list(found):
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            continue
    return found


def _computing(nvml: Any, handle: Any) -> list[Any]:
    try:
        return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return []


def _binding() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
