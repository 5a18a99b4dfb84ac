"""YAML as people mean it: `3e-4` is a number, and mistakes are answered with file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec_errors import brief


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where 3e-4 without a dot is text; everyone writing a learning rate means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.(?:inf|nan))$",
        re.I,
    ),
    list("-+0123456789."),
)


_YAML_HINT = "check brackets, quotes and indentation there; YAML is indented with spaces, not tabs"


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"{where}{line}: not valid YAML ({problem})", _YAML_HINT) from None


def read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(
            f"no such file: {path}", "give the path of a YAML file or the name of an experiment"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "give a YAML file in UTF-8 that you may read") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: expected `key: value` lines, found {brief(value)}",
            "`joulelab run demo-kd --dry-run` prints settings to start from",
        )
    return value


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
