"""Pydantic's findings in the user's words: the key, what was found, what was expected, the nearest right name."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from joulelab.errors import ConfigError
from joulelab.lookup import nearest

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
    "dict_type": "a section with keys of its own",
}


def explain(
    error: ValidationError, model: type[BaseModel], hint: str = "`joulelab explain KEY` describes a setting"
) -> ConfigError:
    findings = [_sentence(dict(finding), model) for finding in error.errors()]
    return ConfigError("\n".join(findings), f"{hint}; nothing was started")


def _sentence(finding: dict[str, Any], model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in finding["loc"])
    kind = finding["type"]
    if kind == "extra_forbidden":
        parent = finding["loc"][:-1]
        names = field_names(model, parent)
        guess = nearest(str(finding["loc"][-1]), names)
        prefix = "".join(f"{part}." for part in parent)
        meant = f"{prefix}{guess}" if guess else _elsewhere(model, str(finding["loc"][-1]))
        return f"unknown setting {key}; " + (
            f"did you mean {meant}?" if meant else f"known here: {', '.join(prefix + name for name in names)}"
        )
    if kind == "missing":
        return f"{key} is not set; it has no default"
    if kind == "value_error":  # a check of ours, which has its own sentence
        return f"{key + ': ' if key else ''}{finding['ctx']['error']}"
    return f"{key}: {expected_and_found(finding)}"


def expected_and_found(finding: Mapping[str, Any]) -> str:
    """One finding of pydantic without its key: `expected a number greater than 0, found -1`."""
    expected = _EXPECTED.get(finding["type"]) or finding["msg"].removeprefix("Input should be ")
    if expected.startswith(("greater than", "less than")):
        expected = f"a number {expected}"
    return f"expected {expected}, found {brief(finding['input'])}"


def _elsewhere(model: type[BaseModel], name: str, prefix: str = "") -> str | None:
    """The same name in another section: `learning_rate` is `training.learning_rate`."""
    for field, info in model.model_fields.items():
        inner = model_in(info.annotation)
        if inner is not None and name in inner.model_fields:
            return f"{prefix}{field}.{name}"
        if inner is not None and (found := _elsewhere(inner, name, f"{prefix}{field}.")):
            return found
    return None


def brief(value: Any) -> str:
    kind = {list: "a list ", dict: "a section ", str: "the text ", type(None): "nothing "}.get(type(value), "")
    text = repr(value)
    return f"{kind}{text[:60]}{'…' if len(text) > 60 else ''}"


def field_names(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the settings below a path of keys."""
    for part in path:
        if isinstance(part, int):  # a place in a list, whose items' model this is already
            continue
        if part not in model.model_fields:
            return []
        annotation = model.model_fields[part].annotation
        inner = model_in(get_args(annotation)[0] if get_origin(annotation) is tuple else annotation)
        if inner is None:
            return []
        model = inner
    return sorted(model.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for arg in get_args(annotation) if (found := model_in(arg))), None)
    return None
