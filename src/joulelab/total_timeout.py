"""HTTP requests whose whole reply has a time limit.

The timeout of a socket is for one read: a server that sends a byte now and then can delay a reply without end. Here
each read waits only for what is left of the limit.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.request
from functools import cache
from typing import Any


class _TimedReads(io.RawIOBase):
    def __init__(self, inner: Any, sock: socket.socket) -> None:
        self._inner, self._socket = inner, sock
        limit_s = sock.gettimeout()
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._end_s is not None:
            left_s = self._end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the reply was not complete within the time limit")
            self._socket.settimeout(left_s)
        return int(self._inner.readinto1(buffer))

    def close(self) -> None:
        self._inner.close()
        super().close()


class TimedResponse(http.client.HTTPResponse):
    """Status, headers and body together arrive within the timeout of the connection."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp: Any = io.BufferedReader(_TimedReads(self.fp, sock))


class TimedConnection(http.client.HTTPConnection):
    response_class = TimedResponse


class TimedSecureConnection(http.client.HTTPSConnection):
    response_class = TimedResponse


class _TimedHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(TimedConnection, req)


class _TimedSecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(TimedSecureConnection, req)


@cache
def certificates() -> ssl.SSLContext:
    """Read once: from Python 3.12 on, every opener without a context reads all certificates of the system, also for
    addresses without encryption, and other threads wait for that for 25 to 30 ms."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def timed_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener whose `timeout` is for the whole reply."""
    return urllib.request.build_opener(_TimedHandler, _TimedSecureHandler(context=certificates()), *handlers)
