"""Options shared by several verbs, and the one way in which options become settings.

A verb declares a table from its option to a setting (`Flag`); `checked_spec` merges base.yaml, the options that were
given and `key.path=value` arguments. Options that stand for several settings (`--budget`, `--data-script`, `--shard`,
`--compare`) are translated here too.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from joulelab.errors import NOTHING_STARTED, ConfigError, UsageError
from joulelab.redaction import printable
from joulelab.units import J_PER_KWH, J_PER_WH

if TYPE_CHECKING:
    from joulelab.runs.phases import Phase, Shard
    from joulelab.runs.spec import RunSpec


# -v and -q, the same on every verb.

Detail = Literal["quiet", "normal", "verbose"]
_DETAIL: ContextVar[Detail] = ContextVar("detail", default="normal")


def detail() -> Detail:
    """How much the verb that is running prints."""
    return _DETAIL.get()


@contextmanager
def detail_level(level: Detail) -> Iterator[None]:
    token = _DETAIL.set(level)
    try:
        yield
    finally:
        _DETAIL.reset(token)


def with_detail_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb with `-v` and `-q`, which it does not see: it prints through `console.print_answer` and `note`."""
    signature = inspect.signature(verb, eval_str=True)
    flags = {
        "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Print everything.")],
        "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result line.")],
    }

    @functools.wraps(verb)
    def wrapper(*args: Any, verbose: bool = False, quiet: bool = False, **kwargs: Any) -> Any:
        for value in kwargs.values():
            if isinstance(value, typer.Context):  # verbs read their options from it
                for name in flags:
                    value.params.pop(name, None)
        if verbose and quiet:
            raise UsageError("-v and -q were both given", "choose one of them")
        with detail_level("verbose" if verbose else "quiet" if quiet else "normal"):
            return verb(*args, **kwargs)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in flags.items()
    ]
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what typer reads
        parameters=[*signature.parameters.values(), *added]
    )
    wrapper.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()} | flags
    return wrapper


def note(text: str, detail_needed: Detail = "normal") -> None:
    """A message for people on stderr; not with -q, and with `verbose` only with -v."""
    if detail() == "verbose" or (detail() == "normal" and detail_needed == "normal"):
        print(printable(text), file=sys.stderr, flush=True)


# Shell completion: names that exist, without importing a framework.


def complete_runs(incomplete: str) -> list[str]:
    """Runs and groups of the store, newest first."""
    from joulelab.runs.store import group_folders, run_folders, store_root

    store = store_root(None)
    names = [folder.name for folder in (*group_folders(store), *run_folders(store))] if store.is_dir() else []
    return [name for name in ["last", *reversed(names)] if name.startswith(incomplete)]


def complete_experiments(incomplete: str) -> list[str]:
    """Experiments of the package, then YAML files."""
    from joulelab.runs.spec import experiment_names

    names = [*experiment_names(), *(str(path) for path in Path().glob("*.yaml"))]
    return [name for name in names if name.startswith(incomplete)]


def complete_models(incomplete: str) -> list[str]:
    """Zoo models and samples."""
    from joulelab.data.sources import SAMPLES
    from joulelab.zoo.registry import all_models

    names = [*(entry.name for entry in all_models()), *(f"sample:{name}" for name in SAMPLES)]
    return [name for name in names if name.startswith(incomplete)]


def existing_store(runs_dir: Path | None) -> Path:
    """The store for a command that only reads it; it is created by the first run."""
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    if not store.is_dir():
        raise UsageError(
            f"no store at {store.absolute()}",
            "measure something first: joulelab measure -- python train.py; "
            "or set --runs-dir or JOULELAB_RUNS to the directory of your runs",
        )
    return store


# Options of several verbs.

RunsDir = Annotated[
    Path | None,
    typer.Option("--runs-dir", help="Store of runs (default: JOULELAB_RUNS, else ./runs).", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check and print the settings without running; on a terminal those that are not defaults, with -v all.",
    ),
]
EstimateCpu = Annotated[
    bool, typer.Option("--estimate-cpu", help="Also estimate CPU energy from CPU time (labeled as an estimate).")
]
Require = Annotated[
    str | None,
    typer.Option("--require", metavar="measured", help="Refuse to start without a working sensor (exit code 3)."),
]
RequireGrade = Annotated[
    str | None,
    typer.Option("--require-grade", metavar="A|B|C", help="Lowest accepted validity grade (exit code 4)."),
]
Prometheus = Annotated[
    str | None,
    typer.Option(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus at HOST:PORT/metrics; HOST is 127.0.0.1 by default.",
        show_default=False,
    ),
]
SeveralRuns = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs or groups: id (or its start or end), directory, quoted pattern, or `last`.",
        autocompletion=complete_runs,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="LABEL", help="Method to compare with (default: the group's, or the first)."),
]
QualityName = Annotated[
    str | None,
    typer.Option(
        "--quality", metavar="NAME", help="Metric to compare, e.g. `exact_match` (default: the runs' main metric)."
    ),
]
IncludeRepeated = Annotated[
    bool,
    typer.Option(
        "--include-repeated", help="Include energy of work repeated after an interruption in a method's energy."
    ),
]


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help lists its options under the headings of `rich_help_panel`, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is None:
                continue
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(row)
        if "Options" in groups:  # what applies to all groups is last, as --help is
            groups["Options"] = groups.pop("Options")
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


# Options as settings.


@dataclass(frozen=True)
class Flag:
    """The setting that an option sets."""

    key: str
    read: Callable[[str], Any] | None = None
    """Parses the option's text; None: typer has parsed it already."""
    is_list: bool = False
    """Commas separate the items of one value, not the values of a sweep."""
    switch: bool = False
    """An absent switch or empty list (a falsy value) leaves the setting unchanged."""

    def is_given(self, value: Any) -> bool:
        return value is not None and not (self.switch and not value)


@dataclass(frozen=True)
class RequestedSetting:
    """One setting from the command line, unparsed."""

    flag: Flag
    given: Any
    command: str = ""
    parameter: str = ""
    """Of the command's function; empty for `key.path=value`."""

    @property
    def key(self) -> str:
        return self.flag.key

    @property
    def option(self) -> str:
        """As the user typed it, or as the help spells it; empty for `key.path=value`."""
        declared = command_named(self.command).params if self.parameter else ()
        found = next((one for one in declared if one.name == self.parameter), None)
        if found is None:
            return ""
        if found.param_type_name != "option":
            return str(found.metavar or found.name)
        typed = {word.partition("=")[0] for word in sys.argv}
        return str(next((name for name in found.opts if name in typed), found.opts[0]))

    @property
    def text(self) -> str:
        """As the user wrote it."""
        if not self.option:
            return f"{self.key}={self.given}"
        return self.option if self.flag.switch else f"{self.option} {self.given}"

    @property
    def value(self) -> Any:
        return self._read(self.given)

    @property
    def values(self) -> list[Any]:
        """The values of a sweep: one per comma-separated item."""
        if self.flag.read is None or self.flag.is_list:
            return [self.value]
        return [self._read(text) for text in split_at_commas(self.given)]

    def _read(self, text: Any) -> Any:
        if self.flag.read is None:
            return text
        try:
            return self.flag.read(text)
        except UsageError as error:
            if self.option and type(error) is UsageError and self.option not in error.message:
                raise UsageError(f"{self.option}: {error.message}", error.hint) from None
            raise


def command_named(name: str) -> Any:
    """typer's form of `joulelab NAME`, for example of `prepare dump`."""
    from joulelab.cli.main import app

    found: Any = typer.main.get_command(app)
    for word in name.split():
        found = found.commands[word]
    return found


def requested_settings(command: str, flags: Mapping[str, Flag], params: Mapping[str, Any]) -> list[RequestedSetting]:
    """Settings from the options given to `command`, then from `--set` and `key.path=value`. Raises if an option and a
    setting, or the argument with the model and a setting, set the same."""
    options = [
        RequestedSetting(flag, params[name], command, name)
        for name, flag in flags.items()
        if flag.is_given(params.get(name))
    ]
    overrides = [read_override(text) for text in (*(params.get("settings") or ()), *(params.get("overrides") or ()))]
    for override in overrides:
        rivals = [one.text for one in options if one.key == override.key]
        if override.key == "model" and params.get("model"):
            rivals.append(str(params["model"]))
        if rivals:
            raise UsageError(f"{rivals[0]} and {override.text} both set {override.key}", "leave one of them out")
    return [*options, *overrides]


@contextmanager
def options_in_errors(requested: Sequence[RequestedSetting]) -> Iterator[None]:
    """Wrong settings are named by the options that set them: `--norm: expected ...` for `norms.0: expected ...`."""
    try:
        yield
    except ConfigError as error:
        message, listed, known = error.message.partition("known here: ")
        command = ""
        for one in requested:
            if option := one.option:
                command, name = one.command, re.escape(one.key)
                message = re.sub(rf"^(  - )?{name}(\.\d+)?: ", rf"\g<1>{option}: ", message, flags=re.MULTILINE)
                if "_" in name:  # cannot be an ordinary word of the message
                    message = re.sub(rf"(?<![\w.]){name}\b", option, message)
        message = f"{message}{listed}{known}"
        if message == error.message:
            raise
        raise ConfigError(message, f"`joulelab {command} --help` describes the options; {NOTHING_STARTED}") from None


def checked_spec(
    command: str, pipeline: str, flags: Mapping[str, Flag], params: Mapping[str, Any], **fixed: object
) -> RunSpec:
    """base.yaml, the pipeline with its `fixed` settings, then everything requested on the command line; checked."""
    from joulelab.runs.spec import check

    requested = requested_settings(command, flags, params)
    with options_in_errors(requested):
        return check(merged(base_settings(pipeline, **fixed), requested))


def base_settings(pipeline: str, **fixed: object) -> dict[str, Any]:
    from joulelab.runs.spec import BASE, EXPERIMENTS, read_mapping

    return {**read_mapping(EXPERIMENTS / f"{BASE}.yaml"), "pipeline": pipeline, **fixed}


def merged(settings: Mapping[str, Any], requested: Iterable[RequestedSetting]) -> dict[str, Any]:
    from joulelab.runs.spec import merge, nest, overlay

    changes: dict[str, Any] = {}
    for setting in requested:
        changes = overlay(changes, nest(setting.key, setting.value))
    return merge(settings, changes)


def read_override(text: str) -> RequestedSetting:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or ".." in key or key.startswith("."):
        raise UsageError(f"'{text}' is not a setting", "write key.path=value, for example training.clip_norm=0.5")
    key = key.strip()
    if key == "training.stats" and not value.startswith("["):
        return RequestedSetting(Flag(key, read_trackers, is_list=True), value)
    return RequestedSetting(Flag(key, lambda item: read_yaml(item, f"the value of {key}")), value)


def read_yaml(text: str, where: str = "") -> Any:
    from joulelab.runs.spec import parse_yaml

    return parse_yaml(text, where or f"'{text}'")


def read_trackers(text: str) -> list[str]:
    """Names of `training.stats`; none means the tracker that does nothing."""
    return _names(text) or ["no-op"]


def read_names(text: str) -> list[str]:
    found = _names(text)
    if not found:
        raise UsageError(
            f"'{text}' contains no value", "write one value or several separated by commas, or leave it out"
        )
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def split_at_commas(text: str) -> list[str]:
    """`8,16` has two values; commas inside `[0.9, 0.95]` or quotes belong to one value."""
    return ["".join(item).strip() for item in _items(text)]


def _items(text: str) -> Iterator[list[str]]:
    item: list[str] = []
    depth, quote = 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield item
            item = []
            continue
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "[{") - (letter in "]}")
        item.append(letter)
    yield item


# `--budget 500kJ`: a training budget as people write it, as settings of the experiment's pipeline.

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([A-Za-z]+)")
_JOULES = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9, "Wh": J_PER_WH, "kWh": J_PER_KWH}
_TOKENS = {"tokens": 1, "ktokens": 1_000, "Mtokens": 1_000_000, "Gtokens": 1_000_000_000}
_LIMITS = ("budget.energy_j", "budget.tokens", "training.max_energy_j", "training.max_tokens")


def budget_settings(text: str, experiment: str, overrides: Iterable[str] = ()) -> list[str]:
    """The budget as `key.path=value`. It replaces the experiment's own limits: exactly one limit is in force."""
    _require_no_other_limit(text, overrides)
    energy_j, tokens = parse_budget(text)
    if all("budget" in model.model_fields for model in _models(experiment)):
        found = {"budget.energy_j": energy_j, "budget.tokens": tokens}
    else:
        found = {"training.max_energy_j": energy_j, "training.max_tokens": tokens, "training.epochs": None}
    return [f"{key}={'null' if value is None else value}" for key, value in found.items()]


def _require_no_other_limit(text: str, overrides: Iterable[str]) -> None:
    from joulelab.runs.spec import parse_overrides

    given = parse_overrides(overrides)
    for key in _LIMITS:
        section, _, name = key.partition(".")
        inside = given.get(section)
        if isinstance(inside, dict) and inside.get(name) is not None:
            raise UsageError(f"--budget {text} and {key}={inside[name]} both set a training budget", "leave one out")


def parse_budget(text: str) -> tuple[float | None, int | None]:
    """Joules or tokens; the other one is None."""
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
    tokens = round(amount * _TOKENS[unit], 6)  # 4.1 ktokens is 4100 although 4.1 * 1000 is not in binary
    if tokens != int(tokens):
        raise UsageError(f"'{text}' is {tokens:g} tokens; expected a whole number of tokens")
    return None, int(tokens)


def _models(experiment: str) -> Iterable[type[RunSpec]]:
    from joulelab import lookup
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_experiment, read_layers

    settings = read_layers(experiment)
    names = [str(member["experiment"]) for member in settings["members"]] if is_group(settings) else [experiment]
    return [lookup.PIPELINE_SPECS.resolve(str(read_experiment(name).get("pipeline"))) for name in names]


# `--compare`: the group that compares an experiment with others on the same data and budget.


def comparison_of(experiment: str | None) -> str:
    """The group itself if a group is named; among several groups with the experiment, the one it is named after."""
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import experiment_names, read_layers

    if experiment is None:
        raise UsageError("--compare needs an experiment", "for example: joulelab run fitnets --compare")
    if is_group(read_layers(experiment)):
        return experiment
    groups = {name: layers for name in experiment_names() if is_group(layers := read_layers(name))}
    containing = [
        name for name, layers in groups.items() if experiment in {row["experiment"] for row in layers["members"]}
    ]
    named_after = [name for name in containing if experiment.startswith(f"{name}-")]
    found = named_after or containing
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{experiment} is a member of several groups", f"name one of them: {', '.join(found)}")
    raise UsageError(f"no group compares {experiment} with others", f"available groups: {', '.join(groups)}")


# Part of a run: `--until PHASE` (formerly `--part`), `--data-script NAME`, `--shard I/N`.

UntilOption = Annotated[
    str | None,
    typer.Option("--until", metavar="data|teacher|train", help="Stop after this phase; continue later with --resume."),
]
PartOption = Annotated[str | None, typer.Option("--part", metavar="data|teacher|train", hidden=True)]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Run only shard I of N (counted from 0) of the teacher's work; needs --until teacher, or a --data-script "
        "that uses the teacher. Shards can run on any machine in any order; a later run merges their outputs.",
    ),
]


def read_phase(until: str | None, part: str | None = None) -> Phase | None:
    """The phase of `--until`, or of its former spelling `--part`."""
    from joulelab import lookup
    from joulelab.runs.phases import PHASES, RENAMED_PHASES

    if part is not None:
        if until is not None:
            raise UsageError("--part is the former name of --until", "give --until only")
        print(f"--part is now --until: use --until {part}", file=sys.stderr)
    name = until if part is None else part
    if name in RENAMED_PHASES:
        print(f"the phase {name} is now {RENAMED_PHASES[name]}", file=sys.stderr)
        name = RENAMED_PHASES[name]
    found = next((phase for phase in PHASES if phase == name), None)
    if name is not None and found is None:
        raise lookup.unknown("phase", name, PHASES)
    return found


def read_shard(text: str | None, until: Phase | None, data_script: str | None) -> Shard | None:
    from joulelab.runs.phases import Shard

    if text is None:
        return None
    shard = Shard.parse(text)
    if until != "teacher" and data_script is None:
        raise UsageError(
            f"--shard {text} does not select any work by itself",
            "add --until teacher (everything the experiment needs from its teacher), or --data-script logit_caching, "
            "synthetic_generation or preference_dataset (one step of it)",
        )
    return shard


def prerun_experiment(experiment: str) -> str:
    """The experiment whose energy settings a prerun uses; for a group its first member."""
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_layers

    settings = read_layers(experiment)
    return str(settings["members"][0]["experiment"]) if is_group(settings) else experiment


def script_settings(script: str, experiment: str, overrides: Sequence[str]) -> list[str]:
    """A data script as `key.path=value`; the user's overrides come after it and take precedence."""
    from joulelab.distill.causal.config import data_script_settings
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import parse_overrides, read_layers

    settings = read_layers(experiment)
    if is_group(settings):
        named = ", ".join(dict.fromkeys(str(member["experiment"]) for member in settings["members"]))
        raise UsageError(f"{experiment} is a group; --data-script applies to one experiment", f"name one of {named}")
    pipeline = str(parse_overrides(overrides).get("pipeline", settings.get("pipeline")))
    requested = data_script_settings(script, str(settings["name"]), overrides, pipeline)
    users = _USERS.get(script)
    if users and pipeline not in users:
        raise UsageError(
            f"{experiment} (pipeline {pipeline}) does not use the output of {script}",
            f"name an experiment with the pipeline {' or '.join(users)}: {experiment_like(users[0], experiment)}",
        )
    return requested


# Pipelines that use the output of a teacher's data script.
_USERS = {
    "logit_caching": ("kd",),
    "synthetic_generation": ("synthetic", "dpo"),
    "preference_dataset": ("dpo",),
}


def experiment_like(pipeline: str, experiment: str) -> str:
    """The pipeline's experiment of the same size: `kd-small` for `sft-small`; else its tiny one."""
    from joulelab.runs.spec import experiment_names

    same_size = f"{pipeline}-{experiment.partition('-')[2]}"
    return same_size if same_size in experiment_names() else f"{pipeline}-tiny"
