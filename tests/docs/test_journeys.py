"""docs/journeys.md: each journey needs at most three commands, and they run as printed in an empty folder.

The journey of the HPC user needs a cluster and runs in tests/cluster/test_real_slurm_scripts.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import document
from test_examples_in_pages import Block, blocks_of_text, run_block

MOST_COMMANDS = 3
NUMBER = re.compile(r"\d[\d.,]* [µmk]?J\b")
CLUSTER = "An HPC user measures a job"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", document("docs/journeys.md"), re.MULTILINE | re.DOTALL))
JOURNEYS = [title for title in SECTIONS if re.match(r"An? ", title)]


def commands(blocks: list[Block]) -> list[str]:
    shell = "".join(block.text for block in blocks if block.language == "sh" and block.mark != "not run")
    return [line for line in shell.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def test_there_are_four_journeys() -> None:
    assert len(JOURNEYS) == 4
    assert CLUSTER in JOURNEYS


@pytest.mark.parametrize("title", JOURNEYS)
def test_a_journey_has_at_most_three_commands_and_a_number(title: str) -> None:
    blocks = blocks_of_text(SECTIONS[title])
    typed = commands(blocks)
    assert 1 <= len(typed) <= MOST_COMMANDS
    assert all(command.startswith("joulelab ") for command in typed)
    assert any(NUMBER.search(block.text) for block in blocks if block.language == "text")


@pytest.mark.slow
@pytest.mark.samples
@pytest.mark.parametrize("title", [title for title in JOURNEYS if title != CLUSTER])
def test_the_commands_run_as_printed_and_print_a_number(title: str, tmp_path: Path) -> None:
    printed = ""
    for block in blocks_of_text(SECTIONS[title]):
        if block.mark == "file":
            (tmp_path / block.value).write_text(block.text)
        elif block.is_example:
            done = run_block(block, tmp_path, timeout_s=1200)
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            printed += done.stdout + done.stderr
    assert NUMBER.search(printed)
