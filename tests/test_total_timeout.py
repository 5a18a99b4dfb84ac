"""A server that sends a byte now and then does not delay a request beyond its limit."""

import socket
import ssl
import threading
import time
import urllib.request

import pytest

from joulelab.errors import UsageError
from joulelab.infer.generation.server import Endpoint
from joulelab.infer.serving.client_load import SentRequest, StreamingClient
from joulelab.meter.sensors.node_meters import REDFISH, RedfishSensor
from joulelab.total_timeout import timed_opener

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"


@pytest.fixture
def trickle():
    """Starts a server that sends `at_once` and then a byte every 0.1 s; returns its address."""
    ended, sockets = threading.Event(), []

    def serve(listener, at_once, slowly):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(at_once)
            for byte in slowly:
                if ended.wait(0.1):
                    return
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return

    def start(at_once, slowly):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)
        threading.Thread(target=serve, args=(listener, at_once, slowly), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    ended.set()
    for one in sockets:
        one.close()


@pytest.mark.parametrize(
    "at_once", [HEAD, b"HTTP/1.1 200 OK\r\nX: ", b""], ids=["in the body", "in a header", "in the status"]
)
def test_the_limit_is_for_the_whole_reply(trickle, at_once):
    began_s = time.monotonic()
    with pytest.raises(TimeoutError), timed_opener().open(trickle(at_once, b"1" * 1000), timeout=0.5) as reply:
        reply.read()
    assert time.monotonic() - began_s < 5


def test_a_slow_reply_within_the_limit_is_read(trickle):
    with timed_opener().open(trickle(WHOLE + b"{", b'"a": 1}'[:3] + b": 1}"), timeout=30) as reply:
        assert reply.read(3) == b'{"a'
    with urllib.request.urlopen(trickle(WHOLE + b"123456789", b""), timeout=30) as reply:
        assert reply.read() == b"123456789"


def test_endpoints_sensors_and_probes_have_the_limit(trickle, monkeypatch):
    began_s = time.monotonic()
    with pytest.raises(UsageError, match="no server answers"):
        Endpoint(trickle(HEAD, b"1" * 1000) + "/v1", timeout_s=0.5).get("/models")
    probe = SentRequest(time.monotonic_ns())
    StreamingClient(trickle(HEAD, b"1" * 1000) + "/v1", timeout_s=0.5, whole=True).ask(probe, "/completions", {})
    assert "TimeoutError" in probe.error
    assert time.monotonic() - began_s < 10
    monkeypatch.setenv(REDFISH, trickle(HEAD, b"1" * 1000))
    assert RedfishSensor._power_w() is None
    assert time.monotonic() - began_s < 20


def test_certificates_are_read_once_for_all_openers():
    """Since Python 3.12 an opener reads them if it gets none, for 30 ms, during which no other thread sends: 256
    threads sent 30 requests per second to an engine."""
    found = [handler for _ in range(3) for handler in timed_opener().handlers if hasattr(handler, "https_open")]
    contexts = [vars(handler)["_context"] for handler in found]
    assert len(contexts) == 3 and isinstance(contexts[0], ssl.SSLContext)
    assert all(context is contexts[0] for context in contexts)
