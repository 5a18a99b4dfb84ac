"""`joulelab train`: one model of the zoo, trained and measured, with the flags of the course."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from joulelab.cli.options import AsJson, Require, RequireGrade, RunsDir
from joulelab.errors import UsageError


def _flag(metavar: str, text: str, *names: str) -> Any:
    """A flag whose text is read by `train_flags`, so that a sweep can take several values of it."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def train(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model of `joulelab zoo`, or a .py file of yours that holds a MODEL.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any setting of `joulelab explain --pipeline train`."),
    ] = None,
    model_option: Annotated[str | None, _flag("MODEL", "The same as the argument MODEL.", "--model")] = None,
    size: Annotated[
        str | None, _flag("SIZE", "Which size; every model has a `tiny` (default: the published one).", "--size")
    ] = None,
    batch_size: Annotated[
        str | None, _flag("N", "Samples in a micro-batch (default: the size's own).", "--batch_size", "--batch-size")
    ] = None,
    learning_rate: Annotated[
        str | None, _flag("RATE", "Peak learning rate (default: 5e-5).", "--learning_rate", "--learning-rate")
    ] = None,
    dataset: Annotated[
        str | None,
        _flag("NAME", "`synthetic`, or a path or hub id the model can read (default: synthetic).", "--dataset"),
    ] = None,
    dataset_split: Annotated[
        str | None,
        _flag(
            "SPLIT",
            'Which rows: train, "train[:100]", "train[10%:20%]" (default: train).',
            "--dataset_split",
            "--dataset-split",
        ),
    ] = None,
    train_stats: Annotated[
        str | None, _flag("NAMES", "Trackers of the loop, by commas: simple,energy.", "--train_stats", "--train-stats")
    ] = None,
    epochs: Annotated[
        str | None, _flag("N", "Passes over the split (default: 1, or as many as another budget allows).", "--epochs")
    ] = None,
    max_steps: Annotated[
        str | None, _flag("N", "Stop after so many optimiser steps.", "--max_steps", "--max-steps")
    ] = None,
    max_time_minutes: Annotated[
        str | None,
        _flag("MINUTES", "Stop after so many minutes of training.", "--max_time_minutes", "--max-time-minutes"),
    ] = None,
    trainer: Annotated[str | None, _flag("NAME", "simple; under torchrun ddp or fsdp.", "--trainer")] = None,
    precision: Annotated[str | None, _flag("NAME", "fp32, tf32, bf16 or fp16 (default: fp32).", "--precision")] = None,
    compile: Annotated[
        str | None, _flag("MODE", "off, default, blocks, reduce-overhead or max-autotune (default: off).", "--compile")
    ] = None,
    optimizer: Annotated[str | None, _flag("NAME", "adamw, adafactor or sgd (default: adamw).", "--optimizer")] = None,
    accumulate: Annotated[
        str | None, _flag("N", "Micro-batches to one optimiser step (default: 1).", "--accumulate")
    ] = None,
    weights: Annotated[
        str | None,
        _flag(
            "NAME", "Start from `published` weights, a folder or a hub id (default: drawn from the seed).", "--weights"
        ),
    ] = None,
    seed: Annotated[
        str | None, _flag("N", "Seed of weights, order of the data and dropout (default: 0).", "--seed")
    ] = None,
    device: Annotated[str | None, _flag("NAME", "auto, cpu or cuda (default: auto).", "--device")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As KEY.PATH=VALUE above.")
    ] = None,
    save_model: Annotated[
        bool, typer.Option("--save_model", "--save-model", help="Keep the weights, as artifacts/final_model.")
    ] = False,
    estimate_cpu: Annotated[
        bool, typer.Option("--estimate-cpu", help="Estimate CPU energy from CPU time, labelled as an estimate.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the settings; train nothing.")] = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Train a model of the zoo and say what it cost: items per second, joules per item, loss, by stage.

    Without --dataset the data is synthetic, of the right shape, and --dataset_split slices it. Without any budget it
    is one epoch of the split; a budget that is given (--max_steps, --max_time_minutes) stands in place of the epoch.

    Examples:

      joulelab train gpt2 --batch_size 4 --learning_rate 1e-6 --dataset_split "train[:100]" --train_stats simple,energy

      joulelab train bert --size tiny --max_steps 20

      joulelab train resnet50 --precision bf16 --compile default --max_time_minutes 5

      joulelab train ./my_model.py --size tiny --max_steps 20 training.clip_norm=0.5

      torchrun --nproc-per-node 2 -m joulelab train gpt2 --trainer ddp --max_steps 100
    """
    from joulelab.cli.run import start_run
    from joulelab.runs.spec import check
    from joulelab.runs.store import store_root

    spec = check(train_settings(context.params))
    start_run(store_root(runs_dir), spec, dry_run, as_json)


def train_settings(params: dict[str, Any]) -> dict[str, Any]:
    """base.yaml, the model, and what was asked for."""
    from joulelab.runs.spec import merge, nest

    params = with_model(params)
    settings = base_settings(params["model"])
    for asked in asked_settings(params):
        settings = merge(settings, nest(asked.key, asked.value))
    return settings


def base_settings(model: str) -> dict[str, Any]:
    from joulelab.runs.spec import BASE, EXPERIMENTS, read_mapping

    return {**read_mapping(EXPERIMENTS / f"{BASE}.yaml"), "pipeline": "train", "model": model}


def with_model(params: dict[str, Any]) -> dict[str, Any]:
    """The model from the argument or from --model; after --model the first argument is a setting already."""
    first, option = params.get("model"), params.get("model_option")
    overrides = list(params.get("overrides") or ())
    if option is not None and first is not None:
        if "=" not in first:
            raise UsageError(f"two models were named: {first} and {option}", "leave one of them out")
        overrides = [first, *overrides]
    model = option if option is not None else first
    if model is None or ("=" in model and not model.endswith(".py")):
        raise UsageError(
            "no model was named", "`joulelab zoo` lists them; for a first look: joulelab train gpt2 --size tiny"
        )
    return {**params, "model": model, "overrides": overrides}


# The flags of `joulelab train`: which setting each one sets, and how its text is read.
#
# The course writes `--batch_size`; `--batch-size` is understood as well. A sweep reads the same flags with commas.


TRAINERS = {"simple": "none", "ddp": "ddp", "fsdp": "fsdp"}
DEFAULT_TRACKER = "no-op"


@dataclass(frozen=True)
class TrainOptions:
    """One setting, as the user wrote it."""

    key: str
    text: str
    read: Callable[[str], Any]
    is_list: bool = False
    """Its commas separate what belongs together."""

    @property
    def value(self) -> Any:
        return self.read(self.text)

    @property
    def values(self) -> list[Any]:
        """One for each piece between commas, for a sweep."""
        return [self.value] if self.is_list else [self.read(text) for text in split_at_commas(self.text)]


def _yaml(text: str) -> Any:
    from joulelab.runs.spec import parse_yaml

    return parse_yaml(text, f"'{text}'")


def _minutes(text: str) -> Any:
    minutes = _yaml(text)
    return 60.0 * minutes if isinstance(minutes, int | float) else minutes


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] or [DEFAULT_TRACKER]


def _trainer(text: str) -> str:
    if text not in TRAINERS:
        from joulelab.lookup import unknown

        raise unknown("trainer", text, TRAINERS)
    return TRAINERS[text]


# flag -> setting and reader; names stay text (YAML would make `off` false), the rest is read as in `key.path=value`
FLAGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "size": ("size", str),
    "trainer": ("training.parallel", _trainer),
    "batch_size": ("training.batch_size", _yaml),
    "accumulate": ("training.accumulate", _yaml),
    "learning_rate": ("training.learning_rate", _yaml),
    "optimizer": ("training.optimizer", str),
    "precision": ("training.precision", str),
    "compile": ("training.compile", str),
    "epochs": ("training.epochs", _yaml),
    "max_steps": ("training.max_steps", _yaml),
    "max_time_minutes": ("training.max_time_s", _minutes),
    "dataset": ("dataset", str),
    "dataset_split": ("dataset_split", str),
    "train_stats": ("training.stats", _names),
    "weights": ("weights", str),
    "seed": ("seed", _yaml),
    "device": ("device", str),
    "require": ("energy.require", str),
    "require_grade": ("energy.require_grade", str),
}


def asked_settings(params: Mapping[str, Any]) -> list[TrainOptions]:
    """The flags that were given, then the settings written as key.path=value, which are the more precise."""
    flags = [TrainOptions(*_setting(name, params[name])) for name in FLAGS if params.get(name) is not None]
    switches = [
        TrainOptions(key, "true", _yaml)
        for key, name in (("save_model", "save_model"), ("energy.estimate_cpu", "estimate_cpu"))
        if params.get(name)
    ]
    return [*flags, *switches, *map(read_override, [*(params.get("settings") or ()), *(params.get("overrides") or ())])]


def _setting(name: str, text: str) -> tuple[str, str, Callable[[str], Any], bool]:
    key, read = FLAGS[name]
    return key, text, read, read is _names


def read_override(text: str) -> TrainOptions:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or ".." in key or key.startswith("."):
        raise UsageError(f"'{text}' is not a setting", "write key.path=value, for example training.clip_norm=0.5")
    if key.strip() == "training.stats" and not value.startswith("["):
        return TrainOptions("training.stats", value, _names, is_list=True)
    return TrainOptions(key.strip(), value, _yaml)


def split_at_commas(text: str) -> list[str]:
    """`8,16` is two; the commas inside `[0.9, 0.95]` or quotes belong to one value."""
    return ["".join(piece).strip() for piece in _pieces(text)]


def _pieces(text: str) -> Iterator[list[str]]:
    piece: list[str] = []
    depth, quote = 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield piece
            piece = []
            continue
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "[{") - (letter in "]}")
        piece.append(letter)
    yield piece
