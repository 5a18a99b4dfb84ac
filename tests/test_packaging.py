"""What a user gets: types, a wheel with everything in it, project files that agree with each other."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import joulelab

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

USER_FILE = """
import joulelab
from joulelab.integrations import JoulelabCallback

with joulelab.measure("training") as m:
    with m.window("step"):
        pass
energy: float | None = m.energy_j
reveal_type(m)


@joulelab.measured("work")
def work(n: int) -> int:
    return n * n


reveal_type(work(3))
reveal_type(joulelab.load("last"))
joulelab.measure(repeats=3)
"""


def test_a_users_file_is_checked_in_strict_mode_against_our_types(tmp_path):
    """As for an installed package: its types count because of py.typed, and a wrong argument is an error."""
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER_FILE)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    done = subprocess.run(
        [*command, "--config-file=", "--cache-dir", tmp_path / "cache", "user.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    revealed = [line.split("note: Revealed type is ")[1].strip('"') for line in lines if "Revealed" in line]
    assert [name.rpartition(".")[2] for name in revealed] == ["Measurement", "int", "LoadedRun"], done.stdout
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == 1 and "measure" in errors[0] and "repeats" in errors[0], done.stdout


def test_the_package_is_marked_as_typed():
    assert (REPOSITORY / "src" / "joulelab" / "py.typed").exists()


def test_the_version_is_the_same_everywhere():
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert PROJECT["version"] == joulelab.__version__
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == joulelab.__version__


def test_no_python_version_is_excluded_and_the_tested_ones_are_named():
    assert PROJECT["requires-python"] == ">=3.11"
    named = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: Python :: 3" in text}
    assert named == {"3.11", "3.12", "3.13", "3.14"}


def test_the_address_of_the_repository_is_a_placeholder_in_one_place():
    (address,) = PROJECT["urls"].values()
    placeholder = address.rpartition("/")[2]
    listed = subprocess.run(["git", "grep", "-l", placeholder], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode > 1:
        pytest.skip("not a git checkout")
    assert listed.stdout.split() in ([], ["pyproject.toml"])


def test_no_page_pretends_that_the_package_is_published():
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]
    wrong = [page.name for page in pages if re.search(r"pip install joulelab\b(?!\[)", page.read_text())]
    assert len(pages) > 30 and not wrong
