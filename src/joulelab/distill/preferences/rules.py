"""Rules that score an answer by looking at it, each a small pure function; a table by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from joulelab.evaluate.exact_answers import NUMBER, ascii_minus, same_answer
from joulelab.infer.generation.completions import Completion

Rule = Callable[[Completion, str | None], float | None]
_MARK = re.compile(r"answer\s*:|####|\\boxed\{", re.IGNORECASE)


def ends(answer: Completion, expected: str | None) -> float:
    """An answer that came to its end is better than one that was cut off."""
    return float(answer.finish_reason == "stop")


def exact_answer(answer: Completion, expected: str | None) -> float | None:
    """The right final answer is better than a wrong one; nothing can be said where the right one is not known."""
    if expected is None:
        return None
    return float(same_answer(final_answer(answer.text), final_answer(expected)))


def final_answer(text: str) -> str:
    """What stands behind the last `Answer:`, `####` or in the last box; else the last number; else the whole text."""
    marks = list(_MARK.finditer(text))
    if marks:
        behind = text[marks[-1].end() :].strip()
        return _boxed(behind) if marks[-1].group().startswith("\\") else behind.split("\n")[0].strip()
    numbers = NUMBER.findall(ascii_minus(text))
    return numbers[-1] if numbers else text.strip()


def _boxed(text: str) -> str:
    """Up to the brace that closes the box; fractions and roots have braces of their own."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:place].strip()
    return text.strip()


RULES: dict[str, Rule] = {"ends": ends, "exact-answer": exact_answer}
