"""Documents to a store of ids: in blocks, by as many processes as there are cores, in the order they came.

One line at a time is how this step came to take hours. Blocks are worked on apart and taken back in their order, so
the bytes are the same whatever the number of workers. A worker needs the tokenizer's definition and nothing of torch.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.cores import usable_cores
from joulelab.data.store import TokenStore, write_blocks
from joulelab.data.tokenizer_family import TokenizerFacts
from joulelab.data.word_cache import WordCache
from joulelab.errors import ConfigError, DependencyMissing

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
