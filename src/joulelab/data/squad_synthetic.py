"""A SQuAD document out of a seed: short made-up stories, so that a first run needs no download.

Every fact is drawn anew, so that memory does not help. Each paragraph tells two facts of each of two people; where they
are of one kind, the kind of word asked for does not give the answer away either, and the names must be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

SYNTHETIC = "synthetic"
"""What a user writes instead of a file."""

# Common words, most of them one token each: a tiny model has better things to learn than spelling.
_PEOPLE = """Alice Brian Clara David Emma Frank Grace Henry Irene James Karen Louis Maria Nancy Oscar Paul Rosa Simon
Thomas Vera"""
_TOWNS = "Athens Berlin Cairo Dublin Florence Geneva Havana Istanbul Lima London Madrid Oslo Paris Prague Rome Vienna"
_JOBS = "baker carpenter doctor farmer fisherman gardener judge painter pilot sailor singer teacher writer"
_ANIMALS = "bear cat cow dog donkey duck goat horse parrot pig rabbit sheep snake turtle"
_COLOURS = "black blue brown golden green grey purple red silver white yellow"
_THINGS = "bag bell book box car clock coat cup hat key lamp ring stone table"
_PLACES = "castle church forest garden harbor hotel kitchen library market museum park school theater tower"


@dataclass(frozen=True)
class _Kind:
    """A kind of fact; `#` is the person and `*` the answer."""

    sentences: tuple[str, ...]
    question: str
    values: tuple[str, ...]
    """Words in a row; an answer has one of each row."""


_KINDS = (
    _Kind(("# was born in *.", "In * # was born."), "Where was # born?", (_TOWNS,)),
    _Kind(("# works as a *.", "For years # works as a *."), "What does # work as?", (_JOBS,)),
    _Kind(("# keeps a *.", "At home # keeps a *."), "Which animal does # keep?", (_ANIMALS,)),
    _Kind(("# found a *.", "Last week # found a *."), "What did # find?", (_COLOURS, _THINGS)),
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
    context, asked = "", []
    for person, kind in facts:
        before, after = random.choice(kind.sentences).replace("#", person).split("*")
        answer = " ".join(random.choice(words.split()) for words in kind.values)
        asked.append(_entry(person, kind, [{"text": answer, "answer_start": len(context) + len(before)}]))
        context += before + answer + after + " "
    if version_2:
        asked += [_entry(person, kinds[person][-1], []) for person in people]
    for number, entry in enumerate(asked):
        entry["id"] = f"{name}-{number}"
        if version_2:
            entry["is_impossible"] = not entry["answers"]
    return {"context": context.strip(), "qas": asked}


def _entry(person: str, kind: _Kind, answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"question": kind.question.replace("#", person), "answers": answers}
