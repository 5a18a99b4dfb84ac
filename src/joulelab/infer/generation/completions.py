"""Prompts and completions, independent of the engine: the Generator protocol, completions on disk, tokenization.

Completions are appended to a file, one line per prompt, keyed by content, so that a killed generation can be resumed. A
line counts once it is complete; nothing is rewritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from joulelab.data.chat import encoding
from joulelab.data.chat.conversations import ASSISTANT, Conversation, Message
from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.phases import ALL, Shard

FinishReason = Literal["stop", "length"]
TEXT_PROMPTS = "generation takes messages with text only; use the pipelines sft or kd for conversations with tools"
Prompt = str | Sequence[Message]
"""Plain text to continue, or chat messages (role, content), which are formatted with the model's chat template."""


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt."""

    text: str
    """Without special tokens and without the stop text."""
    ids: tuple[int, ...]
    """As generated, including the end token; empty if a server does not return them."""
    finish_reason: FinishReason
    """`stop`: ended by an end token or stop text; `length`: truncated."""
    tokens: int
    """Generated tokens, including the end token, without padding."""
    log_probability_sum: float | None = None
    """Under the model at temperature 1 without filters; None if unknown."""
    prompt_tokens: int | None = None
    """None if unknown."""
    log_probabilities: tuple[float, ...] = ()
    """One per token in `ids`, as in `log_probability_sum`; empty unless the generator was asked for them."""

    @property
    def mean_log_probability(self) -> float | None:
        if self.log_probability_sum is None or not self.tokens:
            return None
        return self.log_probability_sum / self.tokens

    def to_json(self) -> dict[str, Any]:
        value = dict(vars(self))  # not `asdict`, which would copy every token id: a third of the host's time
        if not self.log_probabilities:
            del value["log_probabilities"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Completion:
        logs = tuple(value.get("log_probabilities", ()))
        return cls(**{**value, "ids": tuple(value["ids"]), "log_probabilities": logs})


class Generator(Protocol):
    """Generates completions for prompts. One that holds more than memory has `close()`, see `close_generator`."""

    @property
    def settings(self) -> GenerationSettings: ...

    @property
    def identity(self) -> str:
        """Hash of the weights, or server and model name. Part of a completion's key."""

    @property
    def prompts_at_once(self) -> int:
        """Suitable number of prompts per batch."""

    @property
    def energy_gap(self) -> str | None:
        """Why this node's meter does not measure the energy of the generation; None if it does."""

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Completion]]:
        """For every prompt, in order, its `settings.n` completions."""


def close_generator(generator: Generator) -> None:
    """Release what the generator holds, such as the process of an engine."""
    # Engines of other packages and models in this process hold nothing but memory.
    getattr(generator, "close", lambda: None)()


@contextmanager
def closing_generator(generator: Generator) -> Iterator[Generator]:
    try:
        yield generator
    finally:
        close_generator(generator)


class EngineFactory(Protocol):
    """What an entry point of `joulelab.engines` names: loaded model and tokenizer in, a generator out."""

    def __call__(
        self, model: Any, tokenizer: Any, settings: GenerationSettings, *, identity: str, batch_size: int
    ) -> Generator: ...


def as_messages(prompt: Prompt) -> Conversation | None:
    """The messages of a chat prompt as dictionaries; None for plain text."""
    if isinstance(prompt, str):
        return None
    messages = [_message(one) for one in prompt]
    if not messages or messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"a prompt of {len(messages)} messages does not end with a user message: {messages!r:.120}",
            "end the prompt with a user or system message",
        )
    return messages


def _message(one: Any) -> Message:
    fields = one if isinstance(one, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(f"not a message: {one!r:.120}", "a message needs `role` and `content`, both text")
    if fields.get("tool_calls"):
        raise ConfigError(f"a message of a prompt has tool calls: {one!r:.120}", TEXT_PROMPTS)
    return {"role": role, "content": content}


def completion_key(identity: str, settings: GenerationSettings, prompt: Prompt) -> str:
    """Key by content: generator, settings and prompt. Position and batch do not matter."""
    content = as_messages(prompt) or prompt
    text = json.dumps([identity, settings.model_dump(mode="json"), content], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class GenerationProgress:
    """Counts so far, including earlier attempts."""

    prompts: int
    answers: int
    prompt_tokens: int
    """Each prompt counts once, however many answers it has."""
    generated_tokens: int

    @classmethod
    def of(cls, answers: Iterable[Sequence[Completion]]) -> GenerationProgress:
        every = list(answers)
        return cls(
            prompts=len(every),
            answers=sum(len(some) for some in every),
            prompt_tokens=sum((some[0].prompt_tokens or 0) for some in every if some),
            generated_tokens=sum(one.tokens for some in every for one in some),
        )

    def plus(self, answers: Sequence[Completion]) -> GenerationProgress:
        one = GenerationProgress.of([answers])
        return GenerationProgress(
            self.prompts + 1,
            self.answers + one.answers,
            self.prompt_tokens + one.prompt_tokens,
            self.generated_tokens + one.generated_tokens,
        )


def read_completions(*paths: Path) -> dict[str, list[Completion]]:
    """By key. If a key occurs twice the first line is used, because it may have been used already."""
    found: dict[str, list[Completion]] = {}
    for line in (line for path in paths if path.exists() for line in read_lines(path)):
        if "key" in line and "answers" in line:
            found.setdefault(line["key"], [Completion.from_json(answer) for answer in line["answers"]])
    return found


def write_completions(
    path: Path, keys: Sequence[str], prompts: Sequence[Prompt], found: Mapping[str, list[Completion]]
) -> None:
    """Write the completions of all prompts to one file, in the order of a single process."""
    missing = [prompts[number] for number, key in enumerate(keys) if key not in found]
    if missing:
        raise JoulelabError(
            f"{len(missing):,} of {len(keys):,} prompts have no completion, for example {missing[0]!r:.80}",
            "rerun the generation; only missing completions are generated",
        )
    path.unlink(missing_ok=True)
    file = LineFile(path)
    try:
        file.append(
            *(_line(keys[at], prompts[at], found[keys[at]]) for batch in make_batches(keys, prompts, 1) for at in batch)
        )
        file.sync()
    finally:
        file.close()


def generate_into(
    path: Path,
    generator: Generator,
    prompts: Sequence[Prompt],
    tick: Callable[[GenerationProgress], None] = lambda so_far: None,
    *,
    share: Shard = ALL,
    at_once: int | None = None,
    others: Sequence[Path] = (),
) -> list[list[Completion]]:
    """Completions of all prompts of this shard, in order; those already in a file are not generated again.

    Prompts of similar length share a batch. Batches (of `at_once` prompts, by default the generator's number) do not
    depend on what is already on disk, and a batch with a missing completion is regenerated as a whole: floating-point
    results depend slightly on the batch shape, and a resumed or sharded run must generate the same text as an
    uninterrupted one. Completions in the files of `others` are not written again.
    """
    keys = [completion_key(generator.identity, generator.settings, prompt) for prompt in prompts]
    ours = shard_batches(keys, prompts, at_once or generator.prompts_at_once, share)
    found, elsewhere = read_completions(path), read_completions(*others)
    so_far = GenerationProgress.of(found[keys[at]] for batch in ours for at in batch if keys[at] in found)
    tick(so_far)
    there = found.keys() | elsewhere.keys()
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
    both = {**elsewhere, **found}
    return [both[key] for key in keys if key in mine]


def shard_batches(keys: Sequence[str], prompts: Sequence[Prompt], at_once: int, share: Shard) -> list[list[int]]:
    batches = make_batches(keys, prompts, at_once)
    return [batches[place] for place in share.units([keys[batch[0]] for batch in batches])]


def make_batches(keys: Sequence[str], prompts: Sequence[Prompt], at_once: int) -> list[list[int]]:
    """Indices of prompts in batches, short prompts first; a duplicate prompt is generated once."""
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    order = sorted(first.values(), key=lambda number: (_prompt_length(prompts[number]), keys[number]))
    return [order[start : start + at_once] for start in range(0, len(order), at_once)]


def _line(key: str, prompt: Prompt, answers: Sequence[Completion]) -> dict[str, Any]:
    return {"key": key, "prompt": as_messages(prompt) or prompt, "answers": [answer.to_json() for answer in answers]}


def _prompt_length(prompt: Prompt) -> int:
    messages = as_messages(prompt)
    return len(prompt) if messages is None else sum(len(message["content"]) for message in messages)


CHAIN_OF_THOUGHT = "Think step by step. Write your reasoning first, then the answer on a last line after 'Answer:'."


def with_chain_of_thought(prompt: Prompt, request: str = CHAIN_OF_THOUGHT) -> Prompt:
    """The prompt with a request for reasoning, in the last message because not every template has a system message."""
    messages = as_messages(prompt)
    if messages is None:
        return f"{prompt}\n\n{request}\n\n"
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{request}"}]


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids. Messages are formatted with the chat template up to the assistant's turn; plain text is encoded as
    is."""
    messages = as_messages(prompt)
    ids = _encode_text(tokenizer, str(prompt)) if messages is None else encoding.encode_prompt(tokenizer, messages)
    if not ids:
        raise ConfigError(f"the prompt {prompt!r:.60} has no tokens", "pass a prompt that is not empty")
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The same for many; plain texts in one call, which tokenizes them in parallel."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str) and prompt]
    together = iter(tokenizer(texts)["input_ids"] if texts else ())
    encoded = [
        _without_end(tokenizer, prompt, list(next(together))) if isinstance(prompt, str) and prompt else []
        for prompt in prompts
    ]
    # Messages are formatted one by one; so is a text without tokens, which is an error.
    return [ids or encode_prompt(tokenizer, prompt) for prompt, ids in zip(prompts, encoded, strict=True)]


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    return _without_end(tokenizer, text, list(tokenizer(text)["input_ids"]))


def _without_end(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    # Some tokenizers append an end token; after it the model would generate nothing.
    while ids and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    return ids


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the model, the tokenizer and the chat template's end of turn."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        given = getattr(owner, "eos_token_id", None)
        found.update([given] if isinstance(given, int) else given or [])
    turn = end_of_turn(tokenizer)
    return tuple(sorted(found | ({turn} if turn is not None else set())))


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the chat template ends a turn; None if it uses plain text."""
    closed = encoding.encode_conversation(
        tokenizer, [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}]
    )
    last = int(closed.ids[closed.trained][-1])
    return last if last in tokenizer.all_special_ids and last != tokenizer.unk_token_id else None


def closing_id(tokenizer: Any, prompt: Prompt) -> int:
    """End token of a finished answer to this prompt: end of turn, or end of text."""
    turn = end_of_turn(tokenizer) if not isinstance(prompt, str) else None
    return turn if turn is not None else encoding.require_end_id(tokenizer)


def answer_ids(tokenizer: Any, prompt: Prompt, text: str, finished: bool) -> list[int]:
    """Token ids of an answer as a training target: its text, and the end token if it is finished. A truncated answer
    has none, so that a student does not learn to stop there."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, closing_id(tokenizer, prompt)] if finished else ids


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop text."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
