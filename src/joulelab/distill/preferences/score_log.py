"""Scores on disk as they come, by content, so that judging goes on where it was killed and can be split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from joulelab.distill.preferences.candidates import Candidates, Judge, Score
from joulelab.errors import JoulelabError
from joulelab.infer.generation.completions import as_messages
from joulelab.meter.trace import LineFile, read_lines

Scores = dict[str, list[Score]]


def read_scores(*paths: Path) -> Scores:
    """By key; where a key stands twice the first line counts."""
    found: Scores = {}
    for line in (line for path in paths if path.exists() for line in read_lines(path)):
        if "scores" in line:
            found.setdefault(line["key"], line["scores"])
    return found


def write_scores(path: Path, keys: Sequence[str], found: Mapping[str, list[Score]]) -> None:
    """The scores of all prompts in one file, in their order."""
    lacking = sum(key not in found for key in keys)
    if lacking:
        raise JoulelabError(
            f"the answers to {lacking:,} of {len(keys):,} prompts are not judged",
            "judge again: only what is missing is looked at",
        )
    path.unlink(missing_ok=True)
    file = LineFile(path)
    try:
        file.append(*({"key": key, "scores": found[key]} for key in dict.fromkeys(keys)))
        file.sync()
    finally:
        file.close()


def judge_into(
    path: Path,
    judge: Judge,
    asked: Sequence[Candidates],
    tick: Callable[[int], None] = lambda prompts: None,
    *,
    at_once: int | None = None,
    others: Sequence[Path] = (),
) -> list[list[Score]]:
    """Scores of all candidates, in order; `tick` gets the prompts judged so far, earlier attempts included.

    `at_once` prompts are a batch, which is judged as a whole if one of them lacks its scores: the last bits of a score
    depend on its neighbours, and may decide a tie. Without it only what is missing is judged. What stands in the files
    of `others` is left to them.
    """
    keys = [score_key(judge.identity, one) for one in asked]
    found, told = read_scores(path), read_scores(*others)
    there = found.keys() | told.keys()
    done = sum(key in found for key in dict.fromkeys(keys))
    tick(done)
    file = LineFile(path)
    try:
        for batch in _batches(keys, there, at_once):
            for at, scores in zip(batch, judge.scores([asked[at] for at in batch]), strict=True):
                if keys[at] in there:
                    continue
                file.append({"key": keys[at], "scores": scores})
                found[keys[at]] = scores
                done += 1
                tick(done)
        file.sync()
    finally:
        file.close()
    both = {**told, **found}
    return [both[key] for key in keys]


def _batches(keys: Sequence[str], there: set[str], at_once: int | None) -> list[list[int]]:
    first = list({key: at for at, key in reversed(list(enumerate(keys)))}.values())[::-1]
    if at_once is None:
        return [[at for at in first if keys[at] not in there]]
    cut = [first[start : start + at_once] for start in range(0, len(first), at_once)]
    return [batch for batch in cut if any(keys[at] not in there for at in batch)]


def score_key(judge: str, one: Candidates) -> str:
    prompt = as_messages(one.prompt) or one.prompt
    answers = [(answer.text, answer.finish_reason) for answer in one.answers]
    text = json.dumps([judge, prompt, answers, one.expected], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
