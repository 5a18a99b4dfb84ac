"""A prompt with the answers that compete for it, and what a judge is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from joulelab.infer.generation.completions import Completion, Prompt, as_messages

Score = float | None
"""Higher is better; nothing: it could not be judged."""


@dataclass(frozen=True)
class Candidates:
    prompt: Prompt
    answers: Sequence[Completion]
    expected: str | None = None
    """The right answer, where the data knows it; only rules look at it."""

    @property
    def question(self) -> str:
        """As a person would read it."""
        messages = as_messages(self.prompt)
        if messages is None:
            return str(self.prompt)
        return "\n\n".join(message["content"] for message in messages)


class Judge(Protocol):
    @property
    def identity(self) -> str:
        """Who judges and how; part of a score's key."""

    def scores(self, asked: Sequence[Candidates]) -> Iterator[list[Score]]:
        """For every prompt, in order, one score an answer."""
