"""Tables of text as they are found: a sample, a file, a folder, the hub. What the columns mean is decided elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.data import sources
from joulelab.data.text_sources import REVIEW_SOURCES, check_source
from joulelab.errors import ConfigError, NotFoundError

UTF8 = "utf-8-sig"  # some editors begin a file with a mark that is no part of the text
TEXT_COLUMNS = ("text", "content", "review", "sentence")
LABEL_COLUMNS = ("label", "labels", "polarity", "sentiment")
TITLE_COLUMN = "title"
_PART_NAMES = ("train", "validation", "test")
_NOT_LABELLED = -1  # the hub's convention in the test parts of many datasets


@dataclass(frozen=True)
class Columns:
    """A table as it was found: column name -> values, and the names of the classes where the file states them."""

    values: Mapping[str, Sequence[Any]]
    class_names: tuple[str, ...] | None = None


def read_table(source: str, subset: str) -> Columns:
    found = check_source(source, subset)
    if found.path is None:
        return _read_hub(found.name, subset)
    if found.kind == "sample":
        return _read_sample(found.path, subset)
    return _read_folder(found.path) if found.kind == "folder" else _read_file(found.path)


def pick(columns: Columns, candidates: tuple[str, ...], what: str, source: str) -> str:
    name = column(columns, candidates)
    if name is None:
        raise ConfigError(
            f"{source} has no {what} column: found {', '.join(columns.values) or 'no columns'}; "
            f"expected one of {', '.join(candidates)}",
            f"rename the {what} column to '{candidates[0]}'",
        )
    return name


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


def _read_folder(folder: Path) -> Columns:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        return _read_saved_dataset(folder)
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS)
    if len(files) > 1 and all(file.stem in _PART_NAMES for file in files):
        return _joined([_read_file(file) for file in files], str(folder))
    if len(files) != 1:
        listed = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"{folder.absolute()} holds {len(files)} data files ({listed}); "
            "expected one, or a folder saved by datasets",
            f"name the file itself ({', '.join(_READERS)})",
        )
    return _read_file(files[0])


def _joined(parts: Sequence[Columns], source: str) -> Columns:
    """Parts of one set as one table, by the columns they share: the split is ours."""
    header = Columns({name: () for name in parts[0].values if all(name in part.values for part in parts)})
    text = pick(header, TEXT_COLUMNS, "text", source)
    label = pick(header, LABEL_COLUMNS, "label", source)
    chosen = [name for name in (text, label, column(header, (TITLE_COLUMN,))) if name]
    return Columns({name: [value for part in parts for value in part.values[name]] for name in chosen})


def _read_file(path: Path) -> Columns:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path.absolute()} is not a kind of file we read", f"expected {', '.join(_READERS)}")
    import pyarrow as pa

    try:
        return reader(path)
    # Arrow's complaints and JSON's are both ValueErrors, as are bytes that are not UTF-8.
    except (pa.ArrowException, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    """In words: bytes of another encoding are the user's to convert, and no file that is cut off."""
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(
            f"{path.absolute()} is not text in UTF-8: it has a byte 0x{error.object[error.start]:02x} that no "
            "character of UTF-8 has there",
            f"convert it, from Latin-1 for example: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}",
        )
    return ConfigError(f"{path.absolute()} cannot be read: {error}", "check that the file is whole")


def json_line(text: str, number: int) -> Any:
    """One line of a file of JSON lines; what is wrong with it is told with the line's number in the file."""
    try:
        return parsed_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error.msg}, at column {error.colno}") from None


def parsed_json(text: str) -> Any:
    """JSON whose words are text: half a character (a lone `\\ud83d`, as cut-off emoji leave it) becomes U+FFFD."""
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


def _read_csv(path: Path) -> Columns:
    import pyarrow.csv

    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    return Columns(pyarrow.csv.read_csv(path, parse_options=options).to_pydict())


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
            raise ValueError(f"{where} is no object with a text and a label")
    names = dict.fromkeys(name for row in rows for name in row)
    return Columns({name: [row.get(name) for row in rows] for name in names})


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_saved_dataset(folder: Path) -> Columns:
    from joulelab.data import hub

    return _merge_parts(hub.import_datasets().load_from_disk(str(folder)), str(folder))


def _read_hub(name: str, subset: str) -> Columns:
    from joulelab.data import hub

    datasets = hub.import_datasets()
    try:
        found = datasets.load_dataset(name) if subset == "all" else datasets.load_dataset(name, subset)
    # No network, no such name, no such configuration: the hub's clients raise OSError and ValueError for all of these.
    except (OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise NotFoundError(
            f"the hub did not give the dataset '{name}': {first_line}", sources.hub_hint(name)
        ) from error
    return _merge_parts(found, name)


def _merge_parts(found: Any, source: str) -> Columns:
    """All parts of a dataset as one table (the split is ours), without the rows the publisher left unlabelled."""
    parts = list(found.values()) if isinstance(found, dict) else [found]
    shared = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
    header = Columns(dict.fromkeys(shared, ()))
    text = pick(header, TEXT_COLUMNS, "text", source)
    label = pick(header, LABEL_COLUMNS, "label", source)
    title = column(header, (TITLE_COLUMN,))
    # Only these are read: other columns of a hub dataset may be images.
    columns = {name: [value for part in parts for value in part[name]] for name in (text, label, title) if name}
    kept = [row for row, value in enumerate(columns[label]) if value != _NOT_LABELLED]
    names = getattr(parts[0].features[label], "names", None)
    return Columns(
        {name: [values[row] for row in kept] for name, values in columns.items()},
        class_names=tuple(names) if names else None,
    )
