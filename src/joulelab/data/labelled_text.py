"""Texts with a class each, from wherever they lie, and the one split that every run of ours uses.

A text is known by the hash of its own words. That hash decides for ever whether it is for training, validation or test,
so no size, seed, subset or later addition can move a test text into anyone's training set: not this student's, and not
that of a teacher trained last month.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from joulelab import lookup
from joulelab.data import samples, sources
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError

TEXT_COLUMNS = ("text", "content", "review", "sentence")
LABEL_COLUMNS = ("label", "labels", "polarity", "sentiment")
TITLE_COLUMN = "title"
_NOT_LABELLED = -1  # the hub's convention in the test parts of many datasets

_REVIEW_SOURCES = {"short": ("rotten_tomatoes",), "long": ("imdb",), "all": ("rotten_tomatoes", "imdb")}

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


@dataclass(frozen=True)
class _Columns:
    """A table as it was found: column name -> values, and the names of the classes where the file states them."""

    values: Mapping[str, Sequence[Any]]
    class_names: tuple[str, ...] | None = None


def text_id(text: str) -> str:
    """Spacing and case do not make another text."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode()).hexdigest()[:16]


def load(source: str, subset: str = "all") -> LabelledText:
    """`subset`: of sample:reviews "short", "long" or "all"; of a hub dataset the name of its configuration."""
    found = sources.parse(source)
    if found.kind == "hub":
        return _from_columns(_read_hub(found.name, subset), source)
    assert found.path is not None
    if found.kind == "sample":
        return _from_columns(_read_sample(found.name, found.path, subset), source)
    if subset != "all":
        raise ConfigError(f"subset '{subset}' of {source}: files and folders have no subsets", "leave it at 'all'")
    read = _read_folder if found.kind == "folder" else _read_file
    return _from_columns(read(found.path), source)


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


def _from_columns(columns: _Columns, source: str) -> LabelledText:
    """Name the columns, number the classes, drop what is there twice."""
    texts = _texts(columns, source)
    raw_labels = [_plain_label(value) for value in columns.values[_pick(columns, LABEL_COLUMNS, "label", source)]]
    _refuse_gaps(texts, raw_labels, source)
    labels, class_names = _number_classes(raw_labels, columns.class_names, source)
    return _without_duplicates(texts, labels, class_names)


def _texts(columns: _Columns, source: str) -> list[str]:
    texts = [
        "" if text is None else str(text).strip()
        for text in columns.values[_pick(columns, TEXT_COLUMNS, "text", source)]
    ]
    title = _column(columns, (TITLE_COLUMN,))
    if title is None:
        return texts
    return [f"{head}\n{text}" if head else text for head, text in zip(columns.values[title], texts, strict=True)]


def _pick(columns: _Columns, candidates: tuple[str, ...], what: str, source: str) -> str:
    column = _column(columns, candidates)
    if column is None:
        raise ConfigError(
            f"{source} has no {what} column: found {', '.join(columns.values) or 'no columns'}; "
            f"expected one of {', '.join(candidates)}",
            f"rename the {what} column to '{candidates[0]}'",
        )
    return column


def _column(columns: _Columns, candidates: tuple[str, ...]) -> str | None:
    by_name = {name.strip().casefold(): name for name in columns.values}
    return next((by_name[candidate] for candidate in candidates if candidate in by_name), None)


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


def _read_sample(name: str, path: Path, subset: str) -> _Columns:
    sample = samples.find(name)
    if sample.kind != "labelled-text":
        raise ConfigError(f"sample:{name} is a model ({sample.kind}), not labelled text", "use sample:reviews")
    if subset not in _REVIEW_SOURCES:
        raise lookup.unknown("subset", subset, _REVIEW_SOURCES, "subsets of sample:reviews: short, long, all")
    rows = _read_csv(path).values
    kept = [row for row, origin in enumerate(rows["source"]) if origin in _REVIEW_SOURCES[subset]]
    return _Columns(
        {
            "text": [rows["text"][row].replace("<br />", " ") for row in kept],
            "label": [rows["label"][row] for row in kept],
        },
        class_names=("negative", "positive"),
    )


def _read_folder(folder: Path) -> _Columns:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        return _read_saved_dataset(folder)
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS)
    if len(files) != 1:
        listed = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"{folder.absolute()} holds {len(files)} data files ({listed}); "
            "expected one, or a folder saved by datasets",
            f"name the file itself ({', '.join(_READERS)})",
        )
    return _read_file(files[0])


def _read_file(path: Path) -> _Columns:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path.absolute()} is not a kind of file we read", f"expected {', '.join(_READERS)}")
    import pyarrow as pa

    try:
        return reader(path)
    # Arrow's complaints and JSON's are both ValueErrors, as are bytes that are not UTF-8.
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path.absolute()} cannot be read: {error}", "check that the file is whole") from error


def _read_csv(path: Path) -> _Columns:
    import pyarrow.csv

    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    return _Columns(pyarrow.csv.read_csv(path, parse_options=options).to_pydict())


def _read_parquet(path: Path) -> _Columns:
    import pyarrow.parquet

    return _Columns(pyarrow.parquet.read_table(path).to_pydict())


def _read_json(path: Path) -> _Columns:
    """Lines of objects, or one list of objects."""
    text = path.read_text(encoding="utf-8")
    rows = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x.strip()]
    )
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every row must be an object with a text and a label")
    names = dict.fromkeys(name for row in rows for name in row)
    return _Columns({name: [row.get(name) for row in rows] for name in names})


_READERS: dict[str, Callable[[Path], _Columns]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_saved_dataset(folder: Path) -> _Columns:
    return _merge_parts(_datasets().load_from_disk(str(folder)), str(folder))


def _read_hub(name: str, subset: str) -> _Columns:
    datasets = _datasets()
    try:
        found = datasets.load_dataset(name) if subset == "all" else datasets.load_dataset(name, subset)
    # No network, no such name, no such configuration: the hub's clients raise OSError and ValueError for all of these.
    except (OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise NotFoundError(
            f"the hub did not give the dataset '{name}': {first_line}", sources.hub_hint(name)
        ) from error
    return _merge_parts(found, name)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DependencyMissing("the package 'datasets' is not installed", 'pip install "joulelab[train]"') from error
    return datasets


def _merge_parts(found: Any, source: str) -> _Columns:
    """All parts of a dataset as one table (the split is ours), without the rows the publisher left unlabelled."""
    parts = list(found.values()) if isinstance(found, dict) else [found]
    shared = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
    header = _Columns(dict.fromkeys(shared, ()))
    text = _pick(header, TEXT_COLUMNS, "text", source)
    label = _pick(header, LABEL_COLUMNS, "label", source)
    title = _column(header, (TITLE_COLUMN,))
    # Only these are read: other columns of a hub dataset may be images.
    columns = {name: [value for part in parts for value in part[name]] for name in (text, label, title) if name}
    kept = [row for row, value in enumerate(columns[label]) if value != _NOT_LABELLED]
    names = getattr(parts[0].features[label], "names", None)
    return _Columns(
        {name: [values[row] for row in kept] for name, values in columns.items()},
        class_names=tuple(names) if names else None,
    )
