"""What a language model is taught with: a conversation, or a plain text; and which split it belongs to for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

from joulelab.data.labelled_text import SplitName, split_of, text_id

ASSISTANT = "assistant"


class Message(TypedDict):
    role: str
    """system, user, assistant or tool."""
    content: str


Conversation = list[Message]
Row = Conversation | str
"""A conversation, of which the assistant's turns are trained, or a plain text, of which everything is."""


def prompt_of(conversation: Conversation) -> Conversation:
    """What stands before the last answer: what a teacher is asked when it is to answer anew."""
    answers = [place for place, message in enumerate(conversation) if message["role"] == ASSISTANT]
    return conversation[: answers[-1]] if answers else conversation


def row_id(row: Row) -> str:
    """Known by the question, so that two answers to it never lie on both sides of a split."""
    if isinstance(row, str):
        return text_id(row)
    first_answer = next((place for place, turn in enumerate(row) if turn["role"] == ASSISTANT), len(row))
    asked = row[:first_answer] or row
    return text_id("\n".join(turn["content"] for turn in asked))


def only_split(rows: Iterable[Row], split: SplitName) -> Iterator[Row]:
    """By the hash of the words: no size, order or later addition moves a held-out row into anyone's training."""
    return (row for row in rows if split_of(row_id(row)) == split)
