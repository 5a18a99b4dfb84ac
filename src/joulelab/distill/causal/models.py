"""Causal language models opened between hidden states and vocabulary, so that a loss can project in chunks.

`model(ids, hidden_only=True)` gives what the last projection would be applied to. The model stays itself: same class
name, same parameters, saved and loaded as before.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.data.chat.encoding import vocab_size_of
from joulelab.distill.causal.config import SHAPES, CausalSpec, CausalStudent, Lora, Shape
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import causal_lm_config, import_transformers, load_causal_lm, save_hf, seeded_init
from joulelab.zoo.students import check_layers

_NEUTRAL_LOGIT_SETTINGS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""What some models do to their logits after the projection, and the value that does nothing."""


class _HiddenStatesMixin(nn.Module):
    """Mixed into a language model of transformers."""

    def forward(self, *args: Any, hidden_only: bool = False, **kwargs: Any) -> Any:
        """With `hidden_only`: hidden_BTD, after the last norm."""
        if not hidden_only:
            return super().forward(*args, **kwargs)
        trunk: Any = self.base_model
        return trunk(*args, **{**kwargs, "use_cache": False}).last_hidden_state


def expose_hidden_states(model: nn.Module) -> nn.Module:
    """In place; a model whose logits are more than a projection is refused, as its loss would be another one."""
    if isinstance(model, _HiddenStatesMixin):
        return model
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for name, nothing in _NEUTRAL_LOGIT_SETTINGS.items():
        value = getattr(model.config, name, nothing)
        if value not in (None, nothing):
            raise ConfigError(
                f"{type(model).__name__} changes its logits after the projection ({name}={value})",
                "name a model of another family: Llama, OLMo, Qwen, Mistral, SmolLM",
            )
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__} has no plain projection to its vocabulary", "name a causal model")
    model.__class__ = type(type(model).__name__, (_HiddenStatesMixin, type(model)), {})
    return model


def lm_head_weight(model: nn.Module) -> Tensor:
    """Weight [V, D] of the projection to the vocabulary, by reference."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    weight: Tensor = head.weight
    return weight


# Teacher and student by their shapes, looked at before anything is computed: a slip would be told hours later.


def check_models(spec: CausalSpec) -> None:
    """That they are language models, and that the student's layers or embeddings are the teacher's to give."""
    student = spec.student
    if spec.until == "student" and student.model is not None:
        causal_lm_config(student.model)
    if spec.until == "student" and student.lora is not None:
        _check_lora_targets(student, spec.teacher.model)
    if spec.until == "data" or not (spec.has_teacher or student.teacher_embeddings):
        return
    teacher = causal_lm_config(spec.teacher.model)
    if spec.until != "student":
        return
    if student.layers is not None:
        check_layers(student.layers, int(teacher.num_hidden_layers))
    if student.teacher_embeddings:
        check_embedding_width(int(teacher.hidden_size), SHAPES[str(student.size)].width)


def _check_lora_targets(student: CausalStudent, teacher: str) -> None:
    """That adapters find a layer; the student's names are known from its shape, without any weight."""
    assert student.lora is not None
    transformers = import_transformers()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    if student.size is None:
        shape = causal_lm_config(student.model or teacher)
    else:  # drawn ones are Llamas
        shape = transformers.LlamaConfig(num_hidden_layers=1, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape)
    layers = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.dim() == 2}
    wanted = student.lora.targets
    if not any(name.rpartition(".")[2] in layers for name in wanted):
        raise ConfigError(
            f"no layer of the student has a name that student.lora.targets gives: {', '.join(wanted) or 'none'}",
            f"its layers are {', '.join(sorted(layers))}",
        )


def check_embedding_width(teacher_width: int, student_width: int) -> None:
    if teacher_width < student_width:
        raise ConfigError(
            f"the teacher's embeddings have {teacher_width} numbers a word, the student's {student_width}",
            "set student.teacher_embeddings=false, or a narrower size",
        )


# Teacher and student as models: by name, by layers of the teacher, or drawn in a size; with adapters where asked.


MAX_POSITIONS = 4096
"""That a drawn student can be asked about; rotary embeddings cost no parameters for them."""
STATE_FILE = "model.pt"


def make_student(config: CausalStudent, teacher: nn.Module | None, tokenizer: Any, seed: int) -> nn.Module:
    """On the CPU, opened for losses. `teacher` is whose layers or embeddings are taken, where any are."""
    if config.model is not None:
        return expose_hidden_states(load_causal_lm(config.model).float())
    if config.layers is not None:
        assert teacher is not None
        return expose_hidden_states(take_layers(teacher, config.layers))
    words = int(teacher.config.vocab_size) if teacher is not None else vocab_size_of(tokenizer)  # type: ignore[union-attr,arg-type]
    student = random_student(SHAPES[str(config.size)], words, tokenizer, seed)
    if config.teacher_embeddings:
        assert teacher is not None
        _copy_embeddings(student, teacher)
    return expose_hidden_states(student)


def random_student(shape: Shape, words: int, tokenizer: Any, seed: int) -> nn.Module:
    transformers = import_transformers()
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.LlamaConfig(
        vocab_size=words,
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
    """A shorter model of the same kind: these layers in this order, and everything that is not a layer."""
    config: Any = copy.deepcopy(teacher.config)
    check_layers(layers, int(config.num_hidden_layers))
    prefix = "model.layers."
    if not any(name.startswith(prefix) for name in teacher.state_dict()):
        raise ConfigError(f"the layers of {type(teacher).__name__} are not where Llama has them", "use student.size")
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    with seeded_init(0):
        student: Any = import_transformers().AutoModelForCausalLM.from_config(config)
    student.load_state_dict(_renumber_layers(teacher.state_dict(), prefix, layers))
    student.tie_weights()
    made: nn.Module = student.float()
    return made


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
    """Words that are alike to the teacher are alike to the student from its first step on.

    Narrower embeddings keep the main directions of the teacher's (its principal components), at the scale at which the
    student's would have been drawn.
    """
    own, said = lm_head_weight(student), lm_head_weight(teacher).float()
    check_embedding_width(said.shape[1], own.shape[1])
    centred = said - said.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # in rising order of their share
    made = centred @ directions[:, -own.shape[1] :]
    own.copy_(made * (own.std() / made.std()))


@dataclass(frozen=True)
class LoraModel:
    """A student whose adapters are trained; `model` is what goes through the loop."""

    model: nn.Module
    wrapped: Any

    def merged(self) -> nn.Module:
        whole: nn.Module = self.wrapped.merge_and_unload()
        return whole


def add_lora(model: nn.Module, config: Lora, seed: int) -> LoraModel:
    """The same model with low-rank layers beside its own, which are frozen."""
    import peft

    asked = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets),
        task_type="CAUSAL_LM",
    )
    try:
        with seeded_init(seed):
            wrapped: Any = peft.get_peft_model(model, asked)
    except ValueError as error:
        raise ConfigError(f"adapters do not fit this student: {error}", "check student.lora.targets") from error
    return LoraModel(wrapped.get_base_model(), wrapped)


def save_student(model: nn.Module, tokenizer: Any, folder: Path, state_file: bool) -> None:
    """In Hugging Face format; beside it the bare state for programs that load `model.pt` with `weights_only`."""
    save_hf(model, tokenizer, folder)
    if state_file:
        torch.save(model.state_dict(), folder / STATE_FILE)
