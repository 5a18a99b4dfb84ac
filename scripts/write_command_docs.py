"""Write docs/commands.md: the help text of every verb, as the program prints it, so that page and program cannot part.

python scripts/write_command_docs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from joulelab.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
WIDTH = 80
INTRODUCTION = f"""\
# Commands

Made by `python scripts/write_command_docs.py` (typer {version("typer")}) from the program itself; do not edit.
Results go to stdout, messages to stderr; exit codes are in [the run folder](run-folder.md#exit-codes).
"""


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command as the words one types, groups before their members, in the order of the help."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*path, name))


def help_text(path: tuple[str, ...]) -> str:
    # a width in the environment or a terminal must not change the page
    answer = CliRunner().invoke(
        app, [*path, "--help"], prog_name="joulelab", terminal_width=WIDTH, env={"COLUMNS": str(WIDTH)}
    )
    if answer.exit_code != 0:
        raise RuntimeError(f"joulelab {' '.join(path)} --help ended with {answer.exit_code}: {answer.output}")
    return "\n".join(line.rstrip() for line in answer.stdout.strip().splitlines())


def page() -> str:
    sections = [
        f"## {' '.join(('joulelab', *path))}\n\n```text\n{help_text(path)}\n```\n"
        for path in verbs(typer.main.get_command(app))
    ]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
