"""The tour names files, functions, rooms and an order of imports; each of them is as it says."""

from __future__ import annotations

import re
import tomllib

import pytest
from documents import PACKAGE, ROOT, definitions, document, every_definition, module_file

TOUR = document("docs/tour.md")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TOUR)))
OBJECTS = [text for text in QUOTED if re.fullmatch(r"[a-z_.]+:[A-Za-z_.]+", text)]
FILES = [text for text in QUOTED if re.fullmatch(r"(src|scripts|docs|tests)/\S+|pyproject\.toml", text)]
SHORT_FILES = [text for text in QUOTED if re.fullmatch(r"[a-z_]+/(\w+\.py)?", text)]
CALLS = [text for text in QUOTED if re.fullmatch(r"\w+\(\)", text)]


def layers() -> list[str]:
    """The contract, from left to right; a room that need not exist yet is in parentheses."""
    contracts = tomllib.loads(document("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    return list(reversed(next(contract["layers"] for contract in contracts if contract["type"] == "layers")))


def test_the_tour_names_enough_to_be_worth_checking() -> None:
    assert len(OBJECTS) > 15
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES)
def test_every_file_of_the_tour_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", SHORT_FILES)
def test_every_room_and_file_named_without_its_root_exists(path: str) -> None:
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


def test_every_room_is_on_the_tour() -> None:
    rooms = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    names = {room.relative_to(PACKAGE).as_posix() + "/" for room in rooms}
    missing = sorted(name for name in names if f"`{name}`" not in TOUR and f"src/joulelab/{name}" not in TOUR)
    assert not missing, f"docs/tour.md does not mention {missing}"


def test_the_import_order_of_the_tour_is_the_contract() -> None:
    (order,) = re.findall(r"```text\n(errors < .*?)\n```", TOUR, re.DOTALL)
    assert [room.strip() for room in order.split("<")] == layers()


def test_rooms_in_parentheses_are_those_that_are_not_built() -> None:
    built = {room for room in layers() if module_file(room.strip("()"))}
    assert {room for room in layers() if room not in built} == {room for room in layers() if room.startswith("(")}
