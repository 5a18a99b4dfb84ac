"""Trackers by the name a user writes: one of ours, or a Python file of the user's own that holds one."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from joulelab import lookup
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.train.stats.hooks import TrainerStats

GUIDE = "docs/add-a-tracker.md shows a whole one"


def load_tracker(name: str) -> TrainerStats:
    """The tracker behind `simple`, or the only one in `./my_tracker.py`."""
    if is_file(name):
        return _made(name, _only_tracker(Path(name).expanduser()))
    if name not in lookup.TRAINER_STATS.names() and Path(f"{name}.py").is_file():
        raise NotFoundError(f"unknown trainer stats '{name}'", f"for your own file write ./{name}.py")
    tracker: TrainerStats = lookup.TRAINER_STATS.resolve(name)()
    return tracker


def is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _made(name: str, kind: type[TrainerStats]) -> TrainerStats:
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} in {name} cannot be made without arguments: {error}", GUIDE) from error


def _only_tracker(path: Path) -> type[TrainerStats]:
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "name one of our trackers or a .py file of yours")
    if path.suffix != ".py":
        raise NotFoundError(f"{path} is not a Python file", f"a tracker is a class in a .py file; {GUIDE}")
    module = _imported(path.resolve())
    kinds: list[type] = [value for value in vars(module).values() if isinstance(value, type)]
    found = [kind for kind in kinds if issubclass(kind, TrainerStats) and kind.__module__ == module.__name__]
    if not found:
        raise ConfigError(f"{path} holds no tracker", f"write one class that extends TrainerStats; {GUIDE}")
    if len(found) > 1:
        names = " and ".join(kind.__name__ for kind in found)
        raise ConfigError(f"{path} holds several trackers: {names}", "put each into a file of its own")
    return found[0]


def _imported(path: Path) -> ModuleType:
    """Run the file; it is registered under a name of its own, as dataclasses and the like look themselves up."""
    name = f"joulelab_user_tracker_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        text = f"{path}{_line_in(path, error)}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            raise DependencyMissing(text, f"pip install {error.name}") from error
        raise ConfigError(text, GUIDE) from error
    return module


def _line_in(path: Path, error: Exception) -> str:
    """The last line of the user's own file that the error went through."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""
