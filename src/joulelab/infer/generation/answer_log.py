"""Answers on disk as they come: one line a prompt, found again by content, so that a killed generation goes on.

A line counts once it is whole; what a kill cut off is passed over and made again. Nothing is ever rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from joulelab.infer.generation.answers import Answer, Generator, Prompt, answer_key, as_messages
from joulelab.meter.trace import LineFile, read_lines


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


def read_answers(path: Path) -> dict[str, list[Answer]]:
    """By key; where a key stands twice the first line counts, as others may have used it already."""
    found: dict[str, list[Answer]] = {}
    if path.exists():
        for line in read_lines(path):
            if "key" in line and "answers" in line:
                found.setdefault(line["key"], [Answer.from_json(answer) for answer in line["answers"]])
    return found


def generate_into(
    path: Path, generator: Generator, prompts: Sequence[Prompt], tick: Callable[[Progress], None] = lambda so_far: None
) -> list[list[Answer]]:
    """The answers to all prompts, in order; those that stand in the file already are not generated again.

    Prompts of like length are answered together. Batches are cut before it is known what is there, and one that lacks
    an answer is made again as a whole: numbers in a batch depend a little on its shape, and a resumed run must say the
    same words as one that was never killed.
    """
    keys = [answer_key(generator.identity, generator.settings, prompt) for prompt in prompts]
    found = read_answers(path)
    so_far = Progress.of(found[key] for key in dict.fromkeys(keys) if key in found)
    tick(so_far)
    pending = _pending(keys, prompts, set(found), generator.prompts_at_once)
    file = LineFile(path)
    try:
        for number, answers in zip(pending, generator.generate([prompts[at] for at in pending]), strict=True):
            key = keys[number]
            if key in found:
                continue
            asked = as_messages(prompts[number]) or prompts[number]
            file.append({"key": key, "prompt": asked, "answers": [answer.to_json() for answer in answers]})
            found[key] = answers
            so_far = so_far.plus(answers)
            tick(so_far)
        file.sync()
    finally:
        file.close()
    return [found[key] for key in keys]


def _pending(keys: Sequence[str], prompts: Sequence[Prompt], there: set[str], at_once: int) -> list[int]:
    """Numbers of prompts, batch after batch; a prompt that stands twice is asked once."""
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    order = sorted(first.values(), key=lambda number: (_length(prompts[number]), keys[number]))
    batches = [order[start : start + at_once] for start in range(0, len(order), at_once)]
    return [number for batch in batches if any(keys[one] not in there for one in batch) for number in batch]


def _length(prompt: Prompt) -> int:
    messages = as_messages(prompt)
    return len(prompt) if messages is None else sum(len(message["content"]) for message in messages)
