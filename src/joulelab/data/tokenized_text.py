"""Tokenized sets of labeled texts: the store that training reads, and review files for any framework.

Both are written a few thousand texts at a time, in constant memory.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from joulelab.data import hub
from joulelab.data.labeled_rows import (
    TOKENIZATION,
    LabeledRows,
    Places,
    Tick,
    WantedTokens,
    row_ids,
    silent_tick,
)
from joulelab.data.labeled_text import LabeledSource, LabeledText, Splits, limited_rows, load_splits
from joulelab.data.splits import ALL, SPLITS
from joulelab.data.text import NO_COLUMN_NAMES
from joulelab.data.token_store import Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError
from joulelab.runs.paths import read_json, write_json

_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat

Encode = Callable[[list[str]], list[list[int]]]
CountTick = Callable[[int, int], None]
"""Called with the number of samples and tokens so far."""


def silent_counts(samples: int, tokens: int) -> None: ...


class TokenizedSet(RaggedStore):
    """Token ids and labels of texts."""

    COLUMNS = ("tokens", "labels")
    NOUN = "tokenized set"

    def _read_attributes(self) -> None:
        self.labels: NDArray[np.int64] = self.columns["labels"]
        self.class_names: tuple[str, ...] = tuple(self.attributes["class_names"])
        self.vocab_size: int = self.attributes["vocab_size"]
        self.pad_id: int = self.attributes["pad_id"]

    @cached_property
    def ids(self) -> NDArray[np.str_]:
        """The hash of each text, used to match rows of two sets."""
        if "keys" not in self.columns:  # sets of earlier releases
            return np.array(self.attachment("ids")["ids"])
        keys, copies = self.columns["keys"].view("<u8"), self.columns["copies"]
        width = 16 + (1 + len(str(int(copies.max()) + 1)) if copies.any() else 0)
        return np.fromiter(row_ids(keys, copies), dtype=f"<U{width}", count=len(self))


def write(
    folder: Path,
    data: LabeledText | LabeledRows,
    encode: Encode,
    vocab_size: int,
    pad_id: int,
    tick: CountTick = silent_counts,
) -> TokenizedSet:
    if len(data) == 0:
        raise ConfigError("there are no texts to tokenize", "request at least one row")
    columns = {
        "tokens": token_column(vocab_size),
        "labels": Column("<i8", per="row"),
        "keys": Column("<i8", per="row"),
        "copies": Column("<i4", per="row"),
    }
    if isinstance(data, LabeledText):
        keys, copies = _keys_of(data.ids)
        labels, in_order = np.array(data.labels, dtype=np.int64), True
    else:
        keys, copies, labels = data.keys, data.copies, data.labels
        in_order = bool((np.diff(data.rows) > 0).all())
    portions = _encoded(data, encode, tick)
    scratch = folder.with_name(f".{folder.name}.unordered")
    try:
        if not in_order:
            portions = _ordered(portions, scratch, columns["tokens"], len(data))
        with store_writer(folder, columns) as writer:
            for places, lengths, ids in portions:
                writer.append(
                    lengths,
                    tokens=ids,
                    labels=labels[places],
                    keys=keys[places].view(np.int64),
                    copies=copies[places],
                )
            writer.attributes.update(class_names=list(data.class_names), vocab_size=vocab_size, pad_id=pad_id)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return TokenizedSet(folder)


def _keys_of(ids: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    parted = [identity.partition(".") for identity in ids]
    keys = np.array([int(key, 16) for key, _, _ in parted], dtype=np.uint64)
    return keys, np.array([int(copy or 1) - 1 for _, _, copy in parted], dtype=np.int64)


_Portion = tuple[Places, list[int], NDArray[np.int64]]
"""Places in a set, and the lengths and concatenated token ids of its texts there."""


def _encoded(data: LabeledText | LabeledRows, encode: Encode, tick: CountTick) -> Iterator[_Portion]:
    """In the order in which the texts are stored."""
    samples = tokens = 0
    for places, rows in _token_rows(data, encode):
        lengths = [len(row) for row in rows]
        if 0 in lengths:
            number = int(places[lengths.index(0)])
            raise ConfigError(
                f"text {number} ({data.ids[number]}) has no tokens", "remove it, or use another tokenizer"
            )
        samples, tokens = samples + len(rows), tokens + sum(lengths)
        yield places, lengths, np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(lengths))
        tick(samples, tokens)


def _token_rows(data: LabeledText | LabeledRows, encode: Encode) -> Iterator[tuple[Places, list[list[int]]]]:
    if isinstance(data, LabeledRows) and data.reader.tokens:
        for places, batch in data.batches(data.reader.token_columns):
            yield places, data.reader.token_ids(batch)
        return
    for places, texts in _texts_of(data, _TEXTS_PER_CALL):
        rows = encode(texts)
        if len(rows) != len(texts):
            raise ValueError(f"encode() returned {len(rows)} rows for {len(texts)} texts")
        yield places, rows


def _texts_of(data: LabeledText | LabeledRows, size: int) -> Iterator[tuple[Places, list[str]]]:
    """Texts as they are stored, up to `size` at a time."""
    if isinstance(data, LabeledText):
        batches: Iterable[tuple[Places, list[str]]] = [(np.arange(len(data)), list(data.texts))]
    else:
        reader = data.reader
        batches = ((places, reader.texts(batch)) for places, batch in data.batches(reader.text_columns))
    for places, texts in batches:
        for start in range(0, len(texts), size):
            yield places[start : start + size], texts[start : start + size]


def _ordered(portions: Iterator[_Portion], scratch: Path, column: Column, rows: int) -> Iterator[_Portion]:
    """The portions in the order of the set: tokens are first stored as they come."""
    row_of = np.empty(rows, dtype=np.int64)
    written = 0
    with store_writer(scratch, {"tokens": column}) as writer:
        for places, lengths, ids in portions:
            writer.append(lengths, tokens=ids)
            row_of[places] = np.arange(written, written + len(places))
            written += len(places)
    stored = RaggedStore(scratch)
    for start in range(0, rows, _TEXTS_PER_CALL):
        places = np.arange(start, min(start + _TEXTS_PER_CALL, rows))
        parts = [stored.row(int(row)) for row in row_of[places]]
        yield places, [len(part) for part in parts], np.concatenate(parts)


def open_set(folder: Path) -> TokenizedSet:
    return TokenizedSet(folder)


# Review sets for classifiers of any framework: title and content tokenized, labels checked, one table per split.
# The split is the one that all runs use, so a classifier trained elsewhere on these files never sees a test text. The
# text is saved with the tokens, so that another tokenizer can read the files too.


SaveFormat = Literal["hf", "parquet", "jsonl", "pt"]


def load_reviews(source: str, subset: str, class_names: tuple[str, ...] = (), tick: Tick = silent_tick) -> Splits:
    """Reviews with classes 0, 1, ... in their own splits; class numbers that do not start at 0 need names."""
    everything = {"train_size": ALL, "validation_size": ALL, "test_size": ALL}
    settings = LabeledSource(source=source, subset=subset, **everything)  # type: ignore[arg-type]
    found = load_splits(settings, tick, hold_out=False)
    if found.train.reader.text is None:
        raise ConfigError(
            f"{source} has token ids but no text to tokenize",
            f"`joulelab run` reads it as it is: data.source={source}",
        )
    no_names = any(NO_COLUMN_NAMES in note for note in found.notes)
    if no_names and not class_names and found.train.class_names == AMAZON_LABELS:
        class_names = AMAZON_CLASSES
        note = "labels 1 and 2 are read as negative and positive, as in Amazon's files"
        found = replace(found, notes=(*found.notes, note))
    names = named_classes(found.train.class_names, class_names, source)
    train, validation, test = (replace(getattr(found, name), class_names=names) for name in SPLITS)
    return replace(found, train=train, validation=validation, test=test)


# The files of Amazon Polarity as published: label, title and content without a header; 1 is negative, 2 positive.
AMAZON_LABELS, AMAZON_CLASSES = ("1", "2"), ("negative", "positive")


def named_classes(found: tuple[str, ...], class_names: tuple[str, ...], source: str) -> tuple[str, ...]:
    if class_names:
        if len(class_names) != len(found):
            raise ConfigError(
                f"{len(class_names)} class names were given; {source} has {len(found)} classes: {', '.join(found)}",
                "name each class once, in order",
            )
        return class_names
    numbers = [int(name) for name in found if name.lstrip("-").isdecimal()]
    if len(numbers) == len(found) and numbers != list(range(len(found))):
        raise ConfigError(
            f"the labels of {source} are {', '.join(found)}; expected 0 to {len(found) - 1}, or names",
            f"name them, lowest first: --class-names {','.join('abcdefghij'[: len(found)])} "
            "(for 1 and 2 in Amazon's files: negative,positive)",
        )
    return found


def limited_parts(reviews: Splits, limit_train: int | None, limit_eval: int | None) -> Splits:
    """All rows of each split, or the first ones in hash order up to the limit."""
    return replace(
        reviews,
        train=limited_rows(reviews.train, limit_train),
        validation=limited_rows(reviews.validation, limit_eval),
        test=limited_rows(reviews.test, limit_eval),
    )


def write_tokenization(folder: Path, tokenizer: str, wanted: WantedTokens) -> None:
    write_json(
        folder / TOKENIZATION,
        {"tokenizer": tokenizer, "tokenizer_sha256": wanted.tokenizer_sha256, "max_length": wanted.max_length},
    )


_Batch = dict[str, list[Any]]


def save_parts(
    folder: Path,
    parts: Splits,
    encode: Encode,
    save_format: SaveFormat,
    batch_size: int,
    tick: CountTick = silent_counts,
) -> dict[str, int]:
    """Save the splits that have rows; returns the number of rows of each."""
    samples = tokens = 0

    def encoded(data: LabeledRows) -> Iterator[_Batch]:
        """Unpadded rows in the order of the source: a reader pads each batch to its longest row."""
        nonlocal samples, tokens
        for places, texts in _texts_of(data, batch_size):
            ids = encode(texts)
            yield {
                "text": texts,
                "labels": data.labels[places].tolist(),
                "input_ids": ids,
                "attention_mask": [[1] * len(row) for row in ids],
            }
            samples, tokens = samples + len(ids), tokens + sum(map(len, ids))
            tick(samples, tokens)

    rows: dict[str, int] = {name: len(getattr(parts, name)) for name in SPLITS if len(getattr(parts, name))}
    for name in rows:
        _SAVERS[save_format](folder, name, encoded(getattr(parts, name)), parts.train.class_names)
    if save_format == "hf":
        write_json(folder / "dataset_dict.json", {"splits": list(rows)})
    return rows


_ARROW_SHARD_BYTES = 500 * 10**6  # as `datasets` writes them


def _save_hf(folder: Path, name: str, batches: Iterator[_Batch], class_names: tuple[str, ...]) -> None:
    """The folder that `save_to_disk` of `datasets` writes, one shard after the other.

    `save_to_disk` itself needs the whole set in memory or memory-mapped, and mapped pages count as resident memory.
    """
    import pyarrow as pa

    datasets = hub.import_datasets()
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "labels": datasets.ClassLabel(names=list(class_names)),
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "attention_mask": datasets.Sequence(datasets.Value("int8")),
        }
    )
    made = folder / name
    with _quiet_progress(datasets):  # its description of an empty set is completed below
        datasets.Dataset.from_dict({column: [] for column in features}, features=features).save_to_disk(str(made))
    for empty in made.glob("*.arrow"):
        empty.unlink()
    content, shards, left = hashlib.sha256(), list[Path](), iter(batches)
    while (first := next(left, None)) is not None:
        shards.append(made / f".shard-{len(shards):05d}")
        with pa.OSFile(str(shards[-1]), "wb") as file, pa.ipc.new_stream(file, features.arrow_schema) as writer:
            for batch in chain([first], left):
                rows = pa.RecordBatch.from_pydict(batch, schema=features.arrow_schema)
                writer.write_batch(rows)
                for buffer in chain.from_iterable(column.buffers() for column in rows.columns):
                    content.update(b"" if buffer is None else buffer)
                if file.tell() >= _ARROW_SHARD_BYTES:
                    break
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for shard, named in zip(shards, names, strict=True):
        shard.rename(made / named)
    state = read_json(made / "state.json")
    # `datasets` finds results that it has cached for a set by the fingerprint: another set needs another one.
    described = {"_data_files": [{"filename": named} for named in names], "_fingerprint": content.hexdigest()[:16]}
    write_json(made / "state.json", {**state, **described})


@contextmanager
def _quiet_progress(datasets: Any) -> Iterator[None]:
    """Without the bars of `datasets`: the run shows its own progress."""
    shown = datasets.utils.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _save_parquet(folder: Path, name: str, batches: Iterator[_Batch], class_names: tuple[str, ...]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    tokens = pa.list_(pa.int32())
    schema = pa.schema(
        {"text": pa.string(), "labels": pa.int64(), "input_ids": tokens, "attention_mask": pa.list_(pa.int8())}
    )
    with pyarrow.parquet.ParquetWriter(folder / f"{name}.parquet", schema) as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_pydict(batch, schema=schema))


def _save_jsonl(folder: Path, name: str, batches: Iterator[_Batch], class_names: tuple[str, ...]) -> None:
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for batch in batches:
            for values in zip(*batch.values(), strict=True):
                file.write(json.dumps(dict(zip(batch, values, strict=True)), ensure_ascii=False) + "\n")


_ROWS_PER_TENSOR = 100_000  # about 400 MB at 256 tokens


def _save_pt(folder: Path, name: str, batches: Iterator[_Batch], class_names: tuple[str, ...]) -> None:
    """Tensors padded to the longest review; `torch.load(..., weights_only=True)` reads them. A file has at most
    100,000 reviews: `train.pt`, or `train-00000.pt`, `train-00001.pt`, ..."""
    torch = importlib.import_module("torch")  # by name: this module is also read on login nodes without torch
    rows: list[tuple[int, NDArray[np.int64]]] = []
    files: list[Path] = []

    def save() -> None:
        width = max(len(ids) for _, ids in rows)
        ids_NT, mask_NT = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
        for number, (_, ids) in enumerate(rows):
            ids_NT[number, : len(ids)], mask_NT[number, : len(ids)] = ids, 1
        files.append(folder / f"{name}-{len(files):05d}.pt")
        torch.save(
            {
                "input_ids": torch.from_numpy(ids_NT),
                "attention_mask": torch.from_numpy(mask_NT),
                "labels": torch.tensor([label for label, _ in rows]),
                "class_names": list(class_names),
            },
            files[-1],
        )
        rows.clear()

    for batch in batches:
        rows += zip(batch["labels"], (np.array(ids) for ids in batch["input_ids"]), strict=True)
        if len(rows) >= _ROWS_PER_TENSOR:
            save()
    if rows:
        save()
    if len(files) == 1:
        files[0].rename(folder / f"{name}.pt")


_SAVERS: dict[str, Callable[[Path, str, Iterator[_Batch], tuple[str, ...]], None]] = {
    "hf": _save_hf,
    "parquet": _save_parquet,
    "jsonl": _save_jsonl,
    "pt": _save_pt,
}
