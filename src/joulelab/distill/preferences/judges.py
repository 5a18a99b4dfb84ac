"""Judges that need nothing but a model in this process, or no model at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from joulelab.distill.preferences.candidates import Candidates, Score
from joulelab.distill.preferences.likelihood import mean_log_probability, padded
from joulelab.distill.preferences.rules import RULES
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.infer.generation.completions import Completion, Prompt, answer_ids, encode_prompt
from joulelab.lookup import unknown


def likelihood_identity(model: str) -> str:
    return f"likelihood:{model}"


def rule_identity(rule: str) -> str:
    return f"rule:{rule}"


class LikelihoodJudge:
    """By a model's mean log-likelihood a token: what it finds most natural, whatever the length.

    An answer that the judging model has written itself needs no second reading: it was told when it was generated.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, identity: str, batch_size: int = 16, written_by: str | None = None
    ) -> None:
        """`written_by` is the identity of the generator; the same as the judge's own: its figures are taken."""
        self.identity = likelihood_identity(identity)
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        self._wrote_them = written_by == identity
        self._how = Projecting()

    def scores(self, asked: Sequence[Candidates]) -> Iterator[list[Score]]:
        for some in _together(asked, self._batch_size):
            told = [[self._told(answer) for answer in one.answers] for one in some]
            unread = [
                (number, place)
                for number, one in enumerate(some)
                for place, answer in enumerate(one.answers)
                if told[number][place] is None and answer.text
            ]
            rows = [self._row(some[number].prompt, some[number].answers[place]) for number, place in unread]
            for (number, place), score in zip(unread, self._read(rows), strict=True):
                told[number][place] = score
            yield from told

    def _told(self, answer: Completion) -> Score:
        return answer.mean_log_probability if self._wrote_them else None

    def _row(self, prompt: Prompt, answer: Completion) -> tuple[list[int], list[int]]:
        said = answer_ids(self._tokenizer, prompt, answer.text, answer.finish_reason == "stop")
        return encode_prompt(self._tokenizer, prompt), said

    @torch.no_grad()
    def _read(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        if not rows:
            return []
        device, was_training = next(self._model.parameters()).device, self._model.training
        self._model.eval()
        try:
            found: list[float] = []
            for start in range(0, len(rows), self._batch_size):
                ids_BT, trained_BT = padded(rows[start : start + self._batch_size], device)
                found += mean_log_probability(self._model, ids_BT, trained_BT, self._how).tolist()
        finally:
            self._model.train(was_training)
        return found


def _together(asked: Sequence[Candidates], answers: int) -> Iterator[Sequence[Candidates]]:
    """Prompts whose answers fill a batch."""
    size = max(1, answers // max((len(one.answers) for one in asked), default=1))
    return (asked[start : start + size] for start in range(0, len(asked), size))


class RuleJudge:
    """By a rule that looks at the answer itself; no model, no joules to speak of."""

    def __init__(self, rule: str) -> None:
        if rule not in RULES:
            raise unknown("rule", rule, RULES)
        self.identity = rule_identity(rule)
        self._rule = RULES[rule]

    def scores(self, asked: Sequence[Candidates]) -> Iterator[list[Score]]:
        return ([self._rule(answer, one.expected) for answer in one.answers] for one in asked)
