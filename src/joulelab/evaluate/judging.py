"""How a judge model is asked: for a grade of one answer, or which of two answers is better.

A grade is asked for one answer at a time, so that the order of answers cannot matter. A comparison is asked twice, with
the answers in both orders, because models prefer a position (Zheng et al., 2023, arXiv:2306.05685); a judge that
changes its mind with the order has stated a tie. A reply without a valid verdict is counted, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from joulelab.infer.generation.completions import Generator, Prompt
from joulelab.infer.generation.settings import GenerationSettings

GRADE = GenerationSettings(max_new_tokens=8)
"""How a verdict is generated: greedily and short."""
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])")
_CHOICE = re.compile(r"(?<![A-Za-z])([AB])(?![A-Za-z])")


def grading_prompt(rubric: str, question: str, answer: str, lowest: float, highest: float, chat: bool) -> Prompt:
    """`chat=False` for a model without a chat template: it is prompted with plain text."""
    text = (
        f"{rubric.strip()}\n\nQuestion:\n{question}\n\nAnswer to be graded:\n{answer}\n\n"
        f"Reply with one number from {lowest:g} to {highest:g} and nothing else."
    )
    return [{"role": "user", "content": text}] if chat else f"{text}\nGrade:"


def read_grade(reply: str, lowest: float, highest: float) -> float | None:
    """The first number of the reply that is a valid grade: `4`, `Grade: 4`, `4/5`."""
    numbers = (float(text) for text in _NUMBER.findall(reply))
    return next((number for number in numbers if lowest <= number <= highest), None)


def comparison_prompt(rubric: str, question: str, first: str, second: str, chat: bool) -> Prompt:
    text = (
        f"{rubric.strip()}\n\nQuestion:\n{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\n"
        "Which answer is better? Reply with A or B and nothing else."
    )
    return [{"role": "user", "content": text}] if chat else f"{text}\nBetter answer:"


def read_choice(reply: str) -> float | None:
    """1 if the first answer is better, 0 if the second; None for a reply that names neither."""
    found = _CHOICE.search(reply.strip())
    return None if found is None else float(found[1] == "A")


def grades(
    judge: Generator, rubric: str, items: Iterable[tuple[str, str]], lowest: float, highest: float, chat: bool
) -> Iterator[float | None]:
    """The grade of each (question, answer), in order."""
    prompts = [grading_prompt(rubric, question, answer, lowest, highest, chat) for question, answer in items]
    return (read_grade(reply[0].text, lowest, highest) for reply in judge.generate(prompts))


def win_rates(
    judge: Generator, rubric: str, items: Sequence[tuple[str, str, str]], chat: bool
) -> Iterator[float | None]:
    """For each (question, answer, other answer): 1 if the answer wins in both orders, 0 if it loses in both, 0.5 if the
    judge depends on the order; None if a reply is not valid."""
    prompts = []
    for question, own, other in items:
        prompts += [comparison_prompt(rubric, question, *both, chat) for both in ((own, other), (other, own))]
    replies = judge.generate(prompts)
    for _ in items:
        first, second = (read_choice(reply[0].text) for reply in islice(replies, 2))
        yield None if first is None or second is None else (first + 1 - second) / 2
