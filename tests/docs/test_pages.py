"""All documents: their links lead somewhere, the verbs they show exist, and each requirement has a state."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from documents import ROOT, all_documents, definitions, document, module_file

from joulelab.cli.main import app
from joulelab.cli.slurm_jobs import options_of
from joulelab.meter.figures import ErrorName
from joulelab.runs.spec import experiment_names
from joulelab.zoo.registry import all_models

DOCUMENTS = pytest.mark.parametrize("path", all_documents(), ids=lambda path: path.name)
POINTS = {
    "M": 8, "D": 8, "F": 7, "L": 12, "T": 7, "P": 6, "R": 8, "C": 8, "N": 13, "A": 5, "U": 9, "E": 10, "G": 5, "O": 5,
    "H": 8, "V": 4,
}  # fmt: skip


@DOCUMENTS
def test_every_link_leads_to_a_file(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    inside = [target for target in targets if "://" not in target]
    assert not [target for target in inside if not (path.parent / target).exists()]


@DOCUMENTS
def test_every_command_shown_is_one_the_program_has(path: Path) -> None:
    program: Any = typer.main.get_command(app)
    shown = re.findall(r"`joulelab ([a-z]+)(?: ([\w-]+))?", path.read_text(encoding="utf-8"))
    assert not [verb for verb, _ in shown if verb not in program.commands]
    started = [name for verb, name in shown if verb == "run" and re.fullmatch(r"demo[\w-]*", name)]
    assert not [name for name in started if name not in experiment_names()]


@DOCUMENTS
def test_every_option_shown_in_an_example_is_one_of_its_command(path: Path) -> None:
    program: Any = typer.main.get_command(app)
    unknown = []
    for line in re.findall(r"^ *joulelab ([a-z].*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        words = re.split(r" #| -- | && ", line)[0].split()
        command = program
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if not command.params or getattr(command, "context_settings", {}).get("ignore_unknown_options"):
            continue  # it passes its options on
        known = set(options_of(command))
        if words and command.name == "submit" and words[0] in program.commands:  # the words of a verb
            known |= set(options_of(program.commands[words[0]]))
        unknown += [f"{word}: joulelab {line}" for word in words if word.startswith("--") and word not in known]
    assert not unknown


@DOCUMENTS
def test_every_import_shown_in_an_example_exists(path: Path) -> None:
    shown = re.findall(r"^from joulelab\.([\w.]+) import ([\w, ]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    for module, names in shown:
        file = module_file(module)
        assert file is not None, f"there is no module joulelab.{module}"
        missing = {name for name in names.split(", ") if not module_file(f"{module}.{name}")} - definitions(file)
        exported = {name for name in missing if f" {name}" in file.read_text()} if file.name == "__init__.py" else set()
        assert not missing - exported, f"joulelab.{module} does not define {missing}"


def test_every_requirement_has_a_state_and_what_is_done_has_a_command() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \|(.*)\|$", document("docs/requirements.md"), re.MULTILINE)
    assert [identity for identity, _ in rows] == [
        f"{room}{n}" for room, last in POINTS.items() for n in range(1, last + 1)
    ]
    for identity, cells in rows:
        _, state, shown_by = (cell.strip() for cell in cells.split("|"))
        assert re.match(r"(done$|partly: .|open($|: .))", state), f"{identity}: {state}"
        assert bool(shown_by) != state.startswith("open"), (
            f"{identity}: a command for what is there, none for what is not"
        )


def test_tests_shown_for_a_requirement_exist() -> None:
    commands = re.findall(r"`pytest ([^`]+)`", document("docs/requirements.md"))
    shown = [word for command in commands for word in command.split() if word.startswith("tests")]
    assert len(shown) > len(commands) / 2
    assert not [path for path in shown if not (ROOT / path).exists()]


def test_the_zoos_sizes_in_the_results_are_those_the_zoo_lists() -> None:
    """Longformer had 127.4 M on the page and 149 M in `joulelab zoo`."""
    page = document("docs/results.md")
    table = page[page.index("## The zoo on one H200") :].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z0-9-]+)(?: ([a-z0-9-]+))?(?:,[^|]*)? \| ([\d,.]+) M \|", table, re.MULTILINE)
    models = {entry.name: entry for entry in all_models()}
    assert {name for name, *_ in rows} == set(models)
    for name, size, millions in rows:
        entry = models[name]
        parameters = entry.sizes[size or entry.default_size].parameters
        assert float(millions.replace(",", "")) == round(parameters / 1e6, 1), name


def test_every_error_component_of_a_figure_is_explained() -> None:
    listed = re.findall(r"^\| `([a-z ]+)` \|", document("docs/measuring.md"), re.MULTILINE)
    assert set(get_args(ErrorName)) <= set(listed)


def test_messages_explained_in_troubleshooting_are_messages_of_the_program() -> None:
    explained = re.findall(r"^### `([^`]+)`$", document("docs/troubleshooting.md"), re.MULTILINE)
    assert len(explained) >= 5
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "joulelab").rglob("*.py"))
    assert not [message for message in explained if message not in sources]


def test_every_extra_is_on_the_install_page() -> None:
    extras = tomllib.loads(document("pyproject.toml"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \|", document("docs/install.md"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(extras)
