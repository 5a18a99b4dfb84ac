"""Rules that score an answer by looking at it, each a small pure function; a table by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from joulelab.evaluate.answer_text import exact_match
from joulelab.infer.generation.answers import Answer

Rule = Callable[[Answer, str | None], float | None]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARK = re.compile(r"answer\s*:|####|\\boxed\{", re.IGNORECASE)


def ends(answer: Answer, expected: str | None) -> float:
    """An answer that came to its end is better than one that was cut off."""
    return float(answer.finish_reason == "stop")


def exact_answer(answer: Answer, expected: str | None) -> float | None:
    """The right final answer is better than a wrong one; nothing can be said where the right one is not known."""
    if expected is None:
        return None
    return float(_same(final_answer(answer.text), final_answer(expected)))


def final_answer(text: str) -> str:
    """What stands behind the last `Answer:`, `####` or in the last box; else the last number; else the whole text."""
    marks = list(_MARK.finditer(text))
    if marks:
        behind = text[marks[-1].end() :].strip()
        return behind.split("}")[0] if marks[-1].group().startswith("\\") else behind.split("\n")[0].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else text.strip()


def _same(said: str, true: str) -> bool:
    said_number, true_number = _number(said), _number(true)
    if true_number is not None:
        return said_number == true_number
    return exact_match(said, true) == 1.0


def _number(text: str) -> float | None:
    found = _NUMBER.fullmatch(text.strip().strip("$%.").replace(" ", ""))
    return float(found.group().replace(",", "")) if found else None


RULES: dict[str, Rule] = {"ends": ends, "exact-answer": exact_answer}
