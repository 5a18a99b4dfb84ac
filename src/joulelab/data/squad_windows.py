"""Question and paragraph as windows of tokens that a model can take, with the way back to characters.

A paragraph that is too long for the model is read through windows that begin `doc_stride` tokens apart; each carries
the whole question. Question and paragraph are tokenised once, apart, and put together here, so that the step between
two windows is exactly what was asked for (the tokenizers' own `stride` is the overlap instead).

Shapes: T tokens of a text or a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.squad import Answer, Question
from joulelab.errors import ConfigError

Ints = NDArray[np.int64]

CLS = 0
"""Where the class token stands: the answer of a window that holds none."""
NOT_CONTEXT = -1
"""In place of a character's number, for tokens that are not the paragraph's."""
_QUESTIONS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


@dataclass(frozen=True)
class WindowShape:
    max_seq_length: int
    doc_stride: int
    max_query_length: int


@dataclass(frozen=True, eq=False)
class Window:
    question: int  # which of the questions
    ids: Ints  # T
    types: Ints  # T
    characters: Ints  # T x 2: first character of the token and the one after its last
    first_token: int  # of the paragraph's tokens, the first one in this window
    span: tuple[int, int]  # first and last token of the answer, or CLS twice


@dataclass(frozen=True)
class PairLayout:
    """The special tokens that a model's tokenizer puts around a pair of texts, with their type ids."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int, int, int, int]
    """Of before, question, between, paragraph, after."""

    @property
    def specials(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, eq=False)
class _Encoded:
    ids: Ints
    characters: Ints


def pair_layout(tokenizer: Any) -> PairLayout:
    """Read off a pair of one-letter texts, so that every family of models is served without naming any."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} cannot say which characters a token stands for",
            "use a model with a fast tokenizer (tokenizer.json)",
        )
    probe = tokenizer("a", "b", return_token_type_ids=True)
    ids, sides, types = probe["input_ids"], probe.sequence_ids(0), probe["token_type_ids"]
    first, second = sides.index(0), sides.index(1)
    end_first, end_second = len(sides) - sides[::-1].index(0), len(sides) - sides[::-1].index(1)
    if tokenizer.cls_token_id is None or ids[CLS] != tokenizer.cls_token_id:
        raise ConfigError(
            f"{type(tokenizer).__name__} puts no class token first; 'no answer' would have no place to point to",
            "use an encoder such as BERT, RoBERTa or DistilBERT",
        )
    return PairLayout(
        before=tuple(ids[:first]),
        between=tuple(ids[end_first:second]),
        after=tuple(ids[end_second:]),
        types=(types[CLS], types[first], types[end_first], types[second], types[-1]),
    )


def make_windows(questions: Sequence[Question], tokenizer: Any, shape: WindowShape) -> Iterator[Window]:
    """All windows of all questions, in order; the same questions and tokenizer give the same windows."""
    layout = pair_layout(tokenizer)
    for start in range(0, len(questions), _QUESTIONS_PER_CALL):
        chunk = questions[start : start + _QUESTIONS_PER_CALL]
        contexts = list(dict.fromkeys(question.context for question in chunk))  # several questions share one
        encoded = dict(zip(contexts, _encode(contexts, tokenizer), strict=True))
        asked = _encode([question.text.strip() for question in chunk], tokenizer)
        for number, (question, query) in enumerate(zip(chunk, asked, strict=True), start):
            query_ids = query.ids[: shape.max_query_length]
            yield from _windows(number, question, query_ids, encoded[question.context], layout, shape)


def token_span(answer: Answer, characters_T2: Ints) -> tuple[int, int] | None:
    """First and last token that share a character with the answer; nothing where the tokenizer dropped all of it."""
    start = answer.end - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    touching = np.flatnonzero((characters_T2[:, 1] > start) & (characters_T2[:, 0] < end))
    return (int(touching[0]), int(touching[-1])) if len(touching) else None


def _windows(
    number: int, question: Question, query: Ints, context: _Encoded, layout: PairLayout, shape: WindowShape
) -> Iterator[Window]:
    room = shape.max_seq_length - len(query) - layout.specials
    span = token_span(question.answers[0], context.characters) if question.answers else None
    ahead = len(layout.before) + len(query) + len(layout.between)
    for first in _window_starts(len(context.ids), room, shape.doc_stride):
        part = slice(first, first + room)
        pieces = (layout.before, query, layout.between, context.ids[part], layout.after)
        characters = np.full((sum(map(len, pieces)), 2), NOT_CONTEXT, dtype=np.int64)
        characters[ahead : ahead + len(pieces[3])] = context.characters[part]
        yield Window(
            question=number,
            ids=np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces]),
            types=np.repeat(np.array(layout.types, dtype=np.int64), [len(piece) for piece in pieces]),
            characters=characters,
            first_token=first,
            span=_inside(span, first, len(pieces[3]), ahead),
        )


def _window_starts(tokens: int, room: int, stride: int) -> range:
    """Until a window reaches the paragraph's end; the last one is not followed by others that lie inside it."""
    steps = max(0, -(-(tokens - room) // stride))
    return range(0, steps * stride + 1, stride)


def _inside(span: tuple[int, int] | None, first: int, length: int, ahead: int) -> tuple[int, int]:
    """The answer counted in the window's tokens; half an answer is none."""
    if span is None or span[0] < first or span[1] >= first + length:
        return CLS, CLS
    return span[0] - first + ahead, span[1] - first + ahead


def _encode(texts: list[str], tokenizer: Any) -> list[_Encoded]:
    found = tokenizer(
        texts,
        add_special_tokens=False,
        truncation=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # a paragraph longer than the model is what the windows are for
    )
    return [
        _Encoded(np.array(ids, dtype=np.int64), np.array(characters, dtype=np.int64).reshape(-1, 2))
        for ids, characters in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]
