"""A corpus as one plain file with one document per line: what every later step, and a person with `less`, can read.

Whitespace inside a document, line breaks included, becomes one space, so a line is a document and never part of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from joulelab.errors import ConfigError, NotFoundError

DEFAULT_MIN_CHARS = 1
DOCUMENTS_PER_TICK = 1_000


@dataclass(frozen=True)
class DumpCounts:
    kept: int = 0
    too_short: int = 0
    too_long: int = 0
    characters: int = 0
    """Of those kept."""

    @property
    def read(self) -> int:
        return self.kept + self.too_short + self.too_long

    def told(self) -> str:
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
    """Write the documents whose length, whitespace normalised, lies within the limits; the order stays."""
    if min_chars < 0 or (max_chars is not None and max_chars < max(min_chars, 1)):
        raise ConfigError(f"no document has {min_chars} to {max_chars} characters", "check min_chars and max_chars")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        counts = _write(texts, temporary, max(min_chars, 1), max_chars, tick)
        if counts.kept == 0:
            raise ConfigError(f"no document is left to write: {counts.told()}", "check the source, or widen the limits")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def read_dump(file: Path) -> Iterator[str]:
    """Its documents; lines without any text are passed over."""
    if not file.is_file():
        raise NotFoundError(f"there is no file {file.absolute()}", "`joulelab prepare dump` makes one")
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
