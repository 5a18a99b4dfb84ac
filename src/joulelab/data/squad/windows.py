"""SQuAD questions and paragraphs as windows of tokens: made, stored and batched.

A paragraph that is too long for the model is read through windows that begin `doc_stride` tokens apart; each contains
the whole question. Question and paragraph are tokenized once, separately, and joined here, so the step between two
windows is exactly `doc_stride` (the tokenizers' own `stride` is the overlap instead).

Shapes: T tokens of a text or a window; N windows, L tokens of all of them in a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.batches import Rows, TensorBatch, batch_order
from joulelab.data.squad.questions import Answer, Question
from joulelab.data.token_store import Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError

Ints = NDArray[np.int64]

CLS = 0
"""Position of the class token, which is the answer of a window without one."""
NOT_CONTEXT = -1
"""Character position of tokens outside the paragraph."""
_QUESTIONS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


@dataclass(frozen=True)
class WindowShape:
    max_seq_length: int
    doc_stride: int
    max_query_length: int


@dataclass(frozen=True, eq=False)
class Window:
    question: int  # number of the question
    ids: Ints  # T
    types: Ints  # T
    characters: Ints  # T x 2: start and end of the token in characters
    first_token: int  # first of the paragraph's tokens in this window
    span: tuple[int, int]  # first and last token of the answer, or CLS twice


@dataclass(frozen=True)
class PairLayout:
    """Special tokens that the tokenizer puts around a pair of texts, with their type ids."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[int, int, int, int, int]
    """Type ids of: before, question, between, paragraph, after."""

    @property
    def specials(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, eq=False)
class _Encoded:
    ids: Ints
    characters: Ints


def pair_layout(tokenizer: Any) -> PairLayout:
    """Derived from a pair of one-letter texts, so that it works for any model family."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(tokenizer).__name__} does not return the characters of a token",
            "use a model with a fast tokenizer (tokenizer.json)",
        )
    probe = tokenizer("a", "b", return_token_type_ids=True)
    ids, sides, types = probe["input_ids"], probe.sequence_ids(0), probe["token_type_ids"]
    first, second = sides.index(0), sides.index(1)
    end_first, end_second = len(sides) - sides[::-1].index(0), len(sides) - sides[::-1].index(1)
    if tokenizer.cls_token_id is None or ids[CLS] != tokenizer.cls_token_id:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not put a class token first, which 'no answer' needs",
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
        queries = _encode([question.text.strip() for question in chunk], tokenizer)
        for number, (question, query) in enumerate(zip(chunk, queries, strict=True), start):
            query_ids = query.ids[: shape.max_query_length]
            yield from _windows(number, question, query_ids, encoded[question.context], layout, shape)


def token_span(answer: Answer, characters_T2: Ints) -> tuple[int, int] | None:
    """First and last token that overlap the answer; None if the tokenizer dropped all of it."""
    start = answer.end - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    # Overlap and not containment: a tokenizer may join the answer's last letter with punctuation
    # after it.
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
    """Starts of windows up to the first that reaches the paragraph's end."""
    # The smallest number of steps after which a window of this room reaches the last token.
    steps = max(0, -(-(tokens - room) // stride))
    return range(0, steps * stride + 1, stride)


def _inside(span: tuple[int, int] | None, first: int, length: int, ahead: int) -> tuple[int, int]:
    """The answer as positions in the window; a partial answer counts as none."""
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
        verbose=False,  # no warning for paragraphs longer than the model, which windows handle
    )
    return [
        _Encoded(np.array(ids, dtype=np.int64), np.array(characters, dtype=np.int64).reshape(-1, 2))
        for ids, characters in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]


class SquadFeatures(RaggedStore):
    """Windows on disk, one per row; questions and paragraphs are an attachment that only evaluation reads."""

    COLUMNS = ("tokens", "types", "characters", "spans", "question_of", "first_tokens")
    NOUN = "set of windows"

    def _read_attributes(self) -> None:
        self.types: NDArray[np.uint8] = self.columns["types"]  # L
        self.characters: NDArray[np.int32] = self.columns["characters"]  # L x 2, NOT_CONTEXT outside the paragraph
        self.spans: NDArray[np.int64] = self.columns["spans"]  # N x 2
        self.question_of: NDArray[np.int64] = self.columns["question_of"]  # N
        self.first_tokens: NDArray[np.int64] = self.columns["first_tokens"]  # N
        self.pad_id: int = self.attributes["pad_id"]

    def answerable(self, row: int) -> NDArray[np.bool_]:
        """Positions that an answer may have: the paragraph's tokens, and the class token for 'no answer'."""
        inside: NDArray[np.bool_] = self.characters[self.span(row), 0] != NOT_CONTEXT
        inside[CLS] = True
        return inside


def write_features(
    folder: Path, questions: Sequence[Question], windows: Iterable[Window], vocab_size: int, pad_id: int
) -> SquadFeatures:
    columns = {
        "tokens": token_column(vocab_size),
        "types": Column("|u1"),
        "characters": Column("<i4", width=2),
        "spans": Column("<i8", per="row", width=2),
        "question_of": Column("<i8", per="row"),
        "first_tokens": Column("<i8", per="row"),
    }
    with store_writer(folder, columns) as writer:
        for window in windows:
            writer.append(
                [len(window.ids)],
                tokens=window.ids,
                types=window.types,
                characters=window.characters,
                spans=[window.span],
                question_of=[window.question],
                first_tokens=[window.first_token],
            )
        writer.attributes.update(vocab_size=vocab_size, pad_id=pad_id)
        writer.attach("questions", _as_json(questions))
    return SquadFeatures(folder)


def open_features(folder: Path) -> SquadFeatures:
    return SquadFeatures(folder)


def load_questions(folder: Path) -> tuple[Question, ...]:
    found = open_features(folder).attachment("questions")
    contexts = found["contexts"]
    return tuple(
        Question(
            entry["id"],
            entry["question"],
            contexts[entry["context"]],
            tuple(Answer(text, start) for text, start in entry["answers"]),
        )
        for entry in found["questions"]
    )


def _as_json(questions: Sequence[Question]) -> dict[str, Any]:
    """Questions with each paragraph stored once."""
    places = {context: place for place, context in enumerate(dict.fromkeys(q.context for q in questions))}
    entries = [
        {
            "id": question.id,
            "question": question.text,
            "context": places[question.context],
            "answers": [(answer.text, answer.start) for answer in question.answers],
        }
        for question in questions
    ]
    return {"contexts": list(places), "questions": entries}


class SquadBatches:
    """Batches by (epoch, index); windows of similar length share a batch, which saves padding."""

    def __init__(self, features: SquadFeatures, batch_size: int, seed: int) -> None:
        self._features, self._batch_size, self._seed = features, batch_size, seed
        self._epoch: int | None = None
        self._order: list[Rows] = []

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self._features) // self._batch_size)

    def at(self, epoch: int, index: int) -> TensorBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        if epoch != self._epoch:
            self._order = batch_order(self._features.lengths, self._batch_size, self._seed, epoch)
            self._epoch = epoch
        return collate(self._features, self._order[index])


def iterate_in_order(features: SquadFeatures, batch_size: int) -> Iterator[tuple[Rows, TensorBatch]]:
    """For evaluation: every window once, longest first, so that a batch that does not fit into memory fails first."""
    longest_first = np.argsort(-features.lengths, kind="stable").astype(np.int64)
    for start in range(0, len(longest_first), batch_size):
        rows = longest_first[start : start + batch_size]
        yield rows, collate(features, rows)


def collate(features: SquadFeatures, rows: Rows) -> TensorBatch:
    lengths = features.lengths[rows]
    shape = (len(rows), int(lengths.max()))
    ids_BT, types_BT = np.full(shape, features.pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    answerable_BT = np.zeros(shape, dtype=bool)
    for place, row in enumerate(rows):
        part, length = features.span(int(row)), lengths[place]
        ids_BT[place, :length], types_BT[place, :length] = features.tokens[part], features.types[part]
        answerable_BT[place, :length] = features.answerable(int(row))
    arrays = {
        "input_ids": ids_BT,
        "attention_mask": (np.arange(shape[1]) < lengths[:, None]).astype(np.int64),
        "token_type_ids": types_BT,
        "answerable": answerable_BT,
        "spans": np.array(features.spans[rows]),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return TensorBatch(tensors, samples=len(rows), tokens=int(lengths.sum()), count=len(rows))


def takes_token_types(model: nn.Module) -> bool:
    """True for BERT, False for DistilBERT; both use the same batches."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def model_inputs(batch: TensorBatch, token_types: bool) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if token_types else ()))
    return {name: batch[name] for name in names}
