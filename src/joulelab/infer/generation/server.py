"""Generation with an OpenAI-compatible server such as vLLM, and whether this node's meter measures it.

The energy of a server counts if its address belongs to this machine and a process listens there that does the work
itself. A tunnel or proxy listens here but may compute elsewhere, so its energy is not claimed. If the server uses GPUs,
they must be among the metered ones. In doubt the energy is reported as missing: a total without the teacher would look
like a cheap teacher.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import itertools
import json
import os
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from joulelab.data.text import one_line
from joulelab.errors import ConfigError, JoulelabError, UsageError
from joulelab.infer.generation.completions import Completion, FinishReason, Prompt, as_messages, encode_prompts
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.meter.sensors.gpu_selection import select_gpus
from joulelab.meter.sensors.nvml import compute_pids, opened_cards
from joulelab.meter.session import Meter
from joulelab.total_timeout import timed_opener
from joulelab.units import plural

FORWARDERS = frozenset({"ssh", "sshd", "autossh", "socat", "kubectl", "haproxy", "nginx", "envoy", "rinetd", "stunnel"})
_ANY_ADDRESS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True)
class ServerLocation:
    """Whether a server computes on this node."""

    is_local: bool
    reason: str
    pids: tuple[int, ...] = ()
    """Listening processes that are visible to this user."""


def server_address(base_url: str) -> tuple[str, int]:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"'{base_url}' is not a server address", "for example http://localhost:8000/v1")
    try:
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"'{base_url}': {error}", "for example http://localhost:8000/v1") from None


def locate_server(base_url: str) -> ServerLocation:
    host, port = server_address(base_url)
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        return ServerLocation(False, f"{host} cannot be resolved here: {error}")
    strange = found - _own_addresses()
    if strange:
        return ServerLocation(False, f"{host} is {', '.join(sorted(strange))}, which is not an address of this machine")
    return classify_listeners(port, _listeners(port, found))


def classify_listeners(port: int, names: dict[int | None, str]) -> ServerLocation:
    """`names`: listening processes by pid; None stands for processes that are not visible to this user."""
    pids = tuple(pid for pid in names if pid is not None)
    if not names:
        return ServerLocation(False, f"no process on this machine listens on port {port}")
    forwarding = sorted(set(names.values()) & FORWARDERS)
    if forwarding:
        return ServerLocation(False, f"{', '.join(forwarding)} listens on port {port} and forwards requests", pids)
    who = ", ".join(sorted(f"{name} (pid {pid})" for pid, name in names.items() if pid is not None))
    return ServerLocation(True, f"{who or 'a process of another user'} listens on port {port} of this machine", pids)


def unmetered_gpus(pids: Collection[int], wanted: str = "auto", nvml: Any = None) -> list[str]:
    """UUIDs of unmetered GPUs on which the server or its child processes compute; empty without NVML.

    `wanted` is the setting `energy.gpus`.
    """
    if not pids:
        return []
    with opened_cards(nvml) as (nvml, cards):
        metered = set(select_gpus(list(cards), wanted, os.environ).cards)
        server = with_children(pids)
        return [
            card.uuid for card, handle in cards.items() if card not in metered and server & compute_pids(nvml, handle)
        ]


def _own_addresses() -> set[str]:
    own = {address.address.split("%")[0] for some in psutil.net_if_addrs().values() for address in some}
    return own | {"127.0.0.1", "::1"}


def _listeners(port: int, addresses: Collection[str]) -> dict[int | None, str]:
    names: dict[int | None, str] = {}
    for connection in psutil.net_connections("tcp"):
        where = connection.laddr
        if connection.status != psutil.CONN_LISTEN or not where or where.port != port:
            continue
        if where.ip in addresses or where.ip in _ANY_ADDRESS:
            names[connection.pid] = _name(connection.pid)
    return names


def _name(pid: int | None) -> str:
    try:
        return psutil.Process(pid).name() if pid is not None else ""
    except psutil.Error:
        return ""


def with_children(pids: Iterable[int]) -> set[int]:
    """The engine of a server is often a child process."""
    found = set(pids)
    for pid in list(found):
        try:
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.Error:
            continue
    return found


_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Interval between two checks whether the work is still needed.
_POLL_S = 0.2
# Prompts that are tokenized in one call.
_ENCODED_AT_ONCE = 1024
SAMPLING = 3
"""Version of the seeds of requests, for the keys of sampled answers; until 2 all prompts had the same ones."""
_RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    """HTTP client of an OpenAI-compatible server, with retries."""

    base_url: str
    """Up to and including /v1."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    """Time limit for a whole reply."""
    tries: int = 4
    pause_s: float = 1.0
    """Before the second attempt; doubled for each further one."""
    after_failure: str = "see the server's log; completions so far are saved, and the run can be resumed"
    """The hint of an error after the last attempt."""
    closed: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Set when no answer is needed anymore: requests under way are not retried."""

    def require_reachable(self) -> None:
        """Check that a server is reachable, before hours of work. The list of models is not checked: some servers list
        more, or fewer, than they serve, or have no list."""
        try:
            self.get("/models")
        except _ErrorPage:
            return
        except UsageError:
            raise
        except (_TemporaryFailure, JoulelabError):
            return

    def get(self, path: str) -> dict[str, Any]:
        try:
            return self._send(path, None)
        except _Unreachable as error:
            raise UsageError(
                f"no server answers at {self.base_url}: {error}",
                f"start it first; `curl {self.base_url.rstrip('/')}{path}` must work on this machine",
            ) from error
        except _TemporaryFailure as error:
            raise JoulelabError(f"{self.base_url}{path} failed: {error}", "see the server's log") from error

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Retries if the server is busy or unreachable, not if it rejects the request."""
        for attempt in range(1, self.tries + 1):
            try:
                return self._send(path, body)
            except _TemporaryFailure as error:
                if attempt == self.tries:
                    raise JoulelabError(
                        f"{self.base_url}{path} failed after {plural(self.tries, 'attempt')}: {error}",
                        self.after_failure,
                    ) from error
                if self.closed.wait(self.pause_s * 2 ** (attempt - 1)):
                    raise JoulelabError(
                        f"{self.base_url}{path} failed while work was being stopped: {error}"
                    ) from error
        raise AssertionError("unreachable")

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url.rstrip("/") + path, data, headers)
        reply = b""
        try:
            with self._opener().open(request, timeout=self.timeout_s) as response:
                reply = response.read()
            found = json.loads(reply)
        except urllib.error.HTTPError as error:
            page = error.read(_READ_OF_ERRORS).decode(errors="replace")
            text = f"HTTP {error.code}: {_summary(page)}"
            if error.code in _RETRY_STATUS:
                raise _TemporaryFailure(text) from error
            base = self.base_url.rstrip("/")
            if error.code == 404 and not base.endswith("/v1"):
                raise UsageError(f"{base}{path} does not exist: HTTP 404", f"did you mean {base}/v1?") from error
            if _is_web_page(page):
                raise _ErrorPage(f"{base}{path} replied with a web page: {text}", _PROTOCOL_HINT) from error
            raise JoulelabError(
                f"{self.base_url}{path} rejected a request: {text}",
                "check the model name, the API key and the settings",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)  # of a URLError, whose own text is `<urlopen error ...>`
            raise _Unreachable(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__) from error
        except ValueError as error:
            text = _summary(reply[:_READ_OF_ERRORS].decode(errors="replace")) or str(error)
            raise UsageError(f"{self.base_url}{path} did not reply with JSON: {text}", _PROTOCOL_HINT) from error
        if not isinstance(found, dict):
            raise JoulelabError(f"{self.base_url}{path} replied with {found!r:.100}", _PROTOCOL_HINT)
        return found

    def _opener(self) -> urllib.request.OpenerDirector:
        """Clusters set a proxy for external hosts; it must not be used for this machine."""
        host = urllib.parse.urlsplit(self.base_url).hostname
        direct = [urllib.request.ProxyHandler({})] if host in _LOOPBACK else []
        return timed_opener(*direct)


class _TemporaryFailure(Exception):
    """A failure that is worth a retry."""


class _Unreachable(_TemporaryFailure):
    """No HTTP response."""


class _ErrorPage(UsageError):
    """A web page with an error status, of a proxy or of a server for something else."""


def _is_web_page(text: str) -> bool:
    return text.lstrip()[:9].lower().startswith(("<!doctype", "<html"))


def _summary(reply: str) -> str:
    """The text of a reply on one line, without the tags of a web page."""
    if _is_web_page(reply):
        reply = html.unescape(_TAGS.sub(" ", reply))
    return one_line(reply)[:_SHOWN_OF_REPLIES]


# Elements that are not displayed, with their content; an element that is cut off; all other tags.
_TAGS = re.compile(r"<(script|style)\b.*?(</\1>|$)|<!--.*?(-->|$)|<[^>]*(>|$)", re.DOTALL | re.IGNORECASE)
_READ_OF_ERRORS, _SHOWN_OF_REPLIES = 10_000, 200
_PROTOCOL_HINT = "pass the address of an OpenAI-compatible server, ending in /v1"


@dataclass(frozen=True)
class TokenPrompts:
    """Send prompts as token ids, so that an engine reads what a model in this process reads: the chat template, the
    special tokens and the tokens that end an answer are ours. An extension of vLLM and SGLang."""

    tokenizer: Any
    end_ids: Sequence[int]

    def encoded(self, prompts: Sequence[Prompt]) -> Iterator[EncodedPrompt]:
        """Each prompt once, whatever its number of answers."""
        for start in range(0, len(prompts), _ENCODED_AT_ONCE):
            for ids in encode_prompts(self.tokenizer, prompts[start : start + _ENCODED_AT_ONCE]):
                yield EncodedPrompt(ids, self.end_ids)


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and the tokens that end its answer."""

    ids: Sequence[int]
    end_ids: Sequence[int]


def request_body(
    model: str,
    settings: GenerationSettings,
    prompt: Prompt,
    answer: int,
    extra: dict[str, Any],
    as_tokens: EncodedPrompt | None = None,
    log_probabilities: bool = False,
    with_seed: bool = True,
) -> tuple[str, dict[str, Any]]:
    """(path, body) for one answer to one prompt. One per request, because usage counts tokens per request."""
    body: dict[str, Any] = {"model": model, "max_tokens": settings.max_new_tokens, "stream": False}
    if settings.do_sample:
        body |= {"temperature": settings.temperature, "top_p": settings.top_p}
        asked = list(as_tokens.ids) if as_tokens is not None else as_messages(prompt) or prompt
        body |= {"seed": _seed(settings.seed, asked, answer)} if with_seed else {}
        body |= {"top_k": settings.top_k} if settings.top_k else {}
    else:
        body |= {"temperature": 0.0}
    if settings.stop:
        body["stop"] = list(settings.stop)
    if as_tokens is not None:
        body |= {"prompt": list(as_tokens.ids), "stop_token_ids": list(as_tokens.end_ids)}
        body |= {"return_token_ids": True} | ({"logprobs": 1} if log_probabilities else {})
        return "/completions", {**body, **extra}
    messages = as_messages(prompt)
    if messages is None:
        return "/completions", {**body, "prompt": prompt, **({"logprobs": 1} if log_probabilities else {}), **extra}
    return "/chat/completions", {**body, "messages": messages, "logprobs": log_probabilities, **extra}


def read_answer(reply: dict[str, Any], max_new_tokens: int) -> Completion:
    try:
        choice = reply["choices"][0]
        text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
        tokens = int(reply["usage"]["completion_tokens"])
        if tokens < 0:
            raise ValueError(f"{tokens} tokens")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise JoulelabError(
            f"the server's reply has no {_missing_field(reply)}: {json.dumps(reply)[:200]}",
            "choices and usage.completion_tokens are required to compute energy per token",
        ) from error
    finish_reason = choice.get("finish_reason")
    # Without a finish_reason, an answer below the token limit counts as finished.
    ended = finish_reason == "stop" or (finish_reason is None and tokens < max_new_tokens)
    reason: FinishReason = "stop" if ended else "length"
    ids, logs = tuple(choice.get("token_ids") or ()), _log_probabilities(choice.get("logprobs"))
    return Completion(
        str(text), ids, reason, tokens,
        log_probability_sum=sum(logs) if logs else None,
        prompt_tokens=reply["usage"].get("prompt_tokens"),
        log_probabilities=logs,
    )  # fmt: skip


def _log_probabilities(found: Any) -> tuple[float, ...]:
    """Log-probabilities of the generated tokens: a list in completions, a list of objects in chat completions."""
    if not isinstance(found, dict):
        return ()
    values = found.get("token_logprobs") or [one["logprob"] for one in found.get("content") or ()]
    return tuple(float(value) for value in values)


def _missing_field(reply: object) -> str:
    """The missing field of a reply, in terms of the protocol."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return "answer in choices"
    message = choice.get("message")
    if "text" not in choice and not (isinstance(message, dict) and "content" in message):
        return "text in choices[0]"
    return "number in usage.completion_tokens"


def _seed(seed: int, prompt: object, answer: int) -> int:
    """A different one for each answer to each prompt, in the 31 bits that every server accepts: with one seed for all
    prompts, their answers would be sampled by the same random numbers."""
    text = f"{seed}:{answer}:{json.dumps(prompt)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


def server_energy_gap(meter: Meter) -> str | None:
    """Sensors of this machine include a server on it; an estimate from this program's CPU time does not."""
    if any(figure.measured for figure in meter.so_far().values()):
        return None
    return "no sensor works on this machine, and an estimate from this program's CPU time does not include the server"


class ServerGenerator:
    """Sends concurrent requests, so that the server can batch them; yields completions in the order of the prompts.

    `energy_gap` is None if the server computes on this node and its GPUs are metered. Otherwise it has the reason, and
    the energy of the stage must be reported as missing.
    """

    def __init__(
        self,
        server: str | Endpoint,
        model: str,
        settings: GenerationSettings,
        *,
        api_key: str | None = None,
        concurrency: int = 32,
        on_this_node: bool | None = None,
        metered_gpus: str = "auto",
        extra: Mapping[str, Any] | None = None,
        as_tokens: TokenPrompts | None = None,
        log_probabilities: bool = False,
        with_seeds: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`server` is the address up to /v1. `on_this_node` overrides the detected location; `metered_gpus` is the
        setting `energy.gpus`; `extra` is added to every request. `log_probabilities` asks for those of the generated
        tokens; a reply without them is an error. `with_seeds=False`: requests have no seed, so that answers are not
        reproducible. `check` is called while answers are awaited, and ends the work by raising."""
        if settings.num_beams > 1:
            raise ConfigError("the OpenAI protocol has no beam search", "set num_beams=1, or use a local model")
        self.settings, self.prompts_at_once = settings, concurrency
        self._endpoint = Endpoint(server, api_key) if isinstance(server, str) else server
        self._model, self._extra, self._check = model, dict(extra or {}), check
        self._as_tokens, self._log_probabilities, self._with_seeds = as_tokens, log_probabilities, with_seeds
        options = f"?{json.dumps(self._extra, sort_keys=True)}" if self._extra else ""
        self.identity = f"{self._endpoint.base_url.rstrip('/')}#{model}{options}"
        server_address(self._endpoint.base_url)
        self._endpoint.require_reachable()
        self.location = ServerLocation(bool(on_this_node), "according to the settings")
        if on_this_node is None:
            self.location = locate_server(self._endpoint.base_url)
        self._metered_gpus = metered_gpus

    @property
    def energy_gap(self) -> str | None:
        if not self.location.is_local:
            return f"this node's meter does not measure the server: {self.location.reason}"
        unmetered = unmetered_gpus(self.location.pids, self._metered_gpus)
        if unmetered:
            return f"the server computes on GPUs that are not metered here: {', '.join(unmetered)}; set energy.gpus"
        return None

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Completion]]:
        under_way: deque[list[Future[Completion]]] = deque()
        encoded = itertools.repeat(None) if self._as_tokens is None else self._as_tokens.encoded(prompts)
        pool = ThreadPoolExecutor(self.prompts_at_once, thread_name_prefix="asking")
        try:
            for prompt, tokens in zip(prompts, encoded, strict=False):
                under_way.append([pool.submit(self._ask, prompt, tokens, number) for number in range(self.settings.n)])
                if len(under_way) > self.prompts_at_once:
                    yield [self._wait(future) for future in under_way.popleft()]
            while under_way:
                yield [self._wait(future) for future in under_way.popleft()]
        finally:
            # Without waiting: after a signal or a failure the remaining answers are not needed.
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._endpoint.closed.set()

    def _wait(self, future: Future[Completion]) -> Completion:
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except TimeoutError:
                self._check()
            except JoulelabError:
                self._explain_failure()
                raise

    def _explain_failure(self) -> None:
        """Raise a better explanation of a failed request, if there is one."""

    def _ask(self, prompt: Prompt, tokens: EncodedPrompt | None, answer: int) -> Completion:
        path, body = request_body(
            self._model, self.settings, prompt, answer, self._extra, tokens, self._log_probabilities, self._with_seeds
        )
        found = read_answer(self._endpoint.post(path, body), self.settings.max_new_tokens)
        if self._log_probabilities and len(found.log_probabilities) != found.tokens:
            raise JoulelabError(
                f"{self._endpoint.base_url}{path} returned {len(found.log_probabilities)} log-probabilities for "
                f"{found.tokens} tokens",
                "use a server that supports `logprobs`, or the builtin engine",
            )
        return found
