"""Each distinct word is tokenised once: a corpus repeats its words, and looking one up is many times cheaper.

Between some characters a tokenizer never makes a token: BERT's none across a space or beside ASCII punctuation, a
byte-level BPE none across the front of a space. Cut there, the ids of a text are the ids of its pieces in a row, so
they can be kept. Wherever that is not certain (another kind of tokenizer, a text that spells out a special token, odd
whitespace) the whole text goes through the tokenizer, so the ids are its own in every case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

MOST_WORDS = 2**20
"""Kept at a time: about 200 MB. A corpus of the web has more; then the cache starts anew."""
_PUNCTUATION = r"!-/:-@\[-`{-~"
_BERT_PIECES = re.compile(rf"[{_PUNCTUATION}]|[^ {_PUNCTUATION}]+")
# The first word, then every other with the one space before it, as byte-level BPE sees them.
_BPE_PIECES = re.compile(r"^\S+| \S+")
_ODD_WHITESPACE = re.compile(r"\s\s|[^\S ]|^\s|\s$")


class WordCache:
    """Texts to ids through a `tokenizers.Tokenizer`, without special tokens around them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces, self._unsafe = _how_to_cut(json.loads(tokenizer.to_str()))
        self._ids: dict[str, list[int]] = {}

    @property
    def is_used(self) -> bool:
        return self._pieces is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        pieces, unsafe = self._pieces, self._unsafe
        if pieces is None:
            return self._tokenised(texts)
        cut = [None if unsafe(text) else pieces(text) for text in texts]
        self._learn(chain.from_iterable(words for words in cut if words))
        whole = iter(self._tokenised([text for text, words in zip(texts, cut, strict=True) if words is None]))
        ids_of = self._ids.__getitem__
        return [next(whole) if words is None else list(chain.from_iterable(map(ids_of, words))) for words in cut]

    def _learn(self, words: Iterable[str]) -> None:
        here = set(words)
        if len(self._ids) + len(here) > MOST_WORDS:
            self._ids.clear()
        new = list(here.difference(self._ids))
        self._ids.update(zip(new, self._tokenised(new), strict=True))

    def _tokenised(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


Cutter = Callable[[str], list[str]]
Doubt = Callable[[str], object]


def _how_to_cut(definition: Mapping[str, Any]) -> tuple[Cutter | None, Doubt]:
    """How to cut a text into pieces, and which texts not to; without the first, none is cut."""
    added = definition.get("added_tokens") or []
    if definition.get("normalizer") and any(token["normalized"] for token in added):
        # such a token may be spelt in ways we cannot look for
        return None, bool
    spelt_out = re.compile("|".join(re.escape(token["content"]) for token in added) or r"(?!)")
    if _is_bert(definition):
        return _BERT_PIECES.findall, spelt_out.search
    if _is_byte_level_bpe(definition):
        return _BPE_PIECES.findall, lambda text: spelt_out.search(text) or _ODD_WHITESPACE.search(text)
    return None, bool


def _is_bert(definition: Mapping[str, Any]) -> bool:
    parts = [definition.get(part) or {} for part in ("model", "normalizer", "pre_tokenizer")]
    return [part.get("type") for part in parts] == ["WordPiece", "BertNormalizer", "BertPreTokenizer"]


def _is_byte_level_bpe(definition: Mapping[str, Any]) -> bool:
    model, before = definition.get("model") or {}, definition.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("dropout") or definition.get("normalizer"):
        return False
    steps = before.get("pretokenizers", [before])
    *others, last = steps
    # Digits cuts further, inside the pieces; a prefix space would be put before every piece.
    return (
        all(step.get("type") == "Digits" for step in others)
        and last.get("type") == "ByteLevel"
        and last.get("use_regex", True)
        and not last.get("add_prefix_space")
    )
