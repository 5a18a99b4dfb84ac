"""Settings of the pipeline `train`, which trains and measures one zoo model. Importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.splits import SYNTHETIC_SIZES, parse_split
from joulelab.data.text import check_documents
from joulelab.errors import ConfigError, DeviceMissing, NotFoundError
from joulelab.runs import environment
from joulelab.runs.spec import user_path
from joulelab.train.config import CompileMode, PipelineTraining, Precision, TrainingConfig, TrainingRunSpec
from joulelab.zoo.registry import (
    PUBLISHED,
    SYNTHETIC,
    WorkloadRequest,
    ZooEntry,
    find_model,
    is_file,
    refuse_dataset,
    require_packages,
)

BUDGETS = ("max_steps", "max_tokens", "max_time_s", "max_energy_j", "replay_budget_of")
METRIC_LINES = 10


class ZooTraining(PipelineTraining):
    """The training loop, in which a short trial may choose what is efficient on this device."""

    precision: Literal[Precision, "auto"] = "auto"
    """fp32; tf32 matrix products; or autocast to bf16 or fp16 (with loss scaling) over fp32 weights. auto: bf16 on a
    GPU with tensor cores for it, unless a trial of a training of a minute or more finds fp32 faster or the loss
    different; fp32 elsewhere. With weights=bf16 or matmul=fp8, which need it, auto is bf16."""
    compile: Literal[CompileMode, "auto"] = "auto"  # type: ignore[assignment]
    """Mode of torch.compile; `blocks` compiles one layer of a deep model and reuses it for all, which starts faster.
    auto: on a GPU compiled (`blocks` for many layers) if the same trial expects a shorter training, compilation
    included; off elsewhere."""


class TrainSpec(TrainingRunSpec):
    """Train a zoo model on its task and evaluate it on held-out data."""

    aliases: ClassVar = {
        "data.source": "dataset",
        "data.train": "dataset",
        "data.validation": "validation_dataset",
        "data.test": "validation_dataset",
        "data.text_column": "text_column",
    }
    shares_ranks: ClassVar[bool] = True
    pipeline: Literal["train"] = "train"
    """The pipeline that runs the stages."""
    model: str
    """A model listed by `joulelab zoo`, or a Python file that defines MODEL."""
    size: str = ""
    """Size of the model; empty: the published default."""
    dataset: str = SYNTHETIC
    """`synthetic` (generated from the seed in the model's input shape), or a path or hub id that the model can read."""
    dataset_split: str = "train"
    """Rows to train on, in the notation of Hugging Face datasets: train, train[:100], train[10%:20%]."""
    validation_dataset: str = ""
    """Text to evaluate on (data.validation): a path or hub id. Empty: the dataset's own validation split, else its last
    rows are held out."""
    text_column: str | int | None = None
    """Column of the dataset with the text (data.text_column): its name, or its number counted from 1; null: text,
    content, review or sentence."""
    weights: str = ""
    """Initial weights: empty (random, from the seed), `published` (those of this size), a folder or a hub id."""
    tokenizer: str = ""
    """Tokenizer for a text dataset: a folder, hub id or sample. Empty: that of the weights or the published size, else
    bytes."""
    shape: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Input dimensions to override, by name: {tokens: 512}."""
    trainer: str = ""
    """A Python file with a subclass of SimpleTrainer to train with; empty: SimpleTrainer itself."""
    training: ZooTraining = ZooTraining()
    """Training settings. The default batch size is that of the model size; the default budget is one epoch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device; auto uses a GPU if there is one. mps: Apple's GPU, not tested on hardware, never chosen by auto."""
    evaluate_batches: int = Field(8, ge=0)
    """Held-out batches per evaluation; 0 disables evaluation."""
    save_model: bool = False
    """Save the trained weights as the artifact final_model. Off by default: most runs measure time and energy, and the
    weights of a large model take many gigabytes."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the model's batch size and name, and a budget of one epoch, unless they are set."""
        name, training = settings.get("model"), settings.get("training", {})
        if not isinstance(name, str) or not isinstance(training, dict):
            return dict(settings)  # validation reports it
        entry = find_model(name)
        size = entry.sizes.get(settings.get("size") or entry.default_size)
        defaults = {"batch_size": size.batch_size} if size else {}
        training = defaults | _derived_defaults(training) | training
        training |= _absolute_trackers(training)
        return {"name": entry.name} | dict(settings) | {"model": _absolute(name), "training": training}

    @property
    def entry(self) -> ZooEntry:
        return find_model(self.model)

    @property
    def trainings(self) -> tuple[TrainingConfig, ...]:
        return (self.training,)

    @property
    def request(self) -> WorkloadRequest:
        return WorkloadRequest(
            entry=self.entry,
            size_name=self.size,
            batch_size=self.training.batch_size,
            seed=self.seed,
            dataset=self.dataset,
            split=self.dataset_split,
            weights=self.weights,
            requested_shape=self.shape,
            tokenizer=self.tokenizer,
            validation=self.validation_dataset,
            text_column=self.text_column,
        )

    def require_packages(self) -> None:
        used = [name for name in self.training.stats if name == "codecarbon"]  # the tracker has its package's name
        what = " with --train_stats codecarbon" if used else ""
        require_packages(self.request.entry, *used, what=f"{self.request.entry.name}{what}")
        self.training.require_packages()

    def checks(self) -> Iterator[Callable[[], object]]:
        request = self.request
        for name in self.training.stats:
            yield lambda name=name: _check_tracker(name)  # type: ignore[misc]
        yield self._check_trainer
        yield request.require_length
        yield lambda: _check_data(request)
        yield lambda: _check_weights(request)
        yield self._check_device

    def _check_trainer(self) -> None:
        if not self.trainer or self.trainer in lookup.TRAINERS.names():
            return
        if not (Path(self.trainer).is_file() and self.trainer.endswith(".py")):
            raise NotFoundError(
                f"there is no Python file {self.trainer}", "pass a .py file with a subclass of SimpleTrainer"
            )

    def _check_device(self) -> None:
        environment.require_mac(self.device)
        if self.device == "cuda" and not environment.gpus():
            raise DeviceMissing(
                "device=cuda was requested but no NVIDIA GPU was found", "omit --device or pass --device cpu"
            )


def _absolute(name: str) -> str:
    """Absolute path of a file, so that a run can be resumed and repeated from another directory."""
    return str(user_path(name).absolute()) if is_file(name) else name


def _absolute_trackers(training: Mapping[str, Any]) -> dict[str, Any]:
    stats = training.get("stats")
    return {"stats": [_absolute(str(name)) for name in stats]} if isinstance(stats, list) else {}


def _derived_defaults(training: Mapping[str, Any]) -> dict[str, Any]:
    """An explicit budget replaces the default of one epoch; a short training still logs several lines."""
    derived: dict[str, Any] = {}
    if any(training.get(name) is not None for name in BUDGETS):
        derived["epochs"] = None
    steps = training.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        derived["log_every_steps"] = min(METRIC_LINES, max(1, steps // METRIC_LINES))
    return derived


def _check_tracker(name: str) -> None:
    if not is_file(name):
        lookup.TRAINER_STATS.require(name)
    elif not Path(name).is_file():
        raise NotFoundError(f"there is no file {name}", "pass a built-in tracker or the path of a .py file")


def _check_data(request: WorkloadRequest) -> None:
    split = parse_split(request.split)
    if request.dataset != SYNTHETIC:
        if not request.entry.dataset:
            raise refuse_dataset(request)
        for name in filter(None, (request.dataset, request.validation)):
            if request.entry.dataset_kind == "documents":
                check_documents(name, request.text_column)
                continue
            path = sources.parse(name).path
            is_there = {"folder": Path.is_dir, "file": Path.is_file}.get(request.entry.dataset_kind or "")
            if is_there is not None and (path is None or not is_there(path)):
                raise refuse_dataset(request, name)
        return
    if request.validation:
        raise ConfigError(
            f"validation_dataset={request.validation} without a dataset to train on", "set --dataset (data.train)"
        )
    if split.name not in SYNTHETIC_SIZES:
        raise lookup.unknown("split of the synthetic dataset", split.name, SYNTHETIC_SIZES)
    split.rows(SYNTHETIC_SIZES[split.name])


def _check_weights(request: WorkloadRequest) -> None:
    if request.weights == PUBLISHED and not request.size.hub_id:
        size = request.size_name or request.entry.default_size
        raise ConfigError(
            f"{request.entry.name} has no published weights for size {size}", "pass a folder or a hub id instead"
        )
    if request.weights and request.weights != PUBLISHED:
        sources.parse(request.weights)
