"""Text to token ids: vocabularies, tokenizer families, and fast tokenization of whole corpora.

`binarize` writes documents with their special tokens to a token store, by several processes; `pack` joins documents
into one long line of tokens for the language-modeling tasks of the zoo.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
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
"""First id of text in the vocabularies without a tokenizer: synthetic text and bytes."""
OWN_END = 2
"""Ends a document in these. No model of the zoo pads with it: most pad with 0, some with 1."""
OWN_MASK = 4
"""Mask token in these."""


@dataclass(frozen=True)
class Vocabulary:
    plain: range
    """Ids of text."""
    end_id: int
    """Ends a document."""
    mask_id: int | None = None
    """Mask token; some tokenizers have none."""
    sentinels: tuple[int, ...] = ()
    """One for each removed span, in the order of the spans."""


def own_vocabulary(size: int, end_id: int | None, sentinels: int = 0) -> Vocabulary:
    """The vocabulary of a model with `size` ids and no tokenizer; sentinels are the highest ids, as in T5."""
    top = size - sentinels
    end = OWN_END if end_id is None or not 0 <= end_id < size else end_id
    return Vocabulary(range(FIRST_PLAIN, top), end, OWN_MASK, tuple(range(size - 1, top - 1, -1)))


# Byte-level tokenization, which needs no file: any text can train any model.


IDS_NEEDED = FIRST_PLAIN + 256


def encode_bytes(texts: Sequence[str]) -> list[NDArray[np.int64]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + FIRST_PLAIN for text in texts]


def decode_bytes(ids: Sequence[int] | NDArray[np.int64]) -> str:
    """The text of the ids, without special ids."""
    values = np.asarray(ids) - FIRST_PLAIN
    return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode(errors="replace")


# Tokenizer families, and the special tokens that each puts around a document. Wrong ones go unnoticed: a BERT that
# never saw [CLS] still trains, only worse.


Family = Literal["bert", "roberta", "gpt2"]
FAMILIES: tuple[str, ...] = get_args(Family)
# [CLS] text [SEP]; <s> text </s>; <|endoftext|> text <|endoftext|>
_ENDS = {"bert": ("cls", "sep"), "roberta": ("cls", "sep"), "gpt2": ("bos", "eos")}


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer as plain values that can be sent to another process."""

    name: str
    """As given by the user."""
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
    """The facts of a transformers tokenizer; its family is detected if not given."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"the tokenizer {name} is not a fast tokenizer", "use one with a tokenizer.json")
    # Some have both enabled (sample:minilm truncates at 128 tokens); documents are stored whole and unpadded.
    backend.no_truncation()
    backend.no_padding()
    specials = _specials(tokenizer)
    found = _family_of(type(backend.model).__name__, specials)
    if family is not None and family != found:
        _refuse(name, family, found)
    if found is None:
        raise ConfigError(f"the tokenizer {name} is not of a supported family", f"expected {', '.join(FAMILIES)}")
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
        raise ConfigError(f"unknown tokenizer_type '{family}'", f"expected one of {', '.join(FAMILIES)}")
    raise ConfigError(
        f"the tokenizer {name} is not of the type '{family}'",
        f"use --tokenizer_type {found}" if found else "it has neither cls and sep nor bos and eos tokens",
    )


# Word cache: each distinct word is tokenized once, because a lookup is many times cheaper. A BERT tokenizer has no
# token that spans a space or touches ASCII punctuation, a byte-level BPE none that spans the start of a space. Split at
# these places, the ids of a text are the concatenated ids of its pieces. Where that is not certain (another type of
# tokenizer, a text that contains a special token, unusual whitespace), the whole text is tokenized, so the ids are
# always those of the tokenizer.


MOST_WORDS = 2**20
"""Cached words, about 200 MB. A web corpus has more; then the cache is cleared."""
_PUNCTUATION = r"!-/:-@\[-`{-~"
_BERT_PIECES = re.compile(rf"[{_PUNCTUATION}]|[^ {_PUNCTUATION}]+")
# The first word, then every other word with the space before it, as in byte-level BPE.
_BPE_PIECES = re.compile(r"^\S+| \S+")
_ODD_WHITESPACE = re.compile(r"\s\s|[^\S ]|^\s|\s$")


class WordCache:
    """Tokenizes with a `tokenizers.Tokenizer`, without adding special tokens."""

    def __init__(self, tokenizer: Any, most_words: int | None = None) -> None:
        """`most_words`: of the cache; None: `MOST_WORDS`."""
        self._tokenizer, self._most_words = tokenizer, most_words
        self._pieces, self._unsafe = _word_splitter(json.loads(tokenizer.to_str()))
        self._ids: dict[str, list[int]] = {}

    @property
    def is_used(self) -> bool:
        return self._pieces is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        pieces, unsafe = self._pieces, self._unsafe
        if pieces is None:
            return self._tokenized(texts)
        cut = [None if unsafe(text) else pieces(text) for text in texts]
        self._learn(chain.from_iterable(words for words in cut if words))
        whole = iter(self._tokenized([text for text, words in zip(texts, cut, strict=True) if words is None]))
        ids_of = self._ids.__getitem__
        return [next(whole) if words is None else list(chain.from_iterable(map(ids_of, words))) for words in cut]

    def _learn(self, words: Iterable[str]) -> None:
        here = set(words)
        # Cleared and not evicted one by one: word frequencies follow Zipf's law, so the frequent
        # words are back after a few documents, and the dictionary needs no bookkeeping per access.
        if len(self._ids) + len(here) > (self._most_words or MOST_WORDS):
            self._ids.clear()
        new = list(here.difference(self._ids))
        self._ids.update(zip(new, self._tokenized(new), strict=True))

    def _tokenized(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


class TruncatingEncoder:
    """Token ids of texts as `tokenizer(texts, truncation=True, max_length=N)` returns them, several times faster."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        self._words: WordCache | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and getattr(tokenizer, "truncation_side", "right") == "right":
            plain = copy.deepcopy(backend)
            plain.no_truncation()
            plain.no_padding()
            self._words = self._with_ends(plain)

    def _with_ends(self, plain: Any) -> WordCache | None:
        """None where the special tokens are not simply put before and after a text."""
        bare = plain.encode(_PROBE, add_special_tokens=False).ids
        whole = plain.encode(_PROBE).ids
        for first in range(len(whole) - len(bare) + 1):
            if whole[first : first + len(bare)] == bare:
                self._before, self._after = whole[:first], whole[first + len(bare) :]
                words = WordCache(plain, _WORDS_OF_REVIEWS)
                return words if words.is_used else None
        return None

    @property
    def sha256(self) -> str:
        """Identifies the tokenizer by its definition, so that copies under another name are the same."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return hashlib.sha256(repr(sorted(self._tokenizer.get_vocab().items())).encode()).hexdigest()
        definition = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        if self._words is None:
            found: list[list[int]] = self._tokenizer(texts, truncation=True, max_length=self._max_length)["input_ids"]
            return found
        room = self._max_length - len(self._before) - len(self._after)
        return [[*self._before, *ids[:room], *self._after] for ids in self._words.encode(texts)]


_PROBE = "a b"
_WORDS_OF_REVIEWS = 2**18  # fewer than a web corpus has, and a quarter of the memory


Cutter = Callable[[str], list[str]]
Doubt = Callable[[str], object]


def _word_splitter(definition: Mapping[str, Any]) -> tuple[Cutter | None, Doubt]:
    """A function that splits a text into pieces (None: never split), and one that detects texts not to split."""
    added = definition.get("added_tokens") or []
    if _normalizes(definition) and any(token["normalized"] for token in added):
        # such a token has spellings that a search does not find
        return None, bool
    special_text = re.compile("|".join(re.escape(token["content"]) for token in added) or r"(?!)")
    if _is_bert(definition):
        return _BERT_PIECES.findall, special_text.search
    if _is_byte_level_bpe(definition):
        return _BPE_PIECES.findall, lambda text: special_text.search(text) or _ODD_WHITESPACE.search(text)
    return None, bool


def _normalizes(definition: Mapping[str, Any]) -> bool:
    """Older versions of transformers write "no normalizer" as a sequence of none."""
    normalizer = definition.get("normalizer")
    return bool(normalizer) and normalizer != {"type": "Sequence", "normalizers": []}


def _is_bert(definition: Mapping[str, Any]) -> bool:
    parts = [definition.get(part) or {} for part in ("model", "normalizer", "pre_tokenizer")]
    return [part.get("type") for part in parts] == ["WordPiece", "BertNormalizer", "BertPreTokenizer"]


def _is_byte_level_bpe(definition: Mapping[str, Any]) -> bool:
    model, before = definition.get("model") or {}, definition.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("dropout") or _normalizes(definition):
        return False
    steps = before.get("pretokenizers", [before])
    *others, last = steps
    # Digits splits further, within pieces; a prefix space would be added to every piece.
    return (
        all(step.get("type") == "Digits" for step in others)
        and last.get("type") == "ByteLevel"
        and last.get("use_regex", True)
        and not last.get("add_prefix_space")
    )


# Binarize: worker processes tokenize blocks of documents, which are collected in order, so the bytes do not depend on
# the number of workers. A worker imports neither torch nor transformers, only the tokenizer's definition.


TEXTS_PER_BLOCK = 1_000
SMALL_BYTES = 16 * 2**20
"""Text up to this size is tokenized before worker processes would have started."""
_BLOCKS_WAITING_PER_WORKER = 3  # enough to keep workers busy, few enough to keep memory flat

Tick = Callable[[int, int], None]
"""Called with the number of documents and tokens so far."""


def silent_tick(documents: int, tokens: int) -> None: ...


def binarize(
    texts: Iterable[str], folder: Path, tokenizer: TokenizerFacts, *, workers: int = 1, tick: Tick = silent_tick
) -> TokenStore:
    """Write each text, with the special tokens of its tokenizer family, as a row of the store."""
    if workers < 1:
        raise ConfigError(f"workers={workers}; expected 1 or more", "set 1 or more, or omit it")
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
    """One per usable core, or one if starting more takes longer than the work."""
    if size_bytes is not None and size_bytes <= SMALL_BYTES:
        return 1
    return usable_cores()


@dataclass(frozen=True, eq=False)
class Block:
    """Concatenated ids of many texts: two arrays are sent between processes faster than a thousand."""

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
    # Spawned, not forked: tokenizer, torch and recorder have threads, and a forked process can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,)) as pool:
        waiting: deque[Future[Block]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_work, block))
                if len(waiting) > workers * _BLOCKS_WAITING_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # a reader that stops early does not wait for the remaining blocks
            pool.shutdown(cancel_futures=True)


_encoder: BlockEncoder | None = None  # one per worker process, with its word cache


def _start_worker(tokenizer: TokenizerFacts) -> None:
    global _encoder
    # The tokenizer's own threads would only compete with the worker processes.
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


# Packed text: documents as one long sequence of tokens, each ended by an end-of-text token, to be cut into rows of any
# length. A small text stays in memory; a large one is written once to a store in the cache.


IN_MEMORY_BYTES = 64 * 2**20
"""Text up to this size is tokenized by every run, in a few seconds."""
_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


@dataclass(frozen=True)
class Encoding:
    """A tokenizer for `pack`."""

    name: str
    """Part of the cache key: different tokenizers have different names."""
    encode: Callable[[list[str]], Iterable[ArrayLike]]
    end_id: int
    ids: int
    """Upper bound of all ids."""

    @property
    def column(self) -> Column:
        return token_column(self.ids)


class _CachedTokens(RaggedStore):
    NOUN = "cached text"
    HINT = "remove the folder; the next run writes it again"


def pack(documents: Documents, split: Split, encoding: Encoding) -> NDArray[Any]:
    """All tokens of the split, concatenated."""
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
            # Ranks start together and may all write; the first store to be completed is kept.
            with store_writer(folder, {"tokens": column}, keep_existing=True) as writer:
                for lengths, ids in blocks:
                    writer.append(lengths, tokens=ids)
    except OSError as error:
        raise JoulelabError(
            f"tokens cannot be written to {folder.parent}: {error}", "set JOULELAB_CACHE to another folder"
        ) from error
    return _CachedTokens(folder).tokens


# Token ids that the original script pickled: a list of integer arrays. A pickle is a program, so the reader gives it
# nothing to call: the names that such a file refers to are replaced by the classes below, and any other name is an
# error. https://docs.python.org/3/library/pickle.html#restricting-globals
_ROWS_PER_BLOCK = 1_000
_INTEGERS = tuple(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8))


class _PickledType:
    """Replaces `numpy.dtype`."""

    def __init__(self, code: str = "", *_: object) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = "<" if state[1] == "|" else state[1]

    def numpy(self) -> np.dtype[Any]:
        if self.code not in _INTEGERS or self.order not in ("<", ">"):
            raise ValueError(f"an array of type {self.code!r}; expected integers")
        return np.dtype(f"{self.order}{self.code}")


class _PickledArray:
    """Replaces `numpy.ndarray` and for the functions that rebuild one."""

    def __init__(self, *_: object) -> None:
        self.ids: NDArray[Any] = np.zeros(0, dtype=np.int64)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, _, raw = state
        self._take(raw, kind, shape)

    def _take(self, raw: bytes, kind: _PickledType, shape: tuple[int, ...]) -> None:
        if len(shape) > 1 or not isinstance(kind, _PickledType) or not isinstance(raw, bytes | bytearray):
            raise ValueError("an array that is not a row of integers")
        self.ids = np.frombuffer(raw, dtype=kind.numpy())

    @classmethod
    def from_buffer(cls, raw: bytes, kind: _PickledType, shape: tuple[int, ...], *_: object) -> _PickledArray:
        made = cls()
        made._take(raw, kind, shape)
        return made


_REPLACEMENTS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _PickledType,
    ("numpy", "ndarray"): _PickledArray,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _PickledArray for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _PickledArray.from_buffer for core in ("core", "_core")},
}


class _TokenUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _REPLACEMENTS:
            raise ValueError(f"it refers to {module}.{name}; a list of token ids refers to numpy arrays only")
        return _REPLACEMENTS[module, name]


def read_token_pickle(path: Path) -> list[NDArray[np.int64]]:
    """The rows of token ids in a pickle of the original script; no code of the file or of numpy is called."""
    try:
        with path.open("rb") as file:
            rows = _TokenUnpickler(file).load()
        if not isinstance(rows, list | tuple):
            raise ValueError(f"a {type(rows).__name__}; expected a list of integer arrays")
        return [_row_of_ids(row) for row in rows]
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        EOFError,
        OverflowError,
    ) as error:
        raise ConfigError(
            f"{path.absolute()} is not a pickle of token ids: {error}",
            "build a store from the text: joulelab prepare binarize --file_path TEXT --tokenizer_name NAME",
        ) from None


def _row_of_ids(row: object) -> NDArray[np.int64]:
    ids = row.ids if isinstance(row, _PickledArray) else row
    if isinstance(ids, list | tuple) and not all(type(value) is int for value in ids):
        raise ValueError("a row that is not a row of integers")
    if not isinstance(ids, list | tuple | np.ndarray):
        raise ValueError(f"a row of type {type(row).__name__}; expected integers")
    return np.asarray(ids, dtype=np.int64)


def convert_token_pickle(path: Path, folder: Path, tokenizer: TokenizerFacts, tick: Tick = silent_tick) -> TokenStore:
    """Write the rows of a pickle as a store; ids outside the tokenizer's vocabulary are an error."""
    rows = read_token_pickle(path)
    if not rows:
        raise ConfigError(f"{path.absolute()} has no rows", "pass the file that scripts/binarized_data.py wrote")
    highest = max((int(row.max()) for row in rows if len(row)), default=0)
    lowest = min((int(row.min()) for row in rows if len(row)), default=0)
    if lowest < 0 or highest >= tokenizer.vocab_size:
        raise ConfigError(
            f"{path.absolute()} has token ids from {lowest} to {highest}; {tokenizer.name} has {tokenizer.vocab_size}",
            "name the tokenizer that made it with --tokenizer_name",
        )
    blocks = (
        Block(np.concatenate(part).astype(np.uint32), np.array([len(row) for row in part], dtype=np.int64))
        for start in range(0, len(rows), _ROWS_PER_BLOCK)
        if (part := rows[start : start + _ROWS_PER_BLOCK])
    )
    return write_blocks(
        folder,
        _counted(blocks, tick),
        vocab_size=tokenizer.vocab_size,
        specials=tokenizer.specials,
        tokenizer=tokenizer.name,
    )
