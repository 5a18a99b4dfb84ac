"""docs/commands.md matches the help that the program prints."""

from __future__ import annotations

import runpy
from importlib.metadata import version
from typing import Any

import pytest
import typer.main
from documents import ROOT, document

from joulelab.cli.main import app

COMMAND = "python scripts/write_command_docs.py"
PAGE = document("docs/commands.md")


@pytest.fixture(scope="module")
def writer() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "write_command_docs.py"))


def test_the_page_is_what_the_program_prints(writer: dict[str, Any]) -> None:
    if f"(typer {version('typer')})" not in PAGE:
        pytest.skip("another typer lays help out differently; the test below compares verbs and options")
    assert writer["page"]() == PAGE, f"the help has changed; run: {COMMAND}"


def test_every_verb_and_option_is_on_the_page_whatever_lays_it_out(writer: dict[str, Any]) -> None:
    root: Any = typer.main.get_command(app)
    for path in writer["verbs"](root):
        title = " ".join(("joulelab", *path))
        command = root
        for word in path:
            command = command.commands[word]
        _, found, rest = PAGE.partition(f"\n## {title}\n")
        section = rest.partition("\n## ")[0]
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        options = [option for parameter in shown for option in parameter.opts if option.startswith("--")]
        assert found, f"{title} is not on the page; run: {COMMAND}"
        assert not [option for option in options if option not in section], f"{title}; run: {COMMAND}"


def test_lists_of_commands_tell_whole_sentences_in_80_columns() -> None:
    root: Any = typer.main.get_command(app)
    for group in (root, root.commands["prepare"], root.commands["samples"]):
        limit = 80 - 2 - 6 - max(map(len, group.commands))  # as click lays the list out
        for name, command in group.commands.items():
            reported = command.get_short_help_str(limit)
            assert reported.endswith(".") and not reported.endswith("..."), f"{name}: {reported}"


def test_a_width_in_the_environment_does_not_change_the_page(
    writer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = writer["page"]()
    monkeypatch.setenv("COLUMNS", "200")
    assert writer["page"]() == before
