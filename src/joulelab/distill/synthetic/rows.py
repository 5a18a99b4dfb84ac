"""Kept answers as training rows: JSON lines with `messages`, or with `prompt` and `response`, that any tool reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from joulelab.data.chat.conversations import ASSISTANT
from joulelab.distill.synthetic.filters import Kept
from joulelab.infer.generation.completions import as_messages


def row_of(one: Kept) -> dict[str, Any]:
    messages = as_messages(one.prompt)
    if messages is None:
        return {"prompt": one.prompt, "response": one.answer.text}
    return {"messages": [*messages, {"role": ASSISTANT, "content": one.answer.text}]}


def write_rows(path: Path, kept: Iterable[Kept]) -> int:
    """Under another name until it is whole; the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for one in kept:
            file.write(json.dumps(row_of(one), ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(path)
    return count
