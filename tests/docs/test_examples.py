"""The files of examples/ run as examples/README.md says, in an empty folder.

The Slurm script runs in tests/cluster/test_real_slurm_scripts.py, which has a cluster.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 240


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the examples, as a reader would make one."""
    return shutil.copytree(EXAMPLES, tmp_path / "examples")


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "JOULELAB_RUNS": str(folder / "runs"), "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, *words: str, text: str | None = None) -> str:
    done = subprocess.run(
        words, input=text, cwd=folder, env=environment(folder),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*/run.json"))]


@pytest.mark.slow
def test_the_plain_script_learns_and_is_measured_unchanged(folder: Path) -> None:
    script = (folder / "train_pytorch.py").read_text()
    assert "import joulelab" not in script
    output = run(folder, "joulelab", "measure", "--", "python", "train_pytorch.py", "--epochs", "2")
    assert float(output.split()[-1]) > 0.6, "chance is 0.1"
    (record,) = records(folder)
    assert record["status"] == "done"


@pytest.mark.slow
def test_the_trainer_script_measures_training_and_evaluation_separately(folder: Path) -> None:
    run(folder, "python", "train_hf_trainer.py", "--steps", "20")
    (record,) = records(folder)
    assert record["status"] == "done"
    assert {"model.train", "model.evaluate"} <= {stage["name"] for stage in record["stages"]}


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "measure.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


# Each cell as IPython runs it; the first one that raises ends the program with exit code 1.
RUN_CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell, store_history=True).raise_error()
"""


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_order(folder: Path) -> None:
    if importlib.util.find_spec("IPython"):
        run(folder, "python", "-c", RUN_CELLS, text=json.dumps(cells()))
    else:
        plain = [cell for cell in cells() if not cell.startswith("%")]
        run(folder, "python", "-", text="\n".join(plain))
    found = records(folder)
    assert len(found) >= 2
    assert {record["status"] for record in found} == {"done"}


def test_the_notebook_is_saved_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "measure.ipynb").read_text())
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])


def test_the_readme_lists_every_example() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "runs", "trainer-output")]
    assert len(names) >= 4
    assert not [name for name in names if f"]({name})" not in listed]
