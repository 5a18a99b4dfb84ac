"""Texts with a class label: loaded from any source, tokenized into a store, exported as review sets.

The user's own splits are kept row by row. Texts without a split belong to the one that their hash gives
(`data.splits`), whatever the size, seed or subset of a run.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from joulelab.data import hub, sources
from joulelab.data.splits import (
    ALL,
    SPLITS,
    USUAL_SHARES,
    HashShares,
    OwnSplits,
    Size,
    SplitName,
    duplicate_note,
    hash_shares,
    is_place,
    parse_split,
    rows_wanted,
    split_of,
    split_word,
    text_id,
)
from joulelab.data.text import (
    BY_NAME,
    NO_COLUMN_NAMES,
    TITLE_COLUMN,
    UNSPLIT,
    ColumnChoice,
    Columns,
    TableParts,
    check_source,
    column,
    files_identity,
    read_parts,
    read_table,
)
from joulelab.data.token_store import Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError, SeveralProblems, refuse_all


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


class LabeledSource(OwnSplits):
    """Labeled text, its splits and how much of each."""

    source: str = "sample:reviews"
    """`sample:reviews`, a CSV, JSONL or Parquet file, a folder, or a hub id."""
    subset: str = "short"
    """Of sample:reviews: `short` (one-sentence snippets), `long` (full reviews) or `all`; of a hub id: its config."""
    label_column: str | int | None = None
    """Column with the class: its name, or its number counted from 1; null: label, labels, polarity or sentiment."""
    split_column: str | int | None = None
    """Column that assigns each row to train, validation or test; null: a column `split` with these words."""
    header: bool | None = None
    """Whether a CSV file starts with column names; false: columns are numbered from 1; null: detected."""
    train_size: Size = 1500
    """Texts to train on: a number, a share (0.1 or 10 %) or `all`, which is the default for your own data."""
    validation_size: Size = 300
    """Texts for choices made during development, in the same form; not used for reported quality."""
    test_size: Size = 1000
    """Held-out texts on which quality is reported, in the same form."""

    @property
    def sizes(self) -> dict[SplitName, int | float | str]:
        return {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}

    @property
    def columns(self) -> ColumnChoice:
        return ColumnChoice(self.text_column, self.label_column, self.split_column, self.header)


@dataclass(frozen=True)
class Splits:
    train: LabeledText
    validation: LabeledText
    test: LabeledText
    notes: tuple[str, ...] = ()
    """How the splits were made and what was assumed about the files."""
    duplicates: int = 0
    """Test texts that are also training texts."""

    @property
    def warnings(self) -> tuple[str, ...]:
        note = duplicate_note(self.duplicates, len(self.test))
        return (note,) if note else ()


def load(source: str, subset: str = "all") -> LabeledText:
    """One table. `subset`: of sample:reviews "short", "long" or "all"; of a hub dataset its configuration."""
    return _from_columns(read_table(source, subset), source)


def load_splits(settings: LabeledSource) -> Splits:
    """The user's splits, row by row; missing ones are held out from the training texts by hash, which a note states."""
    found = _named_parts(settings)
    if len(found.parts) == 1:
        return _hashed_splits(found, settings)
    return _own_splits(found, settings)


def check_labeled_text(settings: LabeledSource) -> None:
    """Refuse data that cannot be used, before a run starts; a dataset on the hub is read by the run itself."""
    files = [name for name in settings.named_files.values() if is_place(name)]
    named = files if settings.train in files else [settings.source, *files]
    used: list[sources.Source] = refuse_all(partial(sources.parse, name) for name in named)
    if any(place.path is None for place in used):
        check_source(settings.source, settings.subset)
    else:  # members of a comparison share their data, which is read once
        _check_local(settings, tuple(files_identity(place.path) for place in used if place.path is not None))


@lru_cache(maxsize=8)
def _check_local(settings: LabeledSource, identities: tuple[str, ...]) -> None:
    load_splits(settings)


def _named_parts(settings: LabeledSource) -> TableParts:
    """The parts of the source under the names train, validation and test, with those that the settings name."""
    choice = settings.columns
    named = settings.named_files
    files = {split: name for split, name in named.items() if is_place(name)}
    if "train" in files and settings.source != LabeledSource().source:
        raise ConfigError(
            f"data.source={settings.source} and data.train={files['train']} are both set", "set only one of them"
        )
    parts: dict[str, Columns] = {}
    names: dict[str, str] = {}
    notes: list[str] = []
    if "train" not in files:
        whole = read_parts(settings.source, settings.subset, choice)
        inside = {split: name for split, name in named.items() if split not in files}
        parts, names = _assigned(whole, inside, settings.source, also=set(files))
        notes += whole.notes
    elif set(named) - set(files):
        split = next(name for name in named if name not in files)
        raise ConfigError(f"data.{split}={named[split]}: there is no such file", "check the path")
    for split, file in files.items():
        single = read_parts(file, "all", choice)
        if set(single.parts) != {UNSPLIT}:
            raise ConfigError(f"data.{split}={file} already has splits", "name a single file, or set data.source")
        parts[split], names[split] = single.parts[UNSPLIT], file
        notes += single.notes
    if files and UNSPLIT in parts:
        parts["train"], names["train"] = parts.pop(UNSPLIT), names.pop(UNSPLIT)
    return TableParts(parts, names, tuple(dict.fromkeys(notes)))


def _assigned(
    whole: TableParts, named: Mapping[SplitName, str], source: str, also: set[SplitName]
) -> tuple[dict[str, Columns], dict[str, str]]:
    """The splits of a source by their usual names; `named`: as the user chose, `also`: those in other files."""
    if set(whole.parts) == {UNSPLIT}:
        missing = [
            ConfigError(f"data.{split}={name}: there is no such file, and {source} has no splits", "check the path")
            for split, name in named.items()
        ]
        if missing:
            raise missing[0] if len(missing) == 1 else SeveralProblems(missing)
        return dict(whole.parts), dict(whole.names)
    parts: dict[str, Columns] = {}
    names: dict[str, str] = {}
    for split in SPLITS:
        if split in also:
            continue
        if split in named:
            wanted = parse_split(named[split])
            if wanted.name not in whole.parts:
                raise ConfigError(
                    f"data.{split}={named[split]}: there is no such file, and {source} has no such split",
                    f"its splits: {', '.join(whole.parts)}",
                )
            chosen = whole.parts[wanted.name]
            rows = wanted.rows(chosen.rows)
            values = {name: [column[row] for row in rows] for name, column in chosen.values.items()}
            parts[split], names[split] = replace(chosen, values=values), f"{source} ({wanted})"
            continue
        fitting = [name for name in whole.parts if split_word(name) == split]
        exact = [name for name in fitting if name == split] or fitting
        if len(exact) > 1:
            raise ConfigError(
                f"{source} has several splits for {split}: {', '.join(exact)}", f"choose one: data.{split}={exact[0]}"
            )
        if exact:
            parts[split], names[split] = whole.parts[exact[0]], whole.names[exact[0]]
    if "train" not in parts:
        raise ConfigError(
            f"{source} has the splits {', '.join(whole.parts)}, but none is for training",
            f"choose one: data.train={next(iter(whole.parts), 'NAME')}",
        )
    return parts, names


def _hashed_splits(found: TableParts, settings: LabeledSource) -> Splits:
    (columns,), (source,) = found.parts.values(), found.names.values()
    data = _from_columns(columns, source, settings.columns)
    shares = hash_shares(settings.validation_size, settings.test_size, settings.train_size)
    rows = rows_by_split(data, shares)
    chosen = {
        name: data.take(_balanced_rows(data, rows[name], _size_of_hashed(settings, name, rows, data, source)))
        for name in SPLITS
    }
    notes = list(found.notes)
    if settings.train or sources.parse(settings.source).kind != "sample":
        dropped = columns.rows - len(data)
        repeated = f"; {dropped:,} repeated or contradictory rows were dropped" if dropped else ""
        notes.append(f"{source} has no splits: split by the hash of each text ({shares}){repeated}")
    return Splits(chosen["train"], chosen["validation"], chosen["test"], tuple(notes))


def _size_of_hashed(
    settings: LabeledSource, name: SplitName, rows: Mapping[SplitName, list[int]], data: LabeledText, source: str
) -> int:
    """A share is one of all texts; the hash gives about as many to the split, and these are taken."""
    size, there = settings.sizes[name], len(rows[name])
    if isinstance(size, float):
        size = min(there, max(1, round(size * len(data))))
    if not there:
        raise ConfigError(
            f"{source} has {len(data):,} different texts, too few to split: none is for {name}",
            "add rows, or provide your own splits: data.train=, data.validation=, data.test=",
        )
    return rows_wanted(size, there, name, source)


def _own_splits(found: TableParts, settings: LabeledSource) -> Splits:
    shares = HashShares(
        *(
            size if isinstance(size, float) else usual
            for size, usual in (
                (settings.validation_size, USUAL_SHARES.validation),
                (settings.test_size, USUAL_SHARES.test),
            )
        )
    )
    data = _numbered_parts(found, settings.columns)
    missing = [name for name in SPLITS if name not in data]
    train, notes = data["train"], list(found.notes)
    rows = rows_by_split(train, shares)
    for name in missing:
        data[name] = train.take(sorted(rows[name]))
        if not rows[name]:
            raise ConfigError(
                f"{found.names['train']} has {len(train):,} rows, too few to hold some out for {name}",
                f"provide them: data.{name}=FILE",
            )
    if missing:
        held_out = {row for name in missing for row in rows[name]}
        data["train"] = train.take([row for row in range(len(train)) if row not in held_out])
        counts = ", ".join(f"{len(data[name]):,} for {name}" for name in missing)
        notes.append(
            f"{found.names['train']}: no split for {' and '.join(missing)}; held out from the training texts by hash: "
            f"{counts}"
        )
    kept = {}
    for name in SPLITS:
        part, size = data[name], settings.sizes[name]
        given = ALL if name in missing and isinstance(size, float) else size  # the share was held out already
        wanted = rows_wanted(given, len(part), name, found.names.get(name, found.names["train"]))
        kept[name] = _limited(part, wanted)
    trained = {_without_number(identity) for identity in kept["train"].ids}
    twice = sum(_without_number(identity) in trained for identity in kept["test"].ids)
    absent = [name for number, name in enumerate(train.class_names) if number not in set(kept["test"].labels)]
    if absent:
        notes.append(f"no test text has the class {', '.join(absent[:5])}")
    return Splits(kept["train"], kept["validation"], kept["test"], tuple(notes), twice)


def _numbered_parts(found: TableParts, choice: ColumnChoice) -> dict[str, LabeledText]:
    """All parts with the class numbers of the training texts; rows as they are, repeated ones included."""
    texts, labels = {}, {}
    for name, columns in found.parts.items():
        where = found.names[name]
        texts[name], labels[name] = _texts_and_labels(columns, where, choice)
        if not texts[name]:
            raise ConfigError(f"{where} has no rows", f"provide rows for {name}")
        _refuse_gaps(texts[name], labels[name], where)
    train, class_names = _number_classes(labels["train"], found.parts["train"].class_names, found.names["train"])
    number_of = {str(label): number for label, number in zip(labels["train"], train, strict=True)}
    parts = {}
    for name in found.parts:
        unknown = Counter(str(label) for label in labels[name] if str(label) not in number_of)
        if unknown:
            listed = ", ".join(f"{label} ({count:,} rows)" for label, count in unknown.most_common(5))
            raise ConfigError(
                f"{found.names[name]} has classes that no training text has: {listed}",
                "use the same class names in every split, or remove these rows",
            )
        numbers = tuple(number_of[str(label)] for label in labels[name])
        parts[name] = LabeledText(_numbered_ids(texts[name]), tuple(texts[name]), numbers, class_names)
    return parts


def _numbered_ids(texts: Sequence[str]) -> tuple[str, ...]:
    """Hashes of the texts; a repeated text gets a number, because rows of two runs are paired by their id."""
    seen: Counter[str] = Counter()
    ids = []
    for text in texts:
        identity = text_id(text)
        seen[identity] += 1
        ids.append(identity if seen[identity] == 1 else f"{identity}.{seen[identity]}")
    return tuple(ids)


def _without_number(identity: str) -> str:
    return identity.partition(".")[0]


def split(data: LabeledText, train: int, validation: int, test: int, balanced: bool = True) -> Splits:
    """The first texts of each split in hash order; a smaller set is always a subset of a larger one."""
    rows = rows_by_split(data)
    return Splits(
        train=_first(data, "train", rows["train"], train, balanced),
        validation=_first(data, "validation", rows["validation"], validation, balanced),
        test=_first(data, "test", rows["test"], test, balanced),
    )


def rows_by_split(data: LabeledText, shares: HashShares = USUAL_SHARES) -> dict[SplitName, list[int]]:
    """Row numbers by split, in hash order."""
    rows: dict[SplitName, list[int]] = {"train": [], "validation": [], "test": []}
    for row in sorted(range(len(data)), key=lambda row: data.ids[row]):
        rows[split_of(_without_number(data.ids[row]), shares)].append(row)
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


def _from_columns(columns: Columns, source: str, choice: ColumnChoice = BY_NAME) -> LabeledText:
    """Texts and class numbers from a table, without duplicates."""
    texts, raw_labels = _texts_and_labels(columns, source, choice)
    _refuse_gaps(texts, raw_labels, source)
    labels, class_names = _number_classes(raw_labels, columns.class_names, source)
    return _without_duplicates(texts, labels, class_names)


def _texts_and_labels(columns: Columns, source: str, choice: ColumnChoice) -> tuple[list[str], list[Any]]:
    text_name, label_name = choice.text_and_label_in(columns, source)
    texts = ["" if text is None else str(text).strip() for text in columns.values[text_name]]
    labels = [_plain_label(value) for value in columns.values[label_name]]
    title = column(columns, (TITLE_COLUMN,)) if choice.text is None else None
    if title is not None:
        heads = columns.values[title]
        texts = [f"{head}\n{text}" if head else text for head, text in zip(heads, texts, strict=True)]
    return texts, labels


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


SaveFormat = Literal["hf", "parquet", "jsonl", "pt"]
PARTS = ("train", "validation", "test")

Tick = Callable[[int, int], None]


def load_reviews(source: str, subset: str, class_names: tuple[str, ...] = ()) -> Splits:
    """Reviews with classes 0, 1, ... in their own splits; class numbers that do not start at 0 need names."""
    everything = {"train_size": ALL, "validation_size": ALL, "test_size": ALL}
    found = load_splits(LabeledSource(source=source, subset=subset, **everything))  # type: ignore[arg-type]
    no_names = any(NO_COLUMN_NAMES in note for note in found.notes)
    if no_names and not class_names and found.train.class_names == AMAZON_LABELS:
        class_names = AMAZON_CLASSES
        note = "labels 1 and 2 are read as negative and positive, as in Amazon's files"
        found = replace(found, notes=(*found.notes, note))
    train, validation, test = (named_classes(getattr(found, name), class_names, source) for name in SPLITS)
    return replace(found, train=train, validation=validation, test=test)


# The files of Amazon Polarity as published: label, title and content without a header; 1 is negative, 2 positive.
AMAZON_LABELS, AMAZON_CLASSES = ("1", "2"), ("negative", "positive")


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


def limited_parts(reviews: Splits, limit_train: int | None, limit_eval: int | None) -> Splits:
    """All rows of each split, or the first ones in hash order up to the limit."""
    return replace(
        reviews,
        train=_limited(reviews.train, limit_train),
        validation=_limited(reviews.validation, limit_eval),
        test=_limited(reviews.test, limit_eval),
    )


def _limited(part: LabeledText, limit: int | None) -> LabeledText:
    if limit is None or limit >= len(part):
        return part
    return part.take(_balanced_rows(part, sorted(range(len(part)), key=part.ids.__getitem__), limit))


def encoded_rows(data: LabeledText, encode: Encode, batch_size: int) -> Iterator[dict[str, Any]]:
    """Unpadded rows: a reader pads each batch to its longest row."""
    for start in range(0, len(data), batch_size):
        chosen = slice(start, start + batch_size)
        tokens = encode(list(data.texts[chosen]))
        for text, label, ids in zip(data.texts[chosen], data.labels[chosen], tokens, strict=True):
            yield {"text": text, "labels": label, "input_ids": ids, "attention_mask": [1] * len(ids)}


def save_parts(
    folder: Path, parts: Splits, encode: Encode, save_format: SaveFormat, batch_size: int, tick: Tick
) -> dict[str, int]:
    """Save the splits that have rows; returns the number of rows of each."""
    columns: dict[str, dict[str, list[Any]]] = {}
    samples, tokens = 0, 0
    for name in PARTS:
        rows: LabeledText = getattr(parts, name)
        table: dict[str, list[Any]] = {key: [] for key in ("text", "labels", "input_ids", "attention_mask")}
        for row in encoded_rows(rows, encode, batch_size):
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


def _save_pt(folder: Path, columns: dict[str, dict[str, list[Any]]], class_names: tuple[str, ...]) -> None:
    """Tensors padded to the longest review of the split; `torch.load(..., weights_only=True)` reads them."""
    torch = importlib.import_module("torch")  # by name: this module is also read on login nodes without torch
    for name, table in columns.items():
        padded = {
            key: torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in table[key]], batch_first=True)
            for key in ("input_ids", "attention_mask")
        }
        labels = torch.tensor(table["labels"])
        torch.save({**padded, "labels": labels, "class_names": list(class_names)}, folder / f"{name}.pt")


_SAVERS: dict[str, Callable[[Path, dict[str, dict[str, list[Any]]], tuple[str, ...]], None]] = {
    "hf": _save_hf,
    "parquet": _save_parquet,
    "jsonl": _save_jsonl,
    "pt": _save_pt,
}
