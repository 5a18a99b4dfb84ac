"""Texts with a class each, from wherever they lie, and the one split that every run of ours uses.

A text is known by the hash of its own words. That hash decides for ever whether it is for training, validation or test,
so no size, seed, subset or later addition can move a test text into anyone's training set: not this student's, and not
that of a teacher trained last month.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from joulelab.data.text_tables import LABEL_COLUMNS, TEXT_COLUMNS, TITLE_COLUMN, Columns, column, pick, read_table
from joulelab.errors import ConfigError

# Out of ten. A fifth for the test leaves 1,000 and more even of the 8,530 short reviews, enough to tell students apart.
_TRAIN_TENTHS, _VALIDATION_TENTHS = 7, 1

SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class LabelledText:
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> LabelledText:
        return LabelledText(
            ids=tuple(self.ids[row] for row in rows),
            texts=tuple(self.texts[row] for row in rows),
            labels=tuple(self.labels[row] for row in rows),
            class_names=self.class_names,
        )


@dataclass(frozen=True)
class Splits:
    train: LabelledText
    validation: LabelledText
    test: LabelledText


def text_id(text: str) -> str:
    """Spacing and case do not make another text."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode()).hexdigest()[:16]


def load(source: str, subset: str = "all") -> LabelledText:
    """`subset`: of sample:reviews "short", "long" or "all"; of a hub dataset the name of its configuration."""
    return _from_columns(read_table(source, subset), source)


def split(data: LabelledText, train: int, validation: int, test: int, balanced: bool = True) -> Splits:
    """The first texts, by hash, of each split; a smaller set is always part of a larger one."""
    rows = rows_by_split(data)
    return Splits(
        train=_first(data, "train", rows["train"], train, balanced),
        validation=_first(data, "validation", rows["validation"], validation, balanced),
        test=_first(data, "test", rows["test"], test, balanced),
    )


def rows_by_split(data: LabelledText) -> dict[SplitName, list[int]]:
    """Every row number under the split it belongs to, in hash order."""
    rows: dict[SplitName, list[int]] = {"train": [], "validation": [], "test": []}
    for row in sorted(range(len(data)), key=lambda row: data.ids[row]):
        rows[split_of(data.ids[row])].append(row)
    return rows


def split_of(identity: str) -> SplitName:
    # The end of the hash decides the split, its beginning the order inside: the two must not depend on each other.
    tenth = int(identity[-8:], 16) % 10
    if tenth < _TRAIN_TENTHS:
        return "train"
    return "validation" if tenth < _TRAIN_TENTHS + _VALIDATION_TENTHS else "test"


def _first(data: LabelledText, name: SplitName, rows: list[int], size: int, balanced: bool) -> LabelledText:
    if size < 0:
        raise ConfigError(f"{size} rows were asked for {name}; a size is 0 or more", f"set the size of {name}")
    if size > len(rows):
        raise ConfigError(
            f"{size:,} rows were asked for {name}, but there are {len(rows):,} (of {len(data):,} in all)",
            f"ask for at most {len(rows):,}, or bring more data: each text belongs to one split for ever",
        )
    return data.take(_balanced_rows(data, rows, size) if balanced else rows[:size])


def _balanced_rows(data: LabelledText, rows: list[int], size: int) -> list[int]:
    """One text of each class in turn; a class that has run out leaves its turns to the others."""
    seen: dict[int, int] = {}
    turns: list[tuple[int, int, int]] = []
    for place, row in enumerate(rows):
        label = data.labels[row]
        seen[label] = seen.get(label, 0) + 1
        turns.append((seen[label], label, place))
    return [rows[place] for place in sorted(place for _, _, place in sorted(turns)[:size])]


def _from_columns(columns: Columns, source: str) -> LabelledText:
    """Name the columns, number the classes, drop what is there twice."""
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
    """1.0 and '1' are what CSV writers make of 1."""
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
    """Classes by sorted order; where the file states its classes, their numbers are kept as they are."""
    if any(not isinstance(label, int | str) for label in raw):
        odd = next(label for label in raw if not isinstance(label, int | str))
        raise ConfigError(
            f"{source}: the label {odd!r} is no class; expected whole numbers or names", "one class per row"
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


def _without_duplicates(texts: Sequence[str], labels: Sequence[int], class_names: tuple[str, ...]) -> LabelledText:
    ids = [text_id(text) for text in texts]
    labels_of: dict[str, set[int]] = {}
    first_row: dict[str, int] = {}
    for row, (identity, label) in enumerate(zip(ids, labels, strict=True)):
        labels_of.setdefault(identity, set()).add(label)
        first_row.setdefault(identity, row)
    # A text that is filed under two classes says nothing about either, so no copy of it stays.
    kept = [row for identity, row in first_row.items() if len(labels_of[identity]) == 1]
    whole = LabelledText(tuple(ids), tuple(texts), tuple(labels), class_names)
    return whole.take(kept)
