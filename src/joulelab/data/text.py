"""Text from a file, a folder, a sample or a hub dataset: as tables of columns, or as a stream of documents.

Documents are read one after another, so their total size does not matter.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.splits import SPLIT_WORDS, Split, split_word
from joulelab.errors import ConfigError, NotFoundError, refuse_all

# Subsets of sample:reviews, by the value of its `source` column.
REVIEW_SOURCES = {"short": ("rotten_tomatoes",), "long": ("imdb",), "all": ("rotten_tomatoes", "imdb")}


def check_source(source: str, subset: str) -> sources.Source:
    """Check, without reading any data, that the source exists and has this subset."""
    found = sources.parse(source)
    if found.kind in ("file", "folder") and subset != "all":
        raise ConfigError(f"subset '{subset}' of {source}: files and folders have no subsets", "set data.subset=all")
    if found.kind == "sample":
        sample = sources.find_sample(found.name)
        if sample.kind != "labeled-text":
            raise ConfigError(f"sample:{found.name} is a model ({sample.kind}), not labeled text", "use sample:reviews")
        if subset not in REVIEW_SOURCES:
            raise lookup.unknown("subset", subset, REVIEW_SOURCES, "subsets of sample:reviews: short, long, all")
    return found


UTF8 = "utf-8-sig"  # some editors write a byte order mark
TEXT_COLUMNS = ("text", "content", "review", "sentence")
LABEL_COLUMNS = ("label", "labels", "polarity", "sentiment")
SPLIT_COLUMN = "split"
TITLE_COLUMN = "title"
_NOT_LABELED = -1  # the hub's convention in the test splits of many datasets
UNSPLIT = "all"
_SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `datasets` with save_to_disk
_FEW_VALUES = 50  # a column with at most this many different values may hold labels


@dataclass(frozen=True)
class Columns:
    """A table as stored: column name -> values, and the class names if the file has them."""

    values: Mapping[str, Sequence[Any]]
    class_names: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        return max((len(values) for values in self.values.values()), default=0)


@dataclass(frozen=True)
class ColumnChoice:
    """Columns as the user names them; None: by their usual names."""

    text: str | int | None = None
    label: str | int | None = None
    split: str | int | None = None
    header: bool | None = None
    """Whether a CSV file starts with column names; None: detected."""
    labeled: bool = True
    """Whether a label is needed."""

    def text_in(self, columns: Columns, source: str) -> str:
        return chosen_column(columns, self.text, TEXT_COLUMNS, "text", source)

    def label_in(self, columns: Columns, source: str) -> str:
        return chosen_column(columns, self.label, LABEL_COLUMNS, "label", source)

    def text_and_label_in(self, columns: Columns, source: str) -> tuple[str, str]:
        text, label = refuse_all((lambda: self.text_in(columns, source), lambda: self.label_in(columns, source)))
        return text, label


BY_NAME = ColumnChoice()


@dataclass(frozen=True)
class TableParts:
    """The splits of a source as they are stored, or one table under `UNSPLIT`."""

    parts: Mapping[str, Columns]
    names: Mapping[str, str]
    """What error messages call each part."""
    notes: tuple[str, ...] = ()
    """What was assumed about the files."""


def read_table(source: str, subset: str) -> Columns:
    """A source that is one table."""
    found = read_parts(source, subset)
    if len(found.parts) != 1:
        raise ConfigError(f"{source} has the splits {', '.join(found.parts)}; expected one table", "name a single file")
    return next(iter(found.parts.values()))


def read_parts(source: str, subset: str, choice: ColumnChoice = BY_NAME) -> TableParts:
    """The source's own splits (files of a folder, splits of a dataset, values of a split column), never merged."""
    found = check_source(source, subset)
    if found.path is None:
        from joulelab.data import hub

        config = None if subset == "all" else subset
        return _hub_parts(hub.load_dataset(found.name, config), source, choice)
    if found.kind == "sample":
        return TableParts({UNSPLIT: _read_sample(found.path, subset)}, {UNSPLIT: source})
    if found.kind == "file":
        return _file_parts(found.path, source, choice)
    if is_saved_dataset(found.path):
        from joulelab.data import hub

        return _hub_parts(hub.import_datasets().load_from_disk(str(found.path)), source, choice)
    return _folder_parts(found.path, source, choice)


def is_saved_dataset(path: Path) -> bool:
    return any((path / mark).exists() for mark in _SAVED)


def pick(columns: Columns, candidates: tuple[str, ...], what: str, source: str) -> str:
    name = column(columns, candidates)
    if name is None:
        raise ConfigError(
            f"{source} has no {what} column: found {', '.join(columns.values) or 'no columns'}; "
            f"expected one of {', '.join(candidates)}",
            f"rename the {what} column to '{candidates[0]}', or name it: data.{what}_column=NAME",
        )
    return name


def chosen_column(
    columns: Columns, chosen: str | int | None, candidates: tuple[str, ...], what: str, source: str
) -> str:
    """The column that the user named, by name or number; otherwise one of the usual names."""
    if chosen is None:
        return pick(columns, candidates, what, source)
    name = column(columns, (str(chosen).strip().casefold(),))
    if name is not None:
        return name
    names = list(columns.values)
    number = int(chosen) if str(chosen).isdecimal() else 0
    if 1 <= number <= len(names):
        return names[number - 1]
    guess = lookup.nearest(str(chosen), names)
    raise ConfigError(
        f"data.{what}_column={chosen}: {source} has no such column" + (f"; did you mean '{guess}'?" if guess else ""),
        f"columns of {source}: {', '.join(names) or 'none'}",
    )


def column(columns: Columns, candidates: tuple[str, ...]) -> str | None:
    by_name = {name.strip().casefold(): name for name in columns.values}
    return next((by_name[candidate] for candidate in candidates if candidate in by_name), None)


def _read_sample(path: Path, subset: str) -> Columns:
    rows = _read_csv(path).values
    kept = [row for row, origin in enumerate(rows["source"]) if origin in REVIEW_SOURCES[subset]]
    return Columns(
        {
            "text": [rows["text"][row].replace("<br />", " ") for row in kept],
            "label": [rows["label"][row] for row in kept],
        },
        class_names=("negative", "positive"),
    )


def _folder_parts(folder: Path, source: str, choice: ColumnChoice) -> TableParts:
    """Files whose names have a word for a split; several of one split are its shards."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in _READERS and file.is_file() and not file.name.startswith(".")
    ]
    by_split: dict[str, list[Path]] = {}
    for file in files:
        word = split_word(file.relative_to(folder).as_posix())
        by_split.setdefault(word or UNSPLIT, []).append(file)
    others = by_split.pop(UNSPLIT, [])
    if not by_split and len(others) == 1:
        return _file_parts(others[0], source, choice)
    if "train" not in by_split:
        listed = ", ".join(file.name for file in files[:6]) or "none"
        raise ConfigError(
            f"{folder.absolute()} contains {len(files)} data files ({listed}); "
            "expected one, or files named train, validation and test, or a folder saved by datasets",
            f"name a single file ({', '.join(_READERS)}), or rename them",
        )
    notes = [f"not read: {', '.join(file.name for file in others[:3])}"] if others else []
    parts: dict[str, Columns] = {}
    for name, shards in by_split.items():
        read = [file_columns(shard, choice) for shard in shards]
        parts[name] = _concatenated([columns for columns, _ in read])
        notes += [note for _, guessed in read for note in guessed]
    names = {name: ", ".join(str(file) for file in shards[:2]) for name, shards in by_split.items()}
    return TableParts(parts, names, tuple(dict.fromkeys(notes)))


def _concatenated(shards: Sequence[Columns]) -> Columns:
    if len(shards) == 1:
        return shards[0]
    shared = [name for name in shards[0].values if all(name in shard.values for shard in shards)]
    return Columns({name: [value for shard in shards for value in shard.values[name]] for name in shared})


def _file_parts(path: Path, source: str, choice: ColumnChoice) -> TableParts:
    columns, notes = file_columns(path, choice)
    name = _split_column(columns, choice, source)
    if name is None:
        return TableParts({UNSPLIT: columns}, {UNSPLIT: source}, notes)
    words = [str(value).strip().lower() for value in columns.values[name]]
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        rows.setdefault(SPLIT_WORDS[word], []).append(row)
    if "train" not in rows:
        raise ConfigError(f"{source}: no row of the column '{name}' is train", "mark the training rows with `train`")
    parts = {
        part: Columns({key: [values[row] for row in chosen] for key, values in columns.values.items()})
        for part, chosen in rows.items()
    }
    return TableParts(parts, {part: f"{source} ({name} {part})" for part in parts}, notes)


def _split_column(columns: Columns, choice: ColumnChoice, source: str) -> str | None:
    if choice.split is None:
        name = column(columns, (SPLIT_COLUMN,))
        known = name is not None and all(str(value).strip().lower() in SPLIT_WORDS for value in columns.values[name])
        return name if known else None
    name = chosen_column(columns, choice.split, (SPLIT_COLUMN,), "split", source)
    odd = next((value for value in columns.values[name] if str(value).strip().lower() not in SPLIT_WORDS), None)
    if odd is not None:
        raise ConfigError(
            f"data.split_column={choice.split}: {source} has the value {odd!r}",
            f"expected one of {', '.join(SPLIT_WORDS)} in every row",
        )
    return name


def file_columns(path: Path, choice: ColumnChoice) -> tuple[Columns, tuple[str, ...]]:
    """The table of a file, and what was assumed about a CSV file without column names."""
    if path.suffix.lower() != ".csv":
        return _read_file(path), ()
    if choice.header is not None:
        return _read_file(path, choice.header), ()
    columns = _read_file(path)
    known = column(columns, TEXT_COLUMNS) or (choice.text and column(columns, (str(choice.text).casefold(),)))
    if known or not _first_row_is_data(columns):
        return columns, ()
    columns = _read_file(path, header=False)
    return _named_by_content(columns, choice, path)


def _first_row_is_data(columns: Columns) -> bool:
    """Whether a column with few values has the value that is taken for its name: a label, not a name."""
    for name, values in columns.values.items():
        different = {str(value).strip() for value in values}
        if len(different) <= min(_FEW_VALUES, len(values) // 2) and name.strip() in different:
            return True
    return False


NO_COLUMN_NAMES = "has no column names"
"""In the note on a CSV file without a header."""


def _named_by_content(columns: Columns, choice: ColumnChoice, path: Path) -> tuple[Columns, tuple[str, ...]]:
    """`text` is the column with the longest texts, `label` the one with the fewest values; said in a note."""
    sizes = {name: sum(len(str(value)) for value in values) for name, values in columns.values.items()}
    names = list(columns.values)
    text = _by_number(choice.text, names) or max(names, key=sizes.__getitem__)
    others = [name for name in names if name != text]
    if not others:
        return columns, ()
    few = min(others, key=lambda name: len({str(value) for value in columns.values[name]}))
    label = _by_number(choice.label, names) or few
    renamed = {text: "text", label: "label"} if choice.text is None and choice.label is None else {}
    values = {renamed.get(name, name): column for name, column in columns.values.items()}
    note = f"{path.name} {NO_COLUMN_NAMES}: column {text} is read as the text, column {label} as the label"
    return Columns(values), (note,)


def guess_columns(columns: Columns) -> tuple[str | None, str | None]:
    """The likely text and label columns of a table: the usual names, else the longest texts and the fewest values."""
    sizes = {
        name: sum(len(value) for value in values if isinstance(value, str))
        for name, values in columns.values.items()
        if any(isinstance(value, str) for value in values)
    }
    text = column(columns, TEXT_COLUMNS) or max(sizes, key=sizes.__getitem__, default=None)
    few = {
        name: len({str(value) for value in values})
        for name, values in columns.values.items()
        if name not in (text, column(columns, (SPLIT_COLUMN,)))
        and not isinstance(next(iter(values), None), list | dict)
    }
    possible = {name: count for name, count in few.items() if 2 <= count <= min(_FEW_VALUES, columns.rows // 2)}
    return text, column(columns, LABEL_COLUMNS) or min(possible, key=possible.__getitem__, default=None)


def _by_number(chosen: str | int | None, names: Sequence[str]) -> str | None:
    number = int(chosen) if str(chosen or "").isdecimal() and chosen is not None else 0
    return names[number - 1] if 1 <= number <= len(names) else None


def _read_file(path: Path, header: bool = True) -> Columns:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path.absolute()} has an unsupported file type", f"expected {', '.join(_READERS)}")
    import pyarrow as pa

    try:
        return reader(path) if header else _read_csv(path, header)
    # Errors of Arrow, of JSON and of UTF-8 decoding are all ValueErrors.
    except (pa.ArrowException, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    """An error that distinguishes another encoding, which the user can convert, from an incomplete file."""
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(
            f"{path.absolute()} is not UTF-8 text: byte 0x{error.object[error.start]:02x} is "
            f"invalid at position {error.start}",
            f"convert it, for example from Latin-1: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}",
        )
    # A plain ValueError describes a row that was read: what it has and what was expected.
    hint = "correct that row" if type(error) is ValueError else "check that the file is complete"
    return ConfigError(f"{path.absolute()} cannot be read: {error}", hint)


class _NotJson(ValueError):
    pass


def json_line(text: str, number: int) -> Any:
    """One line of a JSON lines file; errors have the line number."""
    try:
        return parsed_json(text)
    except json.JSONDecodeError as error:
        raise _NotJson(f"line {number} is not JSON: {error.msg}, at column {error.colno}") from None


def parsed_json(text: str) -> Any:
    """JSON in which lone surrogates (`\\ud83d`, left by truncated emoji) become U+FFFD."""
    value = json.loads(text)
    return _whole_characters(value) if "\\ud" in text.lower() else value


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(one) for one in value]
    if isinstance(value, dict):
        return {name: _whole_characters(one) for name, one in value.items()}
    return value


def _read_csv(path: Path, header: bool = True) -> Columns:
    """Without a header, columns are named 1, 2, ..."""
    import pyarrow as pa
    import pyarrow.csv

    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    reading = pyarrow.csv.ReadOptions(autogenerate_column_names=not header)
    table = pyarrow.csv.read_csv(path, read_options=reading, parse_options=options)
    if any(pa.types.is_binary(kind) for kind in table.schema.types):
        path.read_text(encoding=UTF8)  # raises with the position: Arrow turns text that is not UTF-8 into bytes
    if not header:
        table = table.rename_columns([str(number) for number in range(1, table.num_columns + 1)])
    return Columns(table.to_pydict())


def _read_parquet(path: Path) -> Columns:
    import pyarrow.parquet

    return Columns(pyarrow.parquet.read_table(path).to_pydict())


def _read_json(path: Path) -> Columns:
    """Lines of objects, or one list of objects."""
    text = path.read_text(encoding=UTF8)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    as_list = text.lstrip().startswith("[")
    rows = parsed_json(text) if as_list else [json_line(line, number) for number, line in lines]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            where = f"row {number}" if as_list else f"line {lines[number - 1][0]}"
            raise ValueError(f"{where} is not an object with a text and a label")
    names = dict.fromkeys(name for row in rows for name in row)
    return Columns({name: [row.get(name) for row in rows] for name in names})


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _hub_parts(found: Any, source: str, choice: ColumnChoice) -> TableParts:
    """The splits of a dataset under their own names, without unlabeled rows."""
    datasets = dict(found) if isinstance(found, dict) else {UNSPLIT: found}
    parts, names, notes = {}, {}, []
    for name, dataset in datasets.items():
        where = source if name == UNSPLIT else f"{source} ({name})"
        columns = _dataset_columns(dataset, where, choice)
        if columns.rows or not len(dataset):
            parts[name], names[name] = columns, where
        else:
            notes.append(f"{where} is not used: its rows have no label")
    return TableParts(parts, names, tuple(notes))


def _dataset_columns(dataset: Any, source: str, choice: ColumnChoice) -> Columns:
    header = Columns(dict.fromkeys(dataset.column_names, ()))
    label: str | None = None
    if choice.labeled:
        text, label = choice.text_and_label_in(header, source)
    else:
        text = choice.text_in(header, source)
    title = column(header, (TITLE_COLUMN,)) if choice.text is None else None
    # Other columns are not read: they may be images.
    columns = {name: list(dataset[name]) for name in (text, label, title) if name}
    if label is None:
        return Columns(columns)
    kept = [row for row, value in enumerate(columns[label]) if value != _NOT_LABELED]
    names = getattr(dataset.features[label], "names", None)
    return Columns(
        {name: [values[row] for row in kept] for name, values in columns.items()},
        class_names=tuple(names) if names else None,
    )


# Streams of documents: a line of a .txt file is a document, in other files the text of a row. Files may be gzipped, as
# C4's are.


_CSV_BLOCK_BYTES = 64 * 2**20  # a row must fit into one block


def files_by_split(path: Path) -> dict[str, list[Path]]:
    """A file is all `train`; files of a folder are assigned by a word in their names (c4-validation.json.gz)."""
    if path.is_file():
        _reader(path)
        return {"train": [path]}
    found: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and _kind(file) in _STREAMS:
            found.setdefault(split_word(file.relative_to(path).as_posix()) or "train", []).append(file)
    if not found:
        raise ConfigError(f"{path.absolute()} contains no text files", f"expected {', '.join(_STREAMS)}")
    return found


def read_files(files: Iterable[Path], chosen: str | int | None = None) -> Iterator[str]:
    """`chosen`: the column with the text, where it has none of the usual names."""
    import pyarrow as pa

    for file in files:
        try:
            yield from (text for text in map(str.strip, _reader(file)(file, chosen)) if text)
        # Errors of Arrow, of JSON and of UTF-8 decoding are all ValueErrors.
        except (pa.ArrowException, ValueError, OSError) as error:
            raise unreadable(file, error) from error


def text_column(names: Iterable[str], source: str, chosen: str | int | None = None) -> str:
    return chosen_column(Columns(dict.fromkeys(names, ())), chosen, TEXT_COLUMNS, "text", source)


def _kind(path: Path) -> str:
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def _reader(path: Path) -> Callable[[Path, str | int | None], Iterator[str]]:
    reader = _STREAMS.get(_kind(path))
    if reader is None:
        raise ConfigError(f"{path.absolute()} has an unsupported file type", f"expected {', '.join(_STREAMS)}")
    return reader


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def _read_lines(path: Path, chosen: str | int | None = None) -> Iterator[str]:
    with _opened(path) as file:
        yield from io.TextIOWrapper(file, encoding=UTF8)


def _stream_json(path: Path, chosen: str | int | None = None) -> Iterator[str]:
    """Lines of objects, or one list of objects."""
    column = ""
    for number, row in enumerate(json_rows(path), 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object with a text")
        column = column if column in row else text_column(row, str(path), chosen)
        yield str(row[column] or "")


def json_rows(path: Path) -> Iterator[Any]:
    lines = ((number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip())
    first = True
    for number, line in lines:
        if first and line.lstrip().startswith("["):
            yield from parsed_json("\n" * (number - 1) + line + "".join(rest for _, rest in lines))
            return
        yield json_line(line, number)
        first = False


def _stream_csv(path: Path, chosen: str | int | None = None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.csv

    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    reading = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    with _opened(path) as file:
        header = pyarrow.csv.open_csv(file, read_options=reading, parse_options=parsing).schema.names
    column = text_column(header, str(path), chosen)
    converting = pyarrow.csv.ConvertOptions(include_columns=[column], column_types={column: pa.string()})
    with _opened(path) as file:
        yield from _texts(pyarrow.csv.open_csv(file, reading, parsing, converting))


def _stream_parquet(path: Path, chosen: str | int | None = None) -> Iterator[str]:
    import pyarrow.parquet

    with _opened(path) as file:
        table = pyarrow.parquet.ParquetFile(file)
        yield from _texts(table.iter_batches(columns=[text_column(table.schema_arrow.names, str(path), chosen)]))


def _texts(batches: Iterable[Any]) -> Iterator[str]:
    for batch in batches:
        yield from (text or "" for text in batch.column(0).to_pylist())


_STREAMS: Mapping[str, Callable[[Path, str | int | None], Iterator[str]]] = {
    ".txt": _read_lines,
    ".jsonl": _stream_json,
    ".json": _stream_json,
    ".csv": _stream_csv,
    ".parquet": _stream_parquet,
}


HUB_DOCUMENT_LIMIT = 100_000
"""Documents read from the hub if the user named no slice: all of C4 is 305 GB."""


class DocumentSource(Protocol):
    def splits(self) -> tuple[str, ...]: ...

    def read(self, split: str) -> Iterator[str]:
        """All documents of a split, in order."""

    def count(self, split: str) -> int: ...


class LocalText:
    def __init__(self, path: Path, column: str | int | None = None) -> None:
        self._files, self._column = files_by_split(path), column

    def splits(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(self, split: str) -> Iterator[str]:
        return read_files(self._files[split], self._column)

    def count(self, split: str) -> int:
        return sum(1 for _ in self.read(split))


@dataclass(frozen=True)
class Documents:
    name: str
    source: DocumentSource
    identity: str
    """Changes when the files change (path, size, modification time)."""
    size_bytes: int | None
    """None if unknown before reading."""

    def read(self, split: Split) -> Iterator[str]:
        """The documents of a split or slice; `train[:100]` is the first 100."""
        if split.name not in self.source.splits():
            raise lookup.unknown(f"split of {self.name}", split.name, self.source.splits())
        first, beyond = self._bounds(split)
        return islice(self.source.read(split.name), first, beyond)

    def is_truncated(self, split: Split) -> bool:
        return self.size_bytes is None and not split.stop

    def _bounds(self, split: Split) -> tuple[int, int | None]:
        if all(edge.isdecimal() or not edge for edge in (split.start, split.stop)):
            first = int(split.start or 0)
            if self.is_truncated(split):
                return first, first + HUB_DOCUMENT_LIMIT
            return first, int(split.stop) if split.stop else None
        rows = split.rows(self.source.count(split.name))
        return int(rows[0]), int(rows[-1]) + 1


def check_documents(name: str, chosen: str | int | None = None) -> None:
    """Refuse a local source whose first document cannot be read; a dataset on the hub is read by the run itself."""
    from joulelab.data.token_store import is_store

    found = sources.parse(name)
    if found.path is None or found.kind == "sample" or is_store(found.path):
        return
    documents = open_documents(name, chosen)
    split = "train" if "train" in documents.source.splits() else documents.source.splits()[0]
    if next(iter(documents.source.read(split)), None) is None:
        raise ConfigError(f"{name} has no text", "name a file or folder with text")


def open_documents(name: str, chosen: str | int | None = None) -> Documents:
    """`chosen`: the column with the text, where it has none of the usual names."""
    found = sources.parse(name)
    if found.kind == "sample" and sources.find_sample(found.name).kind != "labeled-text":
        raise ConfigError(f"{name} is a model, not text", "use sample:reviews")
    if found.path is None:
        from joulelab.data.hub import HubText

        streamed = HubText(found.name)
        return Documents(name, streamed, streamed.identity, size_bytes=None)
    if is_saved_dataset(found.path):
        from joulelab.data.hub import SavedText

        return Documents(name, SavedText(found.path, chosen), files_identity(found.path), _size_bytes(found.path))
    return Documents(name, LocalText(found.path, chosen), files_identity(found.path), _size_bytes(found.path))


def files_identity(path: Path) -> str:
    """Changes when a file changes, without reading it."""
    stamps = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(path)]
    return json.dumps(stamps)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


# Dumps: a corpus as one text file with one document per line. Whitespace inside a document, line breaks included,
# becomes one space.


DEFAULT_MIN_CHARS = 1
DOCUMENTS_PER_TICK = 1_000


@dataclass(frozen=True)
class DumpCounts:
    kept: int = 0
    too_short: int = 0
    too_long: int = 0
    characters: int = 0
    """Of the kept documents."""

    @property
    def read(self) -> int:
        return self.kept + self.too_short + self.too_long

    def summary(self) -> str:
        return f"{self.kept:,} documents kept, dropped {self.too_short:,} too short and {self.too_long:,} too long"


def one_line(text: str) -> str:
    return " ".join(text.split())


def dump(
    texts: Iterable[str],
    file: Path,
    *,
    min_chars: int = DEFAULT_MIN_CHARS,
    max_chars: int | None = None,
    tick: Callable[[DumpCounts], None] = lambda counts: None,
) -> DumpCounts:
    """Write the documents whose length, with normalized whitespace, is within the limits, in order."""
    if min_chars < 0 or (max_chars is not None and max_chars < max(min_chars, 1)):
        raise ConfigError(f"no document has {min_chars} to {max_chars} characters", "check min_chars and max_chars")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        counts = _write(texts, temporary, max(min_chars, 1), max_chars, tick)
        if counts.kept == 0:
            raise ConfigError(
                f"no document is left to write: {counts.summary()}", "check the source, or widen the limits"
            )
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def read_dump(file: Path) -> Iterator[str]:
    """The documents of a dump; blank lines are skipped."""
    if not file.is_file():
        raise NotFoundError(f"there is no file {file.absolute()}", "create it with `joulelab prepare dump`")
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            yield from (text for text in map(str.strip, lines) if text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.absolute()} is not UTF-8 text: {error.reason}", "convert it with iconv") from error


def _write(
    texts: Iterable[str], file: Path, min_chars: int, max_chars: int | None, tick: Callable[[DumpCounts], None]
) -> DumpCounts:
    kept = too_short = too_long = characters = 0
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for number, text in enumerate(texts, start=1):
            line = one_line(text)
            if len(line) < min_chars:
                too_short += 1
            elif max_chars is not None and len(line) > max_chars:
                too_long += 1
            else:
                kept += 1
                characters += len(line)
                out.write(line + "\n")
            if number % DOCUMENTS_PER_TICK == 0:
                tick(DumpCounts(kept, too_short, too_long, characters))
        out.flush()
        os.fsync(out.fileno())
    return DumpCounts(kept, too_short, too_long, characters)
