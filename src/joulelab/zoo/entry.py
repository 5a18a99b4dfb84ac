"""What the zoo knows of a model without importing a framework: enough to list it, and where the rest is.

A model is one file with a `MODEL` and one line in `lookup.ZOO`. The framework is first imported by `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joulelab.zoo.request import WorkloadRequest
    from joulelab.zoo.workload import Workload

Prepare = Callable[["WorkloadRequest"], "Workload"]


@dataclass(frozen=True)
class Size:
    """One size of a model and what it eats."""

    parameters: int
    """Trainable numbers, counted; a test builds the model on the meta device and compares."""
    settings: Mapping[str, Any]
    """Of the architecture, where they differ from its published defaults."""
    shape: Mapping[str, int]
    """Of one input, by name: {"tokens": 512}, {"side": 224}; each can be set by the user."""
    batch_size: int
    """Where the user names none."""
    hub_id: str = ""
    """Where the weights of this size are published."""


@dataclass(frozen=True)
class ZooEntry:
    name: str
    family: str
    """language, vision, speech, image-text, graphs, molecules."""
    task: str
    """What it is trained to do, in a word or two: masked LM, image classification."""
    item: str
    """What one sample is called: sequence, image, clip, graph, trajectory."""
    about: str
    """One sentence for the listing: what is special about it here."""
    sizes: Mapping[str, Size]
    """By name, the published default first; every model has a `tiny`."""
    prepare: Prepare | str
    """Makes model, batches and objective; "module:function" where importing it needs a framework."""
    architecture: str = ""
    """The model's class in transformers, for those that come from there."""
    needs: tuple[str, ...] = ("torch", "transformers")
    """Packages that must be importable."""
    extra: str = "train"
    """The extra of joulelab that brings them."""
    dataset: str = ""
    """What real data it takes with `--dataset`."""
    learnable: bool = True
    """Whether 20 steps of the tiny size on synthetic data should lower the loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What its `prepare` needs to know beyond the above."""

    @property
    def default_size(self) -> str:
        return next(iter(self.sizes))
