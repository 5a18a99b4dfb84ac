"""Text to token ids: vocabularies, tokenizer families, and fast tokenization of whole corpora.

`binarize` writes documents with their special tokens to a token store, by several processes; `pack` joins documents
into one long line of tokens for the language-modeling tasks of the zoo.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joulelab.data.splits import Split
from joulelab.data.text import Documents
from joulelab.data.token_store import (
    FORMAT,
    SPECIAL_NAMES,
    Column,
    RaggedStore,
    TokenStore,
    is_store,
    narrow,
    store_writer,
    token_column,
    write_blocks,
)
from joulelab.errors import ConfigError, DependencyMissing, JoulelabError
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.runs.paths import cache_folder

FIRST_PLAIN = 10
"""Where ids of text begin in the vocabularies that we make ourselves: synthetic text and bytes."""
OWN_END = 2
"""Ends a document there. No model of the zoo pads with it: most pad with 0, some with 1."""
OWN_MASK = 4
"""Stands there for what was masked."""


@dataclass(frozen=True)
class Vocabulary:
    plain: range
    """Ids that stand for text."""
    end_id: int
    """Ends a document."""
    mask_id: int | None = None
    """Stands for what is to be predicted; some tokenizers have none."""
    sentinels: tuple[int, ...] = ()
    """One for each span left out of a text, in the order of the spans."""


def own_vocabulary(size: int, end_id: int | None, sentinels: int = 0) -> Vocabulary:
    """Of a model with `size` ids that no tokenizer belongs to; sentinels lie at its upper end, as T5's do."""
    top = size - sentinels
    end = OWN_END if end_id is None or not 0 <= end_id < size else end_id
    return Vocabulary(range(FIRST_PLAIN, top), end, OWN_MASK, tuple(range(size - 1, top - 1, -1)))


# Text as its own bytes: a tokenizer that needs no file, so that a text of the user's trains any model anywhere.


IDS_NEEDED = FIRST_PLAIN + 256


def encode_bytes(texts: Sequence[str]) -> list[NDArray[np.int64]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + FIRST_PLAIN for text in texts]


def decode_bytes(ids: Sequence[int] | NDArray[np.int64]) -> str:
    """What can be read back; special ids are left out."""
    values = np.asarray(ids) - FIRST_PLAIN
    return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode(errors="replace")


# What each family of tokenizers puts around a document, and whether a tokenizer belongs to the family it is said to.
#
# The wrong ends go unnoticed in training: a BERT that never saw [CLS] in front still learns, only worse.


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


# Each distinct word is tokenised once: a corpus repeats its words, and looking one up is many times cheaper.
#
# Between some characters a tokenizer never makes a token: BERT's none across a space or beside ASCII punctuation, a
# byte-level BPE none across the front of a space. Cut there, the ids of a text are the ids of its pieces in a row, so
# they can be kept. Wherever that is not certain (another kind of tokenizer, a text that spells out a special token,
# odd whitespace) the whole text goes through the tokenizer, so the ids are its own in every case.


MOST_WORDS = 2**20
"""Kept at a time: about 200 MB. A corpus of the web has more; then the cache starts anew."""
_PUNCTUATION = r"!-/:-@\[-`{-~"
_BERT_PIECES = re.compile(rf"[{_PUNCTUATION}]|[^ {_PUNCTUATION}]+")
# The first word, then every other with the one space before it, as byte-level BPE sees them.
_BPE_PIECES = re.compile(r"^\S+| \S+")
_ODD_WHITESPACE = re.compile(r"\s\s|[^\S ]|^\s|\s$")


class WordCache:
    """Texts to ids through a `tokenizers.Tokenizer`, without special tokens around them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces, self._unsafe = _how_to_cut(json.loads(tokenizer.to_str()))
        self._ids: dict[str, list[int]] = {}

    @property
    def is_used(self) -> bool:
        return self._pieces is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        pieces, unsafe = self._pieces, self._unsafe
        if pieces is None:
            return self._tokenised(texts)
        cut = [None if unsafe(text) else pieces(text) for text in texts]
        self._learn(chain.from_iterable(words for words in cut if words))
        whole = iter(self._tokenised([text for text, words in zip(texts, cut, strict=True) if words is None]))
        ids_of = self._ids.__getitem__
        return [next(whole) if words is None else list(chain.from_iterable(map(ids_of, words))) for words in cut]

    def _learn(self, words: Iterable[str]) -> None:
        here = set(words)
        if len(self._ids) + len(here) > MOST_WORDS:
            self._ids.clear()
        new = list(here.difference(self._ids))
        self._ids.update(zip(new, self._tokenised(new), strict=True))

    def _tokenised(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


Cutter = Callable[[str], list[str]]
Doubt = Callable[[str], object]


def _how_to_cut(definition: Mapping[str, Any]) -> tuple[Cutter | None, Doubt]:
    """How to cut a text into pieces, and which texts not to; without the first, none is cut."""
    added = definition.get("added_tokens") or []
    if definition.get("normalizer") and any(token["normalized"] for token in added):
        # such a token may be spelt in ways we cannot look for
        return None, bool
    spelt_out = re.compile("|".join(re.escape(token["content"]) for token in added) or r"(?!)")
    if _is_bert(definition):
        return _BERT_PIECES.findall, spelt_out.search
    if _is_byte_level_bpe(definition):
        return _BPE_PIECES.findall, lambda text: spelt_out.search(text) or _ODD_WHITESPACE.search(text)
    return None, bool


def _is_bert(definition: Mapping[str, Any]) -> bool:
    parts = [definition.get(part) or {} for part in ("model", "normalizer", "pre_tokenizer")]
    return [part.get("type") for part in parts] == ["WordPiece", "BertNormalizer", "BertPreTokenizer"]


def _is_byte_level_bpe(definition: Mapping[str, Any]) -> bool:
    model, before = definition.get("model") or {}, definition.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("dropout") or definition.get("normalizer"):
        return False
    steps = before.get("pretokenizers", [before])
    *others, last = steps
    # Digits cuts further, inside the pieces; a prefix space would be put before every piece.
    return (
        all(step.get("type") == "Digits" for step in others)
        and last.get("type") == "ByteLevel"
        and last.get("use_regex", True)
        and not last.get("add_prefix_space")
    )


# Documents to a store of ids: in blocks, by as many processes as there are cores, in the order they came.
#
# One line at a time is how this step came to take hours. Blocks are worked on apart and taken back in their order, so
# the bytes are the same whatever the number of workers. A worker needs the tokenizer's definition and nothing of
# torch.


TEXTS_PER_BLOCK = 1_000
SMALL_BYTES = 16 * 2**20
"""Text up to this size is done before other processes have started."""
_BLOCKS_WAITING_PER_WORKER = 3  # enough that none waits, little enough that memory stays flat

Tick = Callable[[int, int], None]
"""Told how many documents and tokens there are so far."""


def silent_tick(documents: int, tokens: int) -> None: ...


def binarize(
    texts: Iterable[str], folder: Path, tokenizer: TokenizerFacts, *, workers: int = 1, tick: Tick = silent_tick
) -> TokenStore:
    """Every text with its family's special tokens around it becomes a row of the store."""
    if workers < 1:
        raise ConfigError(f"{workers} workers cannot do anything", "name 1 or more, or leave it out")
    blocks = _blocks(texts)
    encoded = _encoded_here(blocks, tokenizer) if workers == 1 else _encoded_by_workers(blocks, tokenizer, workers)
    return write_blocks(
        folder,
        _counted(encoded, tick),
        vocab_size=tokenizer.vocab_size,
        specials=tokenizer.specials,
        tokenizer=tokenizer.name,
    )


def usual_workers(size_bytes: int | None) -> int:
    """One per core that we may use, or one where starting others takes longer than the work."""
    if size_bytes is not None and size_bytes <= SMALL_BYTES:
        return 1
    return usable_cores()


@dataclass(frozen=True, eq=False)
class Block:
    """Encoded texts one after another: two arrays travel between processes faster than a thousand."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]


class BlockEncoder:
    def __init__(self, tokenizer: TokenizerFacts) -> None:
        self._ends = tokenizer.first_id, tokenizer.last_id
        self._words = WordCache(_import_tokenizers().Tokenizer.from_str(tokenizer.definition))

    def encode(self, texts: Sequence[str]) -> Block:
        first, last = [self._ends[0]], [self._ends[1]]
        rows = self._words.encode(texts)
        lengths = np.array([len(ids) + 2 for ids in rows], dtype=np.int64)
        ids = chain.from_iterable(part for row in rows for part in (first, row, last))
        return Block(np.fromiter(ids, dtype=np.uint32, count=int(lengths.sum())), lengths)


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    lines = iter(texts)
    while block := list(islice(lines, TEXTS_PER_BLOCK)):
        yield block


def _encoded_here(blocks: Iterable[list[str]], tokenizer: TokenizerFacts) -> Iterator[Block]:
    return map(BlockEncoder(tokenizer).encode, blocks)


def _encoded_by_workers(blocks: Iterable[list[str]], tokenizer: TokenizerFacts, workers: int) -> Iterator[Block]:
    # Spawned, not forked: the tokenizer, torch and the recorder have threads, and a fork of those can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin_work, (tokenizer,)) as pool:
        waiting: deque[Future[Block]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_work, block))
                if len(waiting) > workers * _BLOCKS_WAITING_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # whoever stops reading does not wait for blocks that nobody wants
            pool.shutdown(cancel_futures=True)


_encoder: BlockEncoder | None = None  # one per worker process: its cache of words lives as long as it does


def _begin_work(tokenizer: TokenizerFacts) -> None:
    global _encoder
    # The processes are the parallelism; threads of the tokenizer inside each would only compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = BlockEncoder(tokenizer)


def _work(block: list[str]) -> Block:
    assert _encoder is not None
    return _encoder.encode(block)


def _counted(encoded: Iterable[Block], tick: Tick) -> Iterator[tuple[list[int], NDArray[np.uint32]]]:
    documents = tokens = 0
    for block in encoded:
        documents += len(block.lengths)
        tokens += len(block.ids)
        yield block.lengths.tolist(), block.ids
        tick(documents, tokens)


def _import_tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise DependencyMissing("the package 'tokenizers' is not installed", 'pip install "joulelab[train]"') from error


# Documents as one long line of tokens, each closed by an end-of-text, to be cut into rows of any length.
#
# A small text is kept in memory. A large one is written once to a store in the cache; the next run with the same text
# and tokenizer finds it there.


IN_MEMORY_BYTES = 64 * 2**20
"""Text up to this size is tokenised again by every run, in a few seconds."""
_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


@dataclass(frozen=True)
class Encoding:
    """How text becomes ids."""

    name: str
    """Of the tokenizer; other tokens have another name."""
    encode: Callable[[list[str]], Iterable[ArrayLike]]
    end_id: int
    ids: int
    """All ids lie below this."""

    @property
    def column(self) -> Column:
        return token_column(self.ids)


class _CachedTokens(RaggedStore):
    NOUN = "cached text"
    HINT = "remove the folder; the next run writes it again"


def pack(documents: Documents, split: Split, encoding: Encoding) -> NDArray[Any]:
    """Every token of the split, one after another."""
    blocks = _token_blocks(documents.read(split), encoding)
    if documents.size_bytes is not None and documents.size_bytes <= IN_MEMORY_BYTES:
        small = (narrow(ids, encoding.column) for _, ids in blocks)
        return np.concatenate([np.empty(0, encoding.column.dtype), *small])
    key = json.dumps([documents.identity, str(split), encoding.name, encoding.end_id, encoding.ids, FORMAT])
    return _cached(hashlib.sha256(key.encode()).hexdigest()[:24], blocks, encoding.column)


def _token_blocks(texts: Iterator[str], encoding: Encoding) -> Iterator[tuple[list[int], NDArray[np.int64]]]:
    """Lengths and ids of many documents at a time."""
    end = np.array([encoding.end_id])
    while some := list(islice(texts, _TEXTS_PER_CALL)):
        rows = [np.append(np.asarray(ids, dtype=np.int64), end) for ids in encoding.encode(some)]
        yield [len(row) for row in rows], np.concatenate(rows)


def _cached(name: str, blocks: Iterator[tuple[list[int], NDArray[np.int64]]], column: Column) -> NDArray[Any]:
    folder = cache_folder() / "text" / name
    try:
        if not is_store(folder):
            # Ranks start together and all of them may write: the first one to finish is kept.
            with store_writer(folder, {"tokens": column}, keep_existing=True) as writer:
                for lengths, ids in blocks:
                    writer.append(lengths, tokens=ids)
    except OSError as error:
        raise JoulelabError(
            f"tokens cannot be written to {folder.parent}: {error}", "set JOULELAB_CACHE to another folder"
        ) from error
    return _CachedTokens(folder).tokens
