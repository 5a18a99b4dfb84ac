"""SQuAD questions, versions 1.1 and 2.0: read from JSON with every answer checked, or generated from a seed.

A wrong `answer_start` does not crash a training run; it silently trains on wrong spans. So everything is checked here,
and an error names the article and the question.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import user_path

T = TypeVar("T")

_SHAPE = 'a SQuAD file is {"data": [{"title", "paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}'
_WORDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "an integer", bool: "true or false"}


@dataclass(frozen=True)
class Answer:
    text: str
    start: int  # in characters of the context

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]  # of several annotators; empty for unanswerable questions

    @property
    def impossible(self) -> bool:
        return not self.answers


def read_squad(name: str | Path, version_2: bool) -> tuple[Question, ...]:
    path = user_path(str(name))
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", _SHAPE, str(name))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are not UTF-8
        raise ConfigError(f"{path} is not JSON: {error}", _SHAPE) from None
    return parse_squad(document, str(path), version_2)


def parse_squad(document: object, name: str, version_2: bool) -> tuple[Question, ...]:
    """All questions of a document; errors use `name` for it."""
    whole = _require(document, dict, name)
    questions = tuple(
        question
        for number, article in enumerate(_field(whole, "data", list, name))
        for question in _article(article, f"{name}, article {number}", version_2)
    )
    if not questions:
        raise ConfigError(f"{name} contains no questions", _SHAPE)
    _refuse_duplicates(questions, name)
    return questions


def _article(article: object, where: str, version_2: bool) -> Iterator[Question]:
    fields = _require(article, dict, where)
    if isinstance(fields.get("title"), str):
        where = f"{where} ('{fields['title']}')"
    for number, paragraph in enumerate(_field(fields, "paragraphs", list, where)):
        place = f"{where}, paragraph {number}"
        inner = _require(paragraph, dict, place)
        context = _text(inner, "context", place)
        for entry in _field(inner, "qas", list, place):
            yield _question(_require(entry, dict, f"{place}, a question"), context, where, version_2)


def _question(entry: dict[str, Any], context: str, where: str, version_2: bool) -> Question:
    identity = _text(entry, "id", f"{where}, a question")
    place = f"{where}, question {identity}"
    answers = tuple(_answer(answer, context, place) for answer in _field(entry, "answers", list, place))
    impossible = "is_impossible" in entry and _field(entry, "is_impossible", bool, place)
    if impossible and not version_2:
        raise ConfigError(f"{place} is marked impossible; version 1.1 has no such questions", "set data.version_2=true")
    if impossible == bool(answers):
        found = "is marked impossible and has an answer" if answers else "has no answer and is not marked impossible"
        raise ConfigError(
            f"{place} {found}", "add an answer, or in version 2.0 set is_impossible: true without answers"
        )
    return Question(identity, _text(entry, "question", place), context, answers)


def _answer(answer: object, context: str, where: str) -> Answer:
    fields = _require(answer, dict, f"{where}, an answer")
    text, start = _text(fields, "text", where), _field(fields, "answer_start", int, where)
    found = context[start : start + len(text)] if start >= 0 else ""
    if found != text:
        raise ConfigError(
            f"{where}: at answer_start {start} the context is '{_brief(found)}', the answer '{_brief(text)}'",
            "answer_start counts characters of the context from 0, not bytes and not words; fix or remove the answer",
        )
    return Answer(text, start)


def _text(fields: dict[str, Any], key: str, where: str) -> str:
    value = _field(fields, key, str, where)
    if not value.strip():
        raise ConfigError(f"{where}: '{key}' is empty", _SHAPE)
    return value


def _field(fields: dict[str, Any], key: str, kind: type[T], where: str) -> T:
    if key not in fields:
        raise ConfigError(f"{where} has no '{key}'", _SHAPE)
    return _require(fields[key], kind, f"'{key}' of {where}")


def _require(value: object, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        found = _WORDS.get(type(value), type(value).__name__)
        raise ConfigError(f"{where}: expected {_WORDS[kind]}, found {found}", _SHAPE)
    return value


def _refuse_duplicates(questions: tuple[Question, ...], name: str) -> None:
    """Predictions are stored by id, so a second question with the same id would overwrite the first."""
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ConfigError(f"{name} has two questions with the id {question.id}", "give each question its own id")
        seen.add(question.id)


def _brief(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"


# Synthetic SQuAD documents: short stories generated from a seed, so that a first run needs no download. Facts are
# random, so memorization does not help. Each paragraph states two facts about each of two people; if both facts are of
# one kind, the type of the answer does not identify it, and the names must be read.


SYNTHETIC = "synthetic"
"""Used in place of a file name."""

# Common words, most of them one token each, so that a tiny model need not learn spelling.
_PEOPLE = """Alice Brian Clara David Emma Frank Grace Henry Irene James Karen Louis Maria Nancy Oscar Paul Rosa Simon
Thomas Vera"""
_TOWNS = "Athens Berlin Cairo Dublin Florence Geneva Havana Istanbul Lima London Madrid Oslo Paris Prague Rome Vienna"
_JOBS = "baker carpenter doctor farmer fisherman gardener judge painter pilot sailor singer teacher writer"
_ANIMALS = "bear cat cow dog donkey duck goat horse parrot pig rabbit sheep snake turtle"
_COLORS = "black blue brown golden green grey purple red silver white yellow"
_THINGS = "bag bell book box car clock coat cup hat key lamp ring stone table"
_PLACES = "castle church forest garden harbor hotel kitchen library market museum park school theater tower"


@dataclass(frozen=True)
class _Kind:
    """A kind of fact; `#` is the person and `*` the answer."""

    sentences: tuple[str, ...]
    question: str
    values: tuple[str, ...]
    """Lists of words; an answer has one word of each."""


_KINDS = (
    _Kind(("# was born in *.", "In * # was born."), "Where was # born?", (_TOWNS,)),
    _Kind(("# works as a *.", "For years # works as a *."), "What does # work as?", (_JOBS,)),
    _Kind(("# keeps a *.", "At home # keeps a *."), "Which animal does # keep?", (_ANIMALS,)),
    _Kind(("# found a *.", "Last week # found a *."), "What did # find?", (_COLORS, _THINGS)),
    _Kind(("# lives near the *.", "Near the * lives #."), "Near which place does # live?", (_PLACES,)),
)
_KINDS_TOLD = 2


def synthetic_document(paragraphs: int, seed: int, version_2: bool) -> dict[str, Any]:
    """One article; in version 2.0 every paragraph also has questions that it does not answer."""
    random = Random(f"squad {seed}")
    made = [_paragraph(f"synthetic-{seed}-{number}", random, version_2) for number in range(paragraphs)]
    return {"version": "v2.0" if version_2 else "1.1", "data": [{"title": "Made-up stories", "paragraphs": made}]}


def _paragraph(name: str, random: Random, version_2: bool) -> dict[str, Any]:
    people = random.sample(_PEOPLE.split(), 2)
    kinds = {person: random.sample(_KINDS, len(_KINDS)) for person in people}
    facts = [(person, kind) for person in people for kind in kinds[person][:_KINDS_TOLD]]
    random.shuffle(facts)
    context, entries = "", []
    for person, kind in facts:
        before, after = random.choice(kind.sentences).replace("#", person).split("*")
        answer = " ".join(random.choice(words.split()) for words in kind.values)
        entries.append(_entry(person, kind, [{"text": answer, "answer_start": len(context) + len(before)}]))
        context += before + answer + after + " "
    if version_2:
        entries += [_entry(person, kinds[person][-1], []) for person in people]
    for number, entry in enumerate(entries):
        entry["id"] = f"{name}-{number}"
        if version_2:
            entry["is_impossible"] = not entry["answers"]
    return {"context": context.strip(), "qas": entries}


def _entry(person: str, kind: _Kind, answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"question": kind.question.replace("#", person), "answers": answers}
