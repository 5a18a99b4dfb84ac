"""Windows of questions in a store on disk; questions and paragraphs are an attachment that only evaluation reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.squad import Answer, Question
from joulelab.data.squad_windows import CLS, NOT_CONTEXT, Window
from joulelab.data.store import Column, RaggedStore, store_writer, token_column


class SquadFeatures(RaggedStore):
    """Rows are windows. N windows, L tokens of all of them in a row."""

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
        """Positions an answer may point to: the paragraph's tokens, and the class token for 'none here'."""
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
