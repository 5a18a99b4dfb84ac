"""Text from a file, a folder, a sample or a hub dataset: as tables of columns, or as a stream of documents.

Tables are read in batches and documents one after another, so their total size does not matter.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
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


CSV_SUFFIXES = (".csv", ".tsv")
UTF8 = "utf-8-sig"  # some editors write a byte order mark
TEXT_COLUMNS = ("text", "content", "review", "sentence")
LABEL_COLUMNS = ("label", "labels", "polarity", "sentiment")
SPLIT_COLUMN = "split"
TITLE_COLUMN = "title"
TOKEN_IDS_COLUMN, MASK_COLUMN = "input_ids", "attention_mask"  # of texts that another program tokenized
_NOT_LABELED = -1  # the hub's convention in the test splits of many datasets
UNSPLIT = "all"
_SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `datasets` with save_to_disk
# A row must fit into one block; the reader has up to nine blocks in memory.
_CSV_BLOCK_BYTES = 16 * 2**20
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_DETECTION_BYTES = 2**16  # of a CSV file that are read to find its separator
_FEW_VALUES = 50  # a column with at most this many different values may hold labels


@dataclass(frozen=True)
class Columns:
    """A table as stored: column name -> values, and the class names if the file has them."""

    values: Mapping[str, Sequence[Any]]
    class_names: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        return max((len(values) for values in self.values.values()), default=0)

    def take(self, rows: Sequence[int]) -> Columns:
        return Columns({name: [values[row] for row in rows] for name, values in self.values.items()}, self.class_names)


@dataclass(frozen=True, eq=False)
class Table:
    """A table that is read in batches, from its beginning each time."""

    names: tuple[str, ...]
    batches: Callable[[Sequence[str] | None], Iterator[Columns]]
    """Rows in order, with these columns or with all."""
    class_names: tuple[str, ...] | None = None

    @property
    def header(self) -> Columns:
        return Columns(dict.fromkeys(self.names, ()), self.class_names)

    def read(self) -> Columns:
        """All rows, in memory."""
        values: dict[str, list[Any]] = {name: [] for name in self.names}
        for batch in self.batches(None):
            for name, column in values.items():
                column.extend(batch.values[name])
        return Columns(values, self.class_names)

    def head(self) -> Columns:
        """The first rows: all of a file up to a few megabytes."""
        return next(self.batches(None), self.header)

    def changed(self, change: Callable[[Columns], Columns], needs: str | None = None) -> Table:
        """Each batch through a function that drops or changes rows; `needs`: a column that it reads."""

        def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
            read = columns if columns is None or needs is None or needs in columns else [*columns, needs]
            for batch in self.batches(read):
                changed = change(batch)
                kept = changed.values.keys() if columns is None else columns
                yield replace(changed, values={name: changed.values[name] for name in kept})

        return replace(self, batches=batches)


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

    parts: Mapping[str, Table]
    names: Mapping[str, str]
    """What error messages call each part."""
    notes: tuple[str, ...] = ()
    """What was assumed about the files."""


def read_table(source: str, subset: str) -> Columns:
    """A source that is one table."""
    return only_table(open_parts(source, subset), source).read()


def only_table(found: TableParts, source: str) -> Table:
    if len(found.parts) != 1:
        raise ConfigError(f"{source} has the splits {', '.join(found.parts)}; expected one table", "name a single file")
    return next(iter(found.parts.values()))


def open_parts(source: str, subset: str, choice: ColumnChoice = BY_NAME) -> TableParts:
    """The source's own splits (files of a folder, splits of a dataset, values of a split column), never merged."""
    found = check_source(source, subset)
    if found.path is None:
        from joulelab.data import hub

        config = None if subset == "all" else subset
        return _hub_parts(hub.load_dataset(found.name, config), source, choice)
    if found.kind == "sample":
        return TableParts({UNSPLIT: _open_sample(found.path, subset)}, {UNSPLIT: source})
    if found.kind == "file":
        return _file_parts(found.path, source, choice)
    if is_saved_dataset(found.path):
        from joulelab.data import hub

        return _hub_parts(hub.import_datasets().load_from_disk(str(found.path)), source, choice, saved=True)
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


def _open_sample(path: Path, subset: str) -> Table:
    def of_subset(rows: Columns) -> Columns:
        kept = [row for row, origin in enumerate(rows.values["source"]) if origin in REVIEW_SOURCES[subset]]
        chosen = rows.take(kept).values
        return Columns({**chosen, "text": [text.replace("<br />", " ") for text in chosen.get("text", ())]})

    table = replace(_open_csv(path), class_names=("negative", "positive"))
    return replace(table.changed(of_subset, needs="source"), names=("text", "label"))


def _folder_parts(folder: Path, source: str, choice: ColumnChoice) -> TableParts:
    """Files whose names have a word for a split; several of one split are its shards."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in _OPENERS and file.is_file() and not file.name.startswith(".")
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
            f"name a single file ({', '.join(_OPENERS)}), or rename them",
        )
    notes = [f"not read: {', '.join(file.name for file in others[:3])}"] if others else []
    parts: dict[str, Table] = {}
    for name, shards in by_split.items():
        opened = [open_file(shard, choice) for shard in shards]
        parts[name] = _concatenated([table for table, _ in opened])
        notes += [note for _, guessed in opened for note in guessed]
    names = {name: ", ".join(str(file) for file in shards[:2]) for name, shards in by_split.items()}
    return TableParts(parts, names, tuple(dict.fromkeys(notes)))


def _concatenated(shards: Sequence[Table]) -> Table:
    if len(shards) == 1:
        return shards[0]
    shared = tuple(name for name in shards[0].names if all(name in shard.names for shard in shards))

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        for shard in shards:
            yield from shard.batches(shared if columns is None else columns)

    return Table(shared, batches)


def _file_parts(path: Path, source: str, choice: ColumnChoice) -> TableParts:
    table, notes = open_file(path, choice)
    name, words = _split_column(table, choice, source)
    if name is None:
        return TableParts({UNSPLIT: table}, {UNSPLIT: source}, notes)
    if "train" not in words:
        raise ConfigError(f"{source}: no row of the column '{name}' is train", "mark the training rows with `train`")
    parts = {part: table.changed(partial(_rows_of_split, name, part), needs=name) for part in words}
    return TableParts(parts, {part: f"{source} ({name} {part})" for part in parts}, notes)


def _rows_of_split(name: str, part: str, rows: Columns) -> Columns:
    return rows.take([row for row, value in enumerate(rows.values[name]) if SPLIT_WORDS[_word(value)] == part])


def _word(value: object) -> str:
    return str(value).strip().lower()


def _split_column(table: Table, choice: ColumnChoice, source: str) -> tuple[str | None, list[str]]:
    """The column that assigns each row to a split, and the splits in the order of their first rows."""
    if choice.split is None:
        name = column(table.header, (SPLIT_COLUMN,))
    else:
        name = chosen_column(table.header, choice.split, (SPLIT_COLUMN,), "split", source)
    if name is None:
        return None, []
    words: dict[str, None] = {}
    for value in chain.from_iterable(batch.values[name] for batch in table.batches([name])):
        if _word(value) in SPLIT_WORDS:
            words[SPLIT_WORDS[_word(value)]] = None
        elif choice.split is None:
            return None, []
        else:
            raise ConfigError(
                f"data.split_column={choice.split}: {source} has the value {value!r}",
                f"expected one of {', '.join(SPLIT_WORDS)} in every row",
            )
    return name if words or choice.split is not None else None, list(words)


def open_file(path: Path, choice: ColumnChoice) -> tuple[Table, tuple[str, ...]]:
    """The table of a file, and what was assumed about a CSV file: its separator, if it is no comma, and its columns, if
    they have no names."""
    if path.suffix.lower() not in CSV_SUFFIXES:
        return _open_table(path), ()
    table = _open_table(path, choice.header is not False)
    notes = _separator_note(path)
    if choice.header is not None:
        return table, notes
    known = column(table.header, TEXT_COLUMNS) or (choice.text and column(table.header, (str(choice.text).casefold(),)))
    if known or not _first_row_is_data(table.head()):
        return table, notes
    named, assumed = _named_by_content(_open_table(path, header=False), choice, path)
    return named, (*notes, *assumed)


def _separator_note(path: Path) -> tuple[str, ...]:
    with _readable(path):
        separator = _separator(path)
    if separator == "," or _kind(path) == ".tsv":
        return ()
    return (f"{path.name} is read with {_SEPARATORS[separator]} between its columns",)


def _first_row_is_data(columns: Columns) -> bool:
    """Whether a column with few values has the value that is taken for its name: a label, not a name."""
    for name, values in columns.values.items():
        different = {str(value).strip() for value in values}
        if len(different) <= min(_FEW_VALUES, len(values) // 2) and name.strip() in different:
            return True
    return False


NO_COLUMN_NAMES = "has no column names"
"""In the note on a CSV file without a header."""


def _named_by_content(table: Table, choice: ColumnChoice, path: Path) -> tuple[Table, tuple[str, ...]]:
    """`text` is the column with the longest texts, `label` the one with the fewest values; a note states the choice."""
    columns = table.head()
    sizes = {name: sum(len(str(value)) for value in values) for name, values in columns.values.items()}
    names = list(columns.values)
    text = _by_number(choice.text, names) or max(names, key=sizes.__getitem__)
    others = [name for name in names if name != text]
    if not others:
        return table, ()
    few = min(others, key=lambda name: len({str(value) for value in columns.values[name]}))
    label = _by_number(choice.label, names) or few
    renamed = {text: "text", label: "label"} if choice.text is None and choice.label is None else {}
    also = ""
    if renamed and names == [label, "2", text]:  # label, title and text: Amazon's and Yelp's files as published
        renamed["2"], also = TITLE_COLUMN, ", column 2 as its title"
    if choice.labeled:
        also += f", column {label} as the label"
    note = f"{path.name} {NO_COLUMN_NAMES}: column {text} is read as the text{also}"
    return _renamed(table, renamed), (note,)


def _renamed(table: Table, renamed: Mapping[str, str]) -> Table:
    stored = {renamed.get(name, name): name for name in table.names}

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        chosen = tuple(stored) if columns is None else columns
        for batch in table.batches([stored[name] for name in chosen]):
            yield Columns({name: batch.values[stored[name]] for name in chosen})

    return Table(tuple(stored), batches)


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


def _open_table(path: Path, header: bool = True) -> Table:
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise ConfigError(f"{path.absolute()} has an unsupported file type", f"expected {', '.join(_OPENERS)}")
    with _readable(path):
        table = opener(path) if header else _open_csv(path, header)

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        with _readable(path):
            yield from table.batches(columns)

    return replace(table, batches=batches)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except ConfigError:
        raise
    # Errors of Arrow, of JSON and of UTF-8 decoding are all ValueErrors.
    except (pa.ArrowException, ValueError, PermissionError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    """An error that distinguishes another encoding, which the user can convert, from an incomplete file."""
    if isinstance(error, PermissionError):  # Arrow's has the path and a second reason in its text
        return ConfigError(f"{path.absolute()}: {os.strerror(errno.EACCES)}", "check its permissions")
    if recognized := _recognized_content(path):
        return recognized
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(
            f"{path.absolute()} is not UTF-8 text: byte 0x{error.object[error.start]:02x} is "
            f"invalid at position {error.start}",
            f"convert it, for example from Latin-1: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}",
        )
    # A plain ValueError describes a row that was read: what it has and what was expected.
    hint = "correct that row" if type(error) is ValueError else "check that the file is complete"
    if "Expected" in str(error) and "columns" in str(error):
        hint = "correct that row; a text with separators or line breaks needs quotes"
    return ConfigError(f"{path.absolute()} cannot be read: {error}", hint)


def _recognized_content(path: Path) -> ConfigError | None:
    """The reason why a file is unreadable, if its first bytes show it: an empty file, gzip, UTF-16 or binary data."""
    try:
        with path.open("rb") as file:
            start = file.read(1000)
    except OSError:
        return None
    if not start.strip():
        return ConfigError(f"{path.absolute()} is empty", "expected column names and rows")
    if start.startswith(b"\x1f\x8b"):
        return ConfigError(f"{path.absolute()} is compressed (gzip)", f"decompress it: gunzip -c {path.name} > FILE")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return ConfigError(
            f"{path.absolute()} is UTF-16 text; expected UTF-8",
            f"convert it: iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}",
        )
    if b"\0" in start and path.suffix.lower() in (*CSV_SUFFIXES, ".jsonl", ".json", ".txt"):
        return ConfigError(f"{path.absolute()} is not text: it has null bytes", "expected UTF-8 text")
    return None


class _NotJson(ValueError):
    pass


def json_line(text: str, number: int) -> Any:
    """One line of a JSON lines file; errors have the line number."""
    try:
        return parsed_json(text.rstrip("\r\n"))  # otherwise the end of a line would be line 2, column 1
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


def _separator(path: Path) -> str:
    """What separates the columns of a CSV file: in a .tsv file a tab, else what the first line has outside quotes. If
    that has several, the one with which all first rows have equally many columns."""
    if _kind(path) == ".tsv":
        return "\t"
    with _opened(path) as file:
        start = file.read(_DETECTION_BYTES + 1).decode(UTF8, errors="replace")
    first = start.partition("\n")[0].strip("\r")
    outside_quotes = re.sub('"[^"]*"', "", first)
    found = [one for one in _SEPARATORS if one in outside_quotes]
    if not found and "|" in outside_quotes and "\0" not in first:  # UTF-16 is refused as such
        raise ConfigError(
            f"{path.absolute()} has the single column {first[:200]!r}: its values seem to be separated by '|'",
            "separate them with commas, semicolons or tabs",
        )
    fitting = found if len(found) < 2 else [one for one in found if _has_even_rows(start, one)]
    if len(fitting) > 1 or (found and not fitting and "," not in found):
        listed = " or ".join(_SEPARATORS[one] for one in found)
        raise ConfigError(
            f"{path.absolute()}: its columns may be separated by {listed}",
            "put values that contain one of them into quotes, or write a .tsv file, with tabs",
        )
    return fitting[0] if fitting else ","


def _has_even_rows(start: str, separator: str) -> bool:
    rows = csv.reader(io.StringIO(start, newline=""), delimiter=separator)
    try:
        lengths = [len(row) for row in rows if row]
    except csv.Error:
        return False
    return len(set(lengths[:-1] if len(start) > _DETECTION_BYTES else lengths)) == 1  # the last row may be incomplete


def _csv_parsing(path: Path) -> Any:
    import pyarrow.csv

    return pyarrow.csv.ParseOptions(delimiter=_separator(path), newlines_in_values=True)


def _open_csv(path: Path, header: bool = True) -> Table:
    """Without a header, columns are named 1, 2, ... The types of the columns are those of the first block."""
    import pyarrow as pa
    import pyarrow.csv

    parsing = _csv_parsing(path)
    reading = pyarrow.csv.ReadOptions(autogenerate_column_names=not header, block_size=_CSV_BLOCK_BYTES)

    def opened(columns: Sequence[str] | None = None) -> Any:
        converting = pyarrow.csv.ConvertOptions(include_columns=columns)
        return pyarrow.csv.open_csv(path, reading, parsing, converting)

    with opened() as first:
        schema = first.schema
    if any(pa.types.is_binary(kind) for kind in schema.types):
        path.read_text(encoding=UTF8)  # raises with the position: Arrow turns text that is not UTF-8 into bytes
    stored = dict(zip(schema.names if header else map(str, range(1, len(schema) + 1)), schema.names, strict=True))

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        chosen = list(stored) if columns is None else list(columns)
        with opened([stored[name] for name in chosen]) as table:
            for batch in table:
                values = (batch.column(place).to_pylist() for place in range(batch.num_columns))
                yield Columns(dict(zip(chosen, values, strict=True)))

    return Table(tuple(stored), batches)


def _open_parquet(path: Path) -> Table:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = tuple(file.schema_arrow.names)

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=list(names if columns is None else columns)):
                yield Columns(batch.to_pydict())

    return Table(names, batches)


def _open_json(path: Path) -> Table:
    """Lines of objects, or one list of objects. The columns are those of the first rows."""

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(json_rows(path), 1):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object with a text and a label")
            yield row

    names = tuple(dict.fromkeys(name for row in islice(rows(), _ROWS_PER_BATCH) for name in row))
    if not names:
        raise ConfigError(f"{path.absolute()} is empty", "expected rows with named values")

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        left = rows()
        while some := list(islice(left, _ROWS_PER_BATCH)):
            yield Columns({name: [row.get(name) for row in some] for name in (names if columns is None else columns)})

    return Table(names, batches)


_ROWS_PER_BATCH = 4096
_OPENERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _open_csv,
    ".tsv": _open_csv,
    ".jsonl": _open_json,
    ".json": _open_json,
    ".parquet": _open_parquet,
}


def _hub_parts(found: Any, source: str, choice: ColumnChoice, saved: bool = False) -> TableParts:
    """The splits of a dataset under their own names, without unlabeled rows. `saved`: by save_to_disk."""
    datasets = dict(found) if isinstance(found, dict) else {UNSPLIT: found}
    parts, names, notes = {}, {}, []
    for name, dataset in datasets.items():
        where = source if name == UNSPLIT else f"{source} ({name})"
        table, note = _dataset_table(dataset, where, choice, saved)
        if table is not None:
            parts[name], names[name] = table, where
        notes += [note] if note else []
    return TableParts(parts, names, tuple(notes))


def _dataset_table(dataset: Any, source: str, choice: ColumnChoice, saved: bool) -> tuple[Table | None, str | None]:
    """The labeled rows, None if there are none; and a note on the others. Where the dataset names its classes, -1 is
    none of them; otherwise it may be one, unless all rows have it."""

    def batches(columns: Sequence[str] | None) -> Iterator[Columns]:
        if saved and dataset.cache_files:
            yield from _saved_batches(dataset, dataset.column_names if columns is None else columns)
            return
        chosen = dataset.select_columns(list(dataset.column_names if columns is None else columns))
        for start in range(0, len(dataset), _ROWS_PER_BATCH):
            yield Columns(chosen[start : start + _ROWS_PER_BATCH])

    table = Table(tuple(dataset.column_names), batches)
    if not choice.labeled:
        choice.text_in(table.header, source)
        return table, None
    if TOKEN_IDS_COLUMN in table.names and column(table.header, TEXT_COLUMNS) is None:
        label = choice.label_in(table.header, source)
    else:
        _, label = choice.text_and_label_in(table.header, source)
    names = getattr(dataset.features[label], "names", None)
    table = replace(table, class_names=tuple(names) if names else None)
    values = chain.from_iterable(batch.values[label] for batch in table.batches([label]))
    unlabeled = sum(value == _NOT_LABELED for value in values)
    if unlabeled and unlabeled == len(dataset):
        return None, f"{source} is not used: its rows have no label"
    if not unlabeled or not names:
        return table, f"{source}: the label {_NOT_LABELED} is read as a class" if unlabeled else None
    note = f"{source}: {unlabeled:,} of {len(dataset):,} rows are not used: they have no label"
    return table.changed(partial(_labeled_rows, label), needs=label), note


def _saved_batches(dataset: Any, columns: Sequence[str]) -> Iterator[Columns]:
    """Read from the files: `datasets` maps them into memory, and mapped pages count as resident memory."""
    import pyarrow as pa

    for file in dataset.cache_files:
        with pa.OSFile(file["filename"]) as opened, pa.ipc.open_stream(opened) as stored:
            for batch in stored:
                for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
                    part = batch.slice(start, _ROWS_PER_BATCH)
                    yield Columns({name: part.column(name).to_pylist() for name in columns})


def _labeled_rows(label: str, rows: Columns) -> Columns:
    return rows.take([row for row, value in enumerate(rows.values[label]) if value != _NOT_LABELED])


# Streams of documents: a line of a .txt file is a document, in other files the text of a row. Files may be gzipped, as
# C4's are.


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

    parsing = _csv_parsing(path)
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
    ".tsv": _stream_csv,
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
    """Characters in the kept documents."""

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
