"""Rows of labeled tables in constant memory: a hash and a class number of each row, and its text when it is needed.

A table is read twice, a batch of rows at a time. The first pass (`index_rows`) keeps a hash and a class number of each
row, from which `data.labeled_text` decides splits, duplicates and sizes; the second reads the texts of the chosen rows.
Millions of texts need a few hundred megabytes of memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.splits import text_id
from joulelab.data.text import (
    MASK_COLUMN,
    TEXT_COLUMNS,
    TITLE_COLUMN,
    TOKEN_IDS_COLUMN,
    ColumnChoice,
    Columns,
    Table,
    column,
)
from joulelab.errors import ConfigError
from joulelab.runs.paths import read_json
from joulelab.units import plural

Tick = Callable[[int], None]
"""Called with the number of rows that were read so far."""


def silent_tick(rows: int) -> None: ...


Places = NDArray[np.int64]
"""Positions in a set of rows."""


@dataclass(frozen=True)
class WantedTokens:
    """What tokens in a source must have been made with, to be used in place of its texts."""

    tokenizer_sha256: str
    max_length: int


@dataclass(frozen=True, eq=False)
class RowReader:
    """How the rows of a table become texts or token ids, and labels."""

    table: Table
    where: str
    """What error messages call the table."""
    label: str
    text: str | None
    """None: the table has only token ids."""
    title: str | None = None
    tokens: bool = False
    """Whether stored token ids are used in place of the text."""

    def texts(self, batch: Columns) -> list[str]:
        assert self.text is not None
        texts = ["" if text is None else str(text).strip() for text in batch.values[self.text]]
        if self.title is None:
            return texts
        heads = batch.values[self.title]
        return [f"{head}\n{text}" if head else text for head, text in zip(heads, texts, strict=True)]

    def token_ids(self, batch: Columns) -> list[list[int]]:
        """Without padding, which other programs store with the tokens."""
        rows = batch.values[TOKEN_IDS_COLUMN]
        masks = batch.values.get(MASK_COLUMN)
        if masks is None:
            return [list(row or ()) for row in rows]
        return [
            list(ids or ())
            if not mask or 0 not in mask
            else [token for token, real in zip(ids, mask, strict=True) if real]
            for ids, mask in zip(rows, masks, strict=True)
        ]

    @property
    def text_columns(self) -> list[str]:
        return [name for name in (self.text, self.title) if name]

    @property
    def token_columns(self) -> list[str]:
        return [name for name in (TOKEN_IDS_COLUMN, MASK_COLUMN) if name in self.table.names]


@dataclass(frozen=True, eq=False)
class LabeledRows:
    """Rows of a table with hashes and classes in memory; their texts are read when they are needed."""

    reader: RowReader
    rows: NDArray[np.int64]
    """Which rows of the table, in the order of this set."""
    keys: NDArray[np.uint64]
    """`text_id` as a number."""
    copies: NDArray[np.int64]
    """0 for the first row with a text, 1 for the second: rows of two runs are paired by their ids."""
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(row_ids(self.keys, self.copies))

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them, in memory."""
        texts = [""] * len(self)
        for places, batch in self.batches(self.reader.text_columns):
            for place, text in zip(places.tolist(), self.reader.texts(batch), strict=True):
                texts[place] = text
        return tuple(texts)

    def take(self, places: NDArray[np.int64]) -> LabeledRows:
        return replace(
            self,
            rows=self.rows[places],
            keys=self.keys[places],
            copies=self.copies[places],
            labels=self.labels[places],
        )

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[NDArray[np.int64], Columns]]:
        """In the order of the table: places in this set, and the columns of their rows."""
        order = np.argsort(self.rows, kind="stable")
        wanted, start, done = self.rows[order], 0, 0
        for batch in self.reader.table.batches(columns):
            end = int(np.searchsorted(wanted, start + batch.rows))
            if end > done:
                chosen = wanted[done:end] - start
                yield order[done:end], batch if len(chosen) == batch.rows else batch.take(chosen.tolist())
            start, done = start + batch.rows, end
            if done == len(wanted):
                return


def row_ids(keys: NDArray[np.uint64], copies: NDArray[np.int64]) -> Iterator[str]:
    for key, copy in zip(keys.tolist(), copies.tolist(), strict=True):
        yield f"{key:016x}.{copy + 1}" if copy else f"{key:016x}"


@dataclass(frozen=True, eq=False)
class IndexedTable:
    """A table after the first pass."""

    reader: RowReader
    where: str
    keys: NDArray[np.uint64]
    codes: NDArray[np.int64]
    """Place of each row's label in `values`; -1 for no text or no label."""
    values: tuple[Any, ...]
    """Different labels, in the order of their first rows."""
    longest: int = 0
    """Tokens of the longest row, where token ids are stored."""

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: NDArray[np.int64]) -> IndexedTable:
        """Rows of a slice such as `train[:100]`."""
        first, beyond = int(rows[0]), int(rows[-1]) + 1  # slices are contiguous
        table = self.reader.table

        def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
            start = 0
            for batch in table.batches(columns):
                chosen = range(max(0, first - start), min(batch.rows, beyond - start))
                if len(chosen):
                    yield batch.take(chosen)
                start += batch.rows

        sliced = replace(self.reader, table=replace(table, batches=batches))
        return replace(self, reader=sliced, keys=self.keys[rows], codes=self.codes[rows])


def open_reader(
    table: Table, where: str, choice: ColumnChoice, folder: Path | None, wanted: WantedTokens | None
) -> RowReader:
    """Texts if the table has them, token ids if it has only these, or if they are what `wanted` would make."""
    has_tokens = TOKEN_IDS_COLUMN in table.names
    if has_tokens and choice.text is None and column(table.header, TEXT_COLUMNS) is None:
        label = choice.label_in(table.header, where)
        _refuse_other_tokens(where, stored_tokenization(folder), wanted)
        return RowReader(table, where, label, text=None, tokens=True)
    text, label = choice.text_and_label_in(table.header, where)
    title = column(table.header, (TITLE_COLUMN,)) if choice.text is None else None
    stored = stored_tokenization(folder) if has_tokens else None
    usable = stored is not None and wanted is not None and _made_as(stored, wanted)
    return RowReader(table, where, label, text, title, tokens=usable)


def index_rows(reader: RowReader, where: str, tick: Tick = silent_tick) -> IndexedTable:
    keys: list[NDArray[np.uint64]] = []
    codes: list[NDArray[np.int64]] = []
    code_of: dict[Any, int] = {}
    rows = longest = 0
    inputs = reader.token_columns if reader.text is None else reader.text_columns
    for batch in reader.table.batches([*inputs, reader.label]):
        if reader.text is None:
            tokens = reader.token_ids(batch)
            longest = max([longest, *map(len, tokens)])
            hashes = [token_ids_hash(ids) for ids in tokens]
            filled = [bool(ids) for ids in tokens]
        else:
            texts = reader.texts(batch)
            hashes = [int(text_id(text), 16) for text in texts]
            filled = [bool(text) for text in texts]
        labels = [_plain_label(value) for value in batch.values[reader.label]]
        _refuse_odd_labels(labels, where)
        for label in labels:
            if label is not None:
                code_of.setdefault(label, len(code_of))
        keys.append(np.array(hashes, dtype=np.uint64))
        found = [
            code_of[label] if label is not None and full else -1 for label, full in zip(labels, filled, strict=True)
        ]
        codes.append(np.array(found, dtype=np.int64))
        rows += batch.rows
        tick(rows)
    return IndexedTable(
        reader,
        where,
        np.concatenate([np.empty(0, np.uint64), *keys]),
        np.concatenate([np.empty(0, np.int64), *codes]),
        tuple(code_of),
        longest,
    )


def token_ids_hash(ids: Sequence[int]) -> int:
    """Identifies a row without text."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()[:8], "big")


def _plain_label(value: Any) -> Any:
    """CSV writers turn 1 into 1.0 or '1'."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        value = value.strip()
        return int(value) if value.isdecimal() else value or None
    return value


def _refuse_odd_labels(labels: Sequence[Any], where: str) -> None:
    for label in labels:
        if not isinstance(label, int | str | None):
            raise ConfigError(
                f"{where}: the label {label!r} is not a class; expected integers or names", "use one class per row"
            )


def refuse_gaps(found: IndexedTable) -> None:
    gaps = np.flatnonzero(found.codes < 0)
    if len(gaps):
        raise ConfigError(
            f"{found.where}: {len(gaps):,} of {len(found):,} rows have no text or no label, the first is row "
            f"{int(gaps[0]) + 1}",
            "remove these rows or fill them in",
        )


def refuse_long_rows(parts: Iterable[IndexedTable], max_tokens: int | None) -> None:
    for part in parts:
        if max_tokens is not None and part.longest > max_tokens:
            raise ConfigError(
                f"{part.where} has rows of {part.longest} tokens but no text, so they cannot be truncated to "
                f"data.max_tokens={max_tokens}",
                f"set data.max_tokens={part.longest}, or prepare the data again with --max-length {max_tokens}",
            )


_ROWS_OF_LABELS = 20
"""In a table with at least this many rows, a column in which nearly every row has its own class is not a label."""


def number_classes(found: IndexedTable) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Number of each class by its label as text, and the classes' names.

    Classes are numbered in sorted order; if the file names its classes, its numbers are kept.
    """
    names, used = found.reader.table.class_names, sorted(set(np.unique(found.codes[found.codes >= 0]).tolist()))
    values = [found.values[code] for code in used]
    if names is not None and all(isinstance(label, int) and 0 <= label < len(names) for label in values):
        return {str(number): number for number in range(len(names))}, names
    kinds = {isinstance(label, str) for label in values}
    ordered = sorted(values) if len(kinds) < 2 else sorted({str(label) for label in values})
    if len(ordered) < 2:
        raise ConfigError(
            f"{found.where} has {'1 class' if ordered else 'no classes'} in {plural(len(found), 'row')}; "
            "expected at least 2",
            "check the labels",
        )
    if len(found) >= _ROWS_OF_LABELS and len(ordered) > 0.9 * len(found):
        raise ConfigError(
            f"{found.where} has {len(ordered):,} classes in {plural(len(found), 'row')}; expected several rows each",
            "name the column with the classes: data.label_column=NAME",
        )
    return {str(label): number for number, label in enumerate(ordered)}, tuple(str(label) for label in ordered)


def number_rows(found: IndexedTable, number_of: Mapping[str, int], class_names: tuple[str, ...]) -> LabeledRows:
    """All rows, as they are, repeated ones included; classes that `number_of` does not have are refused."""
    counts = np.bincount(found.codes, minlength=len(found.values)).tolist()
    unknown = {
        str(value): count for value, count in zip(found.values, counts, strict=True) if str(value) not in number_of
    }
    if any(unknown.values()):
        listed = ", ".join(f"{label} ({count:,} rows)" for label, count in Counter(unknown).most_common(5))
        raise ConfigError(
            f"{found.where} has classes that no training text has: {listed}",
            "use the same class names in every split, or remove these rows",
        )
    numbers = np.array([number_of.get(str(value), 0) for value in found.values], dtype=np.int64)
    labels = numbers[found.codes] if len(numbers) else found.codes
    rows = np.arange(len(found), dtype=np.int64)
    return LabeledRows(found.reader, rows, found.keys, _copy_numbers(found.keys), labels, class_names)


def _copy_numbers(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many rows before have the same key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(keys)]
    starts = np.flatnonzero(first)
    copies = np.empty(len(keys), dtype=np.int64)
    copies[order] = np.arange(len(keys)) - starts[np.cumsum(first) - 1]
    return copies


def without_duplicates(data: LabeledRows) -> LabeledRows:
    """The first row with each text. A text with two different labels is dropped, because neither can be trusted."""
    _, group = np.unique(data.keys, return_inverse=True)
    first = data.copies == 0
    label_of = np.zeros(int(group.max()) + 1 if len(group) else 0, dtype=np.int64)
    label_of[group[first]] = data.labels[first]
    contradicted = np.zeros(len(label_of), dtype=np.bool_)
    contradicted[group[data.labels != label_of[group]]] = True
    return data.take(np.flatnonzero(first & ~contradicted[group]))


# Token ids that a source has with its texts, or in place of them


TOKENIZATION = "tokenization.json"
"""In a folder of reviews: which tokenizer made its token ids."""


def stored_tokenization(folder: Path | None) -> dict[str, Any] | None:
    """Which tokenizer made the token ids in a folder that `joulelab prepare reviews` wrote."""
    if folder is None or not (folder / TOKENIZATION).is_file():
        return None
    return read_json(folder / TOKENIZATION)


def _made_as(stored: Mapping[str, Any], wanted: WantedTokens) -> bool:
    return (stored.get("tokenizer_sha256"), stored.get("max_length")) == (wanted.tokenizer_sha256, wanted.max_length)


def _refuse_other_tokens(where: str, stored: Mapping[str, Any] | None, wanted: WantedTokens | None) -> None:
    """Token ids without text cannot be made again; those of another tokenizer are other words."""
    if stored is None or wanted is None or stored.get("tokenizer_sha256") == wanted.tokenizer_sha256:
        return
    raise ConfigError(
        f"{where} has token ids of {stored.get('tokenizer')} and no text; the models of this run use another tokenizer",
        "prepare the data with the tokenizer of this run's models",
    )
