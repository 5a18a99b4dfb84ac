"""Windows of questions as flat arrays on disk, read through a memory map; no pickle, so nobody's code runs on opening.

One long array of tokens and the offsets of its rows, beside it the tokens' types and characters. Questions and
paragraphs lie in a JSON file of their own that only evaluation reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.squad import Answer, Question
from joulelab.data.squad_windows import CLS, NOT_CONTEXT, Window
from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.soundness import words_for

FORMAT = 1
META, QUESTIONS = "meta.json", "questions.json"
_ARRAYS = ("tokens", "types", "characters", "offsets", "spans", "question_of", "first_tokens")


@dataclass(frozen=True, eq=False)
class SquadFeatures:
    """Rows are windows. N windows, L tokens of all of them in a row."""

    folder: Path
    tokens: NDArray[Any]  # L
    types: NDArray[np.uint8]  # L
    characters: NDArray[np.int32]  # L x 2, NOT_CONTEXT outside the paragraph
    offsets: NDArray[np.int64]  # N + 1
    spans: NDArray[np.int64]  # N x 2
    question_of: NDArray[np.int64]  # N
    first_tokens: NDArray[np.int64]  # N
    pad_id: int

    def __len__(self) -> int:
        return len(self.question_of)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def tokens_total(self) -> int:
        return int(self.offsets[-1])

    def part(self, row: int) -> slice:
        """Where the row's tokens lie in the flat arrays."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def answerable(self, row: int) -> NDArray[np.bool_]:
        """Positions an answer may point to: the paragraph's tokens, and the class token for 'none here'."""
        inside: NDArray[np.bool_] = self.characters[self.part(row), 0] != NOT_CONTEXT
        inside[CLS] = True
        return inside


def write_features(
    folder: Path, questions: Sequence[Question], windows: Iterable[Window], vocab_size: int, pad_id: int
) -> SquadFeatures:
    rows = list(windows)
    if not rows:
        raise ConfigError("there are no questions to tokenise", "name a file with at least one question")
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in _arrays(rows, vocab_size).items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    write_json(folder / QUESTIONS, _as_json(questions))
    # last: a folder that has it is whole
    write_json(folder / META, {"format": FORMAT, "rows": len(rows), "vocab_size": vocab_size, "pad_id": pad_id})
    return open_features(folder)


def open_features(folder: Path) -> SquadFeatures:
    if not (folder / META).is_file():
        raise NotFoundError(
            f"{folder.absolute()} holds no complete set of windows: {META} is missing", "write it again"
        )
    meta = read_json(folder / META)
    try:
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']}, expected {FORMAT}")
        arrays: dict[str, Any] = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
        }
        opened = SquadFeatures(folder=folder, pad_id=meta["pad_id"], **arrays)
        if not len(opened) == len(opened.offsets) - 1 == meta["rows"] or opened.tokens_total != len(opened.tokens):
            raise ValueError("its arrays have different lengths")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JoulelabError(
            f"the windows in {folder.absolute()} are damaged: {words_for(error)}", "write them again"
        ) from error
    return opened


def load_questions(folder: Path) -> tuple[Question, ...]:
    found = read_json(folder / QUESTIONS)
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


def _arrays(rows: list[Window], vocab_size: int) -> dict[str, NDArray[Any]]:
    tokens = np.concatenate([row.ids for row in rows])
    if tokens.min() < 0 or tokens.max() >= vocab_size:  # it would wrap round in uint16 and train on nonsense
        raise ConfigError(f"a token lies outside 0..{vocab_size - 1}", "the tokenizer and the vocabulary size disagree")
    return {
        "tokens": tokens.astype(np.uint16 if vocab_size < 65_536 else np.int32),
        "types": np.concatenate([row.types for row in rows]).astype(np.uint8),
        "characters": np.concatenate([row.characters for row in rows]).astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum([len(row.ids) for row in rows])]).astype(np.int64),
        "spans": np.array([row.span for row in rows], dtype=np.int64),
        "question_of": np.array([row.question for row in rows], dtype=np.int64),
        "first_tokens": np.array([row.first_token for row in rows], dtype=np.int64),
    }


def _as_json(questions: Sequence[Question]) -> dict[str, Any]:
    """Each paragraph once, however many questions are asked on it."""
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
