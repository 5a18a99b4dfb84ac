"""What every generator takes and gives, whichever engine is behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from joulelab.data.chat.conversations import Conversation, Message
from joulelab.errors import ConfigError
from joulelab.infer.generation.settings import GenerationSettings

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[Message]
"""Plain text that is continued, or messages (role, content) that are answered by the model's chat template."""


@dataclass(frozen=True)
class Answer:
    text: str
    """Without special tokens and without the text that stopped it."""
    ids: tuple[int, ...]
    """As generated, the closing token included, nothing after it; empty where a server does not tell."""
    finish_reason: FinishReason
    """`stop`: it ended by itself; `length`: it was cut off."""
    tokens: int
    """Generated for this answer: the closing token counts, padding beside longer neighbours does not."""
    log_probability_sum: float | None = None
    """Of its tokens by the model itself, at temperature 1 without any filter; nothing: not told."""
    prompt_tokens: int | None = None
    """Of the prompt; nothing: not told."""

    @property
    def mean_log_probability(self) -> float | None:
        if self.log_probability_sum is None or not self.tokens:
            return None
        return self.log_probability_sum / self.tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        return cls(**{**value, "ids": tuple(value["ids"])})


class Generator(Protocol):
    """Whoever answers prompts."""

    @property
    def settings(self) -> GenerationSettings: ...

    @property
    def identity(self) -> str:
        """What answers: hash of the weights, or server and model name. Part of an answer's key."""

    @property
    def prompts_at_once(self) -> int:
        """A good number of prompts to hand over together."""

    @property
    def energy_gap(self) -> str | None:
        """Why the joules of the work are not in this node's meter; nothing: they are."""

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Answer]]:
        """For every prompt, in order, its `settings.n` answers."""


def as_messages(prompt: Prompt) -> Conversation | None:
    """The messages of a chat prompt as plain dictionaries; nothing for plain text."""
    if isinstance(prompt, str):
        return None
    messages = [_message(one) for one in prompt]
    if not messages or messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"a prompt of {len(messages)} messages has nothing to answer: {messages!r:.120}",
            "a prompt ends with a user's (or system's) message",
        )
    return messages


def _message(one: Any) -> Message:
    fields = one if isinstance(one, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(f"not a message: {one!r:.120}", "a message has a role and a content, both text")
    return {"role": role, "content": content}


def answer_key(identity: str, settings: GenerationSettings, prompt: Prompt) -> str:
    """By content: who answers, how, and what was asked. Position and batch do not matter."""
    asked = as_messages(prompt) or prompt
    text = json.dumps([identity, settings.model_dump(mode="json"), asked], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
