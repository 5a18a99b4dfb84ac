"""Teacher and student as models: by name, by layers of the teacher, by configuration or by size."""

from __future__ import annotations

from typing import Any

from torch import nn

from joulelab import lookup
from joulelab.distill.lm_config import LmStudent
from joulelab.distill.lm_heads import decoder_of, open_for_loss, width_of
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import explained_load, import_transformers, seeded_init
from joulelab.zoo.students import extract_student
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
    """A language model with its head; a head that the weights do not have is drawn from the seed."""
    transformers = import_transformers()
    causal = kind == "gpt2"
    loader = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    with seeded_init(seed):
        model = explained_load(loader, name)
    found = str(model.config.model_type)  # type: ignore[union-attr]
    if found != kind:
        raise ConfigError(f"{name} is a model of type '{found}'; expected '{kind}'", "correct its type in the settings")
    return model


def make_student(config: LmStudent, teacher: nn.Module | None, vocab_size: int, seed: int) -> nn.Module:
    """On the CPU. `teacher` is whose layers are taken, where layers are."""
    if config.layers is not None:
        assert teacher is not None
        student: nn.Module = extract_student(teacher, config.layers, vocab_transform=config.vocab_transform, seed=seed)
        return student
    if config.student_pretrained_weights is not None:
        return load_lm(config.student_pretrained_weights, config.student_type, seed)
    return _from_config(config, vocab_size, seed)


def _from_config(config: LmStudent, vocab_size: int, seed: int) -> nn.Module:
    kind: Any = getattr(import_transformers(), _CLASSES[config.student_type])
    if config.student_config is not None:
        settings = kind.config_class.from_json_file(config.student_config)
    else:
        sizes = SIZES[config.student_type]
        if config.student_size not in sizes:
            raise lookup.unknown(f"size of {config.student_type}", str(config.student_size), sizes)
        settings = kind.config_class(vocab_size=vocab_size, **sizes[str(config.student_size)])
    with seeded_init(seed):
        model: nn.Module = kind(settings)
    return model


def require_fit(student: nn.Module, teacher: nn.Module, same_width: bool) -> None:
    """A loss that compares two models needs the same words, or the same width, on both sides."""
    own, said = len(decoder_of(student)[0]), len(decoder_of(teacher)[0])
    if own != said:
        raise ConfigError(
            f"the student knows {own:,} words and the teacher {said:,}: their distributions cannot be compared",
            "take the student from the teacher's layers, or one with the same tokenizer",
        )
    if same_width and width_of(student) != width_of(teacher):
        raise ConfigError(
            f"alpha_cos compares hidden states, and the student's have {width_of(student)} numbers, the teacher's "
            f"{width_of(teacher)}",
            "set distill.alpha_cos=0, or take a student of the teacher's width",
        )


def require_room(model: nn.Module, tokens: int, vocab_size: int) -> None:
    """A position or word that was never embedded would be an index error deep inside the model."""
    config: Any = model.config
    positions = int(config.max_position_embeddings) - (2 if config.model_type == "roberta" else 0)
    if tokens > positions:
        raise ConfigError(
            f"{type(model).__name__} has {positions} positions; data.max_model_input_size is {tokens}",
            f"set data.max_model_input_size={positions} or less",
        )
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokens come from a vocabulary of {vocab_size:,}; {type(model).__name__} knows {config.vocab_size:,}",
            "tokenise the text with the model's own tokenizer",
        )


def ready(model: nn.Module, unpadded: bool) -> nn.Module:
    """Opened for the losses; attention without masks where no row is padded."""
    if unpadded:
        use_unpadded_attention(model)
    return open_for_loss(model)
