"""Options that several verbs share, worded once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.errors import UsageError
from joulelab.units import J_PER_KWH, J_PER_WH

if TYPE_CHECKING:
    from joulelab.runs.phases import Phase
    from joulelab.runs.sharding import Shard
    from joulelab.runs.spec import RunSpec


RunsDir = Annotated[
    Path | None,
    typer.Option("--runs-dir", help="Where runs are kept (default: JOULELAB_RUNS, else ./runs).", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Require = Annotated[
    str | None,
    typer.Option("--require", metavar="measured", help="Do not start where nothing can be measured (exit code 3)."),
]
RequireGrade = Annotated[
    str | None,
    typer.Option("--require-grade", metavar="A|B|C", help="The lowest validity grade that is accepted (exit code 4)."),
]
SeveralRuns = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Runs or groups: an id, its beginning or end, a folder, a pattern in quotes, or `last`."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline", metavar="LABEL", help="What the others are compared with (default: the group's, or the first)."
    ),
]
QualityName = Annotated[
    str | None,
    typer.Option(
        "--quality", metavar="NAME", help="The result that is compared, as `exact_match` (default: the runs' main one)."
    ),
]
IncludeRepeated = Annotated[
    bool,
    typer.Option(
        "--include-repeated", help="Count work that was done again after an interruption as energy of the method."
    ),
]


# `--budget 500kJ`: how much a student may train, as people write it, turned into the settings of its pipeline.


_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([A-Za-z]+)")
_JOULES = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9, "Wh": J_PER_WH, "kWh": J_PER_KWH}
_TOKENS = {"tokens": 1, "ktokens": 1_000, "Mtokens": 1_000_000, "Gtokens": 1_000_000_000}


_LIMITS = ("budget.energy_j", "budget.tokens", "training.max_energy_j", "training.max_tokens")


def budget_settings(text: str, experiment: str, overrides: Iterable[str] = ()) -> list[str]:
    """As `key.path=value`. It takes the place of the experiment's own limits, so that one thing alone is equal."""
    _require_no_other_limit(text, overrides)
    energy_j, tokens = parse_budget(text)
    if all("budget" in model.model_fields for model in _models(experiment)):
        found = {"budget.energy_j": energy_j, "budget.tokens": tokens}
    else:
        found = {"training.max_energy_j": energy_j, "training.max_tokens": tokens, "training.epochs": None}
    return [f"{key}={'null' if value is None else value}" for key, value in found.items()]


def _require_no_other_limit(text: str, overrides: Iterable[str]) -> None:
    """Two answers to one question: whichever held, it would be the wrong one for somebody."""
    from joulelab.runs.spec import parse_overrides

    given = parse_overrides(overrides)
    for key in _LIMITS:
        section, _, name = key.partition(".")
        inside = given.get(section)
        if isinstance(inside, dict) and inside.get(name) is not None:
            raise UsageError(
                f"--budget {text} and {key}={inside[name]} both say how much may be trained", "leave one of them out"
            )


def parse_budget(text: str) -> tuple[float | None, int | None]:
    """Joules or tokens, whichever it is."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = match.group(2) if match else ""
    if match is None or unit not in {*_JOULES, *_TOKENS} or float(match.group(1)) <= 0:
        raise UsageError(
            f"'{text}' is not a budget",
            f"a number and a unit: {', '.join(_JOULES)} for joules, {', '.join(_TOKENS)} for tokens; for example 500kJ",
        )
    amount = float(match.group(1))
    if unit in _JOULES:
        return amount * _JOULES[unit], None
    tokens = round(amount * _TOKENS[unit], 6)  # 4.1 ktokens are 4100, whatever their product's last bit says
    if tokens != int(tokens):
        raise UsageError(f"'{text}' are {tokens:g} tokens, and there are no parts of a token", "name a whole number")
    return None, int(tokens)


def _models(experiment: str) -> Iterable[type[RunSpec]]:
    from joulelab import lookup
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_experiment, read_layers

    settings = read_layers(experiment)
    names = [str(member["experiment"]) for member in settings["members"]] if is_group(settings) else [experiment]
    return [lookup.PIPELINE_SPECS.resolve(str(read_experiment(name).get("pipeline"))) for name in names]


# `--compare`: in place of one experiment the group that sets it beside others, on the same data and budget.


def comparison_of(experiment: str | None) -> str:
    """A group is its own answer; of several that hold the experiment, the one it is named after."""
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import experiment_names, read_layers

    if experiment is None:
        raise UsageError("--compare needs an experiment", "for example: joulelab run fitnets --compare")
    if is_group(read_layers(experiment)):
        return experiment
    groups = {name: layers for name in experiment_names() if is_group(layers := read_layers(name))}
    holding = [
        name for name, layers in groups.items() if experiment in {row["experiment"] for row in layers["members"]}
    ]
    named_after = [name for name in holding if experiment.startswith(f"{name}-")]
    found = named_after or holding
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{experiment} is a member of several groups", f"name one of them: {', '.join(found)}")
    raise UsageError(
        f"no group sets {experiment} beside others", f"these are compared as they stand: {', '.join(groups)}"
    )


# `--data-script NAME`: one step of a language-model experiment by itself, turned into the settings that stop there.


def rehearsed(experiment: str) -> str:
    """Whose meter a prerun takes: the experiment's; of a group its first member's."""
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_layers

    settings = read_layers(experiment)
    return str(settings["members"][0]["experiment"]) if is_group(settings) else experiment


def script_settings(script: str, experiment: str, overrides: Sequence[str]) -> list[str]:
    """As `key.path=value`; what the user writes comes after them and wins."""
    from joulelab.distill.causal.phases import data_script_settings
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import parse_overrides, read_layers

    settings = read_layers(experiment)
    if is_group(settings):
        named = ", ".join(dict.fromkeys(str(member["experiment"]) for member in settings["members"]))
        raise UsageError(f"{experiment} is a group; a data script is a step of one experiment", f"name one of {named}")
    pipeline = str(parse_overrides(overrides).get("pipeline", settings.get("pipeline")))
    asked = data_script_settings(script, str(settings["name"]), overrides, pipeline)
    users = _USERS.get(script)
    if users and pipeline not in users:
        raise UsageError(
            f"{experiment} (pipeline {pipeline}) uses nothing that {script} makes",
            f"name an experiment with the pipeline {' or '.join(users)}: {experiment_like(users[0], experiment)}",
        )
    return asked


# Which pipelines find what a step of the teacher's made.
_USERS = {
    "logit_caching": ("kd",),
    "synthetic_generation": ("synthetic", "dpo"),
    "preference_dataset": ("dpo",),
}


def experiment_like(pipeline: str, experiment: str) -> str:
    """`kd-small` beside `sft-small`; of another name the smallest there is."""
    from joulelab.runs.spec import experiment_names

    beside = f"{pipeline}-{experiment.partition('-')[2]}"
    return beside if beside in experiment_names() else f"{pipeline}-tiny"


# `--shard 2/8`: this task's share of a teacher's work, turned into the settings of the run that does it.


ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="With --part teacher, or a data script of the teacher's: do only share I of N of it, counted from 0. "
        "Tasks may run anywhere, at any time; the run that comes after joins what they made.",
    ),
]


def read_share(text: str | None, part: Phase | None, data_script: str | None) -> Shard | None:
    from joulelab.runs.sharding import Shard

    if text is None:
        return None
    if part != "teacher" and data_script is None:
        raise UsageError(
            f"--shard {text} does not say of which work",
            "--part teacher: all that the experiment needs of its teacher; --data-script logit_caching, "
            "synthetic_generation or preference_dataset: one step of it",
        )
    return Shard.parse(text)
