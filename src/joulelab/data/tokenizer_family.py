"""What each family of tokenizers puts around a document, and whether a tokenizer belongs to the family it is said to.

The wrong ends go unnoticed in training: a BERT that never saw [CLS] in front still learns, only worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from joulelab.data.store import SPECIAL_NAMES
from joulelab.errors import ConfigError

Family = Literal["bert", "roberta", "gpt2"]
FAMILIES: tuple[str, ...] = get_args(Family)
# [CLS] text [SEP]; <s> text </s>; <|endoftext|> text <|endoftext|>
_ENDS = {"bert": ("cls", "sep"), "roberta": ("cls", "sep"), "gpt2": ("bos", "eos")}


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer as plain values that another process can be given."""

    name: str
    """As the user wrote it."""
    family: str
    definition: str
    """tokenizer.json as text, without truncation and padding."""
    vocab_size: int
    specials: Mapping[str, int]

    @property
    def first_id(self) -> int:
        return self.specials[_ENDS[self.family][0]]

    @property
    def last_id(self) -> int:
        return self.specials[_ENDS[self.family][1]]


def describe(tokenizer: Any, name: str, family: str | None = None) -> TokenizerFacts:
    """What is needed of a transformers tokenizer; its family is found out where none is said."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"the tokenizer {name} has no fast form", "use one that comes with a tokenizer.json")
    # Some come with both switched on (sample:minilm cuts at 128 tokens): documents are stored whole, without padding.
    backend.no_truncation()
    backend.no_padding()
    specials = _specials(tokenizer)
    found = _family_of(type(backend.model).__name__, specials)
    if family is not None and family != found:
        _refuse(name, family, found)
    if found is None:
        raise ConfigError(f"{name} is a tokenizer of no family we know", f"expected one like {', '.join(FAMILIES)}")
    ids = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerFacts(name, found, backend.to_str(), max(ids, len(tokenizer)), specials)


def _specials(tokenizer: Any) -> dict[str, int]:
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL_NAMES}
    return {name: int(number) for name, number in ids.items() if number is not None}


def _family_of(model: str, specials: Mapping[str, int]) -> str | None:
    if {"cls", "sep"} <= specials.keys():
        return "bert" if model == "WordPiece" else "roberta"
    return "gpt2" if {"bos", "eos"} <= specials.keys() else None


def _refuse(name: str, family: str, found: str | None) -> None:
    if family not in FAMILIES:
        raise ConfigError(f"tokenizer_type '{family}' is not one we know", f"expected {', '.join(FAMILIES)}")
    raise ConfigError(
        f"the tokenizer {name} is not of the type '{family}'",
        f"write --tokenizer_type {found}" if found else "it has neither cls and sep nor bos and eos tokens",
    )
