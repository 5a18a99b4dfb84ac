"""Speed of `joulelab prepare binarize` compared with tokenizing one line at a time.

Four methods on the same documents, interleaved in several rounds:

    old script       a tokenizer in Python, one line per call (what `BertTokenizer` was when the script was written)
    one line         the fast tokenizer (Rust), one line per call: the old script with the current library
    batches          the fast tokenizer, a thousand lines per call, threads of its own
    ours             batches, every distinct word tokenized once, processes, and the store written to disk

The slow methods get a slice of the corpus in each round, ours gets all of it, including the start of its processes;
tokens per second are compared. On a shared machine wall time is unreliable, so CPU time per token, including child
processes, is printed as well. All four must give the same ids.

    python benchmarks/binarize.py
    python benchmarks/binarize.py --documents 5000 --rounds 2 --workers 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

OLD, ONE, BATCHES, OURS = "old script", "one line", "batches", "ours"
AT_LEAST = 10.0
TEXTS_PER_CALL = 1_000
Encode = Callable[[list[str]], list[list[int]]]


@dataclass
class Timing:
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Rate:
    tokens_per_s: float
    cpu_us_per_token: float


@contextmanager
def timed() -> Iterator[Timing]:
    found = Timing()
    before, started_s = os.times(), time.perf_counter()
    yield found
    after = os.times()
    found.wall_s = time.perf_counter() - started_s
    found.cpu_s = sum(after[:4]) - sum(before[:4])


def main() -> None:
    options = read_options()
    texts = read_texts(options.source, options.documents)
    tokenizer, old = load(options.tokenizer)
    rates: dict[str, list[Rate]] = {}
    for number in range(options.rounds):
        some = texts[number :: max(1, len(texts) // options.slice)][: options.slice]
        ways = one_at_a_time(tokenizer, old)
        ids = {name: measure(rates, name, partial(way, some)) for name, way in ways.items()}
        ids[OURS] = binarize_all(rates, tokenizer, options, texts, some)
        for name, found in ids.items():
            assert found == ids[ONE], f"'{name}' gave other ids than one line at a time"
    report(rates, options, len(texts))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="sample:reviews")
    parser.add_argument("--tokenizer", default="sample:minilm")
    parser.add_argument("--documents", type=int, default=0, help="0: all")
    parser.add_argument("--slice", type=int, default=300, help="documents per round for the slow methods")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def read_texts(source: str, documents: int) -> list[str]:
    from joulelab.data.splits import parse_split
    from joulelab.data.text import one_line, open_documents

    split = parse_split(f"train[:{documents}]" if documents else "train")
    return [line for line in map(one_line, open_documents(source).read(split)) if line]


def load(name: str) -> tuple[Any, Any]:
    """The fast tokenizer, and the Python one if transformers has it."""
    # Imported here: worker processes run the top of this file, and importing torch takes seconds.
    from joulelab.zoo.pretrained import load_tokenizer

    tokenizer = load_tokenizer(name)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.model_max_length = 10**9  # no warning about long documents
    return tokenizer, in_python(tokenizer)


def in_python(tokenizer: Any) -> Any:
    try:
        from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy
    except ImportError:
        return None
    if type(tokenizer.backend_tokenizer.model).__name__ != "WordPiece":
        return None
    vocabulary = tokenizer.get_vocab()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)), encoding="utf-8")
        return BertTokenizerLegacy(str(file), model_max_length=10**9)


def one_at_a_time(tokenizer: Any, old: Any) -> dict[str, Encode]:
    first = tokenizer.cls_token or tokenizer.bos_token
    last = tokenizer.sep_token or tokenizer.eos_token
    ends = tokenizer.convert_tokens_to_ids([first, last])

    def by_line(encode: Callable[..., list[int]], texts: list[str]) -> list[list[int]]:
        return [encode(f"{first} {text} {last}", add_special_tokens=False) for text in texts]

    def by_batch(texts: list[str]) -> list[list[int]]:
        pieces = [texts[start : start + TEXTS_PER_CALL] for start in range(0, len(texts), TEXTS_PER_CALL)]
        found = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
        return [[ends[0], *ids, ends[1]] for rows in found for ids in rows]

    ways: dict[str, Encode] = {ONE: lambda texts: by_line(tokenizer.encode, texts), BATCHES: by_batch}
    return {OLD: lambda texts: by_line(old.encode, texts), **ways} if old is not None else ways


def measure(rates: dict[str, list[Rate]], name: str, work: Callable[[], list[list[int]]]) -> list[list[int]]:
    with timed() as timing:
        ids = work()
    keep(rates, name, timing, sum(map(len, ids)))
    return ids


def binarize_all(
    rates: dict[str, list[Rate]], tokenizer: Any, options: argparse.Namespace, texts: list[str], some: list[str]
) -> list[list[int]]:
    """Times the whole corpus; returns the ids of the slice."""
    from joulelab.data.tokenize import binarize, describe

    facts = describe(tokenizer, options.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        with timed() as timing:
            store = binarize(texts, Path(folder), facts, workers=options.workers)
        keep(rates, OURS, timing, store.tokens_total)
        number_of = {text: number for number, text in enumerate(texts)}
        return [store.row(number_of[text]).tolist() for text in some]


def keep(rates: dict[str, list[Rate]], name: str, timing: Timing, tokens: int) -> None:
    rates.setdefault(name, []).append(Rate(tokens / timing.wall_s, 1e6 * timing.cpu_s / tokens))


def report(rates: dict[str, list[Rate]], options: argparse.Namespace, documents: int) -> None:
    middle = {
        name: Rate(
            statistics.median(rate.tokens_per_s for rate in found),
            statistics.median(rate.cpu_us_per_token for rate in found),
        )
        for name, found in rates.items()
    }
    ours = middle[OURS]
    print(f"{documents} documents of {options.source}, {options.tokenizer}, {options.workers} workers; medians of")
    print(f"{options.rounds} rounds; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(f"{'':<12}{'tokens/s':>12}{'CPU us/token':>14}{'ours is faster':>16}{'less CPU':>10}")
    for name, rate in middle.items():
        faster, less = ours.tokens_per_s / rate.tokens_per_s, rate.cpu_us_per_token / ours.cpu_us_per_token
        print(f"{name:<12}{rate.tokens_per_s:>12,.0f}{rate.cpu_us_per_token:>14.2f}{faster:>15.1f}x{less:>9.1f}x")
    against = OLD if OLD in middle else ONE
    ratio = ours.tokens_per_s / middle[against].tokens_per_s
    print(f"\nagainst the {against}: {ratio:.1f}x, wanted at least {AT_LEAST:.0f}x")
    found = {
        name: {"tokens_per_s": r.tokens_per_s, "cpu_us_per_token": r.cpu_us_per_token} for name, r in middle.items()
    }
    print(json.dumps({"benchmark": "binarize", "workers": options.workers, "ratio": ratio, "ways": found}))


if __name__ == "__main__":
    main()
