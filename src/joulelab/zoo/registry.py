"""Models by the name a user writes: one of the zoo's, or a Python file of the user's own that holds a `MODEL`.

Nothing here imports a framework; a file of the user's may.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from joulelab import lookup
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.zoo.entry import ZooEntry

GUIDE = "docs/add-a-model.md shows a whole one"


def find_model(name: str) -> ZooEntry:
    """The entry behind `gpt2`, or the MODEL of `./my_model.py`."""
    if is_file(name):
        return _from_file(Path(name).expanduser())
    if name not in lookup.ZOO.names() and Path(f"{name}.py").is_file():
        raise NotFoundError(f"unknown model '{name}'", f"for your own file write ./{name}.py")
    if name not in lookup.ZOO.names():
        raise lookup.unknown("model", name, lookup.ZOO.names(), "`joulelab zoo` lists them; ./FILE.py is one of yours")
    entry: ZooEntry = lookup.ZOO.resolve(name)
    return entry


def is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def all_models() -> list[ZooEntry]:
    return [lookup.ZOO.resolve(name) for name in lookup.ZOO.names()]


def absent_packages(entry: ZooEntry) -> list[str]:
    return [name for name in entry.needs if find_spec(name) is None]


def require_packages(entry: ZooEntry) -> None:
    absent = absent_packages(entry)
    if absent:
        raise DependencyMissing(
            f"{entry.name} needs {' and '.join(absent)}, not installed here", f'pip install "joulelab[{entry.extra}]"'
        )


def _from_file(path: Path) -> ZooEntry:
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "name a model of `joulelab zoo` or a .py file")
    if path.suffix != ".py":
        raise NotFoundError(f"{path} is not a Python file", f"a model is a .py file with a MODEL; {GUIDE}")
    entry = getattr(lookup.import_file(path.resolve(), GUIDE), "MODEL", None)
    if entry is None:
        raise ConfigError(f"{path} has no MODEL", f"write MODEL = ZooEntry(...) at its top level; {GUIDE}")
    if not isinstance(entry, ZooEntry):
        raise ConfigError(f"MODEL in {path} is a {type(entry).__name__}, expected a ZooEntry", GUIDE)
    if not entry.sizes:
        raise ConfigError(f"MODEL in {path} has no sizes", f"give it at least one Size; {GUIDE}")
    return entry
