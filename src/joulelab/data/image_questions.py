"""Questions about images of the user's: a table (CSV, JSON lines, Parquet) of `image`, `question` and `answer`, the
images in files beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from joulelab.data.text_tables import pick, read_table
from joulelab.errors import NotFoundError


@dataclass(frozen=True)
class Questions:
    files: tuple[Path, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def read_questions(path: Path) -> Questions:
    """File names are relative to the table; all of them are looked for now, not hours later."""
    columns = read_table(str(path), subset="all")

    def texts(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(value) for value in columns.values[pick(columns, names, names[0], str(path))])

    files = tuple(path.parent / name for name in texts(("image", "image_path", "file")))
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise NotFoundError(f"there is no file {absent.absolute()}", f"names in {path.name} are relative to it")
    return Questions(files, texts(("question", "prompt")), texts(("answer", "response", "text")))
