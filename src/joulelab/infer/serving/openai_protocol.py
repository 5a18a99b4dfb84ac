"""The part of the OpenAI protocol that `joulelab serve` speaks: requests in, answers, stream chunks and errors out.

Parameters that would change the answer and are not implemented are refused, because a benchmark with ignored
parameters measures something other than what was requested. Importable without torch.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from joulelab.data.text import parsed_json
from joulelab.infer.generation.settings import GenerationSettings

MAX_BODY_BYTES = 4 << 20
_TEXT_MARK = "\u0000"
MAX_ANSWERS = 64
"""Limit per request: prompts times `n`."""
# The defaults of the protocol; a chat answer without a limit would run to the end of the context.
_DEFAULT_TOKENS = {"completion": 16, "chat": 256}
_IGNORED = {"model", "user", "metadata", "store", "stream", "stream_options", "service_tier"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "top_logprobs": (None, 0),
}
"""Parameters that are not implemented, with the values that have no effect."""


class RequestError(Exception):
    """An error that the client gets as an OpenAI error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, param, code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class AnswerRequest:
    """A checked request."""

    kind: str
    """`chat` or `completion`."""
    prompts: tuple[str | list[int] | list[dict[str, str]], ...]
    """Texts, token ids, or one conversation."""
    settings: GenerationSettings
    n: int
    stream: bool
    stream_usage: bool
    ignore_eos: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    try:
        body = parsed_json(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {type(body).__name__}, expected a JSON object")
    return body


def parse_request(kind: str, body: Mapping[str, Any], model: str) -> AnswerRequest:
    """Raises `RequestError` for what is missing, out of range or not implemented."""
    named = body.get("model", model)
    if named != model:
        raise RequestError(
            f"the model {named!r:.100} does not exist; this server has '{model}'",
            status=404,
            param="model",
            code="model_not_found",
        )
    prompts = (_messages(body.get("messages")),) if kind == "chat" else _prompts(body.get("prompt"))
    _refuse_unsupported(kind, body)
    n = _number(body, "n", 1, int, 1, MAX_ANSWERS)
    if n * len(prompts) > MAX_ANSWERS:
        raise RequestError(f"{n * len(prompts)} answers were requested; the limit is {MAX_ANSWERS}", param="n")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError(f"stream_options is {options!r:.60}, expected an object", param="stream_options")
    return AnswerRequest(
        kind=kind,
        prompts=prompts,
        settings=_settings(kind, body),
        n=int(n),
        stream=_flag(body, "stream"),
        stream_usage=_flag(options or {}, "include_usage"),
        ignore_eos=_flag(body, "ignore_eos"),
    )


def _refuse_unsupported(kind: str, body: Mapping[str, Any]) -> None:
    own = {"messages", "max_completion_tokens"} if kind == "chat" else {"prompt"}
    known = own | _IGNORED | {"max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "n", "ignore_eos"}
    for name, value in body.items():
        if name in known or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        if name in _NEUTRAL:
            raise RequestError(f"{name} is not implemented by this server", param=name, code="unsupported_parameter")
        raise RequestError(f"unknown parameter '{name:.100}'", param=name[:100], code="unknown_parameter")


def _settings(kind: str, body: Mapping[str, Any]) -> GenerationSettings:
    temperature = _number(body, "temperature", 1.0, float, 0, 2)
    limit_name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(one, str) and one for one in stops):
        raise RequestError(
            f"stop is {stop!r:.60}, expected a string or up to 4 strings, none of them empty", param="stop"
        )
    sampling = {
        "temperature": max(float(temperature), 1e-4),
        "top_p": float(_number(body, "top_p", 1.0, float, 0, 1)) or 1e-6,
        "top_k": int(_number(body, "top_k", 0, int, -1, 1 << 20)),
    }
    sampling["top_k"] = max(0, int(sampling["top_k"]))  # vLLM's -1 means all, as 0 does here
    try:
        return GenerationSettings(
            max_new_tokens=int(_number(body, limit_name, _DEFAULT_TOKENS[kind], int, 1, 1 << 20)),
            stop=tuple(stops),
            seed=int(_number(body, "seed", secrets.randbits(31), int, 0, (1 << 63) - 1)),
            **({"do_sample": True, **sampling} if temperature > 0 else {}),  # type: ignore[arg-type]
        )
    except ValidationError as error:
        raise RequestError(str(error.errors()[0]["msg"])) from None


def _number(body: Mapping[str, Any], name: str, default: float, kind: type, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (kind is int and value != int(value)):
        word = "a whole number" if kind is int else "a number"
        ends = [f"{end:,}" if kind is int else f"{end:g}" for end in (low, high)]
        raise RequestError(f"{name} is {value!r:.60}, expected {word} from {ends[0]} to {ends[1]}", param=name)
    return value  # type: ignore[no-any-return]


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.60}, expected true or false", param=name)
    return bool(value)


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    def is_ids(found: Any) -> bool:
        return (
            isinstance(found, list)
            and bool(found)
            and all(isinstance(one, int) and not isinstance(one, bool) for one in found)
        )

    if (isinstance(value, str) and value) or is_ids(value):
        return (value,)
    if isinstance(value, list) and value and all((isinstance(one, str) and one) or is_ids(one) for one in value):
        return tuple(value)
    raise RequestError(
        f"prompt is {value!r:.60}, expected a string, token ids or a list of these, none of them empty", param="prompt"
    )


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages is {value!r:.60}, expected a list of messages", param="messages")
    found = [_message(one, f"messages[{number}]") for number, one in enumerate(value)]
    if found[-1]["role"] == "assistant":
        raise RequestError("the last message is from the assistant; end with a user message", param="messages")
    return found


def _message(value: Any, where: str) -> dict[str, str]:
    role = value.get("role") if isinstance(value, dict) else None
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(f"{where} is {value!r:.100}, expected role and content, both strings", param="messages")
    return {"role": role, "content": content}


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are written."""

    request: AnswerRequest
    model: str
    identity: str
    created: int
    _around_text: dict[int, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, request: AnswerRequest, model: str) -> AnswerFormat:
        prefix = "chatcmpl" if request.kind == "chat" else "cmpl"
        return cls(request, model, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Mapping[str, int]) -> dict[str, Any]:
        chat = self.request.kind == "chat"
        choices = [
            {
                "index": index,
                **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._head(""), "choices": choices, "usage": usage}

    def chunk(self, index: int, text: str, reason: str | None = None, first: bool = False) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        own = {"delta": {**role, "content": text}} if self.request.kind == "chat" else {"text": text}
        choice = {"index": index, **own, "logprobs": None, "finish_reason": reason}
        return {**self._head(".chunk"), "choices": [choice]}

    def text_event(self, index: int, text: str) -> bytes:
        """A chunk with text only, as a server-sent event. Everything but the text is made once per answer: thousands of
        these are written per second."""
        if index not in self._around_text:
            before, after = json.dumps(self.chunk(index, _TEXT_MARK)).split(json.dumps(_TEXT_MARK))
            self._around_text[index] = before, after
        before, after = self._around_text[index]
        return f"data: {before}{json.dumps(text, ensure_ascii=False)}{after}\n\n".encode()

    def usage_chunk(self, usage: Mapping[str, int]) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _head(self, ending: str) -> dict[str, Any]:
        kind = f"chat.completion{ending}" if self.request.kind == "chat" else "text_completion"
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def server_sent_event(data: Mapping[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
