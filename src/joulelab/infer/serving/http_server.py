"""`joulelab serve`: HTTP in front of the batch engine, for this machine only.

A thread per connection waits for tokens, makes text of them and writes it. It takes all tokens that are there, so a
stream falls back to larger chunks when the processor is the bottleneck, and the model does not wait for it.

The server binds to the loopback address and refuses other host names and bodies that are not declared as JSON: a web
page in a browser of this machine could otherwise send requests to it.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from joulelab.errors import JoulelabError
from joulelab.infer.config import gguf_file
from joulelab.infer.generation.completions import encode_prompt, truncate_at_stop
from joulelab.infer.generation.static_decoder import rows_that_fit
from joulelab.infer.recipes import cast_model
from joulelab.infer.serving.batch_engine import BatchEngine, ServedRequest, ServerBusy
from joulelab.infer.serving.config import LOOPBACK, ServedModel
from joulelab.infer.serving.openai_protocol import (
    MAX_BODY_BYTES,
    AnswerFormat,
    AnswerRequest,
    RequestError,
    error_body,
    parse_body,
    parse_request,
    server_sent_event,
    usage_of,
)
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer

_HOSTS = ("localhost", LOOPBACK, "[::1]", "")
_READ_TIMEOUT_S = 60.0
# Threads that make text would otherwise keep the interpreter for 5 ms while the model's thread waits for it.
_SWITCH_INTERVAL_S = 0.0005
_INCOMPLETE = "\ufffd"
_POST_PATHS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
# Tokens whose text is made in one call, and how many earlier ones the next call begins with.
_DECODED_TOGETHER, _DECODED_BEFORE = 24, 4
_TOKEN_TIMEOUT_S = 600.0


class TextStream:
    """Text of an answer, as far as it is certain: no half of a character, nothing that may begin a stop text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._begin = 0
        self._known = ""  # text of the tokens from `_begin` on, as far as it is part of `_text`
        self._text, self._sent = "", 0

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """New text after these tokens; all of it if they are the last."""
        self._ids += ids
        # Tokens are decoded after a few earlier ones, because some tokenizers drop a space at the beginning; not after
        # all of them, because that would take longer with every token.
        found = self._decode(self._ids[self._begin :])
        if last or (len(found) > len(self._known) and not found.endswith(_INCOMPLETE)):
            self._text += found[len(self._known) :]
            self._known = found
            if len(self._ids) - self._begin >= _DECODED_TOGETHER:
                self._begin = len(self._ids) - _DECODED_BEFORE
                self._known = self._decode(self._ids[self._begin :])
        if not self._stops:
            new, self._sent = self._text[self._sent :], len(self._text)
            return new
        text = truncate_at_stop(self._text, self._stops)
        end = len(text) if last or len(text) < len(self._text) else len(text) - self._held_back()
        new, self._sent = text[self._sent : end], max(self._sent, end)
        return new

    def _held_back(self) -> int:
        lengths = (size for stop in self._stops for size in range(len(stop) - 1, 0, -1))
        return max((size for size in lengths if self._text.endswith(tuple(s[:size] for s in self._stops))), default=0)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


class ModelServer(ThreadingHTTPServer):
    """Serves one model until `stop` is called."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, engine: BatchEngine, model: str, port: int, facts: Mapping[str, Any] | None = None) -> None:
        """`facts`: of the model's device and precision, for people and records."""
        self.engine, self.model, self.facts = engine, model, dict(facts or {})
        self.notes: list[str] = []
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/v1"

    def run(self) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            self.serve_forever(poll_interval=0.1)
        finally:
            sys.setswitchinterval(before)

    def stop(self) -> None:
        """Refuse new connections, end running requests with an error, end the engine."""
        threading.Thread(target=self.shutdown, daemon=True).start()
        self.engine.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def open_server(settings: ServedModel, port: int) -> ModelServer:
    """Load the model, start the engine and bind the port."""
    torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if settings.on_gpu else "cpu")
    model: Any = load_causal_lm(settings.model).eval().requires_grad_(False).to(device)
    tokenizer = load_tokenizer(settings.model)
    cast_model(model, settings.dtype)
    slots = settings.batch_size
    if settings.on_gpu:
        slots = max(1, min(slots, rows_that_fit(model, settings.context)))
    engine = BatchEngine(model, tokenizer, slots=slots, context=settings.context, max_waiting=settings.max_waiting)
    engine.start()
    facts = {
        "device": device.type,
        "dtype": settings.dtype,
        "batch_size": slots,
        "context": settings.context,
        "threads": settings.threads,
    }
    server = ModelServer(engine, settings.name, port, facts)
    server.notes += [engine.note] if engine.note else []
    if slots < settings.batch_size:
        server.notes.append(f"{slots} answers of {settings.context:,} tokens fit into GPU memory at once")
    if gguf_file(settings.model) is not None:
        server.notes.append(f"the weights of the GGUF file were dequantized: the model runs as {settings.dtype}")
    return server


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"
    timeout = _READ_TIMEOUT_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._refuse_method)

    do_DELETE = do_PATCH = do_PUT

    def _answer(self, act: Any) -> None:
        try:
            self._require_local()
            act()
        except RequestError as error:
            self._send_json(error.status, error.body)
        except ServerBusy as error:
            self._send_json(429, error_body(error.message, "server_error", code="rate_limit_exceeded"))
        except JoulelabError as error:
            self._send_json(500, error_body(error.message, "server_error"))

    def _require_local(self) -> None:
        """A page in a browser that reaches this port by another name (DNS rebinding) is refused."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS:
            raise RequestError(f"this server answers requests to localhost only, not to {host!r:.100}", status=403)

    def _get(self) -> None:
        engine, model = self.server.engine, self.server.model
        card = {"id": model, "object": "model", "created": 0, "owned_by": "joulelab"}
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/health":
            running, waiting = engine.load
            self._send_json(200, {"status": "ok", "model": model, "running": running, "waiting": waiting})
        elif path == "/v1/models":
            self._send_json(200, {"object": "list", "data": [{**card, "max_model_len": engine.context}]})
        elif path == f"/v1/models/{model}":
            self._send_json(200, card)
        else:
            self._refuse_path()

    def _post(self) -> None:
        kind = _POST_PATHS.get(self.path.partition("?")[0].rstrip("/"))
        if kind is None:
            self._refuse_path()
        request = parse_request(str(kind), parse_body(self._body()), self.server.model)
        prompts = [self._encode(prompt) for prompt in request.prompts]
        for ids in prompts:
            self._require_room(ids, request)
        asked = [
            ServedRequest(ids, request.settings, number, request.ignore_eos)
            for ids in prompts
            for number in range(request.n)
        ]
        self.server.engine.submit(asked)
        answers = AnswerFormat.of(request, self.server.model)
        prompt_tokens = sum(len(ids) for ids in prompts)
        try:
            if request.stream:
                self._stream(answers, asked, prompt_tokens)
            else:
                self._whole(answers, asked, prompt_tokens)
        finally:
            for one in asked:
                one.cancelled = True  # if the client went away; a finished request ignores it

    def _body(self) -> bytes:
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise self._unread(f"Content-Type is {kind or 'missing'}, expected application/json", 415)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise self._unread("Content-Length is missing", 411)
        if int(length) > MAX_BODY_BYTES:
            raise self._unread(f"the body has {int(length):,} bytes; the limit is {MAX_BODY_BYTES:,}", 413)
        return self.rfile.read(int(length))

    def _unread(self, message: str, status: int) -> RequestError:
        """The body stays unread, so the connection cannot carry another request."""
        self.close_connection = True
        return RequestError(message, status=status)

    def _encode(self, prompt: Any) -> list[int]:
        engine = self.server.engine
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            largest = engine.vocabulary - 1
            wrong = next((one for one in prompt if not 0 <= one <= largest), None)
            if wrong is not None:
                raise RequestError(f"token {wrong} is not in the vocabulary (0 to {largest})", param="prompt")
            return prompt
        try:
            return encode_prompt(engine.tokenizer, prompt)
        except JoulelabError as error:
            raise RequestError(error.message) from None

    def _require_room(self, ids: Sequence[int], request: AnswerRequest) -> None:
        asked, limit = len(ids) + request.settings.max_new_tokens, self.server.engine.context
        if asked > limit:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens and {request.settings.max_new_tokens:,} new ones were requested: "
                f"{asked:,} tokens; this server has room for {limit:,}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _whole(self, answers: AnswerFormat, asked: Sequence[ServedRequest], prompt_tokens: int) -> None:
        texts, reasons = [], []
        for one in asked:
            stream = TextStream(self.server.engine.tokenizer, one.settings.stop)
            for _, reason in _progress(one):
                if reason is not None:
                    reasons.append(reason)
                elif self._client_is_gone():
                    raise ConnectionAbortedError
            texts.append(stream.add(one.answer, last=True))
        made = sum(len(one.answer) for one in asked)
        self._send_json(200, answers.whole(texts, reasons, usage_of(prompt_tokens, made)))

    def _stream(self, answers: AnswerFormat, asked: Sequence[ServedRequest], prompt_tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")  # the end of the stream is the end of the connection
        self.end_headers()
        self.close_connection = True
        try:
            for index, one in enumerate(asked):  # several answers follow each other; they are generated together
                text = TextStream(self.server.engine.tokenizer, one.settings.stop)
                first = True
                for ids, reason in _progress(one):
                    new = text.add(ids, last=reason is not None)
                    if first or reason is not None:
                        self.wfile.write(server_sent_event(answers.chunk(index, new, reason, first)))
                        first = False
                    elif new:
                        self.wfile.write(answers.text_event(index, new))
        except JoulelabError as error:  # the status line is sent already
            self.wfile.write(server_sent_event(error_body(error.message, "server_error")))
            return
        if answers.request.stream_usage:
            made = sum(len(one.answer) for one in asked)
            self.wfile.write(server_sent_event(answers.usage_chunk(usage_of(prompt_tokens, made))))
        self.wfile.write(server_sent_event("[DONE]"))

    def _client_is_gone(self) -> bool:
        """Whether the client has closed the connection: reading from it gives nothing at once."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, OSError):
            return False
        finally:
            self.connection.settimeout(self.timeout)

    def _refuse_path(self) -> None:
        if self.command == "GET" and self.path in _POST_PATHS:
            raise RequestError(f"{self.path} takes POST, not GET", status=405)
        raise RequestError(f"there is no {self.path[:100]}; see /v1/models", status=404, code="not_found")

    def _refuse_method(self) -> None:
        self.close_connection = True
        raise RequestError(f"{self.command} is not supported", status=405)

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the terminal shows the server's state, and a benchmark sends thousands."""


def _progress(request: ServedRequest) -> Iterator[tuple[list[int], str | None]]:
    """(new tokens, finish reason or None) until the end; waits for at least one event and takes all that are there."""
    while True:
        ids: list[int] = []
        reason: str | None = None
        try:
            event = request.events.get(timeout=_TOKEN_TIMEOUT_S)
        except queue.Empty:
            raise JoulelabError(f"no token for {_TOKEN_TIMEOUT_S:g} s: the model does not respond") from None
        while True:
            if isinstance(event, JoulelabError):
                raise event
            if isinstance(event, str):
                reason = event
            else:
                ids += event
            try:
                event = request.events.get_nowait()
            except queue.Empty:
                break
        yield ids, reason
        if reason is not None:
            return
