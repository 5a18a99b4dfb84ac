"""Models of the classification pipelines: students, connectors, and layers by index or name.

A layer is named by its index among the hidden states (0 is the input of the first layer, -1 the last layer's output),
or by its module's name, such as `encoder.layer.3` or `encoder.stages.1`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from joulelab.data.batches import Batch, TensorBatch
from joulelab.distill.classify.config import ClassifySpec, CnnConfig, DistillConfig, StudentConfig
from joulelab.distill.losses import (
    angle_relation_sum,
    cross_entropy_sum,
    distance_relation_sum,
    feature_mse_sum,
    pool,
    soft_target_kl_sum,
)
from joulelab.errors import ConfigError
from joulelab.train.optim import compile_in_place
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker
from joulelab.zoo.pretrained import (
    encoder_config,
    encoder_positions,
    import_transformers,
    load_classifier,
    load_tokenizer,
    seeded_init,
)
from joulelab.zoo.students import check_layers, take_layers

_EMBEDDINGS = ("embeddings", "embedder")
_CONNECTOR = "connector.safetensors"


# students


def build_student(config: StudentConfig, classes: int, seed: int) -> nn.Module:
    source = load_classifier(config.model, num_labels=classes, seed=seed)
    if config.layers == "all":
        return source
    if isinstance(config.layers, int):
        return _initialize_student(source, config.layers, config.width, config.heads, seed)
    return take_layers(source, config.layers, seed)


def _initialize_student(source: nn.Module, layers: int, width: int | None, heads: int | None, seed: int) -> nn.Module:
    """A randomly initialized model of the same family and vocabulary, in its own size."""
    config: Any = copy.deepcopy(source.config)
    width, heads = width or int(config.hidden_size), heads or int(config.num_attention_heads)
    require_heads(width, heads)
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads = layers, width, heads
    for name in ("intermediate_size", "hidden_dim"):  # the names of BERT and of DistilBERT
        if hasattr(config, name):
            setattr(config, name, 4 * width)
    with seeded_init(seed):
        model: nn.Module = import_transformers().AutoModelForSequenceClassification.from_config(config)
    return model


def build_cnn(config: CnnConfig, classes: int, seed: int) -> nn.Module:
    transformers = import_transformers()
    settings = transformers.ResNetConfig(
        num_labels=classes,
        embedding_size=config.stem,
        hidden_sizes=list(config.channels),
        depths=list(config.blocks),
        layer_type=config.block,
    )
    with seeded_init(seed):
        model: nn.Module = transformers.ResNetForImageClassification(settings)
    return model


def require_vocabulary(spec: ClassifySpec) -> None:
    """That the student has an embedding for every token of the texts."""
    own, tokens = int(encoder_config(spec.student.model).vocab_size), len(load_tokenizer(spec.tokenizer))
    if own >= tokens:
        return
    if spec.tokenizer == spec.student.model:
        raise ConfigError(
            f"the tokenizer of {spec.student.model} has {tokens:,} tokens, the model only {own:,}",
            "the folder contains files of two models: save model and tokenizer together",
        )
    raise ConfigError(
        f"the student {spec.student.model} has {own:,} tokens, the teacher {spec.tokenizer} {tokens:,}",
        "student and teacher must share a tokenizer",
    )


def freeze_teacher(model: nn.Module, device: torch.device, precision: str, compile_mode: str = "off") -> nn.Module:
    """Ready for inference, live or into a cache: no dropout, no gradients, and weights in bf16 where that is the
    precision, because casting fp32 weights in every step costs time and gains nothing for a frozen model."""
    model.eval().requires_grad_(False).to(device)
    if precision == "bf16":
        model.to(torch.bfloat16)
    compile_in_place(model, compile_mode)
    return model


# layers


def teacher_layer_check(spec: ClassifySpec) -> None:
    """That the teacher's layer in the settings exists, known from its configuration: without this a wrong one would
    fail after the teacher's training."""
    hidden_index(_without_weights(spec.teacher.source), spec.distill.t_layer, "distill.t_layer")


def student_layer_check(spec: ClassifySpec) -> None:
    layers = spec.student.layers
    depth = len(layers) if isinstance(layers, tuple) else layers if isinstance(layers, int) else None
    hidden_index(_without_weights(spec.student.model, depth), spec.distill.s_layer, "distill.s_layer")


def require_student(spec: ClassifySpec) -> None:
    """That the student can be built from its model, known from the configuration."""
    student, config = spec.student, encoder_config(spec.student.model)
    if isinstance(student.layers, tuple):
        check_layers(student.layers, int(config.num_hidden_layers), student.model, "student.layers")
    heads = student.heads or int(config.num_attention_heads)
    if isinstance(student.layers, int):
        require_heads(student.width or int(config.hidden_size), heads)


def require_positions(model: str, tokens: int) -> None:
    """Longer texts would be an index error inside the model, or on a GPU a dead context."""
    positions = encoder_positions(encoder_config(model))
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"data.max_tokens={tokens}: {model} has {positions} positions", f"set it to at most {positions}"
        )


def require_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(
            f"student.width={width} is not a multiple of its {heads} attention heads", "set student.heads as well"
        )


def _without_weights(source: str, depth: int | None = None) -> Any:
    transformers = import_transformers()
    config = encoder_config(source)
    if depth is not None:
        config.num_hidden_layers = depth
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def hidden_index(model: nn.Module, layer: int | str, setting: str) -> int:
    """The layer's index among the hidden states, counted from the front."""
    states = 1 + len(layer_list(model))
    if isinstance(layer, str):
        return _index_by_name(model, layer, setting)
    if not -states <= layer < states:
        raise ConfigError(
            f"{setting}={layer}: the model has {states} hidden states, its embeddings and {states - 1} layers",
            f"choose {-states} to {states - 1}, or a layer's name",
        )
    return layer % states


def _index_by_name(model: nn.Module, name: str, setting: str) -> int:
    path, layers = layer_path(model), layer_list(model)
    numbers = {f"{path}.{number}": number + 1 for number in range(len(layers))}
    for known, number in numbers.items():
        # `layer.3`, `encoder.layer.3` and `bert.encoder.layer.3` all mean the same module
        if f".{known}".endswith(f".{name}") or name.endswith(f".{known}"):
            return number
    if name.rsplit(".", 1)[-1] in _EMBEDDINGS:
        return 0
    listed = ", ".join(list(numbers)[:3])
    raise ConfigError(
        f"{setting}='{name}': the model has no layer of that name", f"its layers: embeddings, {listed}, ..."
    )


def layer_path(model: nn.Module) -> str:
    """Where the body has its list of layers: the outermost list of modules."""
    body: Any = getattr(model, "base_model", model)
    path = next((name for name, module in body.named_modules() if isinstance(module, nn.ModuleList)), None)
    if path is None:
        raise ConfigError(f"{type(model).__name__} has no list of layers to choose from", "use another architecture")
    return str(path)


def layer_list(model: nn.Module) -> nn.ModuleList:
    body: Any = getattr(model, "base_model", model)
    layers: nn.ModuleList = body.get_submodule(layer_path(model))
    return layers


def hidden_width(model: nn.Module, index: int) -> int:
    """Width of a hidden state: the same in all layers of a transformer, the stage's channels in a CNN."""
    config: Any = model.config
    sizes = getattr(config, "hidden_sizes", None)
    if sizes is None:
        return int(config.hidden_size)
    return int(config.embedding_size if index == 0 else sizes[index - 1])


@contextmanager
def truncated_body(model: nn.Module, index: int) -> Iterator[nn.Module]:
    """The model's body with its first `index` layers only, on the same weights: the layers above the hint are not
    computed."""
    body: Any = getattr(model, "base_model", model)
    path, layers = layer_path(model), layer_list(model)
    owner = body.get_submodule(path.rpartition(".")[0])
    setattr(owner, path.rpartition(".")[2], layers[:index])
    try:
        yield body
    finally:
        setattr(owner, path.rpartition(".")[2], layers)


# connectors: from the student's width to the teacher's; trained with the student and discarded afterwards


def make_connector(student_width: int, teacher_width: int, layer_norm: bool = False) -> nn.Module:
    """For vectors: the identity where the widths agree, else a linear map."""
    connector: nn.Module = nn.Identity()
    if student_width != teacher_width:
        connector = nn.Linear(student_width, teacher_width)
    return nn.Sequential(connector, nn.LayerNorm(teacher_width)) if layer_norm else connector


def make_regressor(student_channels: int, teacher_channels: int, layer_norm: bool = False) -> nn.Module:
    """For feature maps: FitNets' 1x1 convolution. The norm is over the channels of each position, unlike a GroupNorm of
    one group."""
    connector: nn.Module = nn.Identity()
    if student_channels != teacher_channels:
        connector = nn.Conv2d(student_channels, teacher_channels, kernel_size=1)
    return nn.Sequential(connector, ChannelNorm(teacher_channels)) if layer_norm else connector


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a feature map."""

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        return super().forward(maps_BCHW.movedim(1, -1)).movedim(-1, 1)


def save_connector(connector: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().contiguous() for name, value in connector.state_dict().items()}
    save_file(state or {"nothing": torch.zeros(1)}, str(folder / _CONNECTOR))  # an identity has no weights


def load_connector(connector: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(str(folder / _CONNECTOR))
    connector.load_state_dict({name: value for name, value in state.items() if name != "nothing"})


# The student's loss for classification: labels, the teacher's responses, features and relations.
#
# A term of weight 0 is not computed, and neither is what only that term needs (hidden states, the teacher itself).
# Texts and images differ only in the forward adapter.
#
# Shapes: B batch, C classes, T tokens, H width; feature maps of a CNN are [B, C, H, W].


LABELS_ONLY = DistillConfig(alpha=1.0, feat_beta=0.0)

Terms = dict[str, tuple[float, Tensor]]
"""Name -> weight and sum."""


@dataclass(frozen=True)
class ForwardOutput:
    """What the losses use of a forward pass."""

    logits_BC: Tensor
    features: Tensor | None
    """[B, H] of a text model, [B, C, H, W] of a CNN."""


class ForwardAdapter(Protocol):
    """How a batch goes through a model."""

    def __call__(self, model: nn.Module, batch: Any, features: bool) -> ForwardOutput: ...


@dataclass(frozen=True)
class TextForward:
    layer: int
    pooling: str

    def __call__(self, model: nn.Module, batch: Batch, features: bool) -> ForwardOutput:
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=features)
        pooled_BH = pool(output.hidden_states[self.layer], batch.attention_mask, self.pooling) if features else None
        # the hint stage trains a body without a head, which has no logits
        return ForwardOutput(output.logits if hasattr(output, "logits") else output[0], pooled_BH)


@dataclass(frozen=True)
class ImageForward:
    layer: int

    def __call__(self, model: nn.Module, batch: TensorBatch, features: bool) -> ForwardOutput:
        output = model(pixel_values=batch["pixels"], output_hidden_states=features)
        maps_BCHW = output.hidden_states[self.layer] if features else None
        return ForwardOutput(output.logits if hasattr(output, "logits") else output[0], maps_BCHW)


class TeacherSource(Protocol):
    """Where the teacher's outputs come from: a cache, or the teacher itself in the same step. The student learns the
    same from both."""

    def outputs(self, batch: Any, features: bool) -> ForwardOutput:
        """Without gradients."""


@dataclass(frozen=True)
class LiveTeacher:
    """Runs in every step: no cache to make or to store, and it sees augmented samples; its energy is used anew in every
    epoch."""

    model: nn.Module
    forward: ForwardAdapter

    def outputs(self, batch: Any, features: bool) -> ForwardOutput:
        with torch.no_grad():
            return self.forward(self.model, batch, features)


class ClassifyObjective:
    """alpha CE + (1 - alpha) T^2 KL + feat_beta MSE(connector(pool(h_s)), pool(h_t)) + relations, summed over the
    batch."""

    def __init__(
        self,
        config: DistillConfig,
        forward: ForwardAdapter,
        teacher: TeacherSource | None = None,
        connector: nn.Module | None = None,
    ) -> None:
        self._config = config
        self._forward = forward
        self._teacher = teacher
        self._connector = connector

    def modules(self) -> Mapping[str, nn.Module]:
        """The connector is trained with the student; a live teacher is not and must stay in evaluation mode."""
        return {} if self._connector is None else {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        config = self._config
        teacher: ForwardOutput | None = None
        if self._teacher is not None and config.needs_teacher:
            with phase("forward.teacher"):
                teacher = self._teacher.outputs(batch, config.needs_features)
        with phase("forward.student"):
            student = self._forward(model, batch, config.needs_features)
        with phase("forward.loss"):
            terms = self._terms(student, teacher, _labels(batch))
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.samples, parts)

    def _terms(self, student: ForwardOutput, teacher: ForwardOutput | None, labels_B: Tensor) -> Terms:
        config = self._config
        terms: Terms = {}
        if config.alpha > 0:
            terms["ce"] = (config.alpha, cross_entropy_sum(student.logits_BC, labels_B))
        if teacher is None:
            return terms
        if config.alpha < 1:
            divergence = soft_target_kl_sum(student.logits_BC, teacher.logits_BC, config.temperature, config.kd_T2)
            terms["kl"] = (1 - config.alpha, divergence)
        if config.feat_beta > 0 and self._connector is not None:
            distance = feature_distance_sum(student, teacher, self._connector, config.feat_normalize)
            terms["features"] = (config.feat_beta, distance)
        if config.rel_distance > 0:
            terms["distances"] = (config.rel_distance, distance_relation_sum(*_vectors(student, teacher)))
        if config.rel_angle > 0:
            terms["angles"] = (config.rel_angle, angle_relation_sum(*_vectors(student, teacher)))
        return terms


class HintObjective:
    """FitNets' first stage (Romero et al., 2015): the student up to its hint layer, and the connector, learn the
    teacher's features only."""

    def __init__(
        self, config: DistillConfig, forward: ForwardAdapter, teacher: TeacherSource, connector: nn.Module
    ) -> None:
        self._config, self._forward, self._teacher, self._connector = config, forward, teacher, connector

    def modules(self) -> Mapping[str, nn.Module]:
        return {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        with phase("forward.teacher"):
            teacher = self._teacher.outputs(batch, True)
        with phase("forward.student"):
            student = self._forward(model, batch, True)
        with phase("forward.loss"):
            loss_sum = feature_distance_sum(student, teacher, self._connector, self._config.feat_normalize)
        return ObjectiveOutput(loss_sum, batch.samples, {"features": loss_sum.detach()})


def feature_distance_sum(
    student: ForwardOutput, teacher: ForwardOutput, connector: nn.Module, normalize: bool
) -> Tensor:
    assert student.features is not None
    assert teacher.features is not None
    projected, target = to_same_size(connector(student.features), teacher.features)
    return feature_mse_sum(projected, target, normalize)


def to_same_size(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Feature maps averaged down to the smaller of both sizes; vectors are returned unchanged."""
    if student.dim() < 4 or student.shape[-2:] == teacher.shape[-2:]:
        return student, teacher
    height, width = (min(sizes) for sizes in zip(student.shape[-2:], teacher.shape[-2:], strict=True))
    return F.adaptive_avg_pool2d(student, (height, width)), F.adaptive_avg_pool2d(teacher, (height, width))


def _vectors(student: ForwardOutput, teacher: ForwardOutput) -> tuple[Tensor, Tensor]:
    """Relations are between vectors; of a feature map, the mean over its positions."""
    assert student.features is not None
    assert teacher.features is not None
    sides = (student.features, teacher.features)
    first, second = (side.flatten(2).mean(-1) if side.dim() > 2 else side for side in sides)
    return first, second


def _labels(batch: Any) -> Tensor:
    labels: Tensor = batch.labels if hasattr(batch, "labels") else batch["labels"]
    return labels
