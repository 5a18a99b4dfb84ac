"""Trackers by the name a user writes: one of ours, or a Python file of the user's own that holds one."""

from __future__ import annotations

from pathlib import Path

from joulelab import lookup
from joulelab.errors import ConfigError, NotFoundError
from joulelab.train.stats.hooks import TrainerStats
from joulelab.zoo.registry import is_file

GUIDE = "docs/add-a-tracker.md shows a whole one"


def load_tracker(name: str) -> TrainerStats:
    """The tracker behind `simple`, or the only one in `./my_tracker.py`."""
    if is_file(name):
        return _made(name, _only_tracker(Path(name).expanduser()))
    if name not in lookup.TRAINER_STATS.names() and Path(f"{name}.py").is_file():
        raise NotFoundError(f"unknown trainer stats '{name}'", f"for your own file write ./{name}.py")
    tracker: TrainerStats = lookup.TRAINER_STATS.resolve(name)()
    return tracker


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
    module = lookup.import_file(path.resolve(), GUIDE)
    kinds: list[type] = [value for value in vars(module).values() if isinstance(value, type)]
    found = [kind for kind in kinds if issubclass(kind, TrainerStats) and kind.__module__ == module.__name__]
    if not found:
        raise ConfigError(f"{path} holds no tracker", f"write one class that extends TrainerStats; {GUIDE}")
    if len(found) > 1:
        names = " and ".join(kind.__name__ for kind in found)
        raise ConfigError(f"{path} holds several trackers: {names}", "put each into a file of its own")
    return found[0]
