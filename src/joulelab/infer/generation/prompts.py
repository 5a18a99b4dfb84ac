"""From a prompt to the tokens a model continues, and which tokens end its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from joulelab.data.chat import encoding
from joulelab.data.chat.conversations import ASSISTANT
from joulelab.errors import ConfigError
from joulelab.infer.generation.answers import Prompt, as_messages

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


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Up to where the first of the stop texts begins."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
