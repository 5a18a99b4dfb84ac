"""What is run: a model on its device in its precision, inputs of the size asked for, and what a call should cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from joulelab.data import sources
from joulelab.data.batches import TensorBatch
from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.findable import require_positions
from joulelab.infer.infer_config import Case, InferSpec
from joulelab.infer.precisions import cast_inputs, cast_model
from joulelab.zoo.flop_counter import FlopCounter
from joulelab.zoo.norms.build import build, make_inputs
from joulelab.zoo.norms.equivalence import lean
from joulelab.zoo.norms.layers import Encoder
from joulelab.zoo.norms.published import load_published
from joulelab.zoo.norms.shapes import SHAPES
from joulelab.zoo.objective import Objective
from joulelab.zoo.pretrained import drawn_from, explained_load, import_transformers, load_causal_lm
from joulelab.zoo.registry import find_model
from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.workload import prepare


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    inputs: tuple[Any, ...]
    items: int
    """In a call."""
    item: str
    notes: tuple[str, ...] = ()


class Shelf:
    """Models that several rows use are made once; each has its own device, precision and norm."""

    def __init__(self, spec: InferSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._models: dict[tuple[Any, ...], nn.Module] = {}
        self._loaded: nn.Module | None = None

    def subject(self, case: Case) -> Subject:
        make = {"encoder": self._encoder, "zoo": self._from_zoo, "pretrained": self._pretrained}[self._spec.kind]
        found = make(case)
        inputs = tuple(value.to(self._device) for value in found.inputs)
        return replace(found, inputs=_cast(inputs, case.dtype))

    def _ready(self, key: tuple[Any, ...], dtype: str, make: Callable[[], nn.Module]) -> nn.Module:
        if key not in self._models:
            self._models[key] = cast_model(make().eval().requires_grad_(False).to(self._device), dtype)
        return self._models[key]

    def _encoder(self, case: Case) -> Subject:
        spec, shape, fastest = self._spec, SHAPES[self._spec.model], case.mode == "fastest"

        def make() -> nn.Module:
            model = build(shape, case.norm, spec.seed)
            if spec.weights:
                load_published(model, spec.weights)
            return lean(model) if fastest else model

        model = self._ready((case.dtype, case.norm, fastest), case.dtype, make)
        inputs = (make_inputs(shape, case.batch_size, case.tokens),)
        return Subject(model, inputs, case.batch_size, shape.item, _encoder_notes(spec, case))

    def _from_zoo(self, case: Case) -> Subject:
        entry = find_model(self._spec.model)
        request = WorkloadRequest(
            entry,
            self._spec.size,
            batch_size=case.batch_size,
            seed=self._spec.seed,
            weights=self._spec.weights,
            asked_shape={"tokens": case.tokens} if case.tokens else {},
        )
        workload = prepare(request)
        batch = workload.batches.at(0, 0)
        model = self._ready(
            (case.dtype, case.tokens), case.dtype, lambda: _ForwardWithLoss(workload.model, workload.objective)
        )
        notes = (*workload.notes, "a forward pass with its loss, as in evaluation")
        return Subject(model, (batch,), batch.samples, entry.item, notes)

    def _pretrained(self, case: Case) -> Subject:
        if self._loaded is None:
            self._loaded = load_architecture(self._spec.model)
        loaded = self._loaded
        name, value, item = _pretrained_input(self._spec, loaded, case)
        keep = len(self._spec.dtypes) > 1
        model = self._ready((case.dtype,), case.dtype, lambda: _ByName(copy.deepcopy(loaded) if keep else loaded, name))
        return Subject(model, (value,), case.batch_size, item)


def _cast(inputs: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """Also inside a batch of the zoo's."""
    return tuple(
        replace(value, tensors=dict(zip(value.tensors, cast_inputs(list(value.tensors.values()), dtype), strict=True)))
        if isinstance(value, TensorBatch)
        else cast_inputs([value], dtype)[0]
        for value in inputs
    )


def _encoder_notes(spec: InferSpec, case: Case) -> tuple[str, ...]:
    width = SHAPES[spec.model].width
    said = {
        "weights drawn from the seed: time is that of trained ones, joules nearly (not measured: a GPU's power "
        "follows its data a little)": not spec.weights,
        "fastest: norms' scales inside the matrices, and of the last block only the token that the head reads": (
            case.mode == "fastest"
        ),
        f"pre-crms at width {width} computes what a pre-LN encoder of width {width + 1} does": case.norm == "pre-crms",
    }
    return tuple(text for text, holds in said.items() if holds)


class _ForwardWithLoss(nn.Module):
    """A model of the zoo behind its task: what one evaluation step computes."""

    def __init__(self, model: nn.Module, objective: Objective[Any]) -> None:
        super().__init__()
        self.model = model
        self.others = nn.ModuleDict({name.replace(".", "_"): module for name, module in objective.modules().items()})
        self._objective = objective

    def forward(self, batch: Any) -> Tensor:
        return self._objective(self.model, batch, lambda name: nullcontext()).loss_sum


class _ByName(nn.Module):
    """A model of transformers that takes its input by name."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def forward(self, value: Tensor) -> Tensor:
        output: Mapping[str, Any] = self.model(**{self._name: value})
        return next(found for found in output.values() if isinstance(found, Tensor))


def load_architecture(name: str) -> nn.Module:
    """As the class that the folder or hub id says it is; a GGUF file holds a causal language model."""
    path = sources.parse(name).path
    if path is not None and path.suffix.lower() == ".gguf":
        return load_causal_lm(name)
    transformers = import_transformers()
    config: Any = explained_load(transformers.AutoConfig, name)
    kinds = [getattr(transformers, kind, None) for kind in config.architectures or []]
    return explained_load(next((kind for kind in kinds if kind), transformers.AutoModel), name)


def _pretrained_input(spec: InferSpec, model: nn.Module, case: Case) -> tuple[str, Tensor, str]:
    """The argument's name, its value, and what one of it is called."""
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{spec.model} is an encoder with a decoder; one forward pass of it is not defined by its name",
            "use a model of `joulelab zoo` (t5, bart), which brings inputs of its own",
        )
    takes = getattr(model, "main_input_name", "input_ids")
    of_images = takes == "pixel_values" and hasattr(config, "image_size")
    if not of_images and not (takes == "input_ids" and hasattr(config, "vocab_size")):
        raise ConfigError(
            f"{spec.model} ({type(model).__name__}) takes neither tokens alone nor images alone",
            "use a model of `joulelab zoo`, which brings inputs of its own",
        )
    if of_images and spec.seq_lengths:
        raise ConfigError(f"{spec.model} takes images; a sequence length fits models of text", "leave --seq-length out")
    with drawn_from(spec.seed):
        if of_images:
            size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
            channels = getattr(config, "num_channels", 3)
            return "pixel_values", torch.randn(case.batch_size, channels, size, size), "image"
        require_positions(spec.model, getattr(config, "max_position_embeddings", None), [case.tokens])
        return "input_ids", torch.randint(0, config.vocab_size, (case.batch_size, case.tokens)), "sequence"


def forward_flops(subject: Subject) -> tuple[float | None, str]:
    """Per item, counted on one call; or why it cannot be counted. Element-wise operations count nothing."""
    try:
        with _all_tokens(subject.model), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounter() as counter:
            subject.model(*subject.inputs)
    except JoulelabError:
        raise
    except Exception as error:  # whatever a model does that the counter does not like
        return None, f"not counted: {type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:100]}"
    return counter.flops / subject.items, "one call"


@contextmanager
def _all_tokens(model: nn.Module) -> Iterator[None]:
    """A lean encoder as the plain one: work that was left out is no merit of the card."""
    lean_before = isinstance(model, Encoder) and model.first_only
    if isinstance(model, Encoder):
        model.first_only = False
    try:
        yield
    finally:
        if isinstance(model, Encoder):
            model.first_only = lean_before


def weight_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
