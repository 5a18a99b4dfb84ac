"""What a record of a published dataset means: a conversation, a plain text, or nothing that should be taught.

Known by their columns, wherever the file came from: `messages` (Tulu-3 and most others; also `conversations` in the
older spelling with `from` and `value`), `prompt` and `generation` (Codeforces-CoTs), `problem` and several
`generations` with verdicts on each (OpenR1-Math), `prompt` and `response`, and `text`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from joulelab.data.chat.messages import ASSISTANT, Conversation, Message, Row
from joulelab.data.text_tables import TEXT_COLUMNS
from joulelab.errors import ConfigError

_MESSAGES = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "problem")
_ANSWERS = ("response", "generation", "completion", "output", "answer")
_VERDICTS = ("correctness_math_verify", "correctness_llama")
_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
_TRUNCATED = "length"

Record = Mapping[str, Any]


def row_of(record: Record, dropped: Counter[str], only_correct: bool = True) -> Row | None:
    """None for a record that should not be taught; why is counted in `dropped`."""
    if record.get("generations") is not None and record.get("problem"):
        return _several_answers(record, dropped, only_correct)
    if record.get("finish_reason") == _TRUNCATED:
        # it stops in the middle of a thought, and who learns from it never learns to stop
        dropped["answer was cut off"] += 1
        return None
    messages = next((record[name] for name in _MESSAGES if record.get(name) is not None), None)
    if messages is not None:
        return _taught(_conversation(messages), dropped)
    prompt, answer = _first(record, _PROMPTS), _first(record, _ANSWERS)
    if prompt is not None and answer is not None:
        return _taught(_asked_and_answered(prompt, answer), dropped)
    text = _first(record, TEXT_COLUMNS)
    if text is None and _has(record, (*_MESSAGES, *TEXT_COLUMNS)):
        dropped["empty"] += 1
        return None
    if text is None and _has(record, _PROMPTS) and _has(record, _ANSWERS):
        dropped["no answer of the assistant" if prompt is not None else "no question"] += 1
        return None
    if text is None:
        raise ConfigError(
            f"a row has the columns {', '.join(record) or 'none'}, and none of them says what to teach",
            "expected messages, or prompt and response, or problem and generations, or text",
        )
    if not _words(text, "text").strip():
        dropped["empty"] += 1
        return None
    return _words(text, "text")


def _several_answers(record: Record, dropped: Counter[str], only_correct: bool) -> Row | None:
    """The first answer that came to its end and was found right."""
    answers: Sequence[Any] = record["generations"] or ()
    whole = record.get("is_reasoning_complete") or [True] * len(answers)
    reasons = record.get("finish_reasons") or [None] * len(answers)
    verdicts = [record[name] for name in _VERDICTS if record.get(name)]
    only_correct = only_correct and _has(record, _VERDICTS)  # of a set that nobody has judged all are taught
    for place, answer in enumerate(answers):
        complete = _at(whole, place) and _at(reasons, place) != _TRUNCATED
        correct = not only_correct or any(_at(verdict, place) for verdict in verdicts)
        if complete and correct and str(answer or "").strip():
            return _asked_and_answered(record["problem"], answer)
    dropped["no complete and correct answer" if only_correct else "no complete answer"] += 1
    return None


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _has(record: Record, names: Sequence[str]) -> bool:
    """Whether there is such a column, be it empty in this row."""
    return any(name in record for name in names)


def _first(record: Record, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _asked_and_answered(prompt: Any, answer: Any) -> Conversation:
    """Either may be messages already, as preference sets have them."""
    asked = (
        _conversation(prompt) if isinstance(prompt, list) else [Message(role="user", content=_words(prompt, "prompt"))]
    )
    if isinstance(answer, list):
        return asked + _conversation(answer)
    return [*asked, Message(role=ASSISTANT, content=_words(answer, "answer"))]


def _words(value: Any, what: str) -> str:
    """As text; a number is a word too, and a list or an object written out would be taught as if somebody said it."""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        raise ConfigError(f"its {what} is {_kind(value)}, in place of words", "only text can be taught here")
    return str(value)


def _kind(value: Any) -> str:
    names = ((Mapping, "an object"), (str, "words"), (Sequence, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), f"{value!r:.40}")


def _conversation(messages: Any) -> Conversation:
    if not isinstance(messages, list):
        raise ConfigError(f"its messages are {_kind(messages)}", "expected a list of objects with role and content")
    return [_message(found) for found in messages]


def _message(found: Any) -> Message:
    role = found.get("role", found.get("from")) if isinstance(found, Mapping) else None
    if not isinstance(role, str):
        has = f"has {', '.join(map(str, found)) or 'nothing'}" if isinstance(found, Mapping) else f"is {_kind(found)}"
        raise ConfigError(f"a message {has}, and no role", "expected an object with role and content")
    content = found.get("content", found.get("value"))
    if not isinstance(content, str | None):
        raise ConfigError(f"a message's content is {_kind(content)}, in place of words", "only text can be taught here")
    return Message(role=_ROLES.get(role, role), content=content or "")


def _taught(conversation: Conversation, dropped: Counter[str]) -> Conversation | None:
    if not any(turn["role"] == ASSISTANT and turn["content"].strip() for turn in conversation):
        dropped["no answer of the assistant"] += 1
        return None
    return conversation
