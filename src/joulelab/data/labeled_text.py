"""Texts with a class label: read from any source, tokenized into a store, exported as review sets.

The user's own splits are kept row by row. Texts without a split belong to the one that their hash gives
(`data.splits`), whatever the size, seed or subset of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from joulelab.data import sources
from joulelab.data.labeled_rows import (
    IndexedTable,
    LabeledRows,
    Places,
    Tick,
    WantedTokens,
    index_rows,
    number_classes,
    number_rows,
    open_reader,
    refuse_gaps,
    refuse_long_rows,
    silent_tick,
    without_duplicates,
)
from joulelab.data.splits import (
    ALL,
    SPLITS,
    USUAL_SHARES,
    HashShares,
    OwnSplits,
    Size,
    Split,
    SplitName,
    duplicate_note,
    hash_shares,
    is_place,
    parse_split,
    rows_wanted,
    split_numbers,
    split_word,
)
from joulelab.data.text import (
    BY_NAME,
    UNSPLIT,
    ColumnChoice,
    TableParts,
    check_source,
    files_identity,
    only_table,
    open_parts,
)
from joulelab.errors import ConfigError, SeveralProblems, refuse_all


@dataclass(frozen=True)
class LabeledText:
    """Texts in memory."""

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
    """For sample:reviews: `short` (one-sentence snippets), `long` (full reviews) or `all`; for a hub id: its config."""
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
    train: LabeledRows
    validation: LabeledRows
    test: LabeledRows
    notes: tuple[str, ...] = ()
    """How the splits were made and what was assumed about the files."""
    duplicates: int = 0
    """Test texts that are also training texts."""

    @property
    def warnings(self) -> tuple[str, ...]:
        note = duplicate_note(self.duplicates, len(self.test))
        return (note,) if note else ()


def load(source: str, subset: str = "all") -> LabeledText:
    """One table in memory, without duplicates. `subset`: of sample:reviews "short", "long" or "all"; of a hub dataset
    its configuration."""
    found = open_parts(source, subset)
    indexed = index_rows(open_reader(only_table(found, source), source, BY_NAME, None, None), source)
    refuse_gaps(indexed)
    rows = without_duplicates(number_rows(indexed, *number_classes(indexed)))
    return LabeledText(rows.ids, rows.texts, tuple(rows.labels.tolist()), rows.class_names)


def load_splits(
    settings: LabeledSource, tick: Tick = silent_tick, wanted: WantedTokens | None = None, hold_out: bool = True
) -> Splits:
    """The user's splits, row by row; missing ones are held out from the training texts by hash, which a note states.

    `wanted`: token ids that the source stores are used if they were made with this tokenizer. Without `hold_out` a
    source that has splits keeps them: a missing split is empty.
    """
    found = _named_parts(settings, tick, wanted)
    refuse_long_rows(found.parts.values(), getattr(settings, "max_tokens", None))
    if len(found.parts) == 1:
        return _hashed_splits(found, settings)
    return _own_splits(found, settings, hold_out)


def check_labeled_text(settings: LabeledSource) -> None:
    """Refuse data that cannot be used, before a run starts; a dataset on the hub is read by the run itself."""
    if settings.text_column is not None and settings.text_column == settings.label_column:
        raise ConfigError(
            f"data.text_column and data.label_column are both {settings.text_column}", "name two different columns"
        )
    files = [name for name in settings.named_files.values() if is_place(name)]
    named = files if settings.train in files else [settings.source, *files]
    used: list[sources.Source] = refuse_all(partial(sources.parse, name) for name in named)
    if any(place.path is None for place in used):
        check_source(settings.source, settings.subset)
    else:  # members of a comparison share their data, which is read once
        _check_local(settings, tuple(files_identity(place.path) for place in used if place.path is not None))


def check_columns(source: str, subset: str) -> None:
    """Refuse a local source without data files, or whose tables lack a text or label column; rows are not read."""
    if check_source(source, subset).path is not None:
        found = open_parts(source, subset)
        for name, table in found.parts.items():
            open_reader(table, found.names[name], BY_NAME, None, None)


@lru_cache(maxsize=8)
def _check_local(settings: LabeledSource, identities: tuple[str, ...]) -> None:
    load_splits(settings)


# Which rows belong to which split


@dataclass(frozen=True)
class _NamedParts:
    parts: Mapping[str, IndexedTable]
    notes: tuple[str, ...]


def _named_parts(settings: LabeledSource, tick: Tick, wanted: WantedTokens | None) -> _NamedParts:
    """The parts of the source under the names train, validation and test, with those that the settings name."""
    choice = settings.columns
    named = settings.named_files
    files = {split: name for split, name in named.items() if is_place(name)}
    if "train" in files and settings.source != LabeledSource().source:
        raise ConfigError(
            f"data.source={settings.source} and data.train={files['train']} are both set", "set only one of them"
        )
    parts: dict[str, IndexedTable] = {}
    notes: list[str] = []
    read = 0

    def indexed(found: TableParts, source: str, part: str) -> IndexedTable:
        nonlocal read
        path = sources.parse(source).path
        folder = None if path is None else path if path.is_dir() else path.parent
        before = read
        made = index_rows(
            open_reader(found.parts[part], found.names[part], choice, folder, wanted),
            found.names[part],
            lambda rows: tick(before + rows),
        )
        read += len(made)
        return made

    if "train" not in files:
        whole = open_parts(settings.source, settings.subset, choice)
        inside = {split: name for split, name in named.items() if split not in files}
        chosen = _assigned(whole, inside, settings.source, also=set(files))
        by_name = {
            name: indexed(whole, settings.source, name) for name in dict.fromkeys(s.name for s in chosen.values())
        }
        for split, part in chosen.items():
            parts[split] = by_name[part.name]
            if part.start or part.stop:
                sliced = parts[split].take(part.rows(len(parts[split])))
                parts[split] = replace(sliced, where=f"{settings.source} ({part})")
        notes += whole.notes
    elif set(named) - set(files):
        split = next(name for name in named if name not in files)
        raise ConfigError(f"data.{split}={named[split]}: there is no such file", "check the path")
    for split, file in files.items():
        single = open_parts(file, "all", choice)
        if set(single.parts) != {UNSPLIT}:
            raise ConfigError(f"data.{split}={file} already has splits", "name a single file, or set data.source")
        parts[split] = replace(indexed(single, file, UNSPLIT), where=file)
        notes += single.notes
    if files and UNSPLIT in parts:
        parts["train"] = parts.pop(UNSPLIT)
    return _NamedParts(parts, tuple(dict.fromkeys(notes)))


def _assigned(whole: TableParts, named: Mapping[SplitName, str], source: str, also: set[SplitName]) -> dict[str, Split]:
    """The part of a source, or the slice of it, that is each split; `named`: as the user chose, `also`: those in other
    files."""
    if set(whole.parts) == {UNSPLIT}:
        missing = [
            ConfigError(f"data.{split}={name}: there is no such file, and {source} has no splits", "check the path")
            for split, name in named.items()
        ]
        if missing:
            raise missing[0] if len(missing) == 1 else SeveralProblems(missing)
        return {UNSPLIT: Split(UNSPLIT)}
    parts: dict[str, Split] = {}
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
            parts[split] = wanted
            continue
        fitting = [name for name in whole.parts if split_word(name) == split]
        exact = [name for name in fitting if name == split] or fitting
        if len(exact) > 1:
            raise ConfigError(
                f"{source} has several splits for {split}: {', '.join(exact)}", f"choose one: data.{split}={exact[0]}"
            )
        if exact:
            parts[split] = Split(exact[0])
    if "train" not in parts:
        raise ConfigError(
            f"{source} has the splits {', '.join(whole.parts)}, but none is for training",
            f"choose one: data.train={next(iter(whole.parts), 'NAME')}",
        )
    return parts


def _hashed_splits(found: _NamedParts, settings: LabeledSource) -> Splits:
    (indexed,) = found.parts.values()
    refuse_gaps(indexed)
    data = without_duplicates(number_rows(indexed, *number_classes(indexed)))
    shares = hash_shares(settings.validation_size, settings.test_size, settings.train_size)
    places = places_by_split(data.keys, data.copies, shares)
    chosen = {
        name: data.take(
            balanced_places(data.labels, places[name], _size_of_hashed(settings, name, places, data, indexed.where))
        )
        for name in SPLITS
    }
    notes = list(found.notes)
    if settings.train or sources.parse(settings.source).kind != "sample":
        dropped = len(indexed) - len(data)
        repeated = f"; {dropped:,} repeated or contradictory rows were dropped" if dropped else ""
        notes.append(f"{indexed.where} has no splits: split by the hash of each text ({shares}){repeated}")
    notes += _absent_classes(chosen)
    return Splits(chosen["train"], chosen["validation"], chosen["test"], tuple(notes))


def _absent_classes(splits: Mapping[SplitName, LabeledRows]) -> list[str]:
    """What a rare class leads to: it cannot be learned, or its quality is not measured."""
    notes = []
    for part, what in ((splits["train"], "training"), (splits["test"], "test")):
        used = set(np.unique(part.labels).tolist())
        absent = [name for number, name in enumerate(part.class_names) if number not in used]
        if absent and used:
            notes.append(f"no {what} text has the class {', '.join(absent[:5])}")
    return notes


def _size_of_hashed(
    settings: LabeledSource, name: SplitName, places: Mapping[SplitName, Places], data: LabeledRows, source: str
) -> int:
    """A share is one of all texts; the hash gives about as many to the split, and these are taken."""
    size, there = settings.sizes[name], len(places[name])
    if isinstance(size, float):
        size = min(there, max(1, round(size * len(data))))
    if not there:
        raise ConfigError(
            f"{source} has {len(data):,} different texts, too few to split: none is for {name}",
            "add rows, or provide your own splits: data.train=, data.validation=, data.test=",
        )
    return rows_wanted(size, there, name, source)


def _own_splits(found: _NamedParts, settings: LabeledSource, hold_out: bool) -> Splits:
    shares = HashShares(
        *(
            size if isinstance(size, float) else usual
            for size, usual in (
                (settings.validation_size, USUAL_SHARES.validation),
                (settings.test_size, USUAL_SHARES.test),
            )
        )
    )
    for name, part in found.parts.items():
        if not len(part):
            raise ConfigError(f"{part.where} has no rows", f"provide rows for {name}")
        refuse_gaps(part)
    classes = number_classes(found.parts["train"])
    data = {name: number_rows(part, *classes) for name, part in found.parts.items()}
    missing = [name for name in SPLITS if name not in data] if hold_out else []
    train, notes, source = data["train"], list(found.notes), found.parts["train"].where
    if missing:
        places = places_by_split(train.keys, train.copies, shares)
        for name in missing:
            data[name] = train.take(np.sort(places[name]))
            if not len(places[name]):
                raise ConfigError(
                    f"{source} has {len(train):,} rows, too few to hold some out for {name}",
                    f"provide them: data.{name}=FILE",
                )
        held_out = np.concatenate([places[name] for name in missing])
        data["train"] = train.take(np.setdiff1d(np.arange(len(train)), held_out))
        counts = ", ".join(f"{len(data[name]):,} for {name}" for name in missing)
        notes.append(
            f"{source}: no split for {' and '.join(missing)}; held out from the training texts by hash: {counts}"
        )
    kept = {name: train.take(np.empty(0, dtype=np.int64)) for name in SPLITS}
    for name in (name for name in SPLITS if name in data):
        part_rows, size = data[name], settings.sizes[name]
        given = ALL if name in missing and isinstance(size, float) else size  # the share was held out already
        where = found.parts[name].where if name in found.parts else source
        kept[name] = limited_rows(part_rows, rows_wanted(given, len(part_rows), name, where))
    twice = int(np.isin(kept["test"].keys, kept["train"].keys).sum())
    notes += _absent_classes(kept)
    return Splits(kept["train"], kept["validation"], kept["test"], tuple(notes), twice)


def split(data: LabeledText, train: int, validation: int, test: int, balanced: bool = True) -> TextSplits:
    """The first texts of each split in hash order; a smaller set is always a subset of a larger one."""
    rows = rows_by_split(data)
    return TextSplits(
        train=_first(data, "train", rows["train"], train, balanced),
        validation=_first(data, "validation", rows["validation"], validation, balanced),
        test=_first(data, "test", rows["test"], test, balanced),
    )


@dataclass(frozen=True)
class TextSplits:
    """Splits in memory."""

    train: LabeledText
    validation: LabeledText
    test: LabeledText


def rows_by_split(data: LabeledText, shares: HashShares = USUAL_SHARES) -> dict[SplitName, list[int]]:
    """Row numbers by split, in hash order."""
    keys = np.array([int(identity, 16) for identity in data.ids], dtype=np.uint64)
    places = places_by_split(keys, np.zeros(len(keys), dtype=np.int64), shares)
    return {name: rows.tolist() for name, rows in places.items()}


def places_by_split(
    keys: NDArray[np.uint64], copies: NDArray[np.int64], shares: HashShares = USUAL_SHARES
) -> dict[SplitName, Places]:
    """Positions by split, in hash order."""
    order = np.lexsort((copies, keys))
    numbers = split_numbers(keys[order], shares)
    return {name: order[numbers == number].astype(np.int64) for number, name in enumerate(SPLITS)}


def _first(data: LabeledText, name: SplitName, rows: list[int], size: int, balanced: bool) -> LabeledText:
    if size < 0:
        raise ConfigError(f"size {size} of the split {name} is below 0", f"set a size of 0 or more for {name}")
    if size > len(rows):
        raise ConfigError(
            f"{size:,} rows were requested for {name}, but only {len(rows):,} of {len(data):,} belong to it",
            f"request at most {len(rows):,}, or add data: splits are fixed by text hash",
        )
    if not balanced:
        return data.take(rows[:size])
    return data.take(balanced_places(np.array(data.labels), np.array(rows, dtype=np.int64), size).tolist())


def balanced_places(labels: NDArray[np.int64], places: Places, size: int) -> Places:
    """One text of each class in turn; when a class is exhausted, the others continue. `places` keep their order."""
    if size >= len(places):
        return places
    chosen = labels[places]
    by_label = np.argsort(chosen, kind="stable")
    first_of_label = np.concatenate([[0], np.flatnonzero(np.diff(chosen[by_label])) + 1])
    turns = np.empty(len(places), dtype=np.int64)  # how many of its class come before
    starts = np.repeat(first_of_label, np.diff([*first_of_label, len(places)]))
    turns[by_label] = np.arange(len(places)) - starts
    order = np.lexsort((np.arange(len(places)), chosen, turns))
    return places[np.sort(order[:size])]


def limited_rows(part: LabeledRows, limit: int | None) -> LabeledRows:
    if limit is None or limit >= len(part):
        return part
    return part.take(balanced_places(part.labels, np.lexsort((part.copies, part.keys)), limit))
