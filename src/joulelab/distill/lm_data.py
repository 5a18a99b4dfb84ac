"""What the models read: tokens of a text, which documents are held out, and the batches made of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.data import sources
from joulelab.data.masking import mask_weights, read_counts, write_counts
from joulelab.data.splits import parse_split
from joulelab.data.text import open_documents
from joulelab.data.token_store import TokenStore, is_store, open_store
from joulelab.data.tokenize import binarize, describe, usual_workers
from joulelab.distill.lm_batches import LmBatches, LmTask
from joulelab.distill.lm_config import LmData, LmDistillation
from joulelab.distill.lm_masking import MaskRecipe
from joulelab.distill.lm_rows import Limits, Sequences, cut_sequences, pack_rows
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import load_tokenizer

TOKENS, COUNTS = "tokens", "counts.npy"
_ROWS_AT_A_TIME = 10_000
VALIDATION_SEED = 0
"""Held-out tokens are masked once for all runs, so that every model is asked the same questions."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LmCorpus:
    store: TokenStore
    train: Ids
    """Documents."""
    held_out: Ids
    counts_V: Ids
    """Occurrences of each token in the training documents."""


def given_store(config: LmData) -> Path | None:
    """The folder of tokens that the user named, where it is one."""
    path = sources.parse(config.source).path
    return path if path is not None and path.is_dir() and is_store(path) else None


def write_corpus(
    folder: Path, config: LmData, tokenizer_name: str, family: str, tick: Callable[[int, int], None]
) -> LmCorpus:
    """Tokenise what is not tokenised yet, and count tokens; `tick(documents, tokens)` is told how far it is."""
    given = given_store(config)
    if given is None:
        documents = open_documents(config.source)
        facts = describe(load_tokenizer(tokenizer_name), tokenizer_name, family)
        texts = documents.read(parse_split(config.split))
        store = binarize(texts, folder / TOKENS, facts, workers=usual_workers(documents.size_bytes), tick=tick)
    else:
        store = open_store(given)
    train, _ = split_documents(len(store), config.validation_size)
    counts_V = read_counts(Path(config.token_counts)) if config.token_counts else _count(store, train)
    write_counts(counts_V, folder / COUNTS)
    return open_corpus(folder, config)


def open_corpus(folder: Path, config: LmData) -> LmCorpus:
    store = open_store(given_store(config) or folder / TOKENS)
    counts_V = read_counts(folder / COUNTS)
    if len(counts_V) < store.vocab_size:
        raise ConfigError(
            f"token counts of {len(counts_V):,} words for a vocabulary of {store.vocab_size:,}",
            "count again: `joulelab prepare token-counts`",
        )
    return LmCorpus(store, *split_documents(len(store), config.validation_size), counts_V[: store.vocab_size])


def split_documents(documents: int, held_out: int) -> tuple[Ids, Ids]:
    """(to train on, held out): held-out ones stand evenly among all, as files are often sorted by something."""
    if held_out >= documents:
        raise ConfigError(
            f"{held_out} of {documents} documents were to be held out: none is left to train on",
            "lower data.validation_size, or take more text",
        )
    places = np.unique(np.linspace(0, documents - 1, held_out + 2)[1:-1].round().astype(np.int64))
    return np.setdiff1d(np.arange(documents), places), places


def make_task(corpus: LmCorpus, config: LmDistillation, everywhere: bool) -> LmTask:
    special = corpus.store.specials
    pad_id = special.get("pad", special.get("eos", 0))
    if not config.mlm:
        return LmTask(None, True, pad_id)
    if "mask" not in special:
        raise ConfigError(f"the tokenizer {corpus.store.tokenizer} has no mask token", "a masked model's tokenizer has")
    recipe = MaskRecipe(
        share=config.mlm_mask_prop,
        shown_as_mask=config.word_mask,
        shown_as_random=config.word_rand,
        mask_id=special["mask"],
        weights_V=mask_weights(corpus.counts_V, config.mlm_smoothing, special),
    )
    return LmTask(recipe, everywhere, pad_id)


def sequences_of(corpus: LmCorpus, documents: Ids, config: LmData) -> Sequences:
    limits = Limits(config.max_model_input_size, config.min_tokens, config.max_unknown_share)
    cut = cut_sequences(corpus.store, documents, limits)
    return pack_rows(cut, config.max_model_input_size) if config.packing else cut


def held_out_batches(corpus: LmCorpus, data: LmData, config: LmDistillation, batch_size: int) -> LmBatches:
    sequences = sequences_of(corpus, corpus.held_out, data)
    return LmBatches(sequences, make_task(corpus, config, everywhere=False), batch_size, VALIDATION_SEED)


def _count(store: TokenStore, rows: Ids) -> Ids:
    counts_V = np.zeros(store.vocab_size, dtype=np.int64)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        ids = np.concatenate([store.row(int(row)) for row in rows[start : start + _ROWS_AT_A_TIME]])
        counts_V += np.bincount(ids, minlength=store.vocab_size)
    return counts_V
