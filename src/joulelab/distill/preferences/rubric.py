"""A judge model that reads a rubric, the question and one answer, and replies with a grade.

Answers are graded one at a time, so which one is shown first cannot matter. A reply without a grade in the range is no
grade; it is counted, not guessed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

from joulelab.distill.preferences.candidates import Candidates, Score
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Generator, Prompt
from joulelab.infer.generation.settings import GenerationSettings

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])")


def rubric_identity(
    generator: str, settings: GenerationSettings, rubric: str, lowest: float = 1, highest: float = 5, chat: bool = True
) -> str:
    """Of a judge, whose model need not be loaded for it."""
    described = f"{generator}|{settings.model_dump_json()}|{rubric}|{lowest}|{highest}|{chat}"
    return f"rubric:{hashlib.sha256(described.encode()).hexdigest()[:24]}"


class RubricJudge:
    def __init__(
        self, generator: Generator, rubric: str, lowest: float = 1, highest: float = 5, chat: bool = True
    ) -> None:
        """`chat=False` for a model without a chat template: it is asked in plain text."""
        if not rubric.strip() or lowest >= highest:
            raise ConfigError(
                f"a rubric of {len(rubric)} letters with grades from {lowest} to {highest} says nothing",
                "write what makes an answer good, and grades from a lower to a higher number",
            )
        self._generator, self._rubric, self._chat = generator, rubric.strip(), chat
        self._lowest, self._highest = lowest, highest
        self.identity = rubric_identity(generator.identity, generator.settings, rubric, lowest, highest, chat)

    def scores(self, asked: Sequence[Candidates]) -> Iterator[list[Score]]:
        prompts = [self.prompt(one.question, answer.text) for one in asked for answer in one.answers]
        replies = self._generator.generate(prompts)
        for one in asked:
            yield [self.grade(next(replies)[0].text) for _ in one.answers]

    def prompt(self, question: str, answer: str) -> Prompt:
        text = (
            f"{self._rubric}\n\nQuestion:\n{question}\n\nAnswer to be graded:\n{answer}\n\n"
            f"Reply with one number from {self._lowest:g} to {self._highest:g} and nothing else."
        )
        return [{"role": "user", "content": text}] if self._chat else f"{text}\nGrade:"

    def grade(self, reply: str) -> Score:
        """The first number of the reply that is a possible grade: `4`, `Grade: 4`, `4/5`."""
        numbers = (float(found) for found in _NUMBER.findall(reply))
        return next((number for number in numbers if self._lowest <= number <= self._highest), None)
