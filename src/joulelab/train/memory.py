"""Memory that a training needs at least, from sizes and settings, and the settings with which it would fit.

The state is known exactly: weights and what the optimizer keeps of each. Activations are a lower bound: the tensors
that every implementation of a transformer layer saves for its backward pass, which frees them while it makes the
gradients. A training is refused only if the lower bound does not fit, because then the first step would fail after the
model was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig
from joulelab.units import size_text

# Bytes of optimizer state per trained weight: two float32 moments, two bytes, factors of rows and columns (a few
# thousandths), one float32 momentum.
_STATE_BYTES = {"adamw": 8, "adamw-8bit": 2, "adafactor": 0, "sgd": 4}
_MARGIN = 0.9
"""Share of the free memory that a suggested setting may need at least: real use is above the lower bound."""
_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ModelSize:
    """What the memory of a training depends on."""

    parameters: int
    trained: int
    """Of them; fewer than all with adapters."""
    layers: int
    width: int
    inner_width: int
    row_length: int
    """Tokens of a row."""
    vocabulary: int
    chunk: int
    """Tokens whose logits exist at a time."""
    gated: bool = True
    """Whether the feed-forward part multiplies two projections (Llama), instead of having one (OPT, GPT-NeoX)."""
    attention_width: int | None = None
    """Numbers in queries, keys, values and the output of attention, per token of a layer; None: four times the width of
    the model."""
    sure_tokens: int | None = None
    """Tokens that a micro-batch has at least; None: its rows are full."""
    head_is_trained: bool = True
    """Whether the projection to the vocabulary has a gradient; it adds up in float32."""
    other_models_bytes: int = 0
    """Other models on the device: a live teacher, a copy that generates."""
    loading_bytes: int = 0
    """Of another model before it is quantized, when the student's weights are on the device, too."""
    other_models_hint: str = ""
    """How to keep them off this device."""


def training_bytes(size: ModelSize, config: TrainingConfig, ranks: int = 1) -> dict[str, int]:
    """Bytes on each device, by what they are for. `ranks` shard weights, gradients and state."""
    each = 2 if config.weights == "bf16" else 4
    kept = 2 if config.weights == "bf16" and config.rounding == "kahan" else 0
    state = _STATE_BYTES[config.optimizer] // (2 if config.moments == "bf16" else 1)
    computed = 4 if config.precision in ("fp32", "tf32") else 2
    tokens = config.batch_size * size.row_length if size.sure_tokens is None else size.sure_tokens
    saved = tokens * _saved_per_layer(size, config) * size.layers * computed
    head = (size.width if size.head_is_trained else 0) + min(size.chunk, tokens)
    activations, gradients = saved + head * size.vocabulary * 4, size.trained * each // ranks
    parts = {
        "weights": size.parameters * each // ranks,
        f"{config.optimizer} state": size.trained * (state + kept) // ranks,
        "other models": size.other_models_bytes,
    }
    if config.accumulate > 1:  # gradients of earlier micro-batches exist during a forward pass
        parts |= {"gradients": gradients, "activations": activations}
    else:  # most at the end of the forward pass, or at the end of the backward pass
        parts["gradients" if gradients > activations else "activations"] = max(gradients, activations)
    return {name: amount for name, amount in parts.items() if amount}


def _saved_per_layer(size: ModelSize, config: TrainingConfig) -> int:
    """Numbers that a layer keeps of a token for its backward pass, at least."""
    width, inner = size.width, size.inner_width
    attention = 4 * width if size.attention_width is None else size.attention_width
    is_whole = size.trained == size.parameters
    if config.activation_checkpointing:
        return width  # its input
    if config.compile != "off":
        # The compiler computes norms and activation functions again, from the outputs of the products.
        return (2 * width if is_whole else 0) + attention + (2 if size.gated else 1) * inner
    # The inputs of two norms, queries, keys, values and what attention returns; factors and result of the feed-forward
    # part. If all weights are trained, also the inputs of other products, which some layers share with a norm.
    projections = 2 * width if is_whole and size.gated else 0
    return 2 * width + projections + attention + (3 if size.gated else 1) * inner


def require_memory(
    stage: str,
    size: ModelSize,
    config: TrainingConfig,
    free_bytes: int,
    ranks: int = 1,
    section: str = "training",
    on_gpu: bool = True,
) -> None:
    """Raise ConfigError, with settings that fit, if the training needs more than `free_bytes` of a device. `section`:
    where the settings have `config`."""
    free = f"{size_text(free_bytes)}{'' if on_gpu else ' of RAM'} is free"
    parts = training_bytes(size, config, ranks)
    needed = sum(parts.values())
    loading = parts["weights"] + size.loading_bytes
    if size.loading_bytes and loading > free_bytes:
        raise ConfigError(
            f"{stage}: a model of {size_text(size.loading_bytes)} is loaded and then quantized, which needs at least "
            f"{size_text(loading)} with the student's weights, but {free}",
            size.other_models_hint or "use a smaller model",
        )
    if needed <= free_bytes:
        return
    listed = ", ".join(f"{name} {size_text(amount)}" for name, amount in parts.items())
    shared = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise ConfigError(
        f"{stage}: training {size.trained / 1e9:.1f} billion weights needs at least {size_text(needed)}{shared} "
        f"({listed}), but {free}",
        _hint(size, config, _MARGIN * free_bytes, ranks, section, on_gpu),
    )


def _hint(size: ModelSize, config: TrainingConfig, free_bytes: float, ranks: int, section: str, on_gpu: bool) -> str:
    ways = []
    for change, amount in islice(_fitting(size, config, free_bytes, ranks), 3):
        text = " ".join(f"{section}.{key}={str(value).lower()}" for key, value in change.items())
        ways.append(f"{text} ({size_text(amount)})")
    for more in (count for count in _RANKS if count > ranks and on_gpu):
        amount = sum(training_bytes(size, config, more).values())
        is_allowed = config.optimizer != "adamw-8bit" and config.matmul != "fp8" and config.precision != "fp16"
        if amount <= free_bytes and is_allowed and size.trained == size.parameters:  # fsdp has no adapters
            ways.append(f"{section}.parallel=fsdp on {more} GPUs ({size_text(amount)} each)")
            break
    alone = replace(size, other_models_bytes=0)
    if size.other_models_hint and sum(training_bytes(alone, config, ranks).values()) <= free_bytes:
        ways.append(size.other_models_hint)
    if not ways:
        return f"no setting fits: use a smaller student, adapters (student.lora), or a smaller {section}.batch_size"
    return f"settings that fit: {'; or '.join(ways)}"


def _fitting(
    size: ModelSize, config: TrainingConfig, free_bytes: float, ranks: int
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Changes of settings with which the training fits, those with the fewest changes first."""
    optimizers = ("adamw-8bit", "adafactor") if config.parallel != "fsdp" else ("adafactor",)
    choices: Sequence[Mapping[str, Any]] = [
        {**weights, **optimizer, **activations}
        for weights, optimizer, activations in product(
            ({}, {"weights": "bf16", "precision": "bf16"}),
            ({}, *({"optimizer": name} for name in optimizers)),
            ({}, {"activation_checkpointing": True}),
        )
    ]
    if config.moments == "bf16":  # other optimizers have no such moments
        choices = [{**one, "moments": "fp32"} if "optimizer" in one else one for one in choices]
    changes = [{key: value for key, value in one.items() if getattr(config, key) != value} for one in choices]
    unique = {tuple(sorted(one.items())): one for one in changes if one}
    fitting: list[Mapping[str, Any]] = []
    for change in sorted(unique.values(), key=len):
        amount = sum(training_bytes(size, config.model_copy(update=change), ranks).values())
        if amount <= free_bytes and not any(other.items() <= change.items() for other in fitting):
            fitting.append(change)
            yield change, amount
