"""Load on an OpenAI-compatible server, as its clients see it: closed loop or Poisson arrivals, and the steady part.

Closed loop: a fixed number of clients, each of which sends its next request when its answer is complete. Open loop:
requests arrive at a mean rate with exponential gaps, whether earlier ones are answered or not, as those of independent
users do; latency then includes the time in the server's queue.

The load begins with an empty server, so the first seconds are not typical. The warm-up is found by the marginal
standard error rule (White, 1997): leave out the first d intervals of the series of output tokens per interval, with the
d that minimizes the standard error of the mean of the rest. If that is more than half of the series, the load is not
yet steady and goes on. The load is stopped after the window, while the server is still busy: its emptying does not
count. Importable without torch.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from joulelab.total_timeout import TimedResponse, certificates
from joulelab.units import plural

NS = 1_000_000_000
BIN_S = 0.5
# Minimum length of the series: with fewer intervals the result is chance.
_MIN_BINS = 8
_MAX_IN_FLIGHT = 2048
_CHECK_S = 0.25
_END_S = 10.0
# An answer without text that ended for another reason (abort, error) is a failure.
_FINISHED = ("stop", "length")


@dataclass
class SentRequest:
    """One request with times on the monotonic clock, as the client sees it."""

    sent_ns: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """0 until the server has reported them."""
    chunk_ns: list[int] = field(default_factory=list)
    """Arrival of each part of the answer that has text; of an answer that consists of an end token, of its end."""
    done_ns: int = 0
    """0: not finished when the load ended."""
    error: str = ""
    ended_ns: int = 0
    """First event with a finish reason or a number of output tokens; 0: none yet."""

    @property
    def time_to_first_token_s(self) -> float:
        return (self.chunk_ns[0] - self.sent_ns) / NS

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between two tokens after the first; None for an answer of one token or one part."""
        if self.completion_tokens < 2 or len(self.chunk_ns) < 2:
            return None
        return (self.chunk_ns[-1] - self.chunk_ns[0]) / NS / (self.completion_tokens - 1)

    @property
    def latency_s(self) -> float:
        return (self.done_ns - self.sent_ns) / NS


class LoadEnd:
    """Whether a load has ended. Its end closes the connections of requests under way, so that the server stops working
    on them: that work would be part of the next load, without its tokens."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._open: set[socket.socket] = set()

    def __call__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def set(self) -> None:
        with self._lock:
            self._event.set()
            for one in self._open:
                _shut_down(one)

    @contextmanager
    def interrupting(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
            if self():
                _shut_down(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


class FirstToken(LoadEnd):
    """Ends a request at its first token."""

    def __init__(self, request: SentRequest) -> None:
        super().__init__()
        self._request = request

    def __call__(self) -> bool:
        return bool(self._request.chunk_ns)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the server was first
        connection.shutdown(socket.SHUT_RDWR)


class Client(Protocol):
    def ask(self, request: SentRequest, path: str, body: Mapping[str, Any], ended: LoadEnd) -> None:
        """Send the request and note its answer; gives up when the load has `ended`. Errors are noted, not raised."""


@dataclass(frozen=True)
class StreamingClient:
    """Reads answers as server-sent events, each on its own connection."""

    base_url: str
    """Up to and including /v1."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    """Without any data."""
    whole: bool = False
    """Whether the timeout is for the whole answer."""

    def ask(self, request: SentRequest, path: str, body: Mapping[str, Any], ended: LoadEnd | None = None) -> None:
        ended = ended or LoadEnd()
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        parts = urlsplit(self.base_url)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(parts.netloc, timeout=self.timeout_s, context=certificates())
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=self.timeout_s)
        if self.whole:
            connection.response_class = TimedResponse
        try:
            connection.connect()
            with ended.interrupting(connection.sock):
                connection.request("POST", parts.path.rstrip("/") + path, data, headers)
                reply = connection.getresponse()
                if reply.status == 200:
                    self._read(reply, request, ended)
                else:
                    request.error = f"HTTP {reply.status}: {_message(reply.read(2000))}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not ended():
                request.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    @staticmethod
    def _read(reply: http.client.HTTPResponse, request: SentRequest, ended: LoadEnd) -> None:
        while not ended():
            line = reply.readline()
            if ended():
                return
            if not line:
                request.error = request.error or "the stream ended without [DONE]"
                return
            if not line.startswith(b"data:"):
                continue
            now_ns, event = time.monotonic_ns(), line[5:].strip()
            if event == b"[DONE]":
                # A model may answer with the end token at once: one token without text.
                if not request.chunk_ns and request.ended_ns:
                    request.chunk_ns.append(request.ended_ns)
                request.done_ns = request.chunk_ns[-1] if request.chunk_ns else now_ns
                if not request.chunk_ns:
                    request.error = request.error or "the answer has no text, finish_reason or usage"
                return
            # Parsing every chunk would make a fast server wait for this client: once there is text, only the usage
            # and errors matter.
            if request.chunk_ns and b'"usage"' not in event and b'"error"' not in event:
                request.chunk_ns.append(now_ns)
                continue
            _take(json.loads(event), request, now_ns)


def _take(chunk: Mapping[str, Any], request: SentRequest, now_ns: int) -> None:
    if chunk.get("error"):
        request.error = str(chunk["error"])[:300]
    usage = chunk.get("usage") or {}
    request.prompt_tokens = int(usage.get("prompt_tokens") or request.prompt_tokens)
    request.completion_tokens = int(usage.get("completion_tokens") or request.completion_tokens)
    if request.completion_tokens:
        request.ended_ns = request.ended_ns or now_ns
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        # A reasoning model writes its thoughts into a separate field; they are output tokens too.
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            request.chunk_ns.append(now_ns)
            return
        if reason := choice.get("finish_reason"):
            request.ended_ns = request.ended_ns or now_ns
            if reason not in _FINISHED:
                request.error = request.error or f"the answer has no text (finish_reason {reason})"


def _message(raw: bytes) -> str:
    """The message of an error object, or the beginning of whatever the server has sent."""
    text = raw.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]


@dataclass(frozen=True)
class LoadLevel:
    """`concurrency` clients, or `rate_per_s` arrivals."""

    concurrency: int = 0
    rate_per_s: float = 0.0

    @property
    def name(self) -> str:
        return f"c{self.concurrency}" if self.concurrency else f"r{self.rate_per_s:g}"

    @property
    def text(self) -> str:
        if self.concurrency:
            return plural(self.concurrency, "concurrent request")
        return f"{self.rate_per_s:g} request{'' if self.rate_per_s == 1 else 's'}/s"


NextRequest = Callable[[], tuple[str, Mapping[str, Any]]]
"""Path and body of the next request."""


@dataclass(frozen=True)
class LoadWindow:
    """A load and its steady part."""

    level: LoadLevel
    requests: tuple[SentRequest, ...]
    begin_ns: int
    window: tuple[int, int]
    """The steady part, or the second half of a load that did not become steady."""
    steady: bool
    client_cpu_share: float
    """CPU time of this process over the window: near 1, the client limits the load."""
    unsent: int = 0
    """Arrivals that were dropped because too many requests were unanswered."""

    @property
    def seconds(self) -> float:
        return (self.window[1] - self.window[0]) / NS


class LoadRunner:
    """Puts one level of load on a server until a steady window of the wanted length is there."""

    def __init__(self, client: Client, next_request: NextRequest, seed: int) -> None:
        self._client, self._next, self._random = client, next_request, random.Random(seed)
        self._lock = threading.Lock()

    def run(self, level: LoadLevel, seconds: float, limit_s: float, tick: Callable[[float], None]) -> LoadWindow:
        """`tick` gets the seconds so far, and may raise to end the load."""
        ended = LoadEnd()
        requests: list[SentRequest] = []
        cpu: list[tuple[int, float]] = []
        begin_ns, looked_ns = time.monotonic_ns(), 0
        unsent = [0]
        threads = self._start(level, requests, unsent, ended)
        try:
            while True:
                time.sleep(_CHECK_S)
                now_ns = time.monotonic_ns()
                cpu.append((now_ns, time.process_time()))
                tick((now_ns - begin_ns) / NS)
                with self._lock:
                    seen = list(requests)
                if sum(bool(one.error) for one in seen) >= 3 and not any(one.chunk_ns for one in seen):
                    window, steady = (begin_ns, now_ns), False  # nothing to wait for
                    break
                # Examining all tokens takes a while: done at most once a second, and only once the load may end.
                if now_ns - begin_ns < seconds * NS or now_ns - looked_ns < NS:
                    continue
                looked_ns = now_ns
                begin = steady_begin(seen, begin_ns, now_ns)
                if begin is not None and now_ns - begin >= seconds * NS:
                    window, steady = (begin, now_ns), True
                    break
                if now_ns - begin_ns >= limit_s * NS:
                    window, steady = ((begin_ns + now_ns) // 2, now_ns), False
                    break
        finally:
            ended.set()
            _join(threads)
        share = _cpu_share(cpu, window)
        with self._lock:
            return LoadWindow(level, tuple(requests), begin_ns, window, steady, share, unsent[0])

    def _start(
        self, level: LoadLevel, requests: list[SentRequest], unsent: list[int], ended: LoadEnd
    ) -> list[threading.Thread]:
        if level.concurrency:
            targets = [lambda: self._client_loop(requests, ended)] * level.concurrency
        else:
            targets = [lambda: self._arrivals(level.rate_per_s, requests, unsent, ended)]
        threads = [threading.Thread(target=target, daemon=True, name="joulelab-client") for target in targets]
        for thread in threads:
            thread.start()
        return threads

    def _client_loop(self, requests: list[SentRequest], ended: LoadEnd) -> None:
        while not ended():
            found = self._ask(requests, ended)
            if found.error:
                ended.wait(0.2)  # a server that refuses at once is not asked in a tight loop

    def _arrivals(self, rate_per_s: float, requests: list[SentRequest], unsent: list[int], ended: LoadEnd) -> None:
        """Gaps between arrivals are exponential, and times are absolute: a late arrival does not delay the next."""
        at_s, running = time.monotonic(), list[threading.Thread]()
        while True:
            at_s += self._random.expovariate(rate_per_s)
            if ended.wait(max(0.0, at_s - time.monotonic())):
                break
            running = [thread for thread in running if thread.is_alive()]
            if len(running) >= _MAX_IN_FLIGHT:
                unsent[0] += 1
                continue
            running.append(
                threading.Thread(target=self._ask, args=(requests, ended), daemon=True, name="joulelab-client")
            )
            running[-1].start()
        _join(running)

    def _ask(self, requests: list[SentRequest], ended: LoadEnd) -> SentRequest:
        with self._lock:
            path, body = self._next()
            request = SentRequest(time.monotonic_ns())
            requests.append(request)
        self._client.ask(request, path, body, ended)
        return request


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for clients of a load that has ended, for a few seconds in all: one may be connecting."""
    deadline_s = time.monotonic() + _END_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def _cpu_share(readings: Sequence[tuple[int, float]], window: tuple[int, int]) -> float:
    inside = [reading for reading in readings if window[0] <= reading[0] <= window[1]]
    if len(inside) < 2 or inside[-1][0] == inside[0][0]:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / ((inside[-1][0] - inside[0][0]) / NS)


def tokens_per_chunk(requests: Sequence[SentRequest]) -> float:
    """Mean tokens per part of an answer, over finished requests; 1 if there are none. Used for unfinished ones."""
    known = [(one.completion_tokens, len(one.chunk_ns)) for one in requests if one.completion_tokens and one.done_ns]
    chunks = sum(count for _, count in known)
    return sum(tokens for tokens, _ in known) / chunks if chunks else 1.0


def token_times(requests: Sequence[SentRequest]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Time and number of tokens of each part of all answers, in order of time."""
    usual = tokens_per_chunk(requests)
    times: list[int] = []
    weights: list[float] = []
    for one in requests:
        arrived = list(one.chunk_ns)  # a copy: requests under way receive more
        times += arrived
        weights += [one.completion_tokens / len(arrived) if one.completion_tokens and arrived else usual] * len(arrived)
    order = np.argsort(np.asarray(times, dtype=np.int64), kind="stable")
    return np.asarray(times, dtype=np.int64)[order], np.asarray(weights)[order]


def steady_begin(requests: Sequence[SentRequest], begin_ns: int, now_ns: int) -> int | None:
    """When the warm-up ended, by output tokens per interval; None while the load is not steady."""
    count = int((now_ns - begin_ns) / (BIN_S * NS))
    if count < _MIN_BINS:
        return None
    times, weights = token_times(requests)
    edges = begin_ns + (np.arange(count + 1) * BIN_S * NS).astype(np.int64)
    series, _ = np.histogram(times, bins=edges, weights=weights)
    left_out = warm_up_length(series)
    return None if left_out is None else int(edges[left_out])


def warm_up_length(series: NDArray[np.float64]) -> int | None:
    """Intervals to leave out: those whose removal minimizes the standard error of the mean of the others; None if
    that is not within the first half."""
    count = len(series)
    # In an interval without a token the server reads its first prompts: always part of the warm-up.
    busy = np.flatnonzero(series)
    if not len(busy):
        return None
    first = int(busy[0]) + 1
    # The last intervals are too few to judge by: their variance is small by chance.
    candidates = range(first, count - 3)
    if not candidates:
        return None
    errors = [series[d:].var() / (count - d) for d in candidates]
    best = candidates[int(np.argmin(errors))]
    return best if best <= count // 2 else None
