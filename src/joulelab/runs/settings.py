"""Settings described from the models that check them, so that documentation and behaviour cannot part."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from joulelab import lookup
from joulelab.errors import UsageError
from joulelab.runs.spec import RunSpec, experiment_names
from joulelab.runs.spec_errors import model_in


@dataclass(frozen=True)
class Setting:
    key: str
    takes: str
    default: str
    about: str


@dataclass(frozen=True)
class Explained:
    """Settings, whose they are, and who has a setting of that name that is described otherwise."""

    rows: tuple[Setting, ...]
    pipelines: tuple[str, ...]
    otherwise: tuple[str, ...] = ()


def explained(key: str = "", pipeline: str | None = None) -> Explained:
    """What a key means in the pipeline, or in those that have it; without both, what all pipelines have in common."""
    if pipeline is not None:
        return Explained(tuple(describe(lookup.PIPELINE_SPECS.resolve(pipeline), key)), (pipeline,))
    names = lookup.PIPELINE_SPECS.names()
    if not key:
        return Explained(tuple(describe(RunSpec)), tuple(names))
    whole = {name: list(_walk(lookup.PIPELINE_SPECS.resolve(name), "")) for name in names}
    told = {name: tuple(_below(rows, key)) for name, rows in whole.items()}
    having = [name for name in names if told[name]]
    if not having:
        _require_no_other_name(key, names)
        known = {row.key for rows in whole.values() for row in rows}
        raise lookup.unknown("setting", key, known, f"pipelines, for --pipeline: {', '.join(names)}")
    alike = {name: [other for other in having if told[other] == told[name]] for name in having}
    first = max(having, key=lambda name: len(alike[name]))  # as most of them understand it
    others = tuple(name for name in having if name not in alike[first])
    return Explained(told[first], tuple(alike[first]), others)


def _require_no_other_name(key: str, pipelines: Iterable[str]) -> None:
    """Names of other things are answered with the command that tells of them."""
    if key in experiment_names():
        raise UsageError(
            f"{key} is an experiment, not a setting",
            f"`joulelab run {key} --dry-run` prints its settings, `joulelab experiments` lists all experiments",
        )
    if key in pipelines:
        raise UsageError(
            f"{key} is a pipeline, not a setting", f"`joulelab explain --pipeline {key}` tells its settings"
        )
    if key in lookup.ZOO.names():
        raise UsageError(f"{key} is a model, not a setting", f"`joulelab zoo {key}` tells about it")


def describe(model: type[BaseModel], key: str = "") -> list[Setting]:
    """The setting of that name, or all settings below that section; all of them for the empty key."""
    rows = list(_walk(model, ""))
    found = _below(rows, key)
    if not found:
        raise lookup.unknown("setting", key, [row.key for row in rows])
    return found


def _below(rows: Iterable[Setting], key: str) -> list[Setting]:
    return [row for row in rows if not key or row.key == key or row.key.startswith(key + ".")]


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is not None:
            optional = field.annotation is not inner
            about = field.description or ""
            yield Setting(prefix + name, "section" + " or nothing" * optional, "None" * optional, about)
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
    return ", ".join([name, *(f"{word} {_number(bound)}" for word, bound in bounds if bound is not None)])


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


# attributes of pydantic's metadata, in words
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    return ", ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
