"""Teacher and student as models: by name, from layers of the teacher, by configuration or by size.

`open_for_loss` splits a language model of transformers between hidden states and vocabulary, so that a loss can project
in chunks: `model(ids, for_loss=True)` returns the input of the last projection and the last hidden states. The model
keeps its class name and its parameters and is saved and loaded as before.

Shapes: B rows, T tokens, N positions (all rows flattened, or those selected), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab import lookup
from joulelab.distill.chunked import Positions, Projection, TermWeights, VocabularyLoss, matmul_dtype, padded_projection
from joulelab.distill.distilbert.config import LmDistillation, LmStudent
from joulelab.distill.distilbert.data import LmBatch
from joulelab.distill.losses import cosine_distance_sum, logit_mse_sum, response_kl_sum, token_cross_entropy_sum
from joulelab.errors import ConfigError
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker
from joulelab.zoo.pretrained import encoder_positions, import_transformers, load_pretrained, seeded_init
from joulelab.zoo.students import check_layers, extract_student
from joulelab.zoo.tasks.token_rows import use_unpadded_attention

_TINY = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "distilbert": {"base": {}, "tiny": {"dim": 64, "n_heads": 2, "hidden_dim": 128, "n_layers": 2}},
    # 514: RoBERTa counts positions from 2
    "roberta": {
        "base": {"num_hidden_layers": 6, "max_position_embeddings": 514, "type_vocab_size": 1},
        "tiny": {**_TINY, "max_position_embeddings": 514, "type_vocab_size": 1},
    },
    "gpt2": {"base": {"n_layer": 6}, "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2}},
}
_CLASSES = {"distilbert": "DistilBertForMaskedLM", "roberta": "RobertaForMaskedLM", "gpt2": "GPT2LMHeadModel"}


def load_lm(name: str, kind: str, seed: int = 0) -> nn.Module:
    """A language model with its head; a head that the weights do not have is initialized from the seed."""
    transformers = import_transformers()
    causal = kind == "gpt2"
    loader = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    with seeded_init(seed):
        model = load_pretrained(loader, name)
    found = str(model.config.model_type)  # type: ignore[union-attr]
    if found != kind:
        raise ConfigError(f"{name} is a model of type '{found}'; expected '{kind}'", "correct its type in the settings")
    return model


def make_student(config: LmStudent, teacher: nn.Module | None, vocab_size: int, seed: int) -> nn.Module:
    """On the CPU. `teacher`: the model whose layers are taken, if the settings take layers."""
    if config.layers is not None:
        assert teacher is not None
        student: nn.Module = extract_student(teacher, config.layers, vocab_transform=config.vocab_transform, seed=seed)
        return student
    if config.model is not None:
        return load_lm(config.model, config.type, seed)
    return _from_config(config, vocab_size, seed)


def _from_config(config: LmStudent, vocab_size: int, seed: int) -> nn.Module:
    kind: Any = getattr(import_transformers(), _CLASSES[config.type])
    with seeded_init(seed):
        model: nn.Module = kind(_config_by_size(config, vocab_size))
    return model


def _config_by_size(config: LmStudent, vocab_size: int) -> Any:
    kind: Any = getattr(import_transformers(), _CLASSES[config.type]).config_class
    if config.config is not None:
        try:
            return kind(**config.read_config())
        except Exception as error:  # transformers checks values with errors of several kinds
            raise ConfigError(
                f"student.config={config.config} is no configuration of {config.type}: {error}", "correct its values"
            ) from error
    sizes = SIZES[config.type]
    if config.size not in sizes:
        raise lookup.unknown(f"size of {config.type}", str(config.size), sizes)
    return kind(vocab_size=vocab_size, **sizes[str(config.size)])


def require_comparable(student: nn.Module, teacher: nn.Module, same_width: bool) -> None:
    """A loss that compares two models needs the same vocabulary, or the same width, on both sides."""
    own, other = len(decoder_of(student)[0]), len(decoder_of(teacher)[0])
    if own != other:
        raise _different_vocabularies(own, other)
    if same_width and width_of(student) != width_of(teacher):
        raise _different_widths(width_of(student), width_of(teacher))


def _different_vocabularies(student: int, teacher: int) -> ConfigError:
    return ConfigError(
        f"the student has {student:,} tokens and the teacher {teacher:,}: their distributions cannot be compared",
        "take the student from the teacher's layers, or one with the same tokenizer",
    )


def _different_widths(student: int, teacher: int) -> ConfigError:
    return ConfigError(
        f"alpha_cos compares hidden states, but the student's width is {student} and the teacher's {teacher}",
        "set distill.alpha_cos=0, or use a student of the teacher's width",
    )


def require_room(config: Any, name: str, tokens: int, vocab_size: int) -> None:
    """A position or token without an embedding would be an index error deep inside the model; `name`: in the error."""
    positions = encoder_positions(config)
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"{name} has {positions} positions; data.max_model_input_size is {tokens}",
            f"set data.max_model_input_size={positions} or less",
        )
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokens come from a vocabulary of {vocab_size:,}; {name} has {config.vocab_size:,}",
            "tokenize the text with the model's own tokenizer",
        )


# checks by configuration, before anything is computed


def lm_config(name: str, kind: str) -> Any:
    """Configuration of a pretrained model of this type."""
    config: Any = load_pretrained(import_transformers().AutoConfig, name)
    if config.model_type != kind:
        raise ConfigError(
            f"{name} is a model of type '{config.model_type}'; expected '{kind}'", "correct its type in the settings"
        )
    return config


def student_config(student: LmStudent, layers_from: Any | None, vocab_size: int) -> Any:
    """Configuration of the student as it will be made; `layers_from`: of the model whose layers it takes."""
    if student.layers is not None:
        assert layers_from is not None
        check_layers(student.layers, int(layers_from.num_hidden_layers), "the model", "student.layers", once=False)
        return layers_from
    if student.model is not None:
        return lm_config(student.model, student.type)
    return _config_by_size(student, vocab_size)


def require_comparable_configs(student: Any, teacher: Any, same_width: bool) -> None:
    if same_width and student.hidden_size != teacher.hidden_size:
        raise _different_widths(int(student.hidden_size), int(teacher.hidden_size))
    if student.vocab_size != teacher.vocab_size:
        raise _different_vocabularies(int(student.vocab_size), int(teacher.vocab_size))


def ready(model: nn.Module, unpadded: bool) -> nn.Module:
    """Opened for the losses; attention without masks where no row is padded."""
    if unpadded:
        use_unpadded_attention(model)
    return open_for_loss(model)


# between hidden states and vocabulary


@dataclass(frozen=True)
class _Head:
    decoder: str
    """Path of the projection to the vocabulary."""
    transform: Callable[[Any, Tensor], Tensor]
    """What the head computes before it."""
    positions: str
    """Path of the position embeddings."""
    token_types: str | None = None


def _distilbert_transform(model: Any, rows_ND: Tensor) -> Tensor:
    return model.vocab_layer_norm(model.activation(model.vocab_transform(rows_ND)))  # type: ignore[no-any-return]


def _roberta_transform(model: Any, rows_ND: Tensor) -> Tensor:
    return model.lm_head.layer_norm(nn.functional.gelu(model.lm_head.dense(rows_ND)))  # type: ignore[no-any-return]


_EMBEDDINGS = "embeddings.position_embeddings"
_HEADS = {
    "bert": _Head(
        "cls.predictions.decoder",
        lambda model, rows_ND: model.cls.predictions.transform(rows_ND),
        f"bert.{_EMBEDDINGS}",
        "bert.embeddings.token_type_embeddings",
    ),
    "distilbert": _Head("vocab_projector", _distilbert_transform, f"distilbert.{_EMBEDDINGS}"),
    "roberta": _Head(
        "lm_head.decoder", _roberta_transform, f"roberta.{_EMBEDDINGS}", "roberta.embeddings.token_type_embeddings"
    ),
    "gpt2": _Head("lm_head", lambda model, rows_ND: rows_ND, "transformer.wpe"),
}


class _OpenedModel(nn.Module):
    """Mixed into a language model of transformers."""

    transform: Callable[[Any, Tensor], Tensor]

    def forward(
        self, *args: Any, for_loss: bool = False, positions: Tensor | None = None, project: bool = True, **kwargs: Any
    ) -> Any:
        """With `for_loss`: (features_ND or None, hidden_BTD); `positions` are flat, `project=False` skips the head."""
        if not for_loss:
            return super().forward(*args, **kwargs)
        trunk: Any = self.base_model
        hidden_BTD = trunk(*args, **kwargs).last_hidden_state
        if not project:
            return None, hidden_BTD
        rows_ND = hidden_BTD.flatten(0, 1)
        if positions is not None:
            rows_ND = rows_ND.index_select(0, positions)
        return type(self).transform(self, rows_ND), hidden_BTD


def open_for_loss(model: nn.Module) -> nn.Module:
    kind, head = type(model), _head_of(model)
    model.__class__ = type(kind.__name__, (_OpenedModel, kind), {"transform": staticmethod(head.transform)})
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model


def decoder_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, D] and bias [V] of the projection to the vocabulary, by reference."""
    decoder: Any = model.get_submodule(_head_of(model).decoder)
    return decoder.weight, decoder.bias


def freeze_embeddings(model: nn.Module, positions: bool, token_types: bool) -> None:
    head = _head_of(model)
    for frozen, path in ((positions, head.positions), (token_types, head.token_types)):
        if frozen and path is None:
            raise ConfigError(f"{type(model).__name__} has no token type embeddings to freeze")
        if frozen and path:
            model.get_submodule(path).requires_grad_(False)


def width_of(model: nn.Module) -> int:
    """Width of the hidden states."""
    config: Any = model.config
    return int(config.hidden_size)


def _head_of(model: nn.Module) -> _Head:
    name = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if name not in _HEADS:
        raise ConfigError(
            f"a model of type '{name}' is not supported; expected {', '.join(_HEADS)}",
            "name another teacher or student",
        )
    return _HEADS[name]


# The student's loss as a language model's student: each term, and the teacher, only if a weight asks for it.
#
# Every term is a sum over positions times a constant: its alpha over the share of tokens that are its positions. The
# loop divides by the tokens of the whole step. So each term is the mean over its own positions, over an epoch exactly
# and in a step up to the number of positions that were sampled, and any split of the step has the same gradient.
#
# Shapes: B rows, T tokens, N positions projected to the vocabulary, D student's and E teacher's hidden, V vocabulary.


@dataclass(frozen=True)
class Scales:
    """Factor of each summed term."""

    vocabulary: TermWeights
    cos: float
    logged: Mapping[str, tuple[str, float]]
    """Term of the vocabulary -> its name in the logs, and the factor that makes its sum a mean over its positions."""

    @classmethod
    def of(cls, config: LmDistillation, targets_share: float) -> Scales:
        # The loop divides every sum by all tokens of the step. A term over a fraction s of them
        # must be multiplied by 1 / s to be the mean over its own positions; s is a constant of the
        # data, so the gradient does not depend on how the step is split.
        compared = 1 / targets_share if config.restrict_ce_to_mask else 1.0
        predicted = 1 / targets_share
        weights = TermWeights(
            kl=config.alpha_ce * compared,
            mse=config.alpha_mse * compared,
            ce=(config.alpha_mlm + config.alpha_clm) * predicted,
            temperature=config.temperature,
        )
        tokens = "mlm" if config.mlm else "clm"
        return cls(
            weights, config.alpha_cos, {"kl": ("kl", compared), "mse": ("mse", compared), "ce": (tokens, predicted)}
        )


class FrozenTeacher:
    """Computes its outputs without gradients; its projection is cast and padded once."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """`dtype`: of its weights and its computation; None: that of the training."""
        self.model = model.eval().requires_grad_(False)
        if dtype is not None:
            self.model.to(dtype)
            _join_products_with_gelu(self.model)
        self._has_dtype = dtype is not None
        self._projection: Projection | None = None

    @torch.no_grad()
    def __call__(self, batch: LmBatch, project: bool) -> tuple[Tensor | None, Tensor]:
        device = batch["input_ids"].device.type
        # A frozen model in bf16 computes in bf16 by itself; autocast would only add casts.
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device) and not self._has_dtype):
            outputs: tuple[Tensor | None, Tensor] = self.model(
                **batch.inputs, for_loss=True, positions=batch.rows, project=project
            )
        return outputs

    def projection(self, features: Tensor) -> Projection:
        dtype = matmul_dtype(features)
        if self._projection is None or self._projection.weight_VD.dtype != dtype:
            self._projection = padded_projection(*decoder_of(self.model), dtype)
        return self._projection


def _join_products_with_gelu(model: nn.Module) -> None:
    """Let the matrix product before a GELU compute it where it stores its results: a separate kernel would read and
    write the widest activations once more, 12 % of a BERT's energy. On a GPU this is the tanh formula, at most 0.0005
    off, which is below the rounding of 16-bit numbers at the size of those activations."""
    for layer in model.modules():
        dense, activation = getattr(layer, "dense", None), getattr(layer, "intermediate_act_fn", None)
        if type(dense) is nn.Linear and type(activation).__name__ in ("GELU", "GELUActivation"):
            layer.forward = partial(_product_with_gelu, dense)


def _product_with_gelu(dense: nn.Linear, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, -2)
    found = torch._addmm_activation(dense.bias, rows, dense.weight.t(), use_gelu=True)
    return found.view(*hidden.shape[:-1], -1)


class LmObjective:
    """alpha_ce T^2 KL + alpha_mlm or alpha_clm CE + alpha_mse MSE + alpha_cos (1 - cos)."""

    def __init__(
        self, student: nn.Module, teacher: FrozenTeacher | None, scales: Scales, chunk: int, compile_mode: str = "off"
    ) -> None:
        """`student` is the model itself: the loop may call it through a wrapper that hides its parts."""
        self._student, self._teacher, self._scales = student, teacher, scales
        self._vocabulary = VocabularyLoss(scales.vocabulary, chunk, compile_mode)
        self._cosine: Callable[..., Tensor] = cosine_distance_sum
        if compile_mode != "off":
            self._cosine = torch.compile(cosine_distance_sum)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}  # the teacher is not trained and not checkpointed

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: LmBatch, phase: PhaseMaker) -> ObjectiveOutput:
        projects = bool(self._scales.vocabulary.names)
        teacher_NE, teacher_BTE = None, None
        if self._teacher is not None:
            with phase("forward.teacher"):
                teacher_NE, teacher_BTE = self._teacher(batch, self._scales.vocabulary.needs_teacher)
        with phase("forward.student"):
            student_ND, student_BTD = model(**batch.inputs, for_loss=True, positions=batch.rows, project=projects)
        with phase("forward.loss"):
            loss, parts = self._loss(batch, student_ND, student_BTD, teacher_NE, teacher_BTE)
        return ObjectiveOutput(loss, batch.count, parts)

    def _loss(
        self,
        batch: LmBatch,
        student_ND: Tensor | None,
        student_BTD: Tensor,
        teacher_NE: Tensor | None,
        teacher_BTE: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        if student_ND is not None:
            projection = None
            if teacher_NE is not None and self._teacher is not None:
                projection = self._teacher.projection(student_ND)
            decoder = decoder_of(self._student)
            loss, sums = self._vocabulary(student_ND, *decoder, batch.positions, teacher_NE, projection)
            losses.append(loss)
            for term, value in sums.items():
                name, to_mean = self._scales.logged[term]
                parts[name] = to_mean * value
        if self._scales.cos > 0 and teacher_BTE is not None:
            mask_BT = batch.tensors.get("attention_mask")
            weights_N = None if mask_BT is None else mask_BT.flatten().float()
            distance = self._cosine(student_BTD.flatten(0, 1), teacher_BTE.flatten(0, 1), weights_N)
            losses.append(self._scales.cos * distance)
            parts["cos"] = distance.detach()
        return torch.stack(losses).sum(), parts


def plain_loss(student: nn.Module, teacher: nn.Module | None, batch: LmBatch, scales: Scales) -> Tensor:
    """The same loss with all logits of both models in memory: the reference of the tests and of the benchmark."""
    weights, positions = scales.vocabulary, batch.positions
    student_ND, student_BTD = student(**batch.inputs, for_loss=True, positions=batch.rows)
    student_NV = _used(functional.linear(student_ND, *decoder_of(student)), positions)
    loss = weights.ce * token_cross_entropy_sum(student_NV, positions.targets_N[: positions.count])
    if teacher is None:
        return loss
    with torch.no_grad():
        teacher_ND, teacher_BTD = teacher(**batch.inputs, for_loss=True, positions=batch.rows)
        teacher_NV = _used(functional.linear(teacher_ND, *decoder_of(teacher)), positions)
    student_ND, teacher_ND = student_BTD.flatten(0, 1), teacher_BTD.flatten(0, 1)
    if "attention_mask" in batch.tensors:  # selecting rows by a mask makes a GPU wait, so full rows are left alone
        used, real_N = positions.weights_N[: positions.count] > 0, batch["attention_mask"].flatten() > 0
        student_NV, teacher_NV = student_NV[used], teacher_NV[used]
        student_ND, teacher_ND = student_ND[real_N], teacher_ND[real_N]
    if weights.kl > 0:
        loss = loss + weights.kl * response_kl_sum(student_NV, teacher_NV, weights.temperature)
    if weights.mse > 0:
        loss = loss + weights.mse * logit_mse_sum(student_NV, teacher_NV)
    return loss + scales.cos * cosine_distance_sum(student_ND, teacher_ND) if scales.cos > 0 else loss


def _used(logits_NV: Tensor, positions: Positions) -> Tensor:
    ordered_NV = logits_NV if positions.order_N is None else logits_NV[positions.order_N]
    return ordered_NV[: positions.count]
