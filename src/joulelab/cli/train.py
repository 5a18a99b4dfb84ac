"""`joulelab train`: train and measure a zoo model, with the options of the course (`--batch_size`, `--train_stats`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    DryRun,
    EstimateCpu,
    Flag,
    Require,
    RequireGrade,
    RunsDir,
    base_settings,
    complete_models,
    merged,
    options_in_errors,
    read_trackers,
    read_yaml,
    requested_settings,
)
from joulelab.errors import UsageError


def _flag(metavar: str, text: str, *names: str) -> Any:
    """An option whose text is parsed by `FLAGS`, so that a sweep can pass several values."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def train(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Zoo model (`joulelab zoo`), or a .py file that defines MODEL.", autocompletion=complete_models
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any setting of `joulelab explain --pipeline train`."),
    ] = None,
    model_option: Annotated[str | None, _flag("MODEL", "Same as the argument MODEL.", "--model")] = None,
    size: Annotated[
        str | None,
        _flag("SIZE", "Model size; every model has the size `tiny` (default: the published size).", "--size"),
    ] = None,
    batch_size: Annotated[
        str | None, _flag("N", "Micro-batch size (default: the model size's).", "--batch_size", "--batch-size")
    ] = None,
    learning_rate: Annotated[
        str | None, _flag("RATE", "Peak learning rate (default: 5e-5).", "--learning_rate", "--learning-rate")
    ] = None,
    dataset: Annotated[
        str | None,
        _flag("NAME", "`synthetic`, a path or a hub id (default: synthetic).", "--dataset"),
    ] = None,
    dataset_split: Annotated[
        str | None,
        _flag(
            "SPLIT",
            'Split or slice: train, "train[:100]", "train[10%:20%]" (default: train).',
            "--dataset_split",
            "--dataset-split",
        ),
    ] = None,
    train_stats: Annotated[
        str | None,
        _flag(
            "NAMES",
            "Comma-separated training trackers: simple,energy.",
            "--train_stats",
            "--train-stats",
            "--trainer_stats",
        ),
    ] = None,
    epochs: Annotated[
        str | None, _flag("N", "Epochs (default: 1, or no limit if another budget is given).", "--epochs")
    ] = None,
    max_steps: Annotated[str | None, _flag("N", "Stop after N optimizer steps.", "--max_steps", "--max-steps")] = None,
    max_time_minutes: Annotated[
        str | None,
        _flag("MINUTES", "Stop after this training time.", "--max_time_minutes", "--max-time-minutes"),
    ] = None,
    trainer: Annotated[
        str | None,
        _flag("NAME", "simple; ddp or fsdp under torchrun; your .py file; or a name from a package.", "--trainer"),
    ] = None,
    precision: Annotated[
        str | None, _flag("NAME", "fp32, tf32, bf16, fp16; or auto, by a short trial (default: auto).", "--precision")
    ] = None,
    compile: Annotated[
        str | None,
        _flag("MODE", "off, default, blocks, reduce-overhead, max-autotune or auto (default: auto).", "--compile"),
    ] = None,
    optimizer: Annotated[
        str | None, _flag("NAME", "adamw, adamw-8bit, adafactor or sgd (default: adamw).", "--optimizer")
    ] = None,
    accumulate: Annotated[
        str | None, _flag("N", "Micro-batches per optimizer step (default: 1).", "--accumulate")
    ] = None,
    weights: Annotated[
        str | None,
        _flag("NAME", "Initial weights: `published`, a folder or a hub id (default: random).", "--weights"),
    ] = None,
    seed: Annotated[
        str | None, _flag("N", "Seed of initial weights, data order and dropout (default: 0).", "--seed")
    ] = None,
    device: Annotated[
        str | None, _flag("NAME", "auto, cpu, cuda, or mps (Apple; not tested on hardware); default: auto.", "--device")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Same as KEY.PATH=VALUE above.")
    ] = None,
    save_model: Annotated[
        bool, typer.Option("--save_model", "--save-model", help="Save the weights to artifacts/final_model.")
    ] = False,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Train a zoo model and report items per second, joules per item and loss for every stage.

    Without --dataset the data is synthetic with the right shape, and --dataset_split slices it. The default budget is
    one epoch of the split; --max_steps or --max_time_minutes replaces it.

    Examples:

      joulelab train gpt2 --batch_size 4 --learning_rate 1e-6 --dataset_split "train[:100]" --train_stats simple,energy

      joulelab train bert --size tiny --max_steps 20

      joulelab train resnet50 --precision bf16 --compile default --max_time_minutes 5

      joulelab train ./my_model.py --size tiny --max_steps 20 training.clip_norm=0.5

      torchrun --nproc-per-node 2 -m joulelab train gpt2 --trainer ddp --max_steps 100
    """
    from joulelab.cli.run import RunOptions, start_run
    from joulelab.cli.sweep import sweep_in_hint
    from joulelab.runs.spec import check
    from joulelab.runs.store import store_root

    params = with_model(context.params)
    base, requested = base_settings("train", model=params["model"]), requested_settings("train", FLAGS, params)
    with sweep_in_hint(f"train {params['model']}", base, requested), options_in_errors(requested):
        spec = check(merged(base, requested))
    start_run(spec, RunOptions(store_root(runs_dir), as_json, dry_run))


def with_model(params: Mapping[str, Any]) -> dict[str, Any]:
    """The model from the argument or from --model; after --model the first argument is already a setting."""
    first, option = params.get("model"), params.get("model_option")
    overrides = list(params.get("overrides") or ())
    if option is not None and first is not None:
        if "=" not in first:
            raise UsageError(f"two models were named: {first} and {option}", "leave one of them out")
        overrides = [first, *overrides]
    model = option if option is not None else first
    if model is None or ("=" in model and not model.endswith(".py")):
        raise UsageError("no model was named", "`joulelab zoo` lists them; to try one: joulelab train gpt2 --size tiny")
    from joulelab.runs.spec import user_path

    trainer = params.get("trainer")
    own = trainer is not None and (is_trainer_file(trainer) or is_registered(trainer))
    if own:  # a separate setting; ddp and fsdp are ways in which any trainer runs
        named = user_path(str(trainer)).absolute() if is_trainer_file(str(trainer)) else trainer
        overrides = [f"trainer={named}", *overrides]
    return {**params, "model": model, "overrides": overrides, "trainer": None if own else trainer}


def is_trainer_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def is_registered(name: str) -> bool:
    """Whether an installed package adds a trainer of this name."""
    from joulelab import lookup

    return name not in TRAINERS and name in lookup.TRAINERS.names()


TRAINERS = {"simple": "none", "ddp": "ddp", "fsdp": "fsdp"}


def _minutes(text: str) -> Any:
    minutes = read_yaml(text)
    if isinstance(minutes, int | float) and minutes <= 0:
        raise UsageError(f"expected minutes above 0, found {minutes}", "the training ends after this time")
    return 60.0 * minutes if isinstance(minutes, int | float) else minutes


def _trainer(text: str) -> str:
    if text not in TRAINERS:
        from joulelab.lookup import unknown

        raise unknown("trainer", text, TRAINERS)
    return TRAINERS[text]


# Names are read as text, because YAML turns `off` into false; everything else as in `key.path=value`.
FLAGS: Mapping[str, Flag] = {
    "size": Flag("size", str),
    "trainer": Flag("training.parallel", _trainer),
    "batch_size": Flag("training.batch_size", read_yaml),
    "accumulate": Flag("training.accumulate", read_yaml),
    "learning_rate": Flag("training.learning_rate", read_yaml),
    "optimizer": Flag("training.optimizer", str),
    "precision": Flag("training.precision", str),
    "compile": Flag("training.compile", str),
    "epochs": Flag("training.epochs", read_yaml),
    "max_steps": Flag("training.max_steps", read_yaml),
    "max_time_minutes": Flag("training.max_time_s", _minutes),
    "dataset": Flag("dataset", str),
    "dataset_split": Flag("dataset_split", str),
    "train_stats": Flag("training.stats", read_trackers, is_list=True),
    "weights": Flag("weights", str),
    "seed": Flag("seed", read_yaml),
    "device": Flag("device", str),
    "require": Flag("energy.require", str),
    "require_grade": Flag("energy.require_grade", str),
    "save_model": Flag("save_model", switch=True),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
}
