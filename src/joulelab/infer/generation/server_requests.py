"""One question to a server that speaks the OpenAI protocol, over plain HTTP: body out, answer in, failures in words."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.infer.generation.answers import Answer, FinishReason, Prompt, as_messages
from joulelab.infer.generation.settings import GenerationSettings

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    """Up to and including /v1."""
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    tries: int = 4
    pause_s: float = 1.0
    """Before the second try; doubled before each further one."""

    def require_answer(self) -> None:
        """Before hours of work are planned: is anybody there? What it lists is not asked: some servers list more, or
        less, than they serve."""
        try:
            self._send("/models", None)
        except _Unreachable as error:
            raise JoulelabError(
                f"no server answers at {self.base_url}: {error}",
                f"start it first; `curl {self.base_url.rstrip('/')}/models` must work from here",
            ) from error
        except (_Passing, JoulelabError):
            return

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Tried again where the server is busy or gone for a moment; refused requests are not."""
        for attempt in range(1, self.tries + 1):
            try:
                return self._send(path, body)
            except _Passing as error:
                if attempt == self.tries:
                    raise JoulelabError(
                        f"{self.base_url}{path} failed {self.tries} times: {error}",
                        "see the server's own log; what was answered so far is kept, and the run can be resumed",
                    ) from error
                time.sleep(self.pause_s * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url.rstrip("/") + path, data, headers)
        try:
            with self._opener().open(request, timeout=self.timeout_s) as response:
                found = json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = f"HTTP {error.code}: {error.read(2000).decode(errors='replace').strip()[:300]}"
            if error.code in _WORTH_ANOTHER_TRY:
                raise _Passing(text) from error
            raise JoulelabError(
                f"{self.base_url}{path} refused a request: {text}", "check the model's name, the key and the settings"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Unreachable(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise JoulelabError(f"{self.base_url}{path} did not reply with JSON: {error}", _PROTOCOL) from error
        if not isinstance(found, dict):
            raise JoulelabError(f"{self.base_url}{path} replied with {found!r:.100}", _PROTOCOL)
        return found

    def _opener(self) -> urllib.request.OpenerDirector:
        """Clusters set a proxy for the outside, and it must not be asked for this machine itself."""
        host = urllib.parse.urlsplit(self.base_url).hostname
        direct = [urllib.request.ProxyHandler({})] if host in _THIS_MACHINE else []
        return urllib.request.build_opener(*direct)


class _Passing(Exception):
    """A failure that may be over in a moment."""


class _Unreachable(_Passing):
    """Not even a refusal came back."""


_PROTOCOL = "the address must be of an OpenAI-compatible server and end in /v1"


def request_body(
    model: str, settings: GenerationSettings, prompt: Prompt, answer: int, extra: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """(path, body) for one answer to one prompt. One at a time: only then is each one's number of tokens told."""
    body: dict[str, Any] = {"model": model, "max_tokens": settings.max_new_tokens, "stream": False}
    if settings.do_sample:
        body |= {"temperature": settings.temperature, "top_p": settings.top_p, "seed": _seed(settings.seed, answer)}
        body |= {"top_k": settings.top_k} if settings.top_k else {}
    else:
        body |= {"temperature": 0.0}
    if settings.stop:
        body["stop"] = list(settings.stop)
    messages = as_messages(prompt)
    if messages is None:
        return "/completions", {**body, "prompt": prompt, **extra}
    return "/chat/completions", {**body, "messages": messages, **extra}


def read_answer(reply: dict[str, Any], max_new_tokens: int) -> Answer:
    try:
        choice = reply["choices"][0]
        text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
        tokens = int(reply["usage"]["completion_tokens"])
        if tokens < 0:
            raise ValueError(f"{tokens} tokens")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise JoulelabError(
            f"the server's reply has no {_lacking(reply)}: {json.dumps(reply)[:200]}",
            "we need choices and usage.completion_tokens: joules per token without tokens would be a guess",
        ) from error
    told = choice.get("finish_reason")
    # only `stop` means that the answer came to its end; where nothing is told, tokens left over mean the same
    ended = told == "stop" or (told is None and tokens < max_new_tokens)
    reason: FinishReason = "stop" if ended else "length"
    return Answer(str(text), (), reason, tokens, prompt_tokens=reply["usage"].get("prompt_tokens"))


def _lacking(reply: object) -> str:
    """What of an answer is not there, by the name it has in the protocol."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return "answer in choices"
    message = choice.get("message")
    if "text" not in choice and not (isinstance(message, dict) and "content" in message):
        return "text in choices[0]"
    return "number in usage.completion_tokens"


def _seed(seed: int, answer: int) -> int:
    """Another one for each answer to a prompt, in the 31 bits every server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{answer}".encode()).digest()[:4], "little") >> 1
