"""Settings described from the models that check them, so that documentation and behaviour cannot part."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from joulelab import lookup


@dataclass(frozen=True)
class Setting:
    key: str
    takes: str
    default: str
    about: str


def describe(model: type[BaseModel], key: str = "") -> list[Setting]:
    """The setting of that name, or all settings below that section; all of them for the empty key."""
    rows = list(_walk(model, ""))
    found = [row for row in rows if not key or row.key == key or row.key.startswith(key + ".")]
    if not found:
        raise lookup.unknown("setting", key, [row.key for row in rows])
    return found


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield Setting(prefix + name, "section", "", field.description or "")
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, _takes(field), _default(field), field.description or "")


def _takes(field: FieldInfo) -> str:
    annotation = field.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    words = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    limits = ", ".join(str(limit) for limit in field.metadata)
    return words.get(name, name.replace("typing.", "")) + (f", {limits}" if limits else "")


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() else str(field.default)
