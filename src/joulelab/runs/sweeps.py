"""A sweep: one experiment under every combination of some settings, each repeated with its own seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from joulelab.errors import UsageError
from joulelab.runs.spec import RunSpec, check, merge, nest

Axes = Mapping[str, Sequence[Any]]
"""key.path -> the values it takes."""


def sweep_specs(settings: Mapping[str, Any], axes: Axes, repeats: int) -> list[RunSpec]:
    """The members in the order in which they run.

    All configurations once, then all again with the next seed: what drifts over hours (temperature, neighbours) then
    falls on every configuration alike, and a sweep that is cut off has whole rounds.
    """
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}; expected at least 1", "each repeat has a seed of its own")
    _require_distinct(axes)
    first = settings.get("seed", 0)
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [
        check(_member(settings, point, first + number if isinstance(first, int) else first))
        for number in range(repeats)
        for point in points
    ]


def _member(settings: Mapping[str, Any], point: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    made = merge(settings, {"seed": seed, "label": label_of(point)} if point else {"seed": seed})
    for key, value in point.items():
        made = merge(made, nest(key, value))
    return made


def label_of(point: Mapping[str, Any]) -> str:
    """`batch_size=8, precision=bf16`"""
    return ", ".join(f"{short_name(key, point)}={value}" for key, value in point.items())


def short_name(key: str, keys: Mapping[str, Any] | Sequence[str]) -> str:
    """The last part of a setting's name where that tells it apart from the others."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _require_distinct(axes: Axes) -> None:
    for key, values in axes.items():
        if key == "seed":
            raise UsageError("seeds are what repeats differ in", "write --repeats N, and --seed for the first of them")
        repeated = [value for number, value in enumerate(values) if value in values[:number]]
        if repeated:
            raise UsageError(f"{key} has the value {repeated[0]} twice", "for repeats write --repeats N")
