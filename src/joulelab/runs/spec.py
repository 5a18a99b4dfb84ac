"""The spec of a run: base.yaml + experiment + `key.path=value`, merged into one frozen, checked model.

Each pipeline brings a model of its own that extends `RunSpec`; the sentence under a field is its documentation.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from joulelab import lookup
from joulelab.errors import ConfigError, NotFoundError, UsageError
from joulelab.meter.config import EnergyConfig
from joulelab.runs.spec_errors import explain
from joulelab.runs.yaml_text import parse_yaml, read_mapping

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
BASE = "base"
# What every generator behind a run accepts: numpy's takes 32 bits.
LARGEST_SEED = 2**32 - 1


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class RunSpec(Section):
    """What every pipeline's settings have in common."""

    name: str = Field("run", min_length=1, max_length=80)
    """Name of the run; the folder's name begins with it."""
    about: str = ""
    """One sentence on what the experiment is for; shown in listings."""
    pipeline: str
    """Which pipeline runs the stages."""
    label: str = ""
    """What a comparison calls this run's method; runs with the same label are repeats of each other."""
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of everything random: initial weights, order of the data, dropout."""
    reuse_artifacts: bool = True
    """Take an artefact that an earlier run of this store has made from the same inputs, with its bill."""
    energy: EnergyConfig = EnergyConfig()
    """What is measured and how often."""
    trackers: tuple[str, ...] = ()
    """Where the metrics also go while it runs: tensorboard, wandb, mlflow, trackio; one that fails is a warning."""

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
        """The settings with what the user left out and other settings tell, before they are checked."""
        return dict(settings)

    def preflight(self) -> None:
        """Look for what the run will need, before a folder is made: a missing file is a mistake, not a failed run."""


def experiment_names() -> list[str]:
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml") if path.stem != BASE)


def experiment_file(name: str) -> Path:
    """The file of a named experiment, or the path itself when the user gave one."""
    if _is_path(name):
        return Path(name)
    if name not in experiment_names():
        raise lookup.unknown("experiment", name, experiment_names(), "`joulelab experiments` lists them")
    return EXPERIMENTS / f"{name}.yaml"


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def read_layers(name: str) -> dict[str, Any]:
    """The experiment's own settings over those it `extends`, without base.yaml."""
    path = experiment_file(name)
    layers, seen = [_read_layer(path)], [path.resolve()]
    while (parent := layers[-1].pop("extends", None)) is not None:
        parent_path = experiment_file(str(parent))
        if parent_path.resolve() in seen:
            raise ConfigError(f"{name}: `extends: {parent}` leads back to itself")
        seen.append(parent_path.resolve())
        layers.append(_read_layer(parent_path))
    merged: dict[str, Any] = {"name": path.stem}
    for layer in reversed(layers):
        merged = merge(merged, layer)
    return merged


def _read_layer(path: Path) -> dict[str, Any]:
    """The files it names are looked for beside it first, and else where one stands."""
    layer = read_mapping(path)
    members = layer.get("members")
    named = [(member, "experiment") for member in members] if isinstance(members, list) else []
    for holder, key in [(layer, "extends"), *named]:
        if isinstance(holder, dict) and isinstance(name := holder.get(key), str) and _is_path(name):
            beside = path.parent / name
            holder[key] = str(beside) if beside.exists() else name
    return layer


def read_experiment(name: str) -> dict[str, Any]:
    """All settings of an experiment: its layers over base.yaml."""
    return merge(read_mapping(EXPERIMENTS / f"{BASE}.yaml"), read_layers(name))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections merge key by key; anything else is replaced whole."""
    result = dict(copy.deepcopy(dict(under)))
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """`training.learning_rate=3e-4` -> {"training": {"learning_rate": 0.0003}}."""
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or ".." in key or key.startswith("."):
            raise UsageError(f"'{text}' is not a setting", "write key.path=value, for example training.epochs=2")
        result = merge(result, nest(key.strip(), parse_yaml(value, f"the value of {key}")))
    return result


def nest(key: str, value: Any) -> dict[str, Any]:
    """`training.epochs` and 2 -> {"training": {"epochs": 2}}."""
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}


def check(settings: Mapping[str, Any]) -> RunSpec:
    """Validate merged settings against the pipeline's own model."""
    pipeline = settings.get("pipeline")
    if not isinstance(pipeline, str):
        raise ConfigError("the settings name no pipeline", f"add `pipeline: NAME`; known: {lookup.PIPELINES.names()}")
    model: type[RunSpec] = lookup.PIPELINE_SPECS.resolve(pipeline)
    try:
        # through JSON, so that a YAML list may fill a tuple while a text still cannot fill a number
        return model.model_validate_json(json.dumps(model.complete(settings), default=str))
    except ValidationError as error:
        raise explain(error, model) from None


def load_spec(name: str, overrides: Mapping[str, Any] | None = None) -> RunSpec:
    return check(merge(read_experiment(name), overrides or {}))
