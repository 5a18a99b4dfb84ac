"""Conversations and texts by what a user wrote: a sample, a file, a folder, a dataset on the hub."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from joulelab.data import labelled_text, sources
from joulelab.data.chat.messages import ASSISTANT, Message, Row, only_split, row_id
from joulelab.data.chat.schemas import row_of
from joulelab.data.labelled_text import SplitName
from joulelab.data.text_files import files_by_split, json_rows, read_files
from joulelab.data.text_sources import check_source
from joulelab.data.text_tables import unreadable
from joulelab.errors import ConfigError

Form = Literal["text", "chat"]
_OPENING_WORDS = 6  # of a review, that a prompt gives away
_TRAIN = "train"
_FEW = 50  # different rows: with fewer a split may well have none


def rows_of(
    source: str,
    *,
    split: SplitName | None = None,
    subset: str = "all",
    form: Form = "text",
    limit: int | None = None,
    only_correct: bool = True,
    dropped: Counter[str] | None = None,
) -> Iterator[Row]:
    """The rows of a source, cut into train, validation and test by the hash of each row's question.

    `subset` is the configuration of a hub dataset, or short, long, all of sample:reviews; `form` says whether those
    are given as plain texts or as questions with answers. With a `limit` all rows are gone through and those with the
    smallest hashes are taken: published sets lie sorted by origin, so their first rows are of one kind. A smaller
    limit takes part of what a larger one takes.
    """
    counts = dropped if dropped is not None else Counter()
    if limit is not None and limit < 1:
        raise ConfigError(f"{limit} rows were asked for; expected 1 or more", "set a limit of 1 or more, or none")
    if sources.parse(source).kind == "sample":
        rows = _review_rows(source, subset, form, split)
    else:
        rows = _some_of(_read(source, subset, only_correct, counts), split, source, counts)
    return rows if limit is None else iter(_with_smallest_hashes(rows, limit))


def _read(source: str, subset: str, only_correct: bool, dropped: Counter[str]) -> Iterator[Row]:
    for number, record in enumerate(_records(source, subset), 1):
        try:
            row = row_of(record, dropped, only_correct)
        except ConfigError as error:
            raise ConfigError(f"{source}, row {number}: {error.message}", error.hint) from None
        if row is not None:
            yield row


def _some_of(rows: Iterable[Row], split: SplitName | None, source: str, dropped: Counter[str]) -> Iterator[Row]:
    """Those of the split; that there is none is told with the reason, which may be the rows or how they are split."""
    different: set[str] = set()
    seen = taken = 0

    def counted() -> Iterator[Row]:
        nonlocal seen
        for row in rows:
            seen += 1
            if len(different) < _FEW:
                different.add(row_id(row))
            yield row

    for row in only_split(counted(), split) if split else counted():
        taken += 1
        yield row
    if not seen:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
        raise ConfigError(
            f"{source} has no row to train on: " + (f"all were left out ({why})" if why else "it is empty"),
            "rows need an assistant's answer, or a text",
        )
    if not taken:
        few = f"all {seen:,} have the same one" if len(different) == 1 else f"only {len(different)} are different"
        raise ConfigError(
            f"{source} has no row for {split}: rows are split for ever by the hash of their text or question, and "
            + (few if seen > 1 else "it has a single row"),
            f"give it {_FEW} different rows or more: a fifth or so is held out for quality",
        )


def _with_smallest_hashes(rows: Iterable[Row], limit: int) -> list[Row]:
    numbered = ((row_id(row), place, row) for place, row in enumerate(rows))
    return [row for _, _, row in heapq.nsmallest(limit, numbered, key=lambda entry: entry[:2])]


def _review_rows(source: str, subset: str, form: Form, split: SplitName | None) -> Iterator[Row]:
    data = labelled_text.load(source, subset)
    by_split = labelled_text.rows_by_split(data)
    chosen = by_split[split] if split else sorted(chain(*by_split.values()), key=lambda row: data.ids[row])
    for row in chosen:
        text = data.texts[row]
        yield text if form == "text" else _as_question(text, data.class_names[data.labels[row]])


def _as_question(review: str, polarity: str) -> Row:
    """A prompt that a small model can follow, and every review another one."""
    words = review.split()
    opening, rest = " ".join(words[:_OPENING_WORDS]), " ".join(words[_OPENING_WORDS:])
    return [
        Message(role="user", content=f"Continue this {polarity} film review: {opening}"),
        Message(role=ASSISTANT, content=rest or opening),
    ]


def _records(source: str, subset: str) -> Iterator[dict[str, Any]]:
    found = check_source(source, subset)
    if found.path is None:
        from joulelab.data.hub_text import HubText

        name = source if subset == "all" else f"{found.name.partition(':')[0]}:{subset}"
        return HubText(name, whole=True).rows(_TRAIN)
    if any((found.path / mark).exists() for mark in ("dataset_dict.json", "dataset_info.json")):
        from joulelab.data.hub_text import SavedText

        return SavedText(found.path).rows(_TRAIN)
    files = files_by_split(found.path)
    if _TRAIN not in files:
        raise ConfigError(
            f"{found.path.absolute()} has files of {', '.join(files)} and none to train on", "name a file itself"
        )
    return chain.from_iterable(map(_file_records, files[_TRAIN]))


def _file_records(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    kind = file.name.lower().removesuffix(".gz")
    if not kind.endswith((".json", ".jsonl", ".parquet")):
        yield from ({"text": text} for text in read_files([file]))
        return
    try:
        yield from _parquet_rows(file) if kind.endswith(".parquet") else _objects(json_rows(file))
    # Arrow's complaints and JSON's are both ValueErrors, as are bytes that are not UTF-8.
    except (pa.ArrowException, ValueError, OSError) as error:
        raise unreadable(file, error) from error


def _objects(rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {row!r:.60}, expected an object")
        yield row


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            yield from batch.to_pylist()
