"""A chat template of the user's own, as a file; without torch, so that a login node can check it."""

from __future__ import annotations

from pathlib import Path

from joulelab.errors import ConfigError


def read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {path.absolute()} cannot be read: {error}", "check the path") from error
    if not text.strip():
        raise ConfigError(f"the chat template {path.absolute()} is empty", "write a Jinja template into it")
    return text
