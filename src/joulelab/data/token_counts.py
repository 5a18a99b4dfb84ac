"""How often each id occurs, and from it which tokens to mask: rare ones more than their share, special ones never.

A model that guesses "the" a thousand times learns little. With counts c, a token is masked with a probability
proportional to max(c, 1)^-0.7, the smoothing of XLM and DistilBERT.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.data.store import TokenStore, is_pickle
from joulelab.errors import ConfigError, NotFoundError

_TOKENS_PER_STEP = 2**22  # 16-bit ids widen to 64 bits while they are counted


def count_tokens(
    store: TokenStore, vocab_size: int | None = None, tick: Callable[[int], None] = lambda tokens: None
) -> NDArray[np.int64]:
    """Occurrences of every id of the vocabulary; `vocab_size` where the model has more ids than the tokenizer."""
    size = store.vocab_size if vocab_size is None else vocab_size
    counts = np.zeros(max(size, store.vocab_size), dtype=np.int64)
    for start in range(0, store.tokens_total, _TOKENS_PER_STEP):
        counts += np.bincount(store.tokens[start : start + _TOKENS_PER_STEP], minlength=len(counts))
        tick(min(start + _TOKENS_PER_STEP, store.tokens_total))
    if counts[size:].any():
        raise ConfigError(
            f"{store.folder} holds the id {int(np.flatnonzero(counts)[-1])}; a vocabulary of {size} ends before it",
            f"the tokenizer {store.tokenizer} has {store.vocab_size} ids: leave --vocab_size out",
        )
    return counts[:size]


def mask_weights(
    counts: NDArray[np.integer], smoothing: float, specials: Mapping[str, int] | Iterable[int]
) -> NDArray[np.float64]:
    """A weight per id: how likely it is masked, against the others; special tokens have 0."""
    if smoothing < 0:
        raise ConfigError(f"mlm_smoothing is {smoothing}; expected 0 (all alike) or more", "the usual value is 0.7")
    weights: NDArray[np.float64] = np.maximum(counts, 1).astype(np.float64) ** -smoothing
    never = specials.values() if isinstance(specials, Mapping) else specials
    weights[np.array(sorted(set(never)), dtype=np.int64)] = 0.0
    if not weights.any():
        raise ConfigError("every token is a special one: nothing is left to mask", "check the tokenizer")
    return weights


def write_counts(counts: NDArray[np.int64], file: Path) -> None:
    """As .npy, or as JSON where the name says so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            if file.suffix == ".json":
                out.write(json.dumps(counts.tolist()).encode())
            else:
                np.save(out, counts, allow_pickle=False)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def counts_file(named: Path) -> Path:
    """Where counts go that the user called `named`: the old scripts say .pickle, which we neither write nor open."""
    return named if named.suffix in (".npy", ".json") else named.with_name(_without_pickle(named.name) + ".npy")


def require_counts(named: Path) -> Path:
    """The file that is meant; a pickle is told from a file that is not there."""
    file = counts_file(named)
    if file.is_file():
        return file
    again = "joulelab prepare token-counts --data_file STORE --token_counts_dump OUT.npy"
    if is_pickle(named):
        raise ConfigError(
            f"{named.absolute()} is a pickle; expected counts as .npy or .json",
            f"a pickle can run code when it is opened, so we do not; count again: {again}",
        )
    raise NotFoundError(f"there are no token counts {file.absolute()}", f"`{again}` makes them")


def read_counts(named: Path) -> NDArray[np.int64]:
    file = require_counts(named)
    try:
        text = file.read_text(encoding="utf-8") if file.suffix == ".json" else None
        counts = np.array(json.loads(text)) if text is not None else np.load(file, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file.absolute()} cannot be read: {error}", "make the counts again") from error
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ConfigError(f"{file.absolute()} does not hold one count per id", "make the counts again")
    return counts.astype(np.int64)


def _without_pickle(name: str) -> str:
    return name.removesuffix(".pickle").removesuffix(".pkl")
