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
from joulelab.errors import ConfigError

Form = Literal["text", "chat"]
_OPENING_WORDS = 6  # of a review, that a prompt gives away
_TRAIN = "train"


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
        read = (row_of(record, counts, only_correct) for record in _records(source, subset))
        rows = (row for row in read if row is not None)
        rows = only_split(rows, split) if split else rows
    return rows if limit is None else iter(_with_smallest_hashes(rows, limit))


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
        raise ConfigError(f"{file.absolute()} cannot be read: {error}", "check that the file is whole") from error


def _objects(rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"a row is {row!r:.60}, expected an object")
        yield row


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            yield from batch.to_pylist()
