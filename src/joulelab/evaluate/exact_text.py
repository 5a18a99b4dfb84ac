"""Whether a short answer is the right one: numbers as numbers, formulas sign by sign, other words as SQuAD has them.

SQuAD's way takes all punctuation for noise. It is right for names, and takes 1.5 for 15 and -5 for 5.
"""

from __future__ import annotations

import re

from joulelab.evaluate.answer_text import exact_match

NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)(?:/\d+)?")
_FORMULA = re.compile(r"[\\^=+*/<>]|-\s*\d|\d\.\d")
_BEFORE = " \t\n'\"("
_BEHIND = " \t\n%.,;:!?'\")"


def same_answer(said: str, true: str) -> bool:
    number = number_of(true)
    if number is not None:
        return number_of(said) == number
    if _FORMULA.search(true):
        return _signs(said) == _signs(true)
    return exact_match(said, true) == 1.0


def number_of(text: str) -> float | None:
    """12, -1,000, 2.50, .5, 3/4, with or without dollars, a percent sign or a full stop; nothing for other texts."""
    found = NUMBER.fullmatch(text.replace("$", "").lstrip(_BEFORE).rstrip(_BEHIND))
    if found is None:
        return None
    above, _, below = found.group().replace(",", "").partition("/")
    if not below:
        return float(above)
    return float(above) / float(below) if float(below) else None


def _signs(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$.")).casefold()
