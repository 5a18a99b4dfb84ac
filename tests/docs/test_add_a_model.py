"""docs/add-a-model.md, followed to the letter: its files are written, its commands are run."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
from commands import joulelab_here
from documents import document

from joulelab.zoo.cost import model_cost
from joulelab.zoo.registry import WorkloadRequest, find_model

PAGE = document("docs/add-a-model.md")
FILES = re.findall(r"[Aa]s `(\w+\.py)`.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be after writing the files and typing the commands."""
    folder = tmp_path_factory.mktemp("reader")
    for name, text in FILES:
        (folder / name).write_text(text)
    for command in COMMANDS:
        run(folder, command)
    return folder


def run(folder: Path, command: str) -> None:
    """In this process, which imports the framework once and not for every command."""
    program, *words = shlex.split(command)
    assert program == "joulelab"
    with mock.patch.dict(os.environ, {"JOULELAB_RUNS": str(folder / "runs")}):
        done = joulelab_here(*words, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_page_has_two_files_and_trains_each() -> None:
    assert [name for name, _ in FILES] == ["my_model.py", "my_decoder.py"]
    assert all(f"./{name}" in " ".join(COMMANDS) for name, _ in FILES)


def test_what_the_page_states_is_what_happens(folder: Path) -> None:
    runs = [json.loads(path.read_text()) for path in (folder / "runs").glob("*/run.json")]
    assert sorted(run["name"] for run in runs) == ["my-decoder", "my-model", "my-model"]
    assert all(run["status"] == "done" for run in runs)
    values = [{name: result["value"] for name, result in run["results"].items()} for run in runs]
    assert sorted(found["model.train.steps"] for found in values) == [5, 5, 100]
    (long,) = (found for found in values if found["model.train.steps"] == 100)
    assert long["model.train.first_loss"] > 1.5
    assert long["model.train.final_loss"] < 0.2
    assert long["model.evaluate.loss"] < 0.2


def test_the_parameters_in_the_files_are_those_of_the_models(folder: Path) -> None:
    for name, _ in FILES:
        entry = find_model(str(folder / name))
        for size_name, size in entry.sizes.items():
            assert model_cost(WorkloadRequest(entry, size_name)).parameters == size.parameters, f"{name} {size_name}"
