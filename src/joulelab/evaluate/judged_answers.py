"""Benchmarks whose answers a model judges: comparisons with reference answers (as in AlpacaEval) and grades of one or
several turns (as in MT-Bench), over local files in their formats.

A line of the file has `prompt` (text or messages), `instruction` (AlpacaEval) or `turns` (MT-Bench: the user's turns of
one conversation). With a `reference` or `output` in every line the judge compares; otherwise it grades. The judge is a
local model or a server; its work is a separate stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from joulelab.data.chat.conversations import Message
from joulelab.data.text import json_rows
from joulelab.errors import ConfigError
from joulelab.evaluate.config import EvaluateSpec
from joulelab.evaluate.judging import GRADE, grades, win_rates
from joulelab.infer.generation.completions import Generator, Prompt, as_messages
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.server import Endpoint, ServerGenerator, server_energy_gap
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.recipes import cast_model
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.record import Result
from joulelab.units import plural
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer, weights_identity

JUDGED = "judged.json"
LOWEST, HIGHEST = 1.0, 10.0
SERVER_KEY = "JOULELAB_SERVER_KEY"
_PROMPTS, _REFERENCES = ("turns", "prompt", "instruction"), ("reference", "output")
_EXPECTED = "expected prompt, instruction or turns, and for comparisons reference or output, in each line"


@dataclass(frozen=True)
class JudgedPrompt:
    turns: tuple[str, ...]
    """The user's turns; the model answers each before it reads the next."""
    before: tuple[Message, ...] = ()
    """Messages before the first turn."""
    reference: str | None = None
    """The answer to compare with; None: the answers are graded."""


def read_judged_prompts(path: Path, limit: int | None) -> list[JudgedPrompt]:
    found = []
    for number, row in enumerate(islice(json_rows(path), limit), 1):
        try:
            found.append(_judged_prompt(row))
        except (ConfigError, TypeError, KeyError) as error:
            message = error.message if isinstance(error, ConfigError) else str(error)
            raise ConfigError(f"{path}, row {number}: {message}", _EXPECTED) from None
    if not found:
        raise ConfigError(f"{path} has no prompts", _EXPECTED)
    compared = sum(one.reference is not None for one in found)
    if compared not in (0, len(found)):
        raise ConfigError(
            f"{path}: {compared:,} of {len(found):,} rows have a reference answer",
            "give every row one, to compare with it, or none, to grade",
        )
    if compared and any(len(one.turns) > 1 for one in found):
        raise ConfigError(f"{path}: a row has several turns and a reference", "comparisons are for single turns")
    return found


def _judged_prompt(row: Any) -> JudgedPrompt:
    if not isinstance(row, dict):
        raise ConfigError(f"{row!r:.60} is not an object")
    prompt = next((row[name] for name in _PROMPTS if row.get(name)), None)
    reference = next((row[name] for name in _REFERENCES if row.get(name) is not None), None)
    if reference is not None and not isinstance(reference, str):
        raise ConfigError("its reference is not text")
    if isinstance(prompt, str):
        return JudgedPrompt((prompt,), reference=reference)
    if isinstance(prompt, list) and prompt and all(isinstance(turn, str) for turn in prompt):
        return JudgedPrompt(tuple(prompt), reference=reference)
    messages = as_messages(prompt) if isinstance(prompt, list) and prompt else None
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"it has the columns {', '.join(map(str, row)) or 'none'} and no prompt")
    return JudgedPrompt((messages[-1]["content"],), tuple(messages[:-1]), reference)


def judged_answers(
    run: RunContext, spec: EvaluateSpec, model: nn.Module, tokenizer: Any, chat: bool, device: torch.device
) -> dict[str, Any]:
    """The model's answers and the judge's verdicts, item by item."""
    prompts = read_judged_prompts(Path(spec.data), spec.limit)
    with run.stage("evaluate.answers", len(prompts), role="evaluation", activity="generate") as stage:
        settings = GenerationSettings(max_new_tokens=spec.max_new_tokens)
        generator = TransformersGenerator(model, tokenizer, settings, identity="judged")
        answers = _answer_turns(generator, prompts, chat, stage, run)
    compares = prompts[0].reference is not None
    with run.stage("evaluate.judge", len(prompts), role="evaluation", activity="judge") as stage:
        judge, judge_chat = _load_judge(run, spec, device)
        if compares:
            pairs = [(_question(one, 0), own[0], str(one.reference)) for one, own in zip(prompts, answers, strict=True)]
            verdicts = _counted(win_rates(judge, spec.rubric, pairs, judge_chat), stage, run)
        else:
            asked = [
                (_question(one, turn, own), own[turn])
                for one, own in zip(prompts, answers, strict=True)
                for turn in range(len(one.turns))
            ]
            verdicts = _counted(grades(judge, spec.rubric, asked, LOWEST, HIGHEST, judge_chat), stage, run)
    items, left = [], iter(verdicts)
    for one, own in zip(prompts, answers, strict=True):
        scores = list(islice(left, len(own)))
        items.append({"turns": list(one.turns), "given": own, "reference": one.reference, "verdicts": scores})
    return {"style": "compare" if compares else "grade", "judge": spec.judge, "items": items}


def _answer_turns(
    generator: Generator, prompts: Sequence[JudgedPrompt], chat: bool, stage: Stage, run: RunContext
) -> list[list[str]]:
    """Answers to all turns; the first turns of all prompts are one batch, then the second ones, and so on."""
    answers: list[list[str]] = [[] for _ in prompts]
    tokens = 0
    for turn in range(max(len(one.turns) for one in prompts)):
        places = [place for place, one in enumerate(prompts) if len(one.turns) > turn]
        asked = [next_prompt(prompts[place], answers[place], chat) for place in places]
        for place, found in zip(places, generator.generate(asked), strict=True):
            answers[place].append(found[0].text)
            tokens += found[0].tokens
            done = sum(bool(some) for some in answers)
            stage.count(samples=done, tokens=tokens)
            run.progress.advance(done)
            run.stop.check()
    return answers


def next_prompt(one: JudgedPrompt, answers: Sequence[str], chat: bool) -> Prompt:
    """The conversation up to the next turn."""
    turns: list[Message] = list(one.before)
    for place, text in enumerate(one.turns[: len(answers) + 1]):
        turns.append(Message(role="user", content=text))
        if place < len(answers):
            turns.append(Message(role="assistant", content=answers[place]))
    return turns if chat else "\n\n".join(turn["content"] for turn in turns) + "\n\n"


def _question(one: JudgedPrompt, turn: int, answers: Sequence[str] = ()) -> str:
    """What the judge reads before an answer: the conversation so far."""
    parts = [turn_before["content"] for turn_before in one.before]
    for place in range(turn + 1):
        parts.append(one.turns[place])
        if place < turn:
            parts.append(f"(answer) {answers[place]}")
    return "\n\n".join(parts)


def _counted(verdicts: Iterator[float | None], stage: Stage, run: RunContext) -> list[float | None]:
    found: list[float | None] = []
    for verdict in verdicts:
        found.append(verdict)
        stage.count(samples=len(found))
        run.progress.advance(len(found))
        run.stop.check()
    return found


def judge_endpoint(spec: EvaluateSpec) -> Endpoint:
    return Endpoint(spec.judge_server, os.environ.get(SERVER_KEY))


def _load_judge(run: RunContext, spec: EvaluateSpec, device: torch.device) -> tuple[Generator, bool]:
    """The judge, and whether it has a chat template."""
    if spec.judge_server:
        server = ServerGenerator(judge_endpoint(spec), spec.judge, GRADE, metered_gpus=spec.energy.gpus)
        gap = server.energy_gap or server_energy_gap(run.meter)
        if gap:
            run.warn(f"evaluate.judge: {gap}")
            run.unmetered_work("evaluate.judge", server.identity, gap)
        return server, True
    tokenizer = load_tokenizer(spec.judge)
    # Never quantized: with a quantized model it computes in bf16, as that does.
    dtype = spec.precision_here if spec.precision_here in ("fp32", "fp16") else "bf16"
    model = cast_model(load_causal_lm(spec.judge).to(device), dtype).eval()
    judge = TransformersGenerator(model, tokenizer, GRADE, identity=weights_identity(spec.judge))
    return judge, bool(getattr(tokenizer, "chat_template", None))


def report_judged(run: RunContext, found: dict[str, Any]) -> None:
    """Mean verdict with its standard error over items; verdicts that could not be read are counted, not guessed.

    The verdicts of one item are averaged first: the turns of a conversation depend on each other, so that as
    independent values they would make the standard error too small.
    """
    by_item = [[verdict for verdict in item["verdicts"] if verdict is not None] for item in found["items"]]
    means = np.array([np.mean(known) for known in by_item if known], float)
    asked = sum(len(item["verdicts"]) for item in found["items"])
    unjudged = asked - sum(map(len, by_item))
    name = "win_rate" if found["style"] == "compare" else "grade"
    if unjudged:
        run.warn(f"the judge {found['judge']} gave no verdict on {unjudged} of {asked} answers")
    if len(means):
        error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else None
        # Before the count: the first result is the one that a report starts with.
        run.result(f"model.judge.{name}", Result(value=float(means.mean()), standard_error=error))
        run.note(f"judge.{name} is the mean of {len(means)} of {plural(len(by_item), 'item')}")
    run.result("model.judge.unjudged", Result(value=float(unjudged), lower_is_better=True))
