"""The command line of a foreign program: found as a shell would find it, named, and recorded without its secrets."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from joulelab.errors import UsageError
from joulelab.runs.environment import REDACTED, redact

NOT_FOUND, NOT_EXECUTABLE = 127, 126

# Option and variable names that hold secrets. Whole words only: `--tokenizer`, `--max-tokens` and `--keys` hold none.
_SECRET_OPTION = re.compile(
    r"(^|[-_.])(api[-_]?key|access[-_]?key|secret[-_]?key|private[-_]?key|key|token|secret|pass|passwd|password|"
    r"passphrase|credentials?|auth|authorization|cookie|bearer|pwd)($|[-_.](id|value|env)?$)",
    re.I,
)
# `Authorization: Bearer x`, `password=x` or `sig=x` somewhere inside a longer word.
_SECRET_INSIDE = re.compile(
    r"\b(authorization|bearer|api[-_]?key|access[-_]?token|token|password|passwd|secret|signature|sig)\b\s*[:= ]\s*\S",
    re.I,
)


class CannotStart(UsageError):
    """The command cannot be started; exit codes are the shell's (127 not found, 126 found and not executable)."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


def find_program(word: str) -> str:
    """The file that would run, or the shell's own answer to why none would."""
    if not word:
        raise CannotStart("the command is empty", "write the program after `--`", NOT_FOUND)
    if found := shutil.which(word):
        return found
    if "/" not in word:
        raise CannotStart(f"{word}: command not found", _not_found_hint(word), NOT_FOUND)
    path = Path(word)
    if not path.exists():
        raise CannotStart(f"{word}: no such file", "the path is taken from the folder you are in", NOT_FOUND)
    if path.is_dir():
        raise CannotStart(f"{word} is a folder", "name a program", NOT_EXECUTABLE)
    raise CannotStart(
        f"{word} is not executable", f"chmod +x {word}, or name its interpreter: python {word}", NOT_EXECUTABLE
    )


def _not_found_hint(word: str) -> str:
    if Path(word).exists():
        return f"there is a file of that name here: ./{word}, or python {word}"
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    programs = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    guess = difflib.get_close_matches(word, programs, n=1, cutoff=0.8)  # strict: a PATH has thousands of short names
    return f"did you mean '{guess[0]}'?" if guess else "nothing of that name is on the PATH"


def default_name(command: Sequence[str]) -> str:
    """The script's name where an interpreter runs one, else the program's."""
    program = Path(command[0]).name
    script = next((Path(word).stem for word in command[1:] if word.endswith((".py", ".sh"))), None)
    if script and re.match(r"(python[\d.]*|bash|sh|torchrun)$", program):
        program = script
    return program[:80] or "program"


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """The command line with the values of secret options and anything that looks like a secret taken out."""
    clean: list[str] = []
    follows_secret = False
    for word in command:
        name, equals, value = word.partition("=")
        is_secret = bool(_SECRET_OPTION.search(name.lstrip("-")))
        if follows_secret and not word.startswith("--"):
            clean.append(REDACTED)
        elif equals and is_secret and " " not in name:
            clean.append(f"{name}={REDACTED}" if value else word)
        elif _SECRET_INSIDE.search(word):
            clean.append(REDACTED)
        else:
            clean.append(redact("", word))
        follows_secret = is_secret and not equals and word.startswith("-")
    return tuple(clean)
