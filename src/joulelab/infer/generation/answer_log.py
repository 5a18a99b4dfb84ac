"""Answers on disk as they come: one line a prompt, found again by content, so that a killed generation goes on.

A line counts once it is whole; what a kill cut off is passed over and made again. Nothing is ever rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.infer.generation.answers import Answer, Generator, Prompt, answer_key, as_messages
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.shares import ALL, Share


@dataclass(frozen=True)
class Progress:
    """So far, earlier attempts included: what a stage counts."""

    prompts: int
    answers: int
    prompt_tokens: int
    """Read; once a prompt, however many answers it has."""
    generated_tokens: int

    @classmethod
    def of(cls, answers: Iterable[Sequence[Answer]]) -> Progress:
        every = list(answers)
        return cls(
            prompts=len(every),
            answers=sum(len(some) for some in every),
            prompt_tokens=sum((some[0].prompt_tokens or 0) for some in every if some),
            generated_tokens=sum(one.tokens for some in every for one in some),
        )

    def plus(self, answers: Sequence[Answer]) -> Progress:
        one = Progress.of([answers])
        return Progress(
            self.prompts + 1,
            self.answers + one.answers,
            self.prompt_tokens + one.prompt_tokens,
            self.generated_tokens + one.generated_tokens,
        )


def read_answers(*paths: Path) -> dict[str, list[Answer]]:
    """By key; where a key stands twice the first line counts, as others may have used it already."""
    found: dict[str, list[Answer]] = {}
    for line in (line for path in paths if path.exists() for line in read_lines(path)):
        if "key" in line and "answers" in line:
            found.setdefault(line["key"], [Answer.from_json(answer) for answer in line["answers"]])
    return found


def write_answers(
    path: Path, keys: Sequence[str], prompts: Sequence[Prompt], found: Mapping[str, list[Answer]]
) -> None:
    """The answers to all prompts in one file, in the order in which one process alone would have given them."""
    lacking = [prompts[number] for number, key in enumerate(keys) if key not in found]
    if lacking:
        raise JoulelabError(
            f"{len(lacking):,} of {len(keys):,} prompts have no answer, for example {lacking[0]!r:.80}",
            "generate again: only what is missing is asked for",
        )
    path.unlink(missing_ok=True)
    file = LineFile(path)
    try:
        file.append(*(_line(keys[at], prompts[at], found[keys[at]]) for batch in cut(keys, prompts, 1) for at in batch))
        file.sync()
    finally:
        file.close()


def generate_into(
    path: Path,
    generator: Generator,
    prompts: Sequence[Prompt],
    tick: Callable[[Progress], None] = lambda so_far: None,
    *,
    share: Share = ALL,
    at_once: int | None = None,
    others: Sequence[Path] = (),
) -> list[list[Answer]]:
    """The answers to all prompts of our share, in order; those that stand in a file already are not generated again.

    Prompts of like length are answered together. Batches (of `at_once` prompts; by default the generator's) are cut
    before it is known what is there, and one that lacks an answer is made again as a whole: numbers in a batch depend a
    little on its shape, and a resumed or split run must say the same words as one that was never killed. What stands in
    the files of `others` is left to them.
    """
    keys = [answer_key(generator.identity, generator.settings, prompt) for prompt in prompts]
    ours = own_batches(keys, prompts, at_once or generator.prompts_at_once, share)
    found, told = read_answers(path), read_answers(*others)
    so_far = Progress.of(found[keys[at]] for batch in ours for at in batch if keys[at] in found)
    tick(so_far)
    there = found.keys() | told.keys()
    pending = [at for batch in ours if any(keys[at] not in there for at in batch) for at in batch]
    file = LineFile(path)
    try:
        for number, answers in zip(pending, generator.generate([prompts[at] for at in pending]), strict=True):
            key = keys[number]
            if key in there:
                continue
            file.append(_line(key, prompts[number], answers))
            found[key] = answers
            so_far = so_far.plus(answers)
            tick(so_far)
        file.sync()
    finally:
        file.close()
    mine = {keys[at] for batch in ours for at in batch}
    both = {**told, **found}
    return [both[key] for key in keys if key in mine]


def own_batches(keys: Sequence[str], prompts: Sequence[Prompt], at_once: int, share: Share) -> list[list[int]]:
    batches = cut(keys, prompts, at_once)
    return [batches[place] for place in share.units([keys[batch[0]] for batch in batches])]


def cut(keys: Sequence[str], prompts: Sequence[Prompt], at_once: int) -> list[list[int]]:
    """Numbers of prompts, batch after batch, short ones first; a prompt that stands twice is asked once."""
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    order = sorted(first.values(), key=lambda number: (_length(prompts[number]), keys[number]))
    return [order[start : start + at_once] for start in range(0, len(order), at_once)]


def _line(key: str, prompt: Prompt, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"key": key, "prompt": as_messages(prompt) or prompt, "answers": [answer.to_json() for answer in answers]}


def _length(prompt: Prompt) -> int:
    messages = as_messages(prompt)
    return len(prompt) if messages is None else sum(len(message["content"]) for message in messages)
