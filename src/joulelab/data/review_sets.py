"""Review data made ready for classifiers of any framework: title and content tokenised, labels checked, saved in parts.

Parts are those of the one split that all our runs use, so a classifier trained elsewhere on what is written here never
sees a text that one of our runs tests on. Text stays beside the tokens: what was saved here can be read here again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from joulelab.data import hub, labelled_text
from joulelab.data.labelled_text import LabelledText, Splits
from joulelab.errors import ConfigError

SaveFormat = Literal["hf", "parquet", "jsonl"]
PARTS = ("train", "validation", "test")
_TEXTS_AT_ONCE = 1_000

Encode = Callable[[list[str]], list[list[int]]]
Tick = Callable[[int, int], None]


def load_reviews(source: str, subset: str, class_names: tuple[str, ...] = ()) -> LabelledText:
    """The reviews with their classes as 0, 1, ...; numbers that do not begin at 0 must be given names."""
    return named_classes(labelled_text.load(source, subset), class_names, source)


def named_classes(data: LabelledText, class_names: tuple[str, ...], source: str) -> LabelledText:
    found = data.class_names
    if class_names:
        if len(class_names) != len(found):
            raise ConfigError(
                f"{len(class_names)} class names were given; {source} has {len(found)} classes: {', '.join(found)}",
                "name each class once, in their order",
            )
        return LabelledText(data.ids, data.texts, data.labels, class_names)
    numbers = [int(name) for name in found if name.lstrip("-").isdecimal()]
    if len(numbers) == len(found) and numbers != list(range(len(found))):
        raise ConfigError(
            f"the labels of {source} are {', '.join(found)}; expected 0 to {len(found) - 1}, or names",
            f"say what they mean, lowest first: --class-names {','.join('abcdefghij'[: len(found)])} "
            "(for 1 and 2 of Amazon's own files: negative,positive)",
        )
    return data


def limited_parts(data: LabelledText, limit_train: int | None, limit_eval: int | None) -> Splits:
    """Each part whole, or its first rows by hash; a limit above what is there takes what is there."""
    rows = labelled_text.rows_by_split(data)
    limits = {"train": limit_train, "validation": limit_eval, "test": limit_eval}
    sizes = {}
    for name, found in rows.items():
        limit = limits[name]
        sizes[name] = len(found) if limit is None else min(limit, len(found))
    return labelled_text.split(data, sizes["train"], sizes["validation"], sizes["test"])


def encoded_rows(data: LabelledText, encode: Encode) -> Iterator[dict[str, Any]]:
    """Unpadded: who reads them pads each batch to its own longest row."""
    for start in range(0, len(data), _TEXTS_AT_ONCE):
        chosen = slice(start, start + _TEXTS_AT_ONCE)
        tokens = encode(list(data.texts[chosen]))
        for text, label, ids in zip(data.texts[chosen], data.labels[chosen], tokens, strict=True):
            yield {"text": text, "labels": label, "input_ids": ids, "attention_mask": [1] * len(ids)}


def save_parts(folder: Path, parts: Splits, encode: Encode, save_format: SaveFormat, tick: Tick) -> dict[str, int]:
    """Rows of each part; a part without rows is left out."""
    columns: dict[str, dict[str, list[Any]]] = {}
    samples, tokens = 0, 0
    for name in PARTS:
        rows: LabelledText = getattr(parts, name)
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
