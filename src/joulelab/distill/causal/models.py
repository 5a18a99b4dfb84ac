"""Teacher and student as models: by name, by layers of the teacher, or drawn in a size; with adapters where asked."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.data.chat.encoding import vocab_size_of
from joulelab.distill.causal.config import CausalStudent, Lora
from joulelab.distill.causal.heads import head_of, open_for_loss
from joulelab.distill.causal.shapes import SHAPES, Shape
from joulelab.distill.causal.starts import require_room_for_embeddings
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import import_transformers, load_causal_lm, save_hf, seeded_init
from joulelab.zoo.students import check_layers

POSITIONS = 4096
"""That a drawn student can be asked about; rotary embeddings cost no parameters for them."""
STATE_FILE = "model.pt"


def make_student(config: CausalStudent, teacher: nn.Module | None, tokenizer: Any, seed: int) -> nn.Module:
    """On the CPU, opened for losses. `teacher` is whose layers or embeddings are taken, where any are."""
    if config.model is not None:
        return open_for_loss(load_causal_lm(config.model).float())
    if config.layers is not None:
        assert teacher is not None
        return open_for_loss(take_layers(teacher, config.layers))
    words = int(teacher.config.vocab_size) if teacher is not None else vocab_size_of(tokenizer)  # type: ignore[union-attr,arg-type]
    student = draw(SHAPES[str(config.size)], words, tokenizer, seed)
    if config.teacher_embeddings:
        assert teacher is not None
        _begin_with_embeddings(student, teacher)
    return open_for_loss(student)


def draw(shape: Shape, words: int, tokenizer: Any, seed: int) -> nn.Module:
    transformers = import_transformers()
    ids = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        intermediate_size=shape.inner_width,
        max_position_embeddings=POSITIONS,
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
    student.load_state_dict(_renumbered(teacher.state_dict(), prefix, layers))
    student.tie_weights()
    made: nn.Module = student.float()
    return made


def _renumbered(weights: dict[str, Tensor], prefix: str, layers: tuple[int, ...]) -> dict[str, Tensor]:
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
def _begin_with_embeddings(student: nn.Module, teacher: nn.Module) -> None:
    """Words that are alike to the teacher are alike to the student from its first step on.

    Narrower embeddings keep the main directions of the teacher's (its principal components), at the scale at which the
    student's would have been drawn.
    """
    own, said = head_of(student), head_of(teacher).float()
    require_room_for_embeddings(said.shape[1], own.shape[1])
    centred = said - said.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # in rising order of their share
    made = centred @ directions[:, -own.shape[1] :]
    own.copy_(made * (own.std() / made.std()))


@dataclass(frozen=True)
class Adapted:
    """A student whose adapters are trained; `model` is what goes through the loop."""

    model: nn.Module
    wrapped: Any

    def merged(self) -> nn.Module:
        whole: nn.Module = self.wrapped.merge_and_unload()
        return whole


def with_adapters(model: nn.Module, config: Lora, seed: int) -> Adapted:
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
    return Adapted(wrapped.get_base_model(), wrapped)


def save_student(model: nn.Module, tokenizer: Any, folder: Path, state_file: bool) -> None:
    """In Hugging Face format; beside it the bare state for programs that load `model.pt` with `weights_only`."""
    save_hf(model, tokenizer, folder)
    if state_file:
        torch.save(model.state_dict(), folder / STATE_FILE)
