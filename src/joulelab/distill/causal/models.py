"""Teacher and student as models, and the context that every stage of the language-model pipelines uses.

Students are pretrained, made of the teacher's layers or randomly initialized; with LoRA. Language models are opened
between hidden states and vocabulary, so that a loss can project to logits in chunks: `model(ids, hidden_only=True)`
returns the input of the last projection. The model stays what it was: same class name, same parameters, saved and
loaded as before.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from joulelab.data.chat.encoding import DocumentStore, tokenizer_sha256, vocab_size_of
from joulelab.data.chat.packing import (
    QUANTIZED_SHARE,
    ROUNDING_SHARE,
    PackedAttention,
    PackedRows,
    pack,
    use_packed_attention,
)
from joulelab.data.chat.templates import read_template
from joulelab.distill.causal.config import SHAPES, STARTS_FROM_SFT, CausalSpec, CausalStudent, Lora, Shape
from joulelab.distill.logit_cache.codecs import get_codec
from joulelab.distill.runner import Runner
from joulelab.errors import ConfigError, NotFoundError
from joulelab.infer.config import gguf_file
from joulelab.infer.generation.completions import Prompt
from joulelab.runs import environment
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.train.bf16_weights import cast_weights
from joulelab.train.config import TrainingConfig
from joulelab.train.memory import ModelSize, require_memory
from joulelab.units import size_text
from joulelab.zoo.pretrained import (
    causal_lm_config,
    import_transformers,
    load_causal_lm,
    load_tokenizer,
    save_hf,
    seeded_init,
    weights_identity,
)
from joulelab.zoo.quantization import WEIGHT_BYTES, is_quantized, quiet_bitsandbytes
from joulelab.zoo.quantized_layers import quantization_of, quantize
from joulelab.zoo.students import check_layers

MAX_POSITIONS = 4096
"""Of a randomly initialized student; rotary embeddings need no parameters for them."""
STATE_FILE = "model.pt"
_NEUTRAL_LOGIT_SETTINGS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Settings by which some models change their logits after the projection, with the value that has no effect."""


# hidden states and head


class _HiddenStatesMixin(nn.Module):
    """Mixed into a language model of transformers."""

    def forward(self, *args: Any, hidden_only: bool = False, **kwargs: Any) -> Any:
        """With `hidden_only`: hidden_BTD, after the last norm."""
        if not hidden_only:
            return super().forward(*args, **kwargs)
        body: Any = self.base_model
        return body(*args, **{**kwargs, "use_cache": False}).last_hidden_state


def expose_hidden_states(model: nn.Module) -> nn.Module:
    """Add `hidden_only` in place. A model whose logits are more than a projection is refused: its loss would differ."""
    if isinstance(model, _HiddenStatesMixin):
        return model
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for name, neutral in _NEUTRAL_LOGIT_SETTINGS.items():
        value = getattr(model.config, name, neutral)
        if value not in (None, neutral):
            raise ConfigError(
                f"{type(model).__name__} changes its logits after the projection ({name}={value})",
                "use a model of another family: Llama, OLMo, Qwen, Mistral, SmolLM",
            )
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__} has no plain projection to its vocabulary", "use a causal model")
    model.__class__ = type(type(model).__name__, (_HiddenStatesMixin, type(model)), {})
    return model


def weight_dtype(config: TrainingConfig) -> torch.dtype:
    """Of the trained weights."""
    return torch.bfloat16 if config.weights == "bf16" else torch.float32


def lm_head_weight(model: nn.Module) -> Tensor:
    """Weight [V, D] of the projection to the vocabulary, by reference.

    In a model that FSDP has sharded, it belongs to the root, which is whole from the start of a forward pass to the end
    of the backward pass: a loss that reads it after the forward pass has all of it, and its gradient is averaged over
    ranks with the others. At other times it is a shard.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    weight: Tensor = head.weight
    return weight


def packed_attention(model: nn.Module) -> PackedAttention:
    """Of a model that may have quantized weights."""
    return use_packed_attention(model, ROUNDING_SHARE if quantization_of(model) is None else QUANTIZED_SHARE)


# checks by configuration, before anything is computed


def check_models(spec: CausalSpec) -> None:
    """Raise if teacher or student is no language model, or if the student cannot take the teacher's layers or
    embeddings."""
    student = spec.student
    if spec.until == "train" and student.model is not None:
        causal_lm_config(student.model)
        require_positions("student.model", student.model, spec)
    if spec.until == "train" and student.lora is not None:
        _check_lora_targets(student, spec.teacher.model)
    if spec.until == "data" or not (spec.has_teacher or student.teacher_embeddings) or spec.teacher_is_elsewhere:
        return
    with naming_uses_of_served_teacher(spec):
        teacher = causal_lm_config(spec.teacher.model)
    if spec.until != "train":
        return
    if student.layers is not None:
        name = f"the teacher {spec.teacher.model}"
        check_layers(student.layers, int(teacher.num_hidden_layers), name, "student.layers", once=False)
    if student.teacher_embeddings and student.size is not None:
        check_embedding_width(int(teacher.hidden_size), SHAPES[student.size].width)


def embedding_rows(model: str) -> int:
    """Tokens that the model has an embedding for: fewer than its tokenizer's if a token occurs in no text, more if they
    are padded."""
    return int(causal_lm_config(model).get_text_config().vocab_size)


def max_positions(model: str) -> int | None:
    """Tokens that the model can read at most; None if its configuration does not say."""
    found = getattr(causal_lm_config(model).get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def require_positions(setting: str, model: str, spec: CausalSpec) -> None:
    """Raise if texts of this run are longer than the model can read."""
    limit = max_positions(model)
    lengths = {"data.max_tokens": spec.data.max_tokens}
    if spec.pipeline == "on-policy":
        lengths["generation.prompt_tokens and generation.answer.max_new_tokens together"] = spec.generation.longest
    for name, tokens in lengths.items():
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"{setting}={model} has {limit:,} positions, but texts have up to {tokens:,} tokens ({name})",
                f"lower {name} to {limit:,}",
            )


def check_codec(spec: CausalSpec) -> None:
    """Raise if a cache would list more tokens than the teacher has."""
    codec, words = get_codec(spec.distill.codec), embedding_rows(spec.teacher.model)
    if codec.top > words:
        raise ConfigError(
            f"distill.codec={spec.distill.codec} lists {codec.top:,} tokens, but {spec.teacher.model} has {words:,}",
            "distill.codec=hidden is exact; rs50 and topk50-ghost are small",
        )


def check_memory(spec: CausalSpec) -> None:
    """Raise if weights, gradients and optimizer state of the student cannot fit into the device's memory."""
    on_gpu = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    free_bytes = environment.free_gpu_bytes() if on_gpu else environment.free_memory_bytes()
    if free_bytes is None:
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainings = [("student.train", "training", spec.training)]
    if spec.sft_first and spec.pipeline in STARTS_FROM_SFT:
        trainings.append(("student.sft", "start" if spec.start else "training", spec.start or spec.training))
    for stage, section, training in trainings:
        size = _training_size(spec, on_gpu, alone=stage == "student.sft")
        ranks = world if training.parallel == "fsdp" else 1
        require_memory(stage, size, training, free_bytes, ranks, section, on_gpu)


def _training_size(spec: CausalSpec, on_gpu: bool, alone: bool) -> ModelSize:
    """From the configurations, without any weight. `alone`: no other model is on the device."""
    student = spec.student
    model: Any
    if student.size is not None:
        words = vocab_size_of(student_tokenizer(spec))
        with torch.device("meta"):
            model = random_student(SHAPES[student.size], words, None, 0)
    else:
        model = _meta_model(student.model or spec.teacher.model, student.layers)
    config, parameters = model.config, _count(model)
    trained, targets = parameters, list[Any]()
    if student.lora is not None:
        targets = [part for name, part in model.named_modules() if name.rpartition(".")[2] in student.lora.targets]
        trained = sum(student.lora.rank * sum(part.weight.shape) for part in targets if isinstance(part, nn.Linear))
    other_bytes, loading_bytes, hint = 0, 0, ""
    live = spec.pipeline == "on-policy" or (spec.pipeline == "kd" and spec.distill.teacher == "live")
    if live and spec.teacher.server is None and not alone:
        precision = spec.teacher.precision
        half = precision == "bf16" or (precision == "auto" and environment.has_bf16_cores(spec.device))
        each = WEIGHT_BYTES[precision] if is_quantized(precision) else 2 if half else 4
        weights = _count(_meta_model(spec.teacher.model))
        other_bytes += round(weights * each)
        loading_bytes = 2 * weights if is_quantized(precision) else 0  # `load_frozen` quantizes it on the device
        hint = f"the teacher on another device, without its {size_text(other_bytes)}: "
        hint += "teacher.server" if spec.pipeline == "on-policy" else "distill.teacher=cached"
    if spec.pipeline == "on-policy" and not alone:  # the copy that generates
        other_bytes += parameters * (2 if on_gpu and spec.training.precision in ("bf16", "fp16") else 4)
    # Pairs are padded to the longest of their batch, and the completions of a round may fill a single row.
    students_only = spec.pipeline == "on-policy" and spec.on_policy.student_share == 1
    is_short = not alone and (spec.pipeline == "dpo" or students_only)
    return ModelSize(
        parameters=parameters + (trained if student.lora else 0), trained=trained,
        layers=int(config.num_hidden_layers), width=int(config.hidden_size), inner_width=_inner_width(config),
        row_length=spec.data.row_length, vocabulary=int(config.vocab_size), chunk=spec.chunk, gated=_is_gated(model),
        attention_width=_attention_width(model, int(config.num_hidden_layers)),
        sure_tokens=1 if is_short else None,
        head_is_trained=student.lora is None or model.get_output_embeddings() in targets,
        other_models_bytes=other_bytes, loading_bytes=loading_bytes, other_models_hint=hint,
    )  # fmt: skip


def _inner_width(config: Any) -> int:
    """Of the feed-forward layers, at least; transformers raises a RuntimeError for what differs by layer."""
    try:
        width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    except RuntimeError:
        return 0
    return int(min(width) if isinstance(width, list | tuple) else width)


def _attention_width(model: nn.Module, layers: int) -> int:
    """Numbers in queries, keys, values and the output of attention, per token of a layer: the mean over all layers,
    which may differ. By the names that transformers gives to the projections; others are not counted."""
    ends: dict[str, str] = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"), "out_features")
    ends |= dict.fromkeys(("o_proj", "out_proj", "dense"), "in_features")
    total = sum(
        getattr(module, ends[last])
        for name, module in model.named_modules()
        if (last := name.rpartition(".")[2]) in ends and isinstance(module, nn.Linear)
    )
    return int(total) // layers


def _is_gated(model: nn.Module) -> bool:
    """Whether its feed-forward parts multiply two projections, by the names that transformers gives to them."""
    return any(name.rpartition(".")[2] in ("gate_proj", "gate_up_proj") for name, _ in model.named_modules())


def _meta_model(name: str, layers: tuple[int, ...] | None = None) -> Any:
    config = causal_lm_config(name)
    if layers is not None:
        config = copy.deepcopy(config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer] for layer in layers]
    with torch.device("meta"):
        return import_transformers().AutoModelForCausalLM.from_config(config)


def _count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _check_lora_targets(student: CausalStudent, teacher: str) -> None:
    """Raise if no layer gets an adapter; the layers' names are known from the configuration, without any weight."""
    assert student.lora is not None
    transformers = import_transformers()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    if student.size is None:
        config = causal_lm_config(student.model or teacher)
    else:  # randomly initialized students are Llamas
        config = transformers.LlamaConfig(num_hidden_layers=1, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.dim() == 2}
    targets = student.lora.targets
    if not any(name.rpartition(".")[2] in layers for name in targets):
        raise ConfigError(
            f"student.lora.targets matches no layer of the student: {', '.join(targets) or 'none'}",
            f"its layers are {', '.join(sorted(layers))}",
        )


def check_embedding_width(teacher_width: int, student_width: int) -> None:
    if teacher_width < student_width:
        raise ConfigError(
            f"the teacher's embeddings have width {teacher_width}, less than the student's {student_width}",
            "set student.teacher_embeddings=false, or a narrower size",
        )


# students


def student_tokenizer(spec: CausalSpec) -> Any:
    with naming_uses_of_served_teacher(spec):
        return load_tokenizer(spec.tokenizer)


@contextmanager
def naming_uses_of_served_teacher(spec: CausalSpec) -> Iterator[None]:
    """An error that a served teacher's files are not here says which settings need them."""
    try:
        yield
    except NotFoundError as error:
        uses = list(spec.served_teacher_is_used_for or ())
        if spec.tokenizer == spec.teacher.model:
            uses.append("the student's tokenizer (name another one with data.tokenizer)")
        if spec.served_teacher_is_used_for is None or error.name != spec.teacher.model or not uses:
            raise
        hint = f"teacher.server generates with it, but its files are needed here for {', '.join(uses)}"
        raise NotFoundError(error.message, hint, error.name) from error


def make_student(config: CausalStudent, teacher: nn.Module | None, tokenizer: Any, seed: int) -> nn.Module:
    """On the CPU, with `hidden_only`, in the dtype of its source. `teacher` provides layers or embeddings, if the
    settings ask for them."""
    if config.model is not None:
        return expose_hidden_states(load_causal_lm(config.model))
    if config.layers is not None:
        assert teacher is not None
        return expose_hidden_states(take_layers(teacher, config.layers))
    vocabulary = int(teacher.config.vocab_size) if teacher is not None else vocab_size_of(tokenizer)  # type: ignore[union-attr,arg-type]
    student = random_student(SHAPES[str(config.size)], vocabulary, tokenizer, seed)
    if config.teacher_embeddings:
        assert teacher is not None
        _copy_embeddings(student, teacher)
    return expose_hidden_states(student)


def load_student(folder: Path | str) -> nn.Module:
    return expose_hidden_states(load_causal_lm(str(folder)))


def random_student(shape: Shape, vocabulary: int, tokenizer: Any, seed: int) -> nn.Module:
    transformers = import_transformers()
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        intermediate_size=shape.inner_width,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **ids,
    )
    with seeded_init(seed):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def take_layers(teacher: nn.Module, layers: tuple[int, ...]) -> nn.Module:
    """A model of the same kind with these layers in this order, and everything that is not a layer."""
    config: Any = copy.deepcopy(teacher.config)
    check_layers(layers, int(config.num_hidden_layers), once=False)
    prefix = "model.layers."
    if not any(name.startswith(prefix) for name in teacher.state_dict()):
        raise ConfigError(
            f"{type(teacher).__name__} has no layers under {prefix} as Llama has", "use student.size instead"
        )
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    with seeded_init(0):
        student: Any = import_transformers().AutoModelForCausalLM.from_config(config)
    student.load_state_dict(_renumber_layers(teacher.state_dict(), prefix, layers))
    student.tie_weights()
    result: nn.Module = student
    return result


def _renumber_layers(weights: dict[str, Tensor], prefix: str, layers: tuple[int, ...]) -> dict[str, Tensor]:
    chosen = {name: value for name, value in weights.items() if not name.startswith(prefix)}
    for number, layer in enumerate(layers):
        own = f"{prefix}{layer}."
        chosen |= {
            f"{prefix}{number}.{name.removeprefix(own)}": value
            for name, value in weights.items()
            if name.startswith(own)
        }
    return chosen


@torch.no_grad()
def _copy_embeddings(student: nn.Module, teacher: nn.Module) -> None:
    """Tokens with similar embeddings in the teacher start with similar embeddings in the student.

    Narrower embeddings are the projection on the teacher's first principal components, at the scale of the student's
    random initialization.
    """
    own, source = lm_head_weight(student), lm_head_weight(teacher).float()
    check_embedding_width(source.shape[1], own.shape[1])
    centered = source - source.mean(0)
    # Principal components: eigenvectors of the covariance of the embeddings, D x D instead of a
    # singular value decomposition of V x D. The projection on the last k of them keeps the most
    # variance, and with it the distances between tokens, that k dimensions can keep.
    _, directions = torch.linalg.eigh(centered.T @ centered)  # in ascending order of their variance
    projected = centered @ directions[:, -own.shape[1] :]
    # At the scale of the student's initialization, for which its other weights and the learning
    # rate were chosen.
    own.copy_(projected * (own.std() / projected.std()))


@dataclass(frozen=True)
class LoraModel:
    """A student with adapters; `model` is what the training loop sees."""

    model: nn.Module
    wrapped: Any

    def merged(self) -> nn.Module:
        model: nn.Module = self.wrapped.merge_and_unload()
        return model


def add_lora(model: nn.Module, config: Lora, seed: int) -> LoraModel:
    """The model with trainable low-rank adapters on its frozen layers."""
    quiet_bitsandbytes()  # which peft imports
    import peft

    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
        task_type="CAUSAL_LM",
    )
    try:
        with seeded_init(seed), warnings.catch_warnings():
            # transformers deprecates a name that peft still uses
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            wrapped: Any = peft.get_peft_model(model, lora)
    except ValueError as error:
        raise ConfigError(f"adapters do not fit this student: {error}", "check student.lora.targets") from error
    return LoraModel(wrapped.get_base_model(), wrapped)


def unsharded_model(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A model of the same configuration with these weights, on the CPU, to be saved."""
    with torch.device("meta"):
        whole: Any = import_transformers().AutoModelForCausalLM.from_config(model.config)
    missing = whole.load_state_dict(weights, strict=False, assign=True).missing_keys
    whole.tie_weights()
    assert not [name for name, weight in whole.named_parameters() if weight.is_meta], missing
    result: nn.Module = whole
    return result


def save_student(model: nn.Module, tokenizer: Any, folder: Path, state_file: bool) -> None:
    """In Hugging Face format; `state_file` adds the bare state for programs that load `model.pt`."""
    save_hf(model, tokenizer, folder)
    if state_file:
        torch.save(model.state_dict(), folder / STATE_FILE)


Split = Literal["train", "validation", "test"]
TRAIN: Literal["train"] = "train"
VALIDATION: Literal["validation"] = "validation"
TEST: Literal["test"] = "test"


@dataclass(frozen=True)
class CausalContext:
    runner: Runner[CausalSpec]
    prompts: list[tuple[Prompt, str | None]] = field(default_factory=list)
    """Found once for the stages that generate, judge and filter: it takes a pass of the tokenizer over all texts."""
    unigram_losses: dict[str, float] = field(default_factory=dict)
    """Key of the data -> held-out loss of guessing by token frequency."""
    cross_tokenizer: dict[str, Any] = field(default_factory=dict)
    """What `causal.cross_tokenizer` has computed from the two tokenizers."""
    _loaded: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def run(self) -> RunContext:
        return self.runner.run

    @property
    def spec(self) -> CausalSpec:
        return self.runner.spec

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer, template = student_tokenizer(self.spec), self.spec.data.template
        if template is not None:  # the student is saved with it
            tokenizer.chat_template = read_template(Path(template))
        return tokenizer

    @cached_property
    def tokenizer_identity(self) -> str:
        return tokenizer_sha256(self.tokenizer)

    @cached_property
    def vocabulary(self) -> int:
        """Size of the tokenizer's vocabulary; a model's may be padded beyond it."""
        return vocab_size_of(self.tokenizer)

    @cached_property
    def compared_words(self) -> int:
        """Tokens over which student and teacher are compared: those that the student's head has a row for. A special
        token that no text contains may have none."""
        named = self.spec.student.model
        return self.vocabulary if named is None else min(self.vocabulary, embedding_rows(named))

    @cached_property
    def teacher_tokenizer(self) -> Any:
        """The tokenizer of `teacher.model`; the student's itself if both have the same vocabulary, or if only a server
        has the teacher's."""
        name = self.spec.teacher.model
        if not self.spec.has_teacher or self.spec.teacher_is_elsewhere or name == self.spec.tokenizer:
            return self.tokenizer
        other = load_tokenizer(name)
        return self.tokenizer if other.get_vocab() == self.tokenizer.get_vocab() else other

    @cached_property
    def prompt_tokenizer(self) -> Any:
        """Of the model that continues the prompts."""
        student_generates = self.spec.pipeline == "on-policy" or not self.spec.teacher_generates
        return self.tokenizer if student_generates else self.teacher_tokenizer

    @cached_property
    def teacher_identity(self) -> str:
        return self.frozen_identity(self.spec.teacher.model)

    def frozen_identity(self, name: str) -> str:
        """Of a model as `load_frozen` loads it: quantized weights are other weights."""
        kind = self.spec.teacher.quantization
        return weights_identity(name) if kind is None else f"{weights_identity(name)} as {kind}"

    @property
    def teacher_precision(self) -> torch.dtype:
        """Of activations, and of weights that are not quantized."""
        chosen = self.spec.teacher.precision
        half = chosen == "auto" and environment.has_bf16_cores(self.device.type)
        return torch.bfloat16 if half or chosen == "bf16" or is_quantized(chosen) else torch.float32

    @property
    def teacher_precision_key(self) -> str:
        return self.spec.teacher.quantization or str(self.teacher_precision)

    def load_teacher(self) -> nn.Module:
        return self.load_frozen(self.spec.teacher.model)

    def load_frozen(self, name: str) -> nn.Module:
        """On the device, with `hidden_only`. A loaded one is reused: loading takes time and energy. Another model than
        the teacher replaces it, because both may not fit into memory."""
        if name not in self._loaded:
            self.release_teacher()
            model = cast_weights(load_causal_lm(name), self.teacher_precision).to(self.device)
            if self.spec.teacher.quantization is not None:
                model = quantize(model, self.spec.teacher.quantization)
            self._loaded[name] = expose_hidden_states(model.eval().requires_grad_(False))
            if gguf_file(name) is not None:
                runs_as = self.spec.teacher.quantization or str(self.teacher_precision).removeprefix("torch.")
                self.run.note(f"the weights of the GGUF file {name} were dequantized: the model runs as {runs_as}")
        return self._loaded[name]

    def release_teacher(self) -> None:
        """Free its memory for the student's training."""
        self._loaded.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def documents(self, data: Artifact, split: Split) -> DocumentStore:
        return DocumentStore.open(data.folder / split)

    def rows(self, data: Artifact, split: Split) -> PackedRows:
        """Documents packed into rows; the same rows for every seed, so that a teacher's cache serves all students."""
        return pack(self.documents(data, split), self.spec.data.row_length, seed=0)
