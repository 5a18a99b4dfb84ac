"""The measured workload: a model on its device in its precision, inputs of the requested shape, its FLOPs and memory.

A GPU refuses an allocation that does not fit. On a CPU the kernel overcommits and kills the process later, so large
batches are checked in advance: one item is run, and the batch is assumed to need that many times its memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from joulelab.data import sources
from joulelab.data.batches import TensorBatch
from joulelab.errors import ConfigError, JoulelabError, OutOfMemory
from joulelab.infer.config import Case, InferSpec, require_positions
from joulelab.infer.recipes import cast_inputs, cast_model
from joulelab.train.devices import is_out_of_memory, peak_memory_bytes
from joulelab.units import size_text
from joulelab.zoo.cost import FlopCounter
from joulelab.zoo.norms.encoder_shapes import SHAPES
from joulelab.zoo.norms.encoders import Encoder, build, make_inputs
from joulelab.zoo.norms.pretrained_encoders import fold_for_inference, load_published
from joulelab.zoo.objective import Objective, prepare
from joulelab.zoo.pretrained import encoder_positions, import_transformers, load_causal_lm, load_pretrained, seeded_init
from joulelab.zoo.registry import WorkloadRequest, find_model


@dataclass(frozen=True)
class InferenceWorkload:
    model: nn.Module
    inputs: tuple[Any, ...]
    items: int
    """Per call."""
    item: str
    notes: tuple[str, ...] = ()


class ModelCache:
    """Builds each model once for all rows with the same precision and norm."""

    def __init__(self, spec: InferSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._models: dict[tuple[Any, ...], nn.Module] = {}
        self._loaded: nn.Module | None = None

    def workload(self, case: Case) -> InferenceWorkload:
        make = {"encoder": self._encoder, "zoo": self._from_zoo, "pretrained": self._pretrained}[self._spec.kind]
        workload = make(case)
        inputs = tuple(value.to(self._device) for value in workload.inputs)
        return replace(workload, inputs=_cast_batch(inputs, case.dtype))

    def _ready(self, key: tuple[Any, ...], dtype: str, make: Callable[[], nn.Module]) -> nn.Module:
        if key not in self._models:
            self._models[key] = cast_model(make().eval().requires_grad_(False).to(self._device), dtype)
        return self._models[key]

    def _encoder(self, case: Case) -> InferenceWorkload:
        spec, shape, fastest = self._spec, SHAPES[self._spec.model], case.mode == "fastest"

        def make() -> nn.Module:
            model = build(shape, case.norm, spec.seed)
            if spec.weights:
                load_published(model, spec.weights)
            return fold_for_inference(model) if fastest else model

        model = self._ready((case.dtype, case.norm, fastest), case.dtype, make)
        inputs = (make_inputs(shape, case.batch_size, case.tokens),)
        return InferenceWorkload(model, inputs, case.batch_size, shape.item, _encoder_notes(spec, case))

    def _from_zoo(self, case: Case) -> InferenceWorkload:
        entry = find_model(self._spec.model)
        request = WorkloadRequest(
            entry,
            self._spec.size,
            batch_size=case.batch_size,
            seed=self._spec.seed,
            weights=self._spec.weights,
            requested_shape={"tokens": case.tokens} if case.tokens else {},
        )
        workload = prepare(request)
        batch = workload.batches.at(0, 0)
        model = self._ready(
            (case.dtype, case.tokens), case.dtype, lambda: _ForwardWithLoss(workload.model, workload.objective)
        )
        notes = (*workload.notes, "a forward pass with its loss, as in evaluation")
        return InferenceWorkload(model, (batch,), batch.samples, entry.item, notes)

    def _pretrained(self, case: Case) -> InferenceWorkload:
        if self._loaded is None:
            self._loaded = load_architecture(self._spec.model)
        loaded = self._loaded
        name, value, item = _pretrained_input(self._spec, loaded, case)
        keep = len(self._spec.dtypes) > 1
        model = self._ready(
            (case.dtype,), case.dtype, lambda: _NamedInput(copy.deepcopy(loaded) if keep else loaded, name)
        )
        return InferenceWorkload(model, (value,), case.batch_size, item)


def _cast_batch(inputs: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """Also casts the tensors inside a zoo batch."""
    return tuple(
        replace(value, tensors=dict(zip(value.tensors, cast_inputs(list(value.tensors.values()), dtype), strict=True)))
        if isinstance(value, TensorBatch)
        else cast_inputs([value], dtype)[0]
        for value in inputs
    )


def _encoder_notes(spec: InferSpec, case: Case) -> tuple[str, ...]:
    width = SHAPES[spec.model].width
    notes = {
        "random weights: same time as trained ones, nearly the same energy (GPU power depends slightly on the data)": (
            not spec.weights
        ),
        "fastest: norm scales are folded into the matrices, and the last block computes only the first token": (
            case.mode == "fastest"
        ),
        f"pre-crms at width {width} computes the same as a pre-LN encoder of width {width + 1}": case.norm
        == "pre-crms",
    }
    return tuple(text for text, applies in notes.items() if applies)


class _ForwardWithLoss(nn.Module):
    """A zoo model with its objective: what one evaluation step computes."""

    def __init__(self, model: nn.Module, objective: Objective[Any]) -> None:
        super().__init__()
        self.model = model
        self.others = nn.ModuleDict({name.replace(".", "_"): module for name, module in objective.modules().items()})
        self._objective = objective

    def forward(self, batch: Any) -> Tensor:
        return self._objective(self.model, batch, lambda name: nullcontext()).loss_sum


class _NamedInput(nn.Module):
    """A transformers model that takes its input by keyword."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name

    def forward(self, value: Tensor) -> Tensor:
        output: Mapping[str, Any] = self.model(**{self._name: value})
        return next(found for found in output.values() if isinstance(found, Tensor))


def load_architecture(name: str) -> nn.Module:
    """Load with the class named in the model's configuration; a GGUF file is a causal language model."""
    path = sources.parse(name).path
    if path is not None and path.suffix.lower() == ".gguf":
        return load_causal_lm(name)
    transformers = import_transformers()
    config: Any = load_pretrained(transformers.AutoConfig, name)
    kinds = [getattr(transformers, kind, None) for kind in config.architectures or []]
    return load_pretrained(next((kind for kind in kinds if kind), transformers.AutoModel), name)


def _pretrained_input(spec: InferSpec, model: nn.Module, case: Case) -> tuple[str, Tensor, str]:
    """Name of the argument, its value, and the name of one item."""
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{spec.model} is an encoder-decoder model, whose inputs cannot be generated automatically",
            "use a zoo model (t5, bart), which has its own inputs",
        )
    takes = getattr(model, "main_input_name", "input_ids")
    of_images = takes == "pixel_values" and hasattr(config, "image_size")
    if not of_images and not (takes == "input_ids" and hasattr(config, "vocab_size")):
        raise ConfigError(
            f"{spec.model} ({type(model).__name__}) needs inputs other than tokens alone or images alone",
            "use a model of `joulelab zoo`, which has its own inputs",
        )
    if of_images and spec.seq_lengths:
        raise ConfigError(f"{spec.model} takes images; seq_lengths applies to text models", "omit --seq-length")
    with seeded_init(spec.seed):
        if of_images:
            size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
            channels = getattr(config, "num_channels", 3)
            return "pixel_values", torch.randn(case.batch_size, channels, size, size), "image"
        require_positions(spec.model, encoder_positions(config), [case.tokens])
        return "input_ids", torch.randint(0, config.vocab_size, (case.batch_size, case.tokens)), "sequence"


def forward_flops(workload: InferenceWorkload) -> tuple[float | None, str]:
    """FLOPs per item, counted on one call, or None and the reason. Counts matrix products, convolutions and attention,
    not element-wise operations."""
    try:
        with _all_tokens(workload.model), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounter() as counter:
            workload.model(*workload.inputs)
    except JoulelabError:
        raise
    except Exception as error:  # models may do anything that the counter does not support
        return None, f"not counted: {type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:100]}"
    return counter.flops / workload.items, "one call"


@contextmanager
def _all_tokens(model: nn.Module) -> Iterator[None]:
    """Count a folded encoder like the plain one: MFU must not credit the GPU for work that was skipped."""
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


_SMALLER_HINT = "use a smaller batch, a shorter sequence or 16-bit weights"
_LARGE_BATCH = 64


@contextmanager
def explain_out_of_memory(case: Case, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        memory = "GPU memory" if device.type == "cuda" else "memory"
        raise OutOfMemory(f"{_row_name(case)} does not fit into {memory}", _SMALLER_HINT) from error


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def row_memory_bytes(model: nn.Module, device: torch.device, before: int) -> int:
    """Weights plus the peak of additional memory since `before` bytes were allocated and the peak was reset; other
    models on the GPU do not count. On a CPU the peak resident size of the process."""
    peak = peak_memory_bytes(device)
    return weight_bytes(model) + peak - before if device.type == "cuda" else peak


def require_memory(case: Case, device: torch.device, one_item: Callable[[], InferenceWorkload]) -> None:
    if device.type == "cuda" or case.batch_size < _LARGE_BATCH:
        return
    needed = case.batch_size * item_bytes(one_item())
    memory = psutil.virtual_memory()
    text = f"{_row_name(case)} needs at least {size_text(needed)} of memory"
    if needed > memory.total:
        raise ConfigError(f"{text}; this machine has {size_text(memory.total)}", _SMALLER_HINT)
    if needed > memory.available:
        raise OutOfMemory(f"{text}; {size_text(memory.available)} is free", _SMALLER_HINT)


def item_bytes(workload: InferenceWorkload) -> int:
    """Bytes of one item plus the largest operation on it, without the weights."""
    values = [list(v.tensors.values()) if isinstance(v, TensorBatch) else v for v in workload.inputs]
    largest = _LargestOperation(workload.model)
    with torch.no_grad(), largest:
        workload.model(*workload.inputs)
    own = sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor))
    return (own + largest.most_bytes) // max(workload.items, 1)


class _LargestOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the most bytes that one operation reads and writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self.most_bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves([args, result]) if isinstance(leaf, Tensor)]
        apart = {storage.data_ptr(): storage.nbytes() for storage in storages}
        touched = sum(size for place, size in apart.items() if place not in self._weights)
        self.most_bytes = max(self.most_bytes, touched)
        return result


def _row_name(case: Case) -> str:
    return case.stage.removeprefix("infer.")
