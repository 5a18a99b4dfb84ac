"""Whether an answer has just come to one of the texts that end it.

Making text of tokens takes some 50 us, and thousands of rows ask after every token: only a token that could complete a
stop text is worth the look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# what a tokenizer writes for bytes that are no whole character
_PIECE_OF_A_CHARACTER = "\ufffd"


class StopTexts:
    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        # a stop text has at most four tokens (of a byte each) for every character
        self._tail = 4 * max((len(text) for text in texts), default=0)
        self._last_characters = {text[-1] for text in texts}
        # of a space nobody can say which token brings it: decoders put them between words
        self._always = " " in self._last_characters
        self._completing: dict[int, bool] = {}

    def reached(self, ids: Sequence[int]) -> bool:
        """By the last of these tokens; an answer that reached one earlier has ended there."""
        if not self._texts or not self._could_complete(ids[-1]):
            return False
        text = self._text(ids[-self._tail :])
        return any(stop in text for stop in self._texts)

    def _could_complete(self, token: int) -> bool:
        if self._always:
            return True
        known = self._completing.get(token)
        if known is None:
            text = self._text([token])
            known = _PIECE_OF_A_CHARACTER in text or not self._last_characters.isdisjoint(text)
            self._completing[token] = known
        return known

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
