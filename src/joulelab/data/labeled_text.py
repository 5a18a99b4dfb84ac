"""Texts with a class label: loaded from any source, split by hash, tokenized into a store, exported as review sets.

A text belongs to the split that its hash gives (`data.splits`), whatever the size, seed or subset of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from joulelab.data import hub
from joulelab.data.splits import SplitName, split_of, text_id
from joulelab.data.text import LABEL_COLUMNS, TEXT_COLUMNS, TITLE_COLUMN, Columns, column, pick, read_table
from joulelab.data.token_store import Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError


@dataclass(frozen=True)
class LabeledText:
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> LabeledText:
        return LabeledText(
            ids=tuple(self.ids[row] for row in rows),
            texts=tuple(self.texts[row] for row in rows),
            labels=tuple(self.labels[row] for row in rows),
            class_names=self.class_names,
        )


@dataclass(frozen=True)
class Splits:
    train: LabeledText
    validation: LabeledText
    test: LabeledText


def load(source: str, subset: str = "all") -> LabeledText:
    """`subset`: of sample:reviews "short", "long" or "all"; of a hub dataset the name of its configuration."""
    return _from_columns(read_table(source, subset), source)


def split(data: LabeledText, train: int, validation: int, test: int, balanced: bool = True) -> Splits:
    """The first texts of each split in hash order; a smaller set is always a subset of a larger one."""
    rows = rows_by_split(data)
    return Splits(
        train=_first(data, "train", rows["train"], train, balanced),
        validation=_first(data, "validation", rows["validation"], validation, balanced),
        test=_first(data, "test", rows["test"], test, balanced),
    )


def rows_by_split(data: LabeledText) -> dict[SplitName, list[int]]:
    """Row numbers by split, in hash order."""
    rows: dict[SplitName, list[int]] = {"train": [], "validation": [], "test": []}
    for row in sorted(range(len(data)), key=lambda row: data.ids[row]):
        rows[split_of(data.ids[row])].append(row)
    return rows


def _first(data: LabeledText, name: SplitName, rows: list[int], size: int, balanced: bool) -> LabeledText:
    if size < 0:
        raise ConfigError(f"size {size} of the split {name} is below 0", f"set a size of 0 or more for {name}")
    if size > len(rows):
        raise ConfigError(
            f"{size:,} rows were requested for {name}, but only {len(rows):,} of {len(data):,} belong to it",
            f"request at most {len(rows):,}, or add data: splits are fixed by text hash",
        )
    return data.take(_balanced_rows(data, rows, size) if balanced else rows[:size])


def _balanced_rows(data: LabeledText, rows: list[int], size: int) -> list[int]:
    """One text of each class in turn; when a class is exhausted, the others continue."""
    seen: dict[int, int] = {}
    turns: list[tuple[int, int, int]] = []
    for place, row in enumerate(rows):
        label = data.labels[row]
        seen[label] = seen.get(label, 0) + 1
        turns.append((seen[label], label, place))
    return [rows[place] for place in sorted(place for _, _, place in sorted(turns)[:size])]


def _from_columns(columns: Columns, source: str) -> LabeledText:
    """Texts and class numbers from a table, without duplicates."""
    texts = _texts(columns, source)
    raw_labels = [_plain_label(value) for value in columns.values[pick(columns, LABEL_COLUMNS, "label", source)]]
    _refuse_gaps(texts, raw_labels, source)
    labels, class_names = _number_classes(raw_labels, columns.class_names, source)
    return _without_duplicates(texts, labels, class_names)


def _texts(columns: Columns, source: str) -> list[str]:
    texts = [
        "" if text is None else str(text).strip()
        for text in columns.values[pick(columns, TEXT_COLUMNS, "text", source)]
    ]
    title = column(columns, (TITLE_COLUMN,))
    if title is None:
        return texts
    return [f"{head}\n{text}" if head else text for head, text in zip(columns.values[title], texts, strict=True)]


def _plain_label(value: Any) -> Any:
    """CSV writers turn 1 into 1.0 or '1'."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        value = value.strip()
        return int(value) if value.isdecimal() else value or None
    return value


def _refuse_gaps(texts: Sequence[str], labels: Sequence[Any], source: str) -> None:
    gaps = [row for row, (text, label) in enumerate(zip(texts, labels, strict=True)) if not text or label is None]
    if gaps:
        raise ConfigError(
            f"{source}: {len(gaps):,} of {len(texts):,} rows have no text or no label, the first is row {gaps[0] + 1}",
            "remove these rows or fill them in",
        )


def _number_classes(
    raw: Sequence[Any], names: tuple[str, ...] | None, source: str
) -> tuple[list[int], tuple[str, ...]]:
    """Classes numbered in sorted order; if the file names its classes, its numbers are kept."""
    if any(not isinstance(label, int | str) for label in raw):
        odd = next(label for label in raw if not isinstance(label, int | str))
        raise ConfigError(
            f"{source}: the label {odd!r} is not a class; expected integers or names", "use one class per row"
        )
    if names is not None and all(isinstance(label, int) and 0 <= label < len(names) for label in raw):
        return [int(label) for label in raw], names
    kinds = {isinstance(label, str) for label in raw}
    found = sorted(set(raw)) if len(kinds) < 2 else sorted({str(label) for label in raw})
    if len(found) < 2:
        raise ConfigError(
            f"{source} has {len(found)} class(es) in {len(raw):,} rows; expected at least 2", "check the labels"
        )
    numbers = {label: number for number, label in enumerate(found)}
    as_found = raw if len(kinds) < 2 else [str(label) for label in raw]
    return [numbers[label] for label in as_found], tuple(str(label) for label in found)


def _without_duplicates(texts: Sequence[str], labels: Sequence[int], class_names: tuple[str, ...]) -> LabeledText:
    ids = [text_id(text) for text in texts]
    labels_of: dict[str, set[int]] = {}
    first_row: dict[str, int] = {}
    for row, (identity, label) in enumerate(zip(ids, labels, strict=True)):
        labels_of.setdefault(identity, set()).add(label)
        first_row.setdefault(identity, row)
    # A text with two different labels is dropped, because neither label can be trusted.
    kept = [row for identity, row in first_row.items() if len(labels_of[identity]) == 1]
    whole = LabeledText(tuple(ids), tuple(texts), tuple(labels), class_names)
    return whole.take(kept)


_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat

Encode = Callable[[list[str]], list[list[int]]]


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
    def ids(self) -> tuple[str, ...]:
        """The hash of each text, used to match rows of two sets."""
        return tuple(self.attachment("ids")["ids"])


def write(folder: Path, data: LabeledText, encode: Encode, vocab_size: int, pad_id: int) -> TokenizedSet:
    if len(data) == 0:
        raise ConfigError("there are no texts to tokenize", "request at least one row")
    columns = {"tokens": token_column(vocab_size), "labels": Column("<i8", per="row")}
    with store_writer(folder, columns) as writer:
        for start in range(0, len(data), _TEXTS_PER_CALL):
            texts = slice(start, start + _TEXTS_PER_CALL)
            rows = encode(list(data.texts[texts]))
            lengths = [len(row) for row in rows]
            if len(rows) != len(data.texts[texts]):
                raise ValueError(f"encode() returned {len(rows)} rows for {len(data.texts[texts])} texts")
            if 0 in lengths:
                number = start + lengths.index(0)
                raise ConfigError(
                    f"text {number} ({data.ids[number]}) has no tokens", "remove it, or use another tokenizer"
                )
            ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(lengths))
            writer.append(lengths, tokens=ids, labels=data.labels[texts])
        writer.attributes.update(class_names=list(data.class_names), vocab_size=vocab_size, pad_id=pad_id)
        writer.attach("ids", {"ids": list(data.ids)})
    return TokenizedSet(folder)


def open_set(folder: Path) -> TokenizedSet:
    return TokenizedSet(folder)


# Review sets for classifiers of any framework: title and content tokenized, labels checked, one table per split.
# The split is the one that all runs use, so a classifier trained elsewhere on these files never sees a test text. The
# text is saved with the tokens, so the files can be read by `load` again.


SaveFormat = Literal["hf", "parquet", "jsonl"]
PARTS = ("train", "validation", "test")

Tick = Callable[[int, int], None]


def load_reviews(source: str, subset: str, class_names: tuple[str, ...] = ()) -> LabeledText:
    """Reviews with classes 0, 1, ...; class numbers that do not start at 0 need names."""
    return named_classes(load(source, subset), class_names, source)


def named_classes(data: LabeledText, class_names: tuple[str, ...], source: str) -> LabeledText:
    found = data.class_names
    if class_names:
        if len(class_names) != len(found):
            raise ConfigError(
                f"{len(class_names)} class names were given; {source} has {len(found)} classes: {', '.join(found)}",
                "name each class once, in order",
            )
        return LabeledText(data.ids, data.texts, data.labels, class_names)
    numbers = [int(name) for name in found if name.lstrip("-").isdecimal()]
    if len(numbers) == len(found) and numbers != list(range(len(found))):
        raise ConfigError(
            f"the labels of {source} are {', '.join(found)}; expected 0 to {len(found) - 1}, or names",
            f"name them, lowest first: --class-names {','.join('abcdefghij'[: len(found)])} "
            "(for 1 and 2 in Amazon's files: negative,positive)",
        )
    return data


def limited_parts(data: LabeledText, limit_train: int | None, limit_eval: int | None) -> Splits:
    """All rows of each split, or the first ones in hash order up to the limit."""
    rows = rows_by_split(data)
    limits = {"train": limit_train, "validation": limit_eval, "test": limit_eval}
    sizes = {}
    for name, found in rows.items():
        limit = limits[name]
        sizes[name] = len(found) if limit is None else min(limit, len(found))
    return split(data, sizes["train"], sizes["validation"], sizes["test"])


def encoded_rows(data: LabeledText, encode: Encode) -> Iterator[dict[str, Any]]:
    """Unpadded rows: a reader pads each batch to its longest row."""
    for start in range(0, len(data), _TEXTS_PER_CALL):
        chosen = slice(start, start + _TEXTS_PER_CALL)
        tokens = encode(list(data.texts[chosen]))
        for text, label, ids in zip(data.texts[chosen], data.labels[chosen], tokens, strict=True):
            yield {"text": text, "labels": label, "input_ids": ids, "attention_mask": [1] * len(ids)}


def save_parts(folder: Path, parts: Splits, encode: Encode, save_format: SaveFormat, tick: Tick) -> dict[str, int]:
    """Save the splits that have rows; returns the number of rows of each."""
    columns: dict[str, dict[str, list[Any]]] = {}
    samples, tokens = 0, 0
    for name in PARTS:
        rows: LabeledText = getattr(parts, name)
        table: dict[str, list[Any]] = {key: [] for key in ("text", "labels", "input_ids", "attention_mask")}
        for row in encoded_rows(rows, encode):
            for key, value in row.items():
                table[key].append(value)
            samples, tokens = samples + 1, tokens + len(row["input_ids"])
        tick(samples, tokens)
        if len(rows):
            columns[name] = table
    _SAVERS[save_format](folder, columns, parts.train.class_names)
    return {name: len(table["labels"]) for name, table in columns.items()}


def _save_hf(folder: Path, columns: dict[str, dict[str, list[Any]]], class_names: tuple[str, ...]) -> None:
    datasets = hub.import_datasets()
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "labels": datasets.ClassLabel(names=list(class_names)),
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "attention_mask": datasets.Sequence(datasets.Value("int8")),
        }
    )
    made = {name: datasets.Dataset.from_dict(table, features=features) for name, table in columns.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))


def _save_parquet(folder: Path, columns: dict[str, dict[str, list[Any]]], class_names: tuple[str, ...]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    for name, table in columns.items():
        pyarrow.parquet.write_table(pa.table(table), folder / f"{name}.parquet")


def _save_jsonl(folder: Path, columns: dict[str, dict[str, list[Any]]], class_names: tuple[str, ...]) -> None:
    for name, table in columns.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for values in zip(*table.values(), strict=True):
                file.write(json.dumps(dict(zip(table, values, strict=True)), ensure_ascii=False) + "\n")


_SAVERS: dict[str, Callable[[Path, dict[str, dict[str, list[Any]]], tuple[str, ...]], None]] = {
    "hf": _save_hf,
    "parquet": _save_parquet,
    "jsonl": _save_jsonl,
}
