"""The flags of `joulelab train`: which setting each one sets, and how its text is read.

The course writes `--batch_size`; `--batch-size` is understood as well. A sweep reads the same flags with commas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from joulelab.errors import UsageError

TRAINERS = {"simple": "none", "ddp": "ddp", "fsdp": "fsdp"}
DEFAULT_TRACKER = "no-op"


@dataclass(frozen=True)
class Asked:
    """One setting, as the user wrote it."""

    key: str
    text: str
    read: Callable[[str], Any]
    is_list: bool = False
    """Its commas separate what belongs together."""

    @property
    def value(self) -> Any:
        return self.read(self.text)

    @property
    def values(self) -> list[Any]:
        """One for each piece between commas, for a sweep."""
        return [self.value] if self.is_list else [self.read(text) for text in split_at_commas(self.text)]


def _yaml(text: str) -> Any:
    from joulelab.runs.yaml_text import parse_yaml

    return parse_yaml(text, f"'{text}'")


def _minutes(text: str) -> Any:
    minutes = _yaml(text)
    return 60.0 * minutes if isinstance(minutes, int | float) else minutes


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] or [DEFAULT_TRACKER]


def _trainer(text: str) -> str:
    if text not in TRAINERS:
        from joulelab.lookup import unknown

        raise unknown("trainer", text, TRAINERS)
    return TRAINERS[text]


# flag -> setting and reader; names stay text (YAML would make `off` false), the rest is read as in `key.path=value`
FLAGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "size": ("size", str),
    "trainer": ("training.parallel", _trainer),
    "batch_size": ("training.batch_size", _yaml),
    "accumulate": ("training.accumulate", _yaml),
    "learning_rate": ("training.learning_rate", _yaml),
    "optimizer": ("training.optimizer", str),
    "precision": ("training.precision", str),
    "compile": ("training.compile", str),
    "epochs": ("training.epochs", _yaml),
    "max_steps": ("training.max_steps", _yaml),
    "max_time_minutes": ("training.max_time_s", _minutes),
    "dataset": ("dataset", str),
    "dataset_split": ("dataset_split", str),
    "train_stats": ("training.stats", _names),
    "weights": ("weights", str),
    "seed": ("seed", _yaml),
    "device": ("device", str),
    "require": ("energy.require", str),
    "require_grade": ("energy.require_grade", str),
}


def asked_settings(params: Mapping[str, Any]) -> list[Asked]:
    """The flags that were given, then the settings written as key.path=value, which are the more precise."""
    flags = [Asked(*_setting(name, params[name])) for name in FLAGS if params.get(name) is not None]
    switches = [
        Asked(key, "true", _yaml)
        for key, name in (("save_model", "save_model"), ("energy.estimate_cpu", "estimate_cpu"))
        if params.get(name)
    ]
    return [*flags, *switches, *map(read_override, [*(params.get("settings") or ()), *(params.get("overrides") or ())])]


def _setting(name: str, text: str) -> tuple[str, str, Callable[[str], Any], bool]:
    key, read = FLAGS[name]
    return key, text, read, read is _names


def read_override(text: str) -> Asked:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or ".." in key or key.startswith("."):
        raise UsageError(f"'{text}' is not a setting", "write key.path=value, for example training.clip_norm=0.5")
    if key.strip() == "training.stats" and not value.startswith("["):
        return Asked("training.stats", value, _names, is_list=True)
    return Asked(key.strip(), value, _yaml)


def split_at_commas(text: str) -> list[str]:
    """`8,16` is two; the commas inside `[0.9, 0.95]` or quotes belong to one value."""
    return ["".join(piece).strip() for piece in _pieces(text)]


def _pieces(text: str) -> Iterator[list[str]]:
    piece: list[str] = []
    depth, quote = 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield piece
            piece = []
            continue
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "[{") - (letter in "]}")
        piece.append(letter)
    yield piece
