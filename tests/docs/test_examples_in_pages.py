"""Every shell and Python block of the pages is run as it is printed, one page after the other in an empty folder.

A comment on the line before a block changes that:

    <!-- not run: REASON -->     only its commands, options and imports are checked (test_pages.py)
    <!-- needs: PACKAGE -->      skipped where the package is not installed
    <!-- file: NAME -->          written to the folder under this name, for the blocks after it

Job scripts (`#SBATCH`) are run by tests/cluster.

The blocks of a page share a folder and a store, so a block may use the runs and files of an earlier one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from documents import ROOT, document

BLOCK = re.compile(r"(?:^<!-- ([\w ]+): (.+?) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REASONS = ("GPU", "Slurm cluster", "network", "minutes", "root on bare metal", "needs ", "builds the site", "changes ")
TIMEOUT_S = 240
# Pages that are generated or have no examples to follow, and pages whose own test follows them step by step.
OTHER_PAGES = {"commands.md", "decisions.md", "results.md", "add-a-model.md", "add-a-tracker.md", "journeys.md"}
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in OTHER_PAGES)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    mark: str
    value: str

    @property
    def is_example(self) -> bool:
        is_job = self.text.startswith("#!/bin/bash\n#SBATCH")  # tests/cluster runs these on a real Slurm
        return self.language in ("sh", "python") and self.mark not in ("not run", "file") and not is_job


def blocks_of_text(text: str) -> list[Block]:
    return [Block(language, inner, mark, value) for mark, value, language, inner in BLOCK.findall(text)]


def blocks_of(page: str) -> list[Block]:
    return blocks_of_text(document(f"docs/{page}"))


# More than ten seconds each (training, SmolLM2, all reviews tokenized): CI runs them with the slow tests.
SLOW_PAGES = {
    "add-a-dataset.md", "add-a-trainer.md", "compare.md", "distill-encoders.md", "distill-language-models.md",
    "measure.md", "store.md", "teacher-outputs.md", "train.md",
}  # fmt: skip
WITH_EXAMPLES = [page for page in PAGES if any(block.is_example for block in blocks_of(page))]


def run_block(block: Block, folder: Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """The block's result; `python` and `joulelab` are those of this environment."""
    words = [sys.executable, "-"] if block.language == "python" else ["bash", "-euo", "pipefail"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "JOULELAB_RUNS": str(folder / "runs"), "COLUMNS": "120"}
    return subprocess.run(
        words, input=block.text, cwd=folder, env=environment,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


@pytest.mark.samples
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW_PAGES else ()) for page in WITH_EXAMPLES]
)
def test_the_examples_of_the_page_run(page: str, tmp_path: Path) -> None:
    for block in blocks_of(page):
        if block.mark == "file":
            (tmp_path / block.value).write_text(block.text)
        if not block.is_example or (block.mark == "needs" and not importlib.util.find_spec(block.value)):
            continue
        done = run_block(block, tmp_path)
        assert done.returncode == 0, f"docs/{page}\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_are_not_run_have_a_known_reason(page: str) -> None:
    for block in blocks_of(page):
        assert block.mark in ("", "not run", "needs", "file"), f"docs/{page}: unknown comment '{block.mark}'"
        if block.mark == "not run":
            assert block.value.startswith(REASONS), f"docs/{page}: '{block.value}' is not one of {REASONS}"
            if block.language == "python":
                compile(block.text, f"docs/{page}", "exec")


def test_the_measure_page_shows_every_way() -> None:
    shown = "".join(block.text for block in blocks_of("measure.md") if block.is_example)
    ways = ("joulelab measure", "joulelab.measure(", "joulelab.measured(", "joulelab.telemetry(", "JoulelabCallback(")
    assert not [way for way in (*ways, "JoulelabLightningCallback(") if way not in shown]


def test_most_task_pages_have_an_example_that_is_run() -> None:
    expected = {"quickstart.md", "install.md", "measure.md", "compare.md", "distill.md", "store.md", "train.md"}
    assert expected <= set(WITH_EXAMPLES)
