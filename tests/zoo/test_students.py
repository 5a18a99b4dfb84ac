"""A student is its teacher with fewer layers, and a head of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from joulelab.errors import ConfigError
from joulelab.zoo.students import take_layers

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
DISTIL_SIZES = {
    "vocab_size": 60,
    "dim": 16,
    "n_layers": 4,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 64,
}


def teacher(family: str) -> Any:
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3)),
        "roberta": lambda: transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**SIZES, num_labels=3)
        ),
        "distilbert": lambda: transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(**DISTIL_SIZES, num_labels=3)
        ),
    }
    return made[family]().eval()


def hidden_states(model: Any) -> Any:
    tokens = torch.arange(5, 17).reshape(2, 6)
    with torch.no_grad():
        return model.base_model(tokens, output_hidden_states=True).hidden_states


FAMILIES = ["bert", "roberta", "distilbert"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_with_all_layers_thinks_like_its_teacher(family: str) -> None:
    original = teacher(family)
    student = take_layers(original, [0, 1, 2, 3], seed=1)
    pairs = list(zip(hidden_states(student), hidden_states(original), strict=True))
    assert len(pairs) == 5
    assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_with_the_first_layers_follows_its_teacher_that_far(family: str) -> None:
    original = teacher(family)
    student: Any = take_layers(original, [0, 1], seed=1)
    assert student.config.num_hidden_layers == 2
    assert original.config.num_hidden_layers == 4
    for own, other in zip(hidden_states(student), hidden_states(original)[:3], strict=True):
        assert torch.equal(own, other)
    assert type(student) is type(original)
    assert student(torch.arange(5, 11).reshape(1, 6)).logits.shape == (1, 3)


def test_layers_keep_the_order_they_were_named_in() -> None:
    original = teacher("bert")
    student: Any = take_layers(original, [3, 1], seed=1)
    for number, layer in enumerate([3, 1]):
        own = student.bert.encoder.layer[number].attention.self.query.weight
        assert torch.equal(own, original.bert.encoder.layer[layer].attention.self.query.weight)
    assert torch.equal(student.bert.pooler.dense.weight, original.bert.pooler.dense.weight)


def test_the_head_is_fresh_and_drawn_from_the_seed() -> None:
    original = teacher("bert")
    first: Any = take_layers(original, [0, 3], seed=1)
    again: Any = take_layers(original, [0, 3], seed=1)
    other: Any = take_layers(original, [0, 3], seed=2)
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    assert not torch.equal(first.classifier.weight, original.classifier.weight)


def test_student_and_teacher_share_no_memory() -> None:
    original = teacher("bert")
    student: Any = take_layers(original, [0], seed=1)
    before = original.bert.embeddings.word_embeddings.weight.clone()
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(1.0)
    assert torch.equal(original.bert.embeddings.word_embeddings.weight, before)


@pytest.mark.parametrize("layers", [[], [4], [-1, 0], [0, 0]])
def test_layers_that_are_not_there_are_refused_with_the_valid_range(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"the model has layers 0\.\.3") as caught:
        take_layers(teacher("bert"), layers, seed=1)
    assert "1 to 4 different layers" in caught.value.hint


def test_other_families_are_refused_with_those_we_know() -> None:
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    with pytest.raises(ConfigError, match=r"type 'gpt2'; expected one of bert, roberta, xlm-roberta, distilbert"):
        take_layers(transformers.GPT2LMHeadModel(config), [0], seed=1)
    with pytest.raises(ConfigError, match="type 'Linear'"):
        take_layers(torch.nn.Linear(2, 2), [0], seed=1)
