"""The documents and the source tree, as the tests of this folder read them; nothing is imported, so nothing is slow."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "joulelab"


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def all_documents() -> list[Path]:
    """Everything a reader may follow links in."""
    return sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md"), *ROOT.glob("*.md")])


def module_file(module: str) -> Path | None:
    """`runs.execute` -> its file, whether it is a module or a package."""
    place = PACKAGE.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions, classes, methods (`Class.method`) and top-level names of a file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= set(_names(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(names)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def every_definition() -> set[str]:
    """The last part of every name defined anywhere in the package."""
    return {name.rpartition(".")[2] for path in PACKAGE.rglob("*.py") for name in definitions(path)}
