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
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    for python, plain in (*words.items(), (" | None", " or nothing"), ("tuple[", "list of ["), (", ...]", "]")):
        name = name.replace(python, plain)
    bounds = [(word, getattr(limit, key, None)) for limit in field.metadata for key, word in _BOUNDS]
    return ", ".join([name, *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)])


# attributes of pydantic's metadata, in words
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    return ", ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
