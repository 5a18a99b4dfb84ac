"""What is taken out of an assistant's answers before they are taught: its thoughts, or all but its code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from joulelab.data.chat.messages import ASSISTANT, Conversation, Message, Row

_THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
_FENCED = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[^\n]*\n(.*?)^[ ]{0,3}\1[ \t]*$", re.DOTALL | re.MULTILINE)


def cleaned(
    rows: Iterable[Row], dropped: Counter[str], *, strip_thoughts: bool = False, only_code: bool = False
) -> Iterator[Row]:
    """A conversation of which nothing is left to teach is dropped, counted. Plain texts pass as they are."""
    for row in rows:
        if isinstance(row, str) or not (strip_thoughts or only_code):
            yield row
            continue
        kept = _clean_answers(row, strip_thoughts, only_code)
        if kept is None:
            dropped["an answer without code" if only_code else "an answer of thoughts alone"] += 1
        else:
            yield kept


def strip_think_blocks(text: str) -> str:
    """The answer without its `<think>` blocks.

    A block that never ends was cut off, and so all after it is thought. One that never begins was begun by the
    prompt, as some chat templates do, and so all before its end is thought.
    """
    kept: list[str] = []
    depth = start = 0
    for tag in _THINK_TAG.finditer(text):
        if not tag[1]:
            if depth == 0:
                kept.append(text[start : tag.start()])
            depth += 1
        elif depth <= 1:
            if depth == 0:
                kept.clear()
            depth, start = 0, tag.end()
        else:
            depth -= 1
    if depth == 0:
        kept.append(text[start:])
    return "".join(kept).strip()


def code_only(text: str) -> str:
    """The last fenced block of code, in its fence; empty where there is none. Earlier ones are drafts and examples."""
    found = list(_FENCED.finditer(text))
    return found[-1][0].strip() if found else ""


def _clean_answers(conversation: Conversation, strip_thoughts: bool, only_code: bool) -> Conversation | None:
    """None where an answer has nothing left: a turn of silence must not be learned."""
    kept: Conversation = []
    for message in conversation:
        words = message["content"]
        if message["role"] == ASSISTANT:
            words = strip_think_blocks(words) if strip_thoughts else words
            words = code_only(words) if only_code else words
            if not words.strip():
                return None
        kept.append(Message(role=message["role"], content=words))
    return kept
