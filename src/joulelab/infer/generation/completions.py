"""What every generator takes and gives, whichever engine is behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from joulelab.data.chat import encoding
from joulelab.data.chat.conversations import ASSISTANT, Conversation, Message
from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.sharding import ALL, Shard

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[Message]
"""Plain text that is continued, or messages (role, content) that are answered by the model's chat template."""


@dataclass(frozen=True)
class Completion:
    text: str
    """Without special tokens and without the text that stopped it."""
    ids: tuple[int, ...]
    """As generated, the closing token included, nothing after it; empty where a server does not tell."""
    finish_reason: FinishReason
    """`stop`: it ended by itself; `length`: it was cut off."""
    tokens: int
    """Generated for this answer: the closing token counts, padding beside longer neighbours does not."""
    log_probability_sum: float | None = None
    """Of its tokens by the model itself, at temperature 1 without any filter; nothing: not told."""
    prompt_tokens: int | None = None
    """Of the prompt; nothing: not told."""

    @property
    def mean_log_probability(self) -> float | None:
        if self.log_probability_sum is None or not self.tokens:
            return None
        return self.log_probability_sum / self.tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Completion:
        return cls(**{**value, "ids": tuple(value["ids"])})


class Generator(Protocol):
    """Whoever answers prompts."""

    @property
    def settings(self) -> GenerationSettings: ...

    @property
    def identity(self) -> str:
        """What answers: hash of the weights, or server and model name. Part of an answer's key."""

    @property
    def prompts_at_once(self) -> int:
        """A good number of prompts to hand over together."""

    @property
    def energy_gap(self) -> str | None:
        """Why the joules of the work are not in this node's meter; nothing: they are."""

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[list[Completion]]:
        """For every prompt, in order, its `settings.n` answers."""


def as_messages(prompt: Prompt) -> Conversation | None:
    """The messages of a chat prompt as plain dictionaries; nothing for plain text."""
    if isinstance(prompt, str):
        return None
    messages = [_message(one) for one in prompt]
    if not messages or messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"a prompt of {len(messages)} messages has nothing to answer: {messages!r:.120}",
            "a prompt ends with a user's (or system's) message",
        )
    return messages


def _message(one: Any) -> Message:
    fields = one if isinstance(one, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(f"not a message: {one!r:.120}", "a message has a role and a content, both text")
    return {"role": role, "content": content}


def completion_key(identity: str, settings: GenerationSettings, prompt: Prompt) -> str:
    """By content: who answers, how, and what was asked. Position and batch do not matter."""
    asked = as_messages(prompt) or prompt
    text = json.dumps([identity, settings.model_dump(mode="json"), asked], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Answers on disk as they come: one line a prompt, found again by content, so that a killed generation goes on.
#
# A line counts once it is whole; what a kill cut off is passed over and made again. Nothing is ever rewritten.


@dataclass(frozen=True)
class GenerationProgress:
    """So far, earlier attempts included: what a stage counts."""

    prompts: int
    answers: int
    prompt_tokens: int
    """Read; once a prompt, however many answers it has."""
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
    """By key; where a key stands twice the first line counts, as others may have used it already."""
    found: dict[str, list[Completion]] = {}
    for line in (line for path in paths if path.exists() for line in read_lines(path)):
        if "key" in line and "answers" in line:
            found.setdefault(line["key"], [Completion.from_json(answer) for answer in line["answers"]])
    return found


def write_completions(
    path: Path, keys: Sequence[str], prompts: Sequence[Prompt], found: Mapping[str, list[Completion]]
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
    """The answers to all prompts of our share, in order; those that stand in a file already are not generated again.

    Prompts of like length are answered together. Batches (of `at_once` prompts; by default the generator's) are cut
    before it is known what is there, and one that lacks an answer is made again as a whole: numbers in a batch depend a
    little on its shape, and a resumed or split run must say the same words as one that was never killed. What stands in
    the files of `others` is left to them.
    """
    keys = [completion_key(generator.identity, generator.settings, prompt) for prompt in prompts]
    ours = shard_batches(keys, prompts, at_once or generator.prompts_at_once, share)
    found, told = read_completions(path), read_completions(*others)
    so_far = GenerationProgress.of(found[keys[at]] for batch in ours for at in batch if keys[at] in found)
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


def shard_batches(keys: Sequence[str], prompts: Sequence[Prompt], at_once: int, share: Shard) -> list[list[int]]:
    batches = make_batches(keys, prompts, at_once)
    return [batches[place] for place in share.units([keys[batch[0]] for batch in batches])]


def make_batches(keys: Sequence[str], prompts: Sequence[Prompt], at_once: int) -> list[list[int]]:
    """Numbers of prompts, batch after batch, short ones first; a prompt that stands twice is asked once."""
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    order = sorted(first.values(), key=lambda number: (_prompt_length(prompts[number]), keys[number]))
    return [order[start : start + at_once] for start in range(0, len(order), at_once)]


def _line(key: str, prompt: Prompt, answers: Sequence[Completion]) -> dict[str, Any]:
    return {"key": key, "prompt": as_messages(prompt) or prompt, "answers": [answer.to_json() for answer in answers]}


def _prompt_length(prompt: Prompt) -> int:
    messages = as_messages(prompt)
    return len(prompt) if messages is None else sum(len(message["content"]) for message in messages)


# From a prompt to the tokens a model continues, and which tokens end its answer.


CHAIN_OF_THOUGHT = "Think step by step. Write your reasoning first, then the answer on a last line after 'Answer:'."


def with_chain_of_thought(prompt: Prompt, request: str = CHAIN_OF_THOUGHT) -> Prompt:
    """The same question with the wish to see the reasoning; in the last message, as not every template has a system
    message."""
    messages = as_messages(prompt)
    if messages is None:
        return f"{prompt}\n\n{request}\n\n"
    last = messages[-1]
    return [*messages[:-1], {"role": last["role"], "content": f"{last['content']}\n\n{request}"}]


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Messages go through the chat template and end where the assistant begins; plain text stays as it is."""
    messages = as_messages(prompt)
    ids = _encode_text(tokenizer, str(prompt)) if messages is None else encoding.encode_prompt(tokenizer, messages)
    if not ids:
        raise ConfigError(f"the prompt {prompt!r:.60} has no tokens", "write something to be continued")
    return ids


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    # some tokenizers close every text; a prompt that is already closed would be answered with nothing
    while ids and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    return ids


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the model's, the tokenizer's, and the one its template closes a turn with."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        given = getattr(owner, "eos_token_id", None)
        found.update([given] if isinstance(given, int) else given or [])
    turn = end_of_turn(tokenizer)
    return tuple(sorted(found | ({turn} if turn is not None else set())))


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template closes an answer with; nothing where it closes with words."""
    closed = encoding.encode_conversation(
        tokenizer, [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}]
    )
    last = int(closed.ids[closed.trained][-1])
    return last if last in tokenizer.all_special_ids and last != tokenizer.unk_token_id else None


def closing_id(tokenizer: Any, prompt: Prompt) -> int:
    """What a finished answer to this prompt ends with: the end of a turn, or of the text."""
    turn = end_of_turn(tokenizer) if not isinstance(prompt, str) else None
    return turn if turn is not None else encoding.require_end_id(tokenizer)


def answer_ids(tokenizer: Any, prompt: Prompt, text: str, finished: bool) -> list[int]:
    """An answer as it is to be learnt: its words, and the closing token where it came to its end. An answer that was
    cut off gets none: nobody is to learn to stop there."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, closing_id(tokenizer, prompt)] if finished else ids


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Up to where the first of the stop texts begins."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
