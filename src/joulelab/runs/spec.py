"""The spec of a run: base.yaml, experiment and `key.path=value`, merged into one frozen, validated model.

Each pipeline has its own model that extends `RunSpec`; the docstring of a field is its documentation. Errors name the
key, what was expected, what was found, and the nearest valid name.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from joulelab import lookup
from joulelab.errors import (
    NOTHING_STARTED,
    ConfigError,
    JoulelabError,
    NotFoundError,
    SeveralProblems,
    UsageError,
    find_problems,
    refuse_all,
)
from joulelab.lookup import nearest
from joulelab.meter.config import EnergyConfig
from joulelab.meter.profile import config_folder
from joulelab.redaction import find_secret, printable, texts_by_key

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
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "dict_type": "a section with keys",
}


def explain(
    error: ValidationError, model: type[BaseModel], hint: str = "`joulelab explain KEY` describes a setting"
) -> ConfigError:
    found = error.errors()
    if len(found) == 1:
        # The key itself, or the section that it is missing from: a number in a list has no description.
        keys = {row.key for row in _walk(model, "")}
        place = _known_part(".".join(str(part) for part in found[0]["loc"]), keys)
        hint = hint.replace("explain KEY` describes a setting", f"explain {place}` describes it") if place else hint
    hint = f"{hint}; {NOTHING_STARTED}"
    findings = [ConfigError(_sentence(dict(finding), model), hint) for finding in found]
    if len(findings) == 1:
        return findings[0]
    return SeveralProblems([ConfigError(finding.message) for finding in findings], hint)


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
    if kind == "value_error":  # raised by our validators, with a complete message
        names = field_names(model, finding["loc"]) if key else []
        # A section does not know its own key; what to set must work as typed.
        text = re.sub(
            r"\bset (\w+)=",
            lambda found: f"set {key}.{found[1]}=" if found[1] in names else found[0],
            str(finding["ctx"]["error"]),
        )
        return f"{key + ': ' if key else ''}{text}"
    example = ""
    if kind in ("model_type", "model_attributes_type"):
        names = [f"{key}.{name}" for name in field_names(model, finding["loc"])]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        example = f"; its keys are {', '.join(names[:4])}{more}" if names else ""
    return f"{key}: {expected_and_found(finding)}{example}"


def expected_and_found(finding: Mapping[str, Any]) -> str:
    """One pydantic error without its key: `expected a number greater than 0, found -1`."""
    expected = _EXPECTED.get(finding["type"]) or finding["msg"].removeprefix("Input should be ")
    expected = expected.replace("String should have ", "a text of ")
    if expected.startswith(("greater than", "less than")):
        # an option of the command line arrives as text, and is a number where only its size is wrong
        return f"expected a number {expected}, found {finding['input']}"
    return f"expected {expected}, found {brief(finding['input'])}"


def _elsewhere(model: type[BaseModel], name: str) -> str | None:
    """The same name in another section: `learning_rate` is `training.learning_rate`."""
    found = _keys_named(name, (row.key for row in _walk(model, "")))
    return found[0] if found else None


def _keys_named(name: str, keys: Iterable[str]) -> list[str]:
    """Keys that end with this name, or if there are none, with a name that it abbreviates (`lr`)."""
    by_name = [(key, key.rpartition(".")[2]) for key in keys if "." in key]
    found = [key for key, last in by_name if last == name] or [
        key for key, last in by_name if lookup.is_abbreviation(name, last)
    ]
    return sorted(found, key=_remoteness)


def _remoteness(key: str) -> tuple[bool, bool, int]:
    """Sorts keys with the same last name: those of the student's own training first, of an optional hint stage last."""
    return "hint." in key, not key.startswith(("training.", "student.training.")), key.count(".")


def brief(value: Any) -> str:
    kinds: dict[type, str] = {list: "a list ", dict: "a section ", str: "the text "}
    kind = kinds.get(type(value), "")
    text = "null" if value is None else repr(value)
    return f"{kind}{text[:60]}{'…' if len(text) > 60 else ''}"


def field_names(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the settings below a path of keys."""
    for part in path:
        if isinstance(part, int):  # an index of a list; `model` is already that of its items
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


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where 3e-4 without a dot is a string; here it is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.(?:inf|nan))$",
        re.I,
    ),
    list("-+0123456789."),
)


_WHOLE = re.compile(r"[-+]?\d+[eE]\+?\d{1,2}")


def _read_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    """`1e6` is a whole number, as for the number of tokens; `1.0e6` is not."""
    value = float(loader.construct_yaml_float(node))
    return int(value) if _WHOLE.fullmatch(node.value) and abs(value) < 2**53 else value


_Loader.add_constructor("tag:yaml.org,2002:float", _read_number)

# Limits of a settings file. Ours have fewer than 200 values and 5 levels; a list of layers or columns may be long.
_MOST_BYTES = 10 << 20
_MOST_VALUES = 100_000
_MOST_LEVELS = 50
# PyYAML turns texts like dates into date objects, which no setting has, and fails on 2026-02-31. Here they stay texts.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


_YAML_HINT = "check brackets, quotes and indentation there; YAML is indented with spaces, not tabs"


def parse_yaml(text: str, where: str) -> Any:
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None
        _count_values(node, (), {}, where)
        loader = _Loader("")
        try:
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"{where}: nested too deep, expected at most {_MOST_LEVELS} levels", _YAML_HINT) from None
    except (ValueError, OverflowError, TypeError, AttributeError) as error:  # a value that its `!!tag` does not allow
        raise ConfigError(f"{where}: not valid YAML ({error})", _YAML_HINT) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"{where}{line}: not valid YAML ({problem})", _YAML_HINT) from None


def _count_values(node: yaml.Node, above: tuple[int, ...], counts: dict[int, int], where: str) -> int:
    """Values below a node, those of aliases included, before anything is constructed: a few lines of aliases can stand
    for billions of values, or for a section that contains itself."""
    if id(node) in above:
        raise ConfigError(f"{where}, line {node.start_mark.line + 1}: an alias contains itself", "write the value out")
    if len(above) > _MOST_LEVELS:
        raise RecursionError
    if id(node) not in counts:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node, where)
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        counts[id(node)] = 1 + sum(_count_values(child, (*above, id(node)), counts, where) for child in children)
    if counts[id(node)] > _MOST_VALUES:
        raise ConfigError(
            f"{where}, line {node.start_mark.line + 1}: more than {_MOST_VALUES:,} values, aliases included",
            "settings have a few hundred values; put data into a data file",
        )
    return counts[id(node)]


def _refuse_repeated_keys(node: yaml.MappingNode, where: str) -> None:
    """YAML forbids them; PyYAML takes the last one, and the settings of a section that is written twice are lost."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(
                f"{where}, line {line}: {key.value} is set twice; the first one is in line {lines[key.value]}",
                "leave one of them out, or join the two sections",
            )
        lines[key.value] = line


def read_mapping(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes; a settings file has at most {_MOST_BYTES:,}",
                "pass a YAML file with settings",
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(
            f"no such file: {path}", "pass the path of a YAML file or the name of an experiment"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "pass a readable YAML file in UTF-8") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: expected `key: value` lines, found {brief(value)}",
            "`joulelab run demo-kd --dry-run` prints settings to start from",
        )
    return value


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")


EXPERIMENTS = Path(__file__).parent.parent / "experiments"
BASE = "base"
# Accepted by all random generators of a run; numpy's takes 32 bits.
LARGEST_SEED = 2**32 - 1


class Section(BaseModel):
    """A section of the configuration: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Published spellings of settings (`kd_T`, or `data.train` for one of another section) -> names; accepted
    permanently."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Names in earlier releases -> current names; accepted with a notice."""
    renamed_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Setting -> its values in earlier releases -> current values; accepted with a notice."""
    alternatives: ClassVar[tuple[str, ...]] = ()
    """Mutually exclusive settings: setting one of them replaces the others of an experiment."""
    details: ClassVar[Mapping[str, str]] = {}
    """Settings that apply to one of the alternatives, and are replaced with it."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for holds, reason in self._contradictions():
            if holds:
                raise ValueError(reason)
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        """Combinations of settings that are refused: whether they are given, and the reason."""
        return ()


class HardwareAssertions(Section):
    """Hardware that the run requires; on other hardware it does not start (exit code 4)."""

    aliases: ClassVar = {
        "assert_gpu_name": "gpu_name",
        "assert_gpu_count": "gpu_count",
        "assert_cpu_brand": "cpu_name",
    }

    gpu_name: str | None = None
    """Words that the name of every GPU must contain, for example H100; null: any."""
    gpu_count: int | None = Field(None, ge=0)
    """Required number of GPUs available to the run; null: any."""
    min_gpu_memory_gib: float | None = Field(None, ge=0)
    """Minimum memory of every GPU; null: any."""
    cpu_name: str | None = None
    """Words that the name of the processor must contain, for example EPYC; null: any."""


class WandbSettings(Section):
    """Where Weights & Biases stores the run; null: as set by the user's login and the variables of W&B."""

    project: str | None = None
    """Project; null: WANDB_PROJECT, else joulelab."""
    entity: str | None = None
    """User or team; null: WANDB_ENTITY, else the default of the login."""
    name: str | None = None
    """Name of the run in W&B; null: its run id."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of W&B; null: WANDB_MODE, else online if the user is logged in, else offline."""


class RunSpec(Section):
    """Settings that all pipelines have."""

    shares_ranks: ClassVar[bool] = False
    """Whether the pipeline divides its work among torchrun's processes; other pipelines would repeat it in each."""
    uses_gpu: ClassVar[bool] = True
    """Whether the pipeline can use a GPU. If false, its jobs do not request one."""

    name: str = Field("run", min_length=1, max_length=80)
    """Name of the run; its folder name begins with it."""
    about: str = ""
    """One sentence about the experiment, shown in listings."""
    pipeline: str
    """Pipeline that runs the stages."""
    label: str = ""
    """Name of this run's method in comparisons; runs with the same label are repeats of each other."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=40)], ...] = Field((), max_length=20)
    """Tags for finding the run in `joulelab ui`, for example `tags=[paper,h200]`. They do not affect results."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Random seed: initial weights, data order, dropout."""
    reuse_artifacts: bool = True
    """Reuse an artifact that an earlier run of this store made from the same inputs, including its energy bill."""
    energy: EnergyConfig = EnergyConfig()
    """What is measured and how often."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that receive the metrics live: tensorboard, wandb, mlflow, trackio; failures are warnings.
    `trackers.wandb.project=mine` enables W&B with a setting of `wandb`."""
    wandb: WandbSettings = WandbSettings()
    """Settings of the tracker wandb; also written as `trackers.wandb`."""
    hardware: HardwareAssertions = HardwareAssertions()
    """Hardware that the run requires; checked on the machine where it runs."""

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for name in names:
                lookup.TRACKERS.require(name)
        except NotFoundError as error:
            raise ValueError(error.message) from None
        return tuple(dict.fromkeys(names))

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with values derived from other settings, before validation."""
        return dict(settings)

    @property
    def has_teacher(self) -> bool:
        """Whether the run prepares a teacher; a pipeline with an optional one overrides this."""
        return "teacher" in type(self).model_fields

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Sections and single settings (`training.betas`) that this run does not use, each with what uses it."""
        return {}

    def checks(self) -> Iterator[Callable[[], object]]:
        """What can be checked before the run's folder is created, without a framework: files, data, packages, devices.
        Each check raises a `UsageError`."""
        yield from ()

    def for_this_machine(self) -> Self:
        """With what is `auto` and depends on the machine chosen for this one. Called where an attempt begins; the run's
        settings then have the choice, so that a resumed attempt and a repetition use it."""
        return self

    def require_ranks(self, launched: bool, ranks: int, hosts: int) -> None:
        """Raise `ConfigError` if a training of this run cannot run on so many ranks, which torchrun starts if
        `launched`. Not one of `checks`, which are also made on a login node."""

    def require_energy_reading(self) -> None:
        """Raise `ConfigError` if this machine cannot measure the energy that limits a training of this run. Not one of
        `checks`, which are also made on a login node."""

    def require_packages(self) -> None:
        """Raise `DependencyMissing` if a package is not installed without which no stage can run."""

    def meter_settings(self) -> EnergyConfig:
        """What the meter records in an attempt; a pipeline that measures other processes finds them here."""
        return self.energy

    def preflight(self) -> None:
        """Raise everything that is wrong with the settings and files as one error; first that packages are missing,
        without which the other checks may fail in ways that mean nothing."""
        self.require_packages()
        refuse_all(map(self.naming_settings, self.checks()))

    def naming_settings(self, check: Callable[[], object]) -> Callable[[], object]:
        """The check, with an error about a missing file or model preceded by the settings that name it. Settings
        outside sections are left out: users pass them as arguments of a command."""

        def named() -> object:
            try:
                return check()
            except SeveralProblems as error:
                problems = [self._with_settings(problem) for problem in error.problems]
                raise SeveralProblems(problems, error.hint) from None
            except NotFoundError as error:
                raise self._with_settings(error) from error

        return named

    def _with_settings(self, error: JoulelabError) -> JoulelabError:
        if not isinstance(error, NotFoundError) or error.name is None:
            return error
        texts = texts_by_key(self.model_dump(mode="json"))
        named = [f"{key}={text}" for key, text in texts if "." in key and Path(text) == Path(error.name)]
        return NotFoundError(f"{', '.join(named)}: {error.message}", error.hint) if named else error


def user_path(text: str) -> Path:
    """A path as a user writes it in a setting; `~name` of an unknown user stays as it is, and no such file exists."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises RuntimeError for an unknown user


def experiment_names() -> list[str]:
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml") if path.stem != BASE)


def experiment_file(name: str) -> Path:
    """The file of a named experiment, or the path that the user passed."""
    path = Path(name)
    is_known = name in experiment_names()
    if path.is_dir() and not is_known:
        raise ConfigError(f"{name} is a directory", "name a YAML file in it")
    if _is_path(name):
        return path
    if path.is_file() and not is_known:
        raise ConfigError(f"{name} is not a YAML file", "name a .yaml file, or an experiment of `joulelab experiments`")
    if not is_known:
        raise lookup.unknown("experiment", name, experiment_names(), "`joulelab experiments` lists them")
    return EXPERIMENTS / f"{name}.yaml"


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def read_layers(name: str) -> dict[str, Any]:
    """The experiment's own settings over those that it `extends`, without base.yaml."""
    path = experiment_file(name)
    layers, seen = [_read_layer(path)], [path.resolve()]
    while (parent := layers[-1].pop("extends", None)) is not None:
        parent_path = experiment_file(str(parent))
        if parent_path.resolve() in seen:
            raise ConfigError(f"{name}: `extends: {parent}` is circular")
        seen.append(parent_path.resolve())
        layers.append(_read_layer(parent_path))
    # Stated in any layer, the pipeline decides what the names in all of them mean.
    pipeline = next((layer["pipeline"] for layer in layers if "pipeline" in layer), None)
    merged: dict[str, Any] = {"name": path.stem, **({"pipeline": pipeline} if pipeline is not None else {})}
    for layer in reversed(layers):
        merged = merge(merged, layer)
    return merged


def _read_layer(path: Path) -> dict[str, Any]:
    """Paths in a layer are relative to its file, otherwise to the current directory."""
    layer = read_mapping(path)
    members = layer.get("members")
    named = [(member, "experiment") for member in members] if isinstance(members, list) else []
    for holder, key in [(layer, "extends"), *named]:
        if isinstance(holder, dict) and isinstance(name := holder.get(key), str) and _is_path(name):
            local = path.parent / name
            holder[key] = str(local) if local.exists() else name
    for settings in (layer, *(member.get("overrides") for member, _ in named if isinstance(member, dict))):
        if isinstance(settings, dict):
            _resolve_inputs(settings, path.parent)
    return layer


_INPUTS = {
    "data": (
        "source", "train", "validation", "test", "train_file", "validation_file", "test_file", "tokenizer", "template",
        "token_counts",
    ),
    "teacher": ("model", "teacher_name", "fine_tuned"),
    "student": ("model", "init", "student_pretrained_weights", "config", "student_config"),
    "generation": ("prompts_from",),
    "preferences.judge": ("model",),
    "quality": ("answers", "harness_folder"),
}  # fmt: skip


def _resolve_inputs(settings: dict[str, Any], folder: Path) -> None:
    """Data and models that are next to the file and not in the current directory."""
    for section, keys in _INPUTS.items():
        inputs: Any = settings
        for part in section.split("."):
            inputs = inputs.get(part) if isinstance(inputs, dict) else None
        if not isinstance(inputs, dict):
            continue
        for key in keys:
            name = inputs.get(key)
            if isinstance(name, str) and name and not user_path(name).exists() and (folder / name).exists():
                inputs[key] = str(folder / name)


def read_experiment(name: str) -> dict[str, Any]:
    """All settings of an experiment: its layers over base.yaml."""
    return merge(read_mapping(EXPERIMENTS / f"{BASE}.yaml"), read_layers(name))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A layer of settings over another; one that names other data replaces all settings of the former data.

    Both are first brought to the current names of the pipeline, so that a layer replaces a setting whatever name either
    uses, and two names of a setting in one layer are found.
    """
    pipeline = over.get("pipeline", under.get("pipeline"))
    under, over = in_current_names(under, pipeline), in_current_names(over, pipeline)
    result = dict(copy.deepcopy(dict(under)))
    if not still_describes(under, over):
        result.pop("about", None)
    if _names_other_data(result, over):
        _forget_data(result)
    _forget_alternatives(result, over, _model_of(pipeline))
    if isinstance(over.get("trackers"), Mapping) and isinstance(chosen := result.get("trackers"), list):
        result["trackers"] = dict.fromkeys(chosen, True)
    return overlay(result, over)


def _model_of(pipeline: object) -> type[RunSpec] | None:
    if not isinstance(pipeline, str) or pipeline not in lookup.PIPELINE_SPECS:
        return None
    model: type[RunSpec] = lookup.PIPELINE_SPECS.resolve(pipeline)
    return model


def in_current_names(settings: Mapping[str, Any], pipeline: object) -> dict[str, Any]:
    """One layer of a pipeline's settings under their current names; as it is if there is no such pipeline."""
    settings = _wandb_in_its_section(settings)
    return dict(settings) if (model := _model_of(pipeline)) is None else current_names(model, settings)


def _forget_alternatives(result: dict[str, Any], over: Mapping[str, Any], model: type[RunSpec] | None) -> None:
    """Of mutually exclusive settings (a student's size, layers, config), the one set last replaces the others."""
    fields = {} if model is None else model.model_fields
    for name, values in over.items():
        below, section = result.get(name), model_in(fields[name].annotation) if name in fields else None
        if section is None or not isinstance(values, Mapping) or not isinstance(below, dict):
            continue
        alternatives: set[str] = set(getattr(section, "alternatives", ()))
        named = {key for key, value in values.items() if value is not None}
        if named & alternatives:
            gone = alternatives - named
            gone |= {detail for detail, owner in getattr(section, "details", {}).items() if owner in gone}
            result[name] = {key: value for key, value in below.items() if key not in gone}


def still_describes(under: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Whether the `about` of settings holds with a layer over them that names no other data and no other student."""
    below, student = under.get("student"), over.get("student")
    if isinstance(below, Mapping) and isinstance(student, Mapping) and overlay(below, student) != below:
        return False
    return not _names_other_data(under, over)


def overlay(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; other values are replaced."""
    result = dict(copy.deepcopy(dict(under)))
    for key, value in over.items():
        below = result.get(key)
        result[key] = overlay(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


# Settings that describe the data of an experiment, not its method: another source has its own size and columns.
_OF_THE_SOURCE = {
    *("source", "train", "validation", "test", "subset", "form", "split", "documents", "held_out", "token_counts"),
    *("train_size", "validation_size", "test_size", "text_column", "label_column", "split_column", "header"),
}
_SLICE = re.compile(r"\w+(\[.*\])?")


def _names_other_data(under: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a layer replaces the data of the layers below it: `demo-kd data.source=mine.csv`."""
    if "dataset" in under and "dataset" in settings:  # of the pipeline train
        return bool(under["dataset"] != settings["dataset"])
    below, over = under.get("data"), settings.get("data")
    if not isinstance(below, dict) or not isinstance(over, Mapping) or "source" not in below:
        return False
    source, train = over.get("source", below["source"]), over.get("train")
    # `train[:100]` is a part of the same data, `mine.csv` is not
    return source != below["source"] or (isinstance(train, str) and not _SLICE.fullmatch(train))


def _forget_data(settings: dict[str, Any]) -> None:
    """Sizes, columns and test questions of the former data; those that the new layer states are set afterwards."""
    for key in ("dataset_split", "validation_dataset", "text_column"):
        settings.pop(key, None)
    if isinstance(data := settings.get("data"), dict):
        settings["data"] = {key: value for key, value in data.items() if key not in _OF_THE_SOURCE}
    quality = settings.get("quality")
    if isinstance(quality, dict) and str(quality.get("answers", "")).startswith("sample:"):
        settings["quality"] = {key: value for key, value in quality.items() if key not in ("answers", "answer_items")}


def current_names(model: type[BaseModel], settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings under their current names; two names of a setting must have the same value."""
    aliases: Mapping[str, str] = getattr(model, "aliases", {})
    renamed: Mapping[str, str] = getattr(model, "renamed", {})
    renamed_values: Mapping[str, Mapping[str, str]] = getattr(model, "renamed_values", {})
    result: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in _with_moved({**aliases, **renamed}, settings):
        name = aliases.get(key) or renamed.get(key) or key
        if key in renamed:
            _print_notice(f"{prefix}{key} is now called {prefix}{name}")
        field = model.model_fields.get(name)
        inner = model_in(field.annotation) if field is not None else None
        if inner is not None and isinstance(value, Mapping):
            value = current_names(inner, value, f"{prefix}{name}.")
        if isinstance(value, str) and (current := renamed_values.get(name, {}).get(value)) is not None:
            _print_notice(f"{prefix}{name}={value} is now called {prefix}{name}={current}")
            value = current
        if name in given and value != result[name]:
            raise _set_twice(f"{prefix}{given[name]}", f"{prefix}{key}", f"{prefix}{name}")
        given[name], result[name] = key, value
    return result


def _set_twice(one: str, other: str, name: str) -> ConfigError:
    return ConfigError(
        f"{one} and {other} both set {name}, to different values", f"leave one of them out; {NOTHING_STARTED}"
    )


def _with_moved(names: Mapping[str, str], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings; those that have a name in another section (`data.train` is `dataset`) apart from their own."""
    for key, value in settings.items():
        inside = [inner for inner in value if f"{key}.{inner}" in names] if isinstance(value, Mapping) else []
        yield from ((f"{key}.{inner}", value[inner]) for inner in inside)
        if not inside:
            yield key, value
        elif rest := {inner: one for inner, one in value.items() if inner not in inside}:
            yield key, rest


def current_key(model: type[BaseModel], key: str) -> str:
    """`distill.kd_T` -> `distill.temperature`."""
    names: list[str] = []
    settings: Any = current_names(model, nest(key, None)) if key else {}
    while settings:
        (name, settings), *_ = settings.items()
        names.append(name)
    return ".".join(names)


@cache
def _print_notice(text: str) -> None:
    """Once per process: the members of a group share their settings."""
    print(f"joulelab: {text}; the old name is accepted for one more release", file=sys.stderr)


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """`training.learning_rate=3e-4` -> {"training": {"learning_rate": 0.0003}}."""
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or ".." in key or key.startswith("."):
            raise UsageError(f"'{text}' is not a setting", "write key.path=value, for example training.epochs=2")
        result = overlay(result, nest(key.strip(), parse_yaml(value, f"the value of {key}")))
    return result


def nest(key: str, value: Any) -> dict[str, Any]:
    """`training.epochs` and 2 -> {"training": {"epochs": 2}}."""
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}


def _wandb_in_its_section(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `trackers` as a mapping (`trackers.wandb.project=mine`) from names to whether they are enabled, and the
    settings of wandb in its section."""
    given, section = settings.get("trackers"), settings.get("wandb")
    if not isinstance(given, Mapping):
        return settings
    wandb = own if isinstance(own := given.get("wandb"), Mapping) else {}
    trackers = {**given, "wandb": True} if wandb else given
    for name, chosen in trackers.items():
        if chosen not in (None, True, False, {}):
            problem = "has settings, but only wandb accepts settings"
            if not isinstance(chosen, Mapping):
                problem = f"is {brief(chosen)}; expected true or false{', or its settings' * (name == 'wandb')}"
            raise ConfigError(f"trackers.{name} {problem}", f"write trackers=[{','.join(map(str, given))}]")
    settings = {**settings, "trackers": {name: chosen is not False for name, chosen in trackers.items()}}
    if not wandb or not isinstance(section, Mapping | None):
        return settings
    in_section = section or {}
    for name in wandb:
        if name in in_section and in_section[name] != wandb[name]:
            raise _set_twice(f"trackers.wandb.{name}", f"wandb.{name}", f"wandb.{name}")
    return {**settings, "wandb": {**in_section, **wandb}}


Checks = Callable[[RunSpec], Iterable[Callable[[], object]]]
"""What is checked of a spec before its run is created: data, models, device."""


def check(settings: Mapping[str, Any], further: Checks | None = None) -> RunSpec:
    """Validate merged settings against the pipeline's model. If settings are wrong, the `further` checks run on
    the remaining ones, so that one error lists all problems."""
    pipeline = settings.get("pipeline")
    if not isinstance(pipeline, str):
        raise ConfigError("no pipeline is set", f"add `pipeline: NAME`; known: {', '.join(lookup.PIPELINES.names())}")
    model: type[RunSpec] = lookup.PIPELINE_SPECS.resolve(pipeline)
    settings = in_current_names(with_user_settings(settings), pipeline)
    if isinstance(trackers := settings.get("trackers"), Mapping):
        settings["trackers"] = [name for name, enabled in trackers.items() if enabled]
    try:
        # through JSON, so that a YAML list can fill a tuple while a string cannot fill a number
        complete = model.complete(settings)
        checked = model.model_validate_json(json.dumps(complete, default=str))
    except ValidationError as error:
        refused = explain(error, model)
        remaining = _without(complete, error, model) if further is not None else None
        if further is not None and remaining is not None and (others := find_problems(further(remaining))):
            stated = refused.problems if isinstance(refused, SeveralProblems) else (ConfigError(refused.message),)
            raise SeveralProblems([*stated, *others], refused.hint) from None
        raise refused from None
    refuse_unfit_texts(checked)
    return checked


def _without(settings: Mapping[str, Any], error: ValidationError, model: type[RunSpec]) -> RunSpec | None:
    """The spec without the settings that the error names; None if the others are not valid by themselves."""
    remaining = json.loads(json.dumps(settings, default=str))
    for finding in error.errors():
        section = remaining
        for part in finding["loc"][:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not finding["loc"] or not isinstance(section, dict):
            return None
        section.pop(finding["loc"][-1], None)
    try:
        return model.model_validate_json(json.dumps(remaining))
    except ValidationError:
        return None


def refuse_unfit_texts(settings: BaseModel) -> None:
    """Settings are stored, packed and printed as plain text, and a run cannot be repeated from changed ones: refuse
    secrets and characters that control a terminal."""
    values = settings.model_dump(mode="json")
    for key, text in texts_by_key(values):
        if (shown := printable(text)) != text.replace("\r\n", "\n").replace("\r", "\n"):
            raise ConfigError(
                f"{key} contains control characters or bytes that are not UTF-8: {brief(shown)}",
                f"use printable text; {NOTHING_STARTED}",
            )
    if (secret := find_secret(values)) is not None:
        raise ConfigError(
            f"{secret} contains what looks like a secret; settings are stored as plain text",
            f"set it as an environment variable that the program reads, and leave it out of the settings; "
            f"{NOTHING_STARTED}",
        )


# Settings of the user, for all runs: how energy is reported, never what is measured or trained.
USER_KEYS = ("grid", "price", "pue")


def user_config_file() -> Path:
    """`JOULELAB_CONFIG`, else `joulelab/config.yaml` in the user's configuration directory."""
    return Path(os.environ.get("JOULELAB_CONFIG") or config_folder() / "config.yaml")


def with_user_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with `grid`, `price` and `pue` of the user's file where they do not set them."""
    path = user_config_file()
    energy = settings.get("energy", {})
    if not path.is_file() or not isinstance(energy, Mapping):
        return dict(settings)
    given = read_mapping(path)
    if unknown := [str(key) for key in given if key not in USER_KEYS]:
        raise ConfigError(
            f"{path}: unknown setting {unknown[0]}",
            f"this file may only set {', '.join(USER_KEYS)}; nothing was started",
        )
    try:
        EnergyConfig.model_validate(given)
    except ValidationError as error:
        raise explain(error, EnergyConfig, f"correct it in {path}") from None
    return {**settings, "energy": {**given, **energy}}


def load_spec(name: str, overrides: Mapping[str, Any] | None = None) -> RunSpec:
    spec = check(merge(read_experiment(name), overrides or {}))
    refuse_unused(overrides or {}, [spec])
    return spec


def refuse_unused(overrides: Mapping[str, Any], specs: Sequence[RunSpec]) -> None:
    """Refuse changed settings that none of these runs uses. An experiment file may have them: its variants share it."""
    for key in _keys(overrides):
        current = [current_key(type(spec), key) for spec in specs]
        for names in ([name.partition(".")[0] for name in current], current):
            users = [spec.unused_settings.get(name) for spec, name in zip(specs, names, strict=True)]
            if users and all(users):
                raise ConfigError(
                    f"{key} has no effect in this run with pipeline={specs[0].pipeline}; {names[0]} is used by: "
                    f"{users[0]}",
                    "leave it out",
                )


def _keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


# `joulelab explain`: settings described from the models that validate them, so that documentation and behavior agree.
@dataclass(frozen=True)
class Setting:
    key: str
    takes: str
    default: str
    about: str


@dataclass(frozen=True)
class Explained:
    """Settings, the pipelines that have them, and pipelines whose setting of that name is described differently."""

    rows: tuple[Setting, ...]
    pipelines: tuple[str, ...]
    otherwise: tuple[str, ...] = ()
    same_name: tuple[str, ...] = ()
    """Settings of the same name in other sections, where the key had no section."""


def explained(key: str = "", pipeline: str | None = None) -> Explained:
    """What a key means in the pipeline, or in all that have it; without both, the settings that all pipelines share."""
    if pipeline is not None:
        return Explained(tuple(describe(lookup.PIPELINE_SPECS.resolve(pipeline), key)), (pipeline,))
    names = lookup.PIPELINE_SPECS.names()
    if not key:
        return Explained(tuple(describe(RunSpec)), tuple(names))
    models = {name: lookup.PIPELINE_SPECS.resolve(name) for name in names}
    all_rows = {name: list(_walk(model, "")) for name, model in models.items()}
    matching = {name: tuple(_below(rows, current_key(models[name], key))) for name, rows in all_rows.items()}
    having = [name for name in names if matching[name]]
    if not having:
        _require_no_other_name(key, names)
        known = {row.key for rows in all_rows.values() for row in rows}
        same_name = _keys_named(key, sorted(known)) or sorted(
            {found for model in models.values() for found in _keys_once_named(model, key)}, key=_remoteness
        )
        if same_name:
            return replace(explained(same_name[0]), same_name=tuple(same_name[1:]))
        raise _unknown_setting(key, known)
    alike = {name: [other for other in having if matching[other] == matching[name]] for name in having}
    first = max(having, key=lambda name: len(alike[name]))  # the most common description
    others = tuple(name for name in having if name not in alike[first])
    known = {row.key for rows in all_rows.values() for row in rows}
    namesakes = () if "." in key else tuple(one for one in sorted(known) if one.endswith(f".{key}"))
    return Explained(matching[first], tuple(alike[first]), others, namesakes)


def _require_no_other_name(key: str, pipelines: Iterable[str]) -> None:
    """For names of other things, the error points to the command that describes them."""
    if key in experiment_names():
        raise UsageError(
            f"{key} is an experiment, not a setting",
            f"`joulelab run {key} --dry-run` prints its settings, `joulelab experiments` lists all experiments",
        )
    if key in pipelines:
        raise UsageError(
            f"{key} is a pipeline, not a setting", f"`joulelab explain --pipeline {key}` lists its settings"
        )
    if key in lookup.ZOO.names():
        raise UsageError(f"{key} is a model, not a setting", f"`joulelab zoo {key}` describes it")


def describe(model: type[BaseModel], key: str = "") -> list[Setting]:
    """The setting of that name, or all settings of that section; all settings for an empty key."""
    rows = list(_walk(model, ""))
    found = _below(rows, current_key(model, key))
    if not found:
        raise _unknown_setting(key, {row.key for row in rows})
    return found


def _keys_once_named(model: type[BaseModel], name: str, prefix: str = "") -> Iterator[str]:
    """Keys whose published or former name this is: `kd_T` is `distill.temperature`."""
    names: Mapping[str, str] = {**getattr(model, "aliases", {}), **getattr(model, "renamed", {})}
    if name in names:
        yield prefix + names[name]
    for key, field in model.model_fields.items():
        if (inner := model_in(field.annotation)) is not None:
            yield from _keys_once_named(inner, name, f"{prefix}{key}.")


_LEAST_LIKENESS, _MUCH_LESS_LIKELY, _MOST_SIMILAR = 0.6, 0.2, 3


def _unknown_setting(key: str, known: Iterable[str]) -> NotFoundError:
    known = set(known)
    lists = "`joulelab explain --pipeline NAME` lists all settings of a pipeline"
    section = _known_part(key.rpartition(".")[0], known)
    if section:
        lists = f"`joulelab explain {section}` lists the settings of that section; {lists}"
    similar = _similar_keys(key, known)[:_MOST_SIMILAR]
    if not similar:
        return NotFoundError(f"unknown setting '{key}'", lists)
    also = f"or {', '.join(similar[1:])}; " if similar[1:] else ""
    return NotFoundError(f"unknown setting '{key}'; did you mean '{similar[0]}'?", also + lists)


def _known_part(key: str, known: Collection[str]) -> str:
    """The key up to the last name that is known: `generation.answer` of `generation.answer.x.0`; empty if none is."""
    while key and key not in known:
        key = key.rpartition(".")[0]
    return key


def _similar_keys(key: str, known: Iterable[str]) -> list[str]:
    """Keys that may be meant, the likeliest first. Names are compared without their sections, which would outweigh
    them; a whole word of a name counts more than letters in common: `steps` is `max_steps` rather than `eps`."""
    section, _, name = key.lower().rpartition(".")

    def of_name(candidate: str) -> float:
        _, _, other = candidate.rpartition(".")
        letters = _likeness(name.replace("_", ""), other.replace("_", ""))
        is_word = len(name) > 2 and any(word.startswith(name.removesuffix("s")) for word in other.split("_"))
        return 0.8 + 0.2 * letters if is_word or lookup.is_abbreviation(name, other) else letters

    def likeness(candidate: str) -> float:
        return of_name(candidate) + (_likeness(section, candidate.rpartition(".")[0]) if section else 0.0)

    close = [candidate for candidate in known if of_name(candidate) >= _LEAST_LIKENESS]
    best = max(map(likeness, close), default=0.0)
    likely = [candidate for candidate in close if likeness(candidate) >= best - _MUCH_LESS_LIKELY]
    return sorted(likely, key=lambda candidate: (-likeness(candidate), _remoteness(candidate), candidate))


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _below(rows: Iterable[Setting], key: str) -> list[Setting]:
    return [row for row in rows if not key or row.key == key or row.key.startswith(key + ".")]


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is not None:
            optional = field.annotation is not inner
            about = field.description or ""
            yield Setting(prefix + name, "section" + " or null" * optional, "None" * optional, about)
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, _takes(field), _default(field), field.description or "")


def _takes(field: FieldInfo) -> str:
    annotation = field.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    words = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    for python, plain in (*words.items(), (" | None", " or null"), ("tuple[", "list of ["), (", ...]", "]")):
        name = name.replace(python, plain)
    bounds = [(word, getattr(limit, key, None)) for limit in field.metadata for key, word in _BOUNDS]
    return ", ".join([name, *(f"{word} {_number(bound)}" for word, bound in bounds if bound is not None)])


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


# attributes of pydantic's metadata
_BOUNDS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    return ", ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
