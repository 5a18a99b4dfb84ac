"""Settings of the pipeline `train`: one model of the zoo, trained and measured. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.splits import SYNTHETIC_SIZES, parse_split
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError, UsageError
from joulelab.runs import environment
from joulelab.train.config import TrainingConfig, TrainingRunSpec
from joulelab.zoo.registry import (
    SYNTHETIC,
    WorkloadRequest,
    ZooEntry,
    find_model,
    is_file,
    refuse_dataset,
    require_packages,
)

PUBLISHED = "published"
BUDGETS = ("max_steps", "max_tokens", "max_time_s", "max_energy_j", "replay_budget_of")
METRIC_LINES = 10


class TrainSpec(TrainingRunSpec):
    """Train a model of the zoo: build it, train it on its own task, look at held-out data."""

    shares_ranks: ClassVar[bool] = True
    pipeline: Literal["train"] = "train"
    """Which pipeline runs the stages."""
    model: str
    """A model of `joulelab zoo`, or a Python file that holds a MODEL."""
    size: str = ""
    """Which of the model's sizes; empty: its published default."""
    dataset: str = SYNTHETIC
    """`synthetic` (made from the seed, of the right shape), or a path or hub id that the model can read."""
    dataset_split: str = "train"
    """Which rows, as Hugging Face datasets writes it: train, train[:100], train[10%:20%]."""
    weights: str = ""
    """Where training starts: empty draws from the seed, `published` takes the size's published weights; else a folder
    or hub id."""
    tokenizer: str = ""
    """For text of yours: a folder, hub id or sample; empty: that of the weights or the published size, else bytes."""
    shape: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Of one input, by name, where it differs from the size's own: {tokens: 512}."""
    training: TrainingConfig = TrainingConfig()
    """How it is trained. Without a batch size it is the size's own; without any budget it is one epoch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    evaluate_batches: int = Field(8, ge=0)
    """Held-out batches behind each look at the held-out loss; 0: no look."""
    save_model: bool = False
    """Keep the trained weights as the artefact final_model. Off by default: most runs are about time and joules, and
    the weights of a large model are many gigabytes."""

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Batch size and name are the model's own, and the budget is one epoch, unless the user says otherwise."""
        name, training = settings.get("model"), settings.get("training", {})
        if not isinstance(name, str) or not isinstance(training, dict):
            return dict(settings)  # the check has a sentence for that
        entry = find_model(name)
        size = entry.sizes.get(settings.get("size") or entry.default_size)
        own = {"batch_size": size.batch_size} if size else {}
        training = own | _derived_defaults(training) | training | _absolute_trackers(training)
        return {"name": entry.name} | dict(settings) | {"model": _absolute(name), "training": training}

    @property
    def entry(self) -> ZooEntry:
        return find_model(self.model)

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
            asked_shape=self.shape,
            tokenizer=self.tokenizer,
        )

    def preflight(self) -> None:
        request = self.request
        for name in self.training.stats:
            _check_tracker(name)
        request.require_length()
        _check_data(request)
        _check_weights(request)
        require_packages(request.entry)
        if self.device == "cuda" and not environment.gpus():
            raise UsageError("device=cuda, and there is no NVIDIA GPU here", "leave it out, or write --device cpu")


def _absolute(name: str) -> str:
    """A file by its full path, so that a run can be resumed and repeated in another folder."""
    return str(Path(name).expanduser().absolute()) if is_file(name) else name


def _absolute_trackers(training: Mapping[str, Any]) -> dict[str, Any]:
    stats = training.get("stats")
    return {"stats": [_absolute(str(name)) for name in stats]} if isinstance(stats, list) else {}


def _derived_defaults(training: Mapping[str, Any]) -> dict[str, Any]:
    """A budget that was named stands in place of the one epoch; a short training still gets some lines of metrics."""
    found: dict[str, Any] = {}
    if any(training.get(name) is not None for name in BUDGETS):
        found["epochs"] = None
    steps = training.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        found["log_every_steps"] = min(METRIC_LINES, max(1, steps // METRIC_LINES))
    return found


def _check_tracker(name: str) -> None:
    if not is_file(name):
        lookup.TRAINER_STATS.require(name)
        if name == "codecarbon" and find_spec("codecarbon") is None:
            raise DependencyMissing(
                "the tracker codecarbon needs CodeCarbon, not installed here", 'pip install "joulelab[codecarbon]"'
            )
    elif not Path(name).is_file():
        raise NotFoundError(f"there is no file {name}", "name one of our trackers or a .py file of yours")


def _check_data(request: WorkloadRequest) -> None:
    split = parse_split(request.split)
    if request.dataset != SYNTHETIC:
        if not request.entry.dataset:
            raise refuse_dataset(request)
        sources.parse(request.dataset)
        return
    if split.name not in SYNTHETIC_SIZES:
        raise lookup.unknown("split of the synthetic set", split.name, SYNTHETIC_SIZES)
    split.rows(SYNTHETIC_SIZES[split.name])


def _check_weights(request: WorkloadRequest) -> None:
    if request.weights == PUBLISHED and not request.size.hub_id:
        size = request.size_name or request.entry.default_size
        raise ConfigError(
            f"{request.entry.name} has no published weights of the size {size}", "name a folder or a hub id instead"
        )
    if request.weights and request.weights != PUBLISHED:
        sources.parse(request.weights)
