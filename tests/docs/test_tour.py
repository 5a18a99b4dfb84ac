"""Files, functions, packages and the order of imports that the tour names exist, and its story is short."""

from __future__ import annotations

import re
import tomllib

import pytest
from documents import PACKAGE, ROOT, definitions, document, every_definition, module_file

TOUR = document("docs/tour.md")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TOUR)))
OBJECTS = [text for text in QUOTED if re.fullmatch(r"[a-z_.]+:[A-Za-z_.]+", text)]
FILES = [text for text in QUOTED if re.fullmatch(r"(src|scripts|docs|tests)/\S+|pyproject\.toml", text)]
SHORT_FILES = [text for text in QUOTED if re.fullmatch(r"[a-z_]+/(\w+\.py)?", text) and text not in FILES]
STORY = TOUR[TOUR.index("## The story") :].split("\n## ")[0]
LONGEST_STORY = 12  # files
CALLS = [text for text in QUOTED if re.fullmatch(r"\w+\(\)", text)]


def layers() -> list[str]:
    """The contract, from left to right; a package that need not exist yet is in parentheses."""
    contracts = tomllib.loads(document("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    return list(reversed(next(contract["layers"] for contract in contracts if contract["type"] == "layers")))


def test_the_tour_names_enough_to_be_worth_checking() -> None:
    assert len(OBJECTS) > 15
    assert len(FILES) > 15


def test_the_tour_covers_at_most_twelve_files() -> None:
    quoted = re.findall(r"`([^`\n]+)`", STORY)
    files = {ROOT / text for text in quoted if text in FILES}
    files |= {PACKAGE / text for text in quoted if text in SHORT_FILES}
    files |= {module_file(text.partition(":")[0]) for text in quoted if text in OBJECTS}
    assert 8 <= len(files) <= LONGEST_STORY, sorted(map(str, files))
    assert len(re.findall(r"^\d+\. ", STORY, re.MULTILINE)) == len(files), "one step per file"


@pytest.mark.parametrize("path", FILES)
def test_every_file_of_the_tour_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", SHORT_FILES)
def test_every_package_and_file_named_without_its_root_exists(path: str) -> None:
    assert (PACKAGE / path).exists()


@pytest.mark.parametrize("target", OBJECTS)
def test_every_object_of_the_tour_exists(target: str) -> None:
    module, _, name = target.partition(":")
    path = module_file(module)
    assert path is not None, f"there is no module joulelab.{module}"
    assert name in definitions(path), f"joulelab.{module} defines no {name}"


@pytest.mark.parametrize("call", CALLS)
def test_every_function_named_alone_is_defined_somewhere(call: str) -> None:
    assert call.removesuffix("()") in every_definition()


def test_every_package_is_on_the_tour() -> None:
    packages = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    names = {package.relative_to(PACKAGE).as_posix() + "/" for package in packages}
    missing = sorted(name for name in names if f"`{name}`" not in TOUR and f"src/joulelab/{name}" not in TOUR)
    assert not missing, f"docs/tour.md does not mention {missing}"


def test_the_import_order_of_the_tour_is_the_contract() -> None:
    (order,) = re.findall(r"```text\n(errors < .*?)\n```", TOUR, re.DOTALL)
    assert [package.strip() for package in order.split("<")] == layers()


def test_packages_in_parentheses_are_those_that_do_not_exist() -> None:
    existing = {package for package in layers() if module_file(package.strip("()"))}
    assert set(layers()) - existing == {package for package in layers() if package.startswith("(")}
