"""Judges that score answers, and the file that their scores are appended to.

    likelihood   a model's mean log-probability per token. The mean, because a sum falls with every token: a judge by
                 sums would prefer whatever is short.
    rubric       a model reads a rubric, the question and one answer, and replies with a grade.
    pairwise     a model compares every two answers to a prompt, in both orders; the score is the share of wins.
    rule         a function of the answer's text, such as `ends` or `exact-answer`; needs no model.

Scores are written as they are made, by content, so that judging can be interrupted and divided into shards.

Shapes: B rows padded on the right, T tokens, N scored tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joulelab.distill.causal.models import expose_hidden_states, lm_head_weight
from joulelab.distill.preferences.pairs import Candidates, Score
from joulelab.distill.preferences.preference_loss import TargetLogProbabilities
from joulelab.errors import ConfigError, JoulelabError
from joulelab.evaluate.exact_answers import NUMBER, ascii_minus, same_answer
from joulelab.evaluate.judging import grades, win_rates
from joulelab.infer.generation.completions import Completion, Generator, Prompt, answer_ids, as_messages, encode_prompt
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.lookup import unknown
from joulelab.meter.trace import LineFile, read_lines


class Judge(Protocol):
    @property
    def identity(self) -> str:
        """The judge and its settings; part of a score's key."""

    def scores(self, candidates: Sequence[Candidates]) -> Iterator[list[Score]]:
        """For each prompt, in order, one score per answer; a prompt's scores come before the last one is judged, so
        that an interruption loses few."""


class PluginJudge:
    """A function of an installed package (`joulelab.judges`): prompt, answers and the data's own answer, if it has one,
    in; one score per answer out, higher is better, None where an answer cannot be judged."""

    def __init__(self, judge: Callable[[Prompt, Sequence[str], str | None], Sequence[Score]], identity: str) -> None:
        self.identity = identity
        self._judge = judge

    def scores(self, candidates: Sequence[Candidates]) -> Iterator[list[Score]]:
        for one in candidates:
            found = list(self._judge(one.prompt, [answer.text for answer in one.answers], one.expected))
            if len(found) != len(one.answers):
                raise JoulelabError(
                    f"the judge {self.identity} returned {len(found)} scores for {len(one.answers)} answers",
                    "it must return one score per answer",
                )
            yield [None if score is None else float(score) for score in found]


# likelihood


def likelihood_identity(model: str) -> str:
    return f"likelihood:{model}"


class LikelihoodJudge:
    """Scores answers that the judging model has generated itself come from generation, without a second pass."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        identity: str,
        batch_size: int = 16,
        prompts_at_once: int = 32,
        written_by: str | None = None,
    ) -> None:
        """`written_by` is the identity of the generator; if it is the judge's own, generation's values are used.
        Batches have `batch_size` answers, all to the same `prompts_at_once` prompts."""
        self.identity = likelihood_identity(identity)
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        self._prompts_at_once = prompts_at_once
        self._generated_them = written_by == identity
        self._log_probabilities = TargetLogProbabilities()

    def scores(self, candidates: Sequence[Candidates]) -> Iterator[list[Score]]:
        for start in range(0, len(candidates), self._prompts_at_once):
            batch = candidates[start : start + self._prompts_at_once]
            scores = [[self._known_score(answer) for answer in one.answers] for one in batch]
            unscored = [
                (number, place)
                for number, one in enumerate(batch)
                for place, answer in enumerate(one.answers)
                if scores[number][place] is None and answer.text
            ]
            rows = [self._row(batch[number].prompt, batch[number].answers[place]) for number, place in unscored]
            for (number, place), score in zip(unscored, self._score_rows(rows), strict=True):
                scores[number][place] = score
            yield from scores

    def _known_score(self, answer: Completion) -> Score:
        return answer.mean_log_probability if self._generated_them else None

    def _row(self, prompt: Prompt, answer: Completion) -> tuple[list[int], list[int]]:
        ids = answer_ids(self._tokenizer, prompt, answer.text, answer.finish_reason == "stop")
        return encode_prompt(self._tokenizer, prompt), ids

    @torch.no_grad()
    def _score_rows(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        if not rows:
            return []
        device, was_training = next(self._model.parameters()).device, self._model.training
        self._model.eval()
        try:
            scores: list[float] = []
            for start in range(0, len(rows), self._batch_size):
                ids_BT, scored_BT = pad_rows(rows[start : start + self._batch_size], device)
                scores += mean_log_probability(self._model, ids_BT, scored_BT, self._log_probabilities).tolist()
        finally:
            self._model.train(was_training)
        return scores


def log_probability_sums(
    model: nn.Module, ids_BT: Tensor, scored_BT: Tensor, log_probabilities: TargetLogProbabilities | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over the scored tokens of each row, and their number. A row's first token has no prediction.

    Padding is on the right, where no real token attends to it, so no mask is needed.
    """
    mask_BT = scored_BT.bool().clone()
    mask_BT[:, 0] = False
    hidden_BTD = expose_hidden_states(model)(input_ids=ids_BT, hidden_only=True)
    rows_N, at_N = mask_BT.nonzero(as_tuple=True)
    compute = log_probabilities or TargetLogProbabilities()
    # The state at t - 1 predicts the token at t. Only scored positions are projected to the
    # vocabulary.
    logs_N = compute(hidden_BTD[rows_N, at_N - 1], lm_head_weight(model), ids_BT[rows_N, at_N])
    sums_B = logs_N.new_zeros(len(ids_BT)).index_add(0, rows_N, logs_N)
    return sums_B, mask_BT.sum(-1)


def mean_log_probability(
    model: nn.Module, ids_BT: Tensor, scored_BT: Tensor, log_probabilities: TargetLogProbabilities | None = None
) -> Tensor:
    """[B], nats per token."""
    sums_B, tokens_B = log_probability_sums(model, ids_BT, scored_BT, log_probabilities)
    if bool((tokens_B == 0).any()):
        raise ConfigError(
            f"row {int((tokens_B == 0).nonzero()[0])} has no token to judge", "an answer needs at least one token"
        )
    return sums_B / tokens_B


def pad_rows(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(prompt, answer) pairs as ids_BT and scored_BT, padded on the right; the answers are scored."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    scored_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor([*prompt, *answer])
        scored_BT[row, len(prompt) : end] = True
    return ids_BT.to(device), scored_BT.to(device)


# rubric, pairwise


def rubric_identity(
    generator: str, settings: GenerationSettings, rubric: str, lowest: float = 1, highest: float = 5, chat: bool = True
) -> str:
    """Identity of a rubric judge, known without loading its model."""
    described = f"{generator}|{settings.model_dump_json()}|{rubric}|{lowest}|{highest}|{chat}"
    return f"rubric:{hashlib.sha256(described.encode()).hexdigest()[:24]}"


class RubricJudge:
    def __init__(
        self, generator: Generator, rubric: str, lowest: float = 1, highest: float = 5, chat: bool = True
    ) -> None:
        """`chat=False` for a model without a chat template: it is prompted with plain text."""
        if not rubric.strip() or lowest >= highest:
            raise ConfigError(
                f"a rubric of {len(rubric)} characters with grades from {lowest} to {highest} is not usable",
                "describe what makes an answer good, and give grades from a lower to a higher number",
            )
        self._generator, self._rubric, self._chat = generator, rubric.strip(), chat
        self._lowest, self._highest = lowest, highest
        self.identity = rubric_identity(generator.identity, generator.settings, rubric, lowest, highest, chat)

    def scores(self, candidates: Sequence[Candidates]) -> Iterator[list[Score]]:
        items = [(one.question, answer.text) for one in candidates for answer in one.answers]
        found = grades(self._generator, self._rubric, items, self._lowest, self._highest, self._chat)
        for one in candidates:
            yield list(islice(found, len(one.answers)))


def pairwise_identity(generator: str, settings: GenerationSettings, rubric: str, chat: bool = True) -> str:
    described = f"{generator}|{settings.model_dump_json()}|{rubric}|{chat}"
    return f"pairwise:{hashlib.sha256(described.encode()).hexdigest()[:24]}"


class PairwiseJudge:
    """Score of an answer: its share of wins against the other answers to the prompt; None if a comparison failed."""

    def __init__(self, generator: Generator, rubric: str, chat: bool = True) -> None:
        self._generator, self._rubric, self._chat = generator, rubric, chat
        self.identity = pairwise_identity(generator.identity, generator.settings, rubric, chat)

    def scores(self, candidates: Sequence[Candidates]) -> Iterator[list[Score]]:
        pairs = [list(combinations(range(len(one.answers)), 2)) for one in candidates]
        items = [
            (one.question, one.answers[first].text, one.answers[second].text)
            for one, own in zip(candidates, pairs, strict=True)
            for first, second in own
        ]
        found = win_rates(self._generator, self._rubric, items, self._chat)
        for one, own in zip(candidates, pairs, strict=True):
            wins: list[list[Score]] = [[] for _ in one.answers]
            for (first, second), rate in zip(own, islice(found, len(own)), strict=True):
                wins[first].append(rate)
                wins[second].append(None if rate is None else 1 - rate)
            yield [_mean(some) for some in wins]


def _mean(values: Sequence[Score]) -> Score:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


# rules

Rule = Callable[[Completion, str | None], float | None]
_MARK = re.compile(r"answer\s*:|####|\\boxed\{", re.IGNORECASE)


def rule_identity(rule: str) -> str:
    return f"rule:{rule}"


class RuleJudge:
    """Scores answers by a rule on their text; without a model, at negligible energy."""

    def __init__(self, rule: str) -> None:
        if rule not in RULES:
            raise unknown("rule", rule, RULES)
        self.identity = rule_identity(rule)
        self._rule = RULES[rule]

    def scores(self, candidates: Sequence[Candidates]) -> Iterator[list[Score]]:
        return ([self._rule(answer, one.expected) for answer in one.answers] for one in candidates)


def ends(answer: Completion, expected: str | None) -> float:
    """A finished answer is better than a truncated one."""
    return float(answer.finish_reason == "stop")


def exact_answer(answer: Completion, expected: str | None) -> float | None:
    """A correct final answer is better than a wrong one; no score if the correct one is unknown."""
    if expected is None:
        return None
    return float(same_answer(final_answer(answer.text), final_answer(expected)))


def final_answer(text: str) -> str:
    """The text after the last `Answer:`, `####` or in the last box; else the last number; else the whole text."""
    marks = list(_MARK.finditer(text))
    if marks:
        after = text[marks[-1].end() :].strip()
        return _boxed(after) if marks[-1].group().startswith("\\") else after.split("\n")[0].strip()
    numbers = NUMBER.findall(ascii_minus(text))
    return numbers[-1] if numbers else text.strip()


def _boxed(text: str) -> str:
    """Up to the brace that closes the box; fractions and roots contain braces."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:place].strip()
    return text.strip()


RULES: dict[str, Rule] = {"ends": ends, "exact-answer": exact_answer}


# scores on disk

Scores = dict[str, list[Score]]


def score_key(judge: str, one: Candidates) -> str:
    prompt = as_messages(one.prompt) or one.prompt
    answers = [(answer.text, answer.finish_reason) for answer in one.answers]
    text = json.dumps([judge, prompt, answers, one.expected], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_scores(*paths: Path) -> Scores:
    """By key; the first line of a key counts."""
    scores: Scores = {}
    for line in (line for path in paths if path.exists() for line in read_lines(path)):
        if "scores" in line:
            scores.setdefault(line["key"], line["scores"])
    return scores


def write_scores(path: Path, keys: Sequence[str], scores: Mapping[str, list[Score]]) -> None:
    """The scores of all prompts in one file, in order."""
    missing = sum(key not in scores for key in keys)
    if missing:
        raise JoulelabError(
            f"the answers to {missing:,} of {len(keys):,} prompts are not judged",
            "judge again: only missing scores are computed",
        )
    path.unlink(missing_ok=True)
    file = LineFile(path)
    try:
        file.append(*({"key": key, "scores": scores[key]} for key in dict.fromkeys(keys)))
        file.sync()
    finally:
        file.close()


def write_judgments(
    path: Path,
    judge: Judge,
    candidates: Sequence[Candidates],
    tick: Callable[[int], None] = lambda prompts: None,
    *,
    unit: int | None = None,
    others: Sequence[Path] = (),
) -> list[list[Score]]:
    """Scores of all candidates, in order; `tick` gets the prompts judged so far, earlier attempts included.

    `unit` prompts are judged as a whole if one of them lacks its scores: the last bits of a score depend on the other
    rows of its batch, and may decide a tie. Without it only what is missing is judged. Scores in the files of `others`
    are not computed again. The judge gets all units at once, so that one that generates can fill its batches.
    """
    keys = [score_key(judge.identity, one) for one in candidates]
    own, elsewhere = read_scores(path), read_scores(*others)
    known = own.keys() | elsewhere.keys()
    done = sum(key in own for key in dict.fromkeys(keys))
    tick(done)
    file = LineFile(path)
    try:
        pending = _pending(keys, known, unit)
        for at, scores in zip(pending, judge.scores([candidates[at] for at in pending]), strict=True):
            if keys[at] in known:
                continue
            file.append({"key": keys[at], "scores": scores})
            own[keys[at]] = scores
            done += 1
            tick(done)
        file.sync()
    finally:
        file.close()
    both = {**elsewhere, **own}
    return [both[key] for key in keys]


def _pending(keys: Sequence[str], known: set[str], unit: int | None) -> list[int]:
    """Indices of the first occurrence of each key, in units that lack a score."""
    first = list({key: at for at, key in reversed(list(enumerate(keys)))}.values())[::-1]
    size = unit or 1
    units = [first[start : start + size] for start in range(0, len(first), size)]
    return [at for some in units if any(keys[at] not in known for at in some) for at in some]
