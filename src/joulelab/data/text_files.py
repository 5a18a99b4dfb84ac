"""Documents of text in files of the user's, read one after another, so that their size does not matter.

A line of a .txt file is a document; of the other kinds it is a row's text. Any of them may be gzipped, as C4's are.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from joulelab.data.text_tables import TEXT_COLUMNS, UTF8, Columns, json_line, parsed_json, pick, unreadable
from joulelab.errors import ConfigError

_SPLIT_WORDS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLIT_WORDS)})(?![a-z])")
_CSV_BLOCK_BYTES = 64 * 2**20  # a row has to fit into one


def files_by_split(path: Path) -> dict[str, list[Path]]:
    """A file is all `train`; the files of a folder are told apart by a word in their names (c4-validation.json.gz)."""
    if path.is_file():
        _reader(path)
        return {"train": [path]}
    found: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and _kind(file) in _READERS:
            word = _SPLIT_WORD.search(file.relative_to(path).as_posix().lower())
            found.setdefault(_SPLIT_WORDS[word[1]] if word else "train", []).append(file)
    if not found:
        raise ConfigError(f"{path.absolute()} holds no files of text", f"expected {', '.join(_READERS)}")
    return found


def read_files(files: Iterable[Path]) -> Iterator[str]:
    import pyarrow as pa

    for file in files:
        try:
            yield from (text for text in map(str.strip, _reader(file)(file)) if text)
        # Arrow's complaints and JSON's are both ValueErrors, as are bytes that are not UTF-8.
        except (pa.ArrowException, ValueError, OSError) as error:
            raise unreadable(file, error) from error


def text_column(names: Iterable[str], source: str) -> str:
    return pick(Columns(dict.fromkeys(names, ())), TEXT_COLUMNS, "text", source)


def _kind(path: Path) -> str:
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def _reader(path: Path) -> Callable[[Path], Iterator[str]]:
    reader = _READERS.get(_kind(path))
    if reader is None:
        raise ConfigError(f"{path.absolute()} is not a kind of file we read", f"expected {', '.join(_READERS)}")
    return reader


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def _read_lines(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        yield from io.TextIOWrapper(file, encoding=UTF8)


def _read_json(path: Path) -> Iterator[str]:
    """Lines of objects, or one list of objects."""
    column = ""
    for number, row in enumerate(json_rows(path), 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object with a text")
        column = column if column in row else text_column(row, str(path))
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


def _read_csv(path: Path) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.csv

    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    reading = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    with _opened(path) as file:
        header = pyarrow.csv.open_csv(file, read_options=reading, parse_options=parsing).schema.names
    column = text_column(header, str(path))
    converting = pyarrow.csv.ConvertOptions(include_columns=[column], column_types={column: pa.string()})
    with _opened(path) as file:
        yield from _texts(pyarrow.csv.open_csv(file, reading, parsing, converting))


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow.parquet

    with _opened(path) as file:
        table = pyarrow.parquet.ParquetFile(file)
        yield from _texts(table.iter_batches(columns=[text_column(table.schema_arrow.names, str(path))]))


def _texts(batches: Iterable[Any]) -> Iterator[str]:
    for batch in batches:
        yield from (text or "" for text in batch.column(0).to_pylist())


_READERS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _read_lines,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
