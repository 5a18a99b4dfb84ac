"""`joulelab zoo`: the models, and what one of them should cost on paper."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson

if TYPE_CHECKING:
    from joulelab.zoo.entry import ZooEntry


def zoo(
    name: Annotated[str | None, typer.Argument(help="One model, or a .py file of yours that holds a MODEL.")] = None,
    size: Annotated[
        str, typer.Option("--size", help="Which size is costed on paper (default: the published one).")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the models that `joulelab train` knows, or tell one's sizes, inputs and cost on paper.

    The list needs no framework. What one model costs (FLOPs per item, bytes) is counted by building it without memory,
    which needs the packages the model needs.

    Examples:

      joulelab zoo

      joulelab zoo gpt2 --size base
    """
    from joulelab.report.zoo_table import listing_grid, model_grids, paper_grids
    from joulelab.zoo.registry import all_models, find_model

    if name is None:
        rows = [describe(entry) for entry in all_models()]
        _print(rows, [listing_grid(rows)], as_json)
        return
    entry = find_model(name)
    row, cost = describe(entry), on_paper(entry, size)
    grids = [*model_grids(row), *(paper_grids(cost, entry.item) if cost else ())]
    _print({**row, "on_paper": cost}, grids, as_json)


def describe(entry: ZooEntry) -> dict[str, Any]:
    from joulelab.zoo.registry import absent_packages

    absent = absent_packages(entry)
    return {
        "name": entry.name,
        "family": entry.family,
        "task": entry.task,
        "item": entry.item,
        "about": entry.about,
        "dataset": entry.dataset,
        "needs": {package: package not in absent for package in entry.needs},
        "sizes": [
            {
                "name": size_name,
                "parameters": size.parameters,
                "shape": dict(size.shape),
                "batch_size": size.batch_size,
                "hub_id": size.hub_id,
            }
            for size_name, size in entry.sizes.items()
        ],
    }


def on_paper(entry: ZooEntry, size: str) -> dict[str, Any] | None:
    """None, with a word on stderr, where the packages to build the model are not installed."""
    from joulelab import lookup
    from joulelab.zoo.registry import absent_packages
    from joulelab.zoo.request import WorkloadRequest

    request = WorkloadRequest(entry, size)
    absent = [package for package in ("torch", *absent_packages(entry)) if not _installed(package)]
    if absent:
        need = f'{" and ".join(absent)} to count FLOPs and bytes: pip install "joulelab[{entry.extra}]"'
        print(f"not costed on paper; it takes {need}", file=sys.stderr)
        return None
    told: dict[str, Any] = lookup.CALCULATIONS.resolve("paper-cost")(request)
    return told


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _print(data: Any, grids: list[Any], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(data, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.grid import to_rich

    print_result(*map(to_rich, grids))
