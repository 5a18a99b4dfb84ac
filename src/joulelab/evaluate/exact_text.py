"""Whether a short answer is the right one: numbers as numbers, formulas sign by sign, other words as SQuAD has them.

SQuAD's way takes all punctuation for noise. It is right for names, and takes 1.5 for 15, -5 for 5 and 1,2,3 for 123.
"""

from __future__ import annotations

import re

from joulelab.evaluate.answer_text import exact_match

# A comma separates thousands only before groups of three digits; `1,2,3` is a list.
NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:/\d+)?")
_FORMULA = re.compile(r"[\\^=+*/<>]|-\s*\d|\d\.\d")
_NUMBER_LIST = re.compile(r"[-+\d.,;\s()\[\]{}$]*\d\s*[,;][-+\d.,;\s()\[\]{}$]*")
_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d", "-"))
_BEFORE = " \t\n'\"("
_BEHIND = " \t\n%.,;:!?'\")"


def same_answer(said: str, true: str) -> bool:
    said, true = ascii_minus(said), ascii_minus(true)
    number = number_of(true)
    if number is not None:
        return number_of(said) == number
    if _FORMULA.search(true) or _NUMBER_LIST.fullmatch(true):
        return _signs(said) == _signs(true)
    return exact_match(said, true) == 1.0


def ascii_minus(text: str) -> str:
    return text.translate(_MINUS_SIGNS)


def number_of(text: str) -> float | None:
    """12, +5, -1,000, 2.50, .5, 3/4, with or without dollars, a percent sign or a full stop; None for other texts."""
    found = NUMBER.fullmatch(text.replace("$", "").lstrip(_BEFORE).rstrip(_BEHIND))
    if found is None:
        return None
    above, _, below = found.group().replace(",", "").partition("/")
    if not below:
        return float(above)
    return float(above) / float(below) if float(below) else None


def _signs(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$.")).casefold()
