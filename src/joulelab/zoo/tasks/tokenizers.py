"""Which tokenizer turns a user's text into the ids of a model, and what its ids mean.

The one named; else the one that lies with the weights; else the one published with the size, where it is on disk or the
hub can be reached; else the text's own bytes, which need nothing. Which it was is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from joulelab.data import hub
from joulelab.data.masking import MOST_SENTINELS
from joulelab.data.tokenize import IDS_NEEDED, Encoding, Vocabulary, encode_bytes, own_vocabulary
from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.architectures import PUBLISHED
from joulelab.zoo.pretrained import load_tokenizer
from joulelab.zoo.request import WorkloadRequest


@dataclass(frozen=True)
class ChosenTokenizer:
    encoding: Encoding
    vocabulary: Vocabulary
    note: str


def choose_tokenizer(request: WorkloadRequest, config: Any, sentinels: int) -> ChosenTokenizer:
    if request.tokenizer:
        return _pretrained(request.tokenizer, load_tokenizer(request.tokenizer), config)
    published = request.size.hub_id
    if request.weights and request.weights != PUBLISHED:
        found = _tried(request.weights)
        return _pretrained(request.weights, found, config) if found else _bytes(config, sentinels, request.weights)
    place = hub.cached_folder(published, "tokenizer_config.json") if published else None
    found = _tried(str(place)) if place else _tried(published) if published and hub.reachable() else None
    return _pretrained(published, found, config) if found else _bytes(config, sentinels, published)


def _tried(name: str) -> Any | None:
    try:
        return load_tokenizer(name)
    except NotFoundError:
        return None


def _bytes(config: Any, sentinels: int, missed: str) -> ChosenTokenizer:
    size = int(config.vocab_size)
    if size - sentinels < IDS_NEEDED:
        raise ConfigError(
            f"a vocabulary of {size} is too small for bytes ({IDS_NEEDED + sentinels} ids)", "name a tokenizer"
        )
    vocabulary = own_vocabulary(size, end_of_text(config), sentinels)
    reason = f"; the tokenizer of {missed} is not here" if missed else ""
    note = f"the text is read as bytes, one token each{reason}"
    return ChosenTokenizer(Encoding("bytes", encode_bytes, vocabulary.end_id, size), vocabulary, note)


def _pretrained(name: str, tokenizer: Any, config: Any) -> ChosenTokenizer:
    size = int(config.vocab_size)
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer of {name} has {len(tokenizer):,} ids, the model {size:,}",
            "name the model's own tokenizer, or leave it out to read the text as bytes",
        )
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, end_of_text(config))
    end_id = next((int(end) for end in ends if end is not None), 0)
    vocabulary = Vocabulary(range(len(tokenizer)), end_id, tokenizer.mask_token_id, _sentinels(tokenizer, size))

    def encode(texts: list[str]) -> list[list[int]]:
        rows: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return rows

    return ChosenTokenizer(Encoding(name, encode, end_id, size), vocabulary, f"tokenizer: {name}")


def _sentinels(tokenizer: Any, size: int) -> tuple[int, ...]:
    """T5's own, or ids of the model that the tokenizer leaves free."""
    known = tokenizer.get_vocab()
    own = [known[name] for name in (f"<extra_id_{number}>" for number in range(MOST_SENTINELS)) if name in known]
    return tuple(own or range(size - 1, max(len(tokenizer), size - MOST_SENTINELS) - 1, -1))


def end_of_text(config: Any) -> int | None:
    end = getattr(config, "eos_token_id", None)
    return int(end) if isinstance(end, int) else None
