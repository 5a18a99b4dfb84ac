"""JSON files that are either the old version or the new one, never half of either."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from joulelab.errors import JoulelabError
from joulelab.runs.spec_errors import brief


def write_json(path: Path, value: BaseModel | dict[str, Any]) -> None:
    """To a temporary name, synced, renamed: a reader or a crash never meets a partial file."""
    text = (
        value.model_dump_json(indent=2)
        if isinstance(value, BaseModel)
        else json.dumps(value, indent=2, ensure_ascii=False)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk: half a file would only take more of it
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JoulelabError(
            f"{path} is not valid JSON: {error}", "restore it from a copy, or remove the folder"
        ) from None
    if not isinstance(value, dict):
        raise JoulelabError(
            f"{path}: expected a JSON object, found {brief(value)}", "restore it from a copy, or remove the folder"
        )
    return value
