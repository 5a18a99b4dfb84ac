"""Zoo models by name, or a user's Python file that defines `MODEL`: entries, sizes and workload requests.

A model is one file with a `MODEL` and one line in `lookup.ZOO`. Nothing here imports a framework, so that models can be
listed without one; `prepare` imports it first. A user's file may import a framework.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from joulelab import lookup
from joulelab.data.splits import Split, parse_split
from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import user_path

if TYPE_CHECKING:
    from joulelab.zoo.objective import Workload


Prepare = Callable[["WorkloadRequest"], "Workload"]


@dataclass(frozen=True)
class Size:
    """One size of a model and its input shape."""

    parameters: int
    """Trainable parameters; a test builds the model on the meta device and compares."""
    settings: Mapping[str, Any]
    """Settings of the architecture that differ from its defaults."""
    shape: Mapping[str, int]
    """Dimensions of one input by name: {"tokens": 512}, {"side": 224}; users can override each."""
    batch_size: int
    """Default batch size."""
    hub_id: str = ""
    """Hub id of the published weights."""


@dataclass(frozen=True)
class ZooEntry:
    """Everything about a model that is known without importing a framework."""

    name: str
    family: str
    """language, vision, speech, image-text, graphs, molecules."""
    task: str
    """Training task: masked LM, image classification."""
    item: str
    """Name of one sample: sequence, image, clip, graph, trajectory."""
    about: str
    """One sentence for the listing."""
    sizes: Mapping[str, Size]
    """By name, the published default first; every model has a `tiny`."""
    prepare: Prepare | str
    """Builds model, batches and objective; "module:function" if importing it needs a framework."""
    architecture: str = ""
    """Class name in transformers, for models from there."""
    needs: tuple[str, ...] = ("torch", "transformers")
    """Required packages."""
    extra: str = "train"
    """The extra of joulelab that installs them."""
    dataset: str = ""
    """Description of the data accepted by `--dataset`; empty: synthetic data only."""
    dataset_kind: Literal["documents", "folder", "file"] | None = None
    """What `--dataset` must name, checked before a run; None: `prepare` finds out."""
    learnable: bool = True
    """Whether 20 steps of the tiny size on synthetic data should lower the loss."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `prepare`."""

    @property
    def default_size(self) -> str:
        return next(iter(self.sizes))


GUIDE = "docs/add-a-model.md has a complete example"
PUBLISHED = "published"
"""Value of `weights` for the published weights of a size."""


def find_model(name: str) -> ZooEntry:
    """The entry of `gpt2`, or the MODEL of `./my_model.py`."""
    if is_file(name) or (name not in lookup.ZOO.names() and Path(name).is_dir()):
        return _from_file(user_path(name))
    if name not in lookup.ZOO.names() and Path(f"{name}.py").is_file():
        raise NotFoundError(f"unknown model '{name}'", f"for your own file write ./{name}.py")
    if name not in lookup.ZOO.names():
        raise lookup.unknown("model", name, lookup.ZOO.names(), "`joulelab zoo` lists them; use ./FILE.py for your own")
    entry: ZooEntry = lookup.ZOO.resolve(name)
    return entry


def is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def all_models() -> list[ZooEntry]:
    return [lookup.ZOO.resolve(name) for name in lookup.ZOO.names()]


def absent_packages(entry: ZooEntry) -> list[str]:
    return lookup.absent_packages(*entry.needs)


def require_packages(entry: ZooEntry, *others: str, what: str = "") -> None:
    """`what` needs the packages of the entry and `others`."""
    lookup.require_packages(what or entry.name, *entry.needs, *others, otherwise=entry.extra)


_FAMILIES = {"big_bird": "bigbird", "resnet": "resnet50"}
"""Model types of transformers that the zoo has under another name."""


def _refuse_folder(path: Path) -> NotFoundError:
    """For a folder of weights: the command that trains its model from them."""
    try:
        kind = str(json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return NotFoundError(
            f"{path} is a folder; expected a zoo model or a .py file",
            "`joulelab zoo` lists the models; a folder of weights is given with --weights",
        )
    name = _FAMILIES.get(kind, kind)
    known = name in lookup.ZOO.names()
    return NotFoundError(
        f"{path} is a folder with weights of a {kind} model, but `train` takes the name of a zoo model",
        (f"train it from these weights: joulelab train {name} --weights {path}; " if known else "")
        + f"fine-tune it on your own labels: joulelab new compare my.yaml --data FILE --teacher {path}",
    )


def _from_file(path: Path) -> ZooEntry:
    if path.is_dir():
        raise _refuse_folder(path)
    if not path.is_file():
        raise NotFoundError(f"there is no file {path.absolute()}", "pass a model of `joulelab zoo` or a .py file")
    if path.suffix != ".py":
        raise NotFoundError(f"{path} is not a Python file", f"a model is a .py file that defines MODEL; {GUIDE}")
    entry = getattr(lookup.import_file(path.resolve(), GUIDE), "MODEL", None)
    if entry is None:
        raise ConfigError(f"{path} has no MODEL", f"define MODEL = ZooEntry(...) at the top level; {GUIDE}")
    if not isinstance(entry, ZooEntry):
        raise ConfigError(f"MODEL in {path} is a {type(entry).__name__}, expected a ZooEntry", GUIDE)
    if not entry.sizes:
        raise ConfigError(f"MODEL in {path} has no sizes", f"add at least one Size; {GUIDE}")
    return entry


def default_layers(count: int) -> tuple[int, ...]:
    """Half of a model's layers, first and last included, evenly apart: of 12 DistilBERT's 0, 2, 4, 7, 9, 11."""
    kept = max(1, count // 2)
    if kept == 1:
        return (0,)
    return tuple(round(number * (count - 1) / (kept - 1)) for number in range(kept))


SYNTHETIC = "synthetic"

# Names of the maximum sequence length in transformers configurations.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")


@dataclass(frozen=True)
class WorkloadRequest:
    """Model, size, data and initial weights that a user requested."""

    entry: ZooEntry
    size_name: str = ""
    batch_size: int = 0
    seed: int = 0
    dataset: str = SYNTHETIC
    """`synthetic`, a path or a hub id."""
    split: str = "train"
    weights: str = ""
    """Initial weights: a folder, hub id or `published`; empty: random, from the seed."""
    requested_shape: Mapping[str, int] = field(default_factory=dict)
    tokenizer: str = ""
    """For text: a folder, hub id or sample; empty: that of the weights, the published one of the size, or bytes."""
    validation: str = ""
    """Text to evaluate on; empty: the dataset's own validation split, else its last rows."""
    text_column: str | int | None = None
    """Column with the text; None: one of the usual names."""

    def __post_init__(self) -> None:
        shape = self.size.shape if self.size_name in ("", *self.entry.sizes) else {}
        for known, chosen, what in (
            (self.entry.sizes, [self.size_name] if self.size_name else [], "size"),
            (shape, self.requested_shape, "input dimension"),
        ):
            for name in chosen:
                if name not in known:
                    hint = f"`joulelab zoo {self.entry.name}` lists its sizes and their input dimensions"
                    raise lookup.unknown(f"{what} of {self.entry.name}", name, known, hint)

    @property
    def size(self) -> Size:
        return self.entry.sizes[self.size_name or self.entry.default_size]

    @property
    def shape(self) -> dict[str, int]:
        return {**self.size.shape, **self.requested_shape}

    def require_length(self) -> None:
        """Reject an input that is longer than the entry allows, without importing a framework.

        Weights other than the published ones may have more positions; `prepare` checks those.
        """
        tokens, settings, options = self.shape.get("tokens"), self.size.settings, self.entry.options
        if tokens is None or self.weights not in ("", PUBLISHED):
            return
        if "settings" in options:
            options["settings"](settings, tokens)
        declared = [settings[key] for key in _POSITIONS if key in settings]
        self.require_positions(declared[0] if declared else options.get("positions"), tokens)

    def require_positions(self, positions: int | None, tokens: int) -> None:
        unused = self.entry.options.get("unused_positions", 0)
        if positions is not None and tokens > positions - unused:
            raise ConfigError(
                f"{self.entry.name} has {positions - unused:,} positions; {tokens:,} tokens were requested",
                f"request at most {positions - unused:,} tokens, or choose another size",
            )

    @property
    def rows_per_batch(self) -> int:
        return self.batch_size or self.size.batch_size

    @property
    def wanted_split(self) -> Split:
        return parse_split(self.split)


def refuse_dataset(request: WorkloadRequest, name: str = "") -> ConfigError:
    return ConfigError(
        f"{request.entry.name} cannot read the dataset '{name or request.dataset}'",
        f"use `synthetic`{' or ' + request.entry.dataset if request.entry.dataset else ''}",
    )
