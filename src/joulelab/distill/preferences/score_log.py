"""Scores on disk as they come, by content, so that judging goes on where it was killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from joulelab.distill.preferences.candidates import Candidates, Judge, Score
from joulelab.infer.generation.answers import as_messages
from joulelab.meter.trace import LineFile, read_lines


def judge_into(
    path: Path, judge: Judge, asked: Sequence[Candidates], tick: Callable[[int], None] = lambda prompts: None
) -> list[list[Score]]:
    """Scores of all candidates, in order; `tick` gets the prompts judged so far, earlier attempts included."""
    keys = [_key(judge.identity, one) for one in asked]
    found: dict[str, list[Score]] = {}
    if path.exists():
        found = {line["key"]: line["scores"] for line in read_lines(path) if "scores" in line}
    missing = {key: one for key, one in zip(keys, asked, strict=True) if key not in found}
    done = len(asked) - len(missing)
    tick(done)
    file = LineFile(path)
    try:
        for key, scores in zip(missing, judge.scores(list(missing.values())), strict=True):
            file.append({"key": key, "scores": scores})
            found[key] = scores
            done += 1
            tick(done)
        file.sync()
    finally:
        file.close()
    return [found[key] for key in keys]


def _key(judge: str, one: Candidates) -> str:
    prompt = as_messages(one.prompt) or one.prompt
    answers = [(answer.text, answer.finish_reason) for answer in one.answers]
    text = json.dumps([judge, prompt, answers, one.expected], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
