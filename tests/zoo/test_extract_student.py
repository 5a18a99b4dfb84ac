"""Students cut out of language models compute what their teacher does, where nothing was left out."""

import pytest
import torch
import transformers

from joulelab.errors import ConfigError
from joulelab.zoo.registry import default_layers
from joulelab.zoo.students import extract_student

IDS = torch.tensor([[2, 7, 11, 5, 3], [2, 9, 4, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}


def _scattered(model):
    """Fresh biases are 0 and norms 1: a swapped pair would go unnoticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def _teacher(kind):
    torch.manual_seed(0)
    if kind == "bert":
        return _scattered(transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE)))
    if kind == "roberta":
        return _scattered(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SHAPE)))
    shape = {"vocab_size": 40, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 20}
    return _scattered(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=2, eos_token_id=3)))


def _output(model):
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True)


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_with_all_layers_kept_the_student_computes_what_the_teacher_does(kind):
    teacher = _teacher(kind)
    student = extract_student(teacher, range(4))
    theirs, ours = _output(teacher), _output(student)
    real = MASK.bool()
    assert len(ours.hidden_states) == 5
    for expected, found in zip(theirs.hidden_states, ours.hidden_states, strict=True):
        torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], rtol=1e-5, atol=1e-5)


def test_the_token_type_embedding_would_be_missed():
    """The old script drops it; folded into the positions it is still there."""
    teacher = _teacher("bert")
    with torch.no_grad():
        teacher.bert.embeddings.token_type_embeddings.weight[0].add_(1.0)
    student = extract_student(teacher, range(4))
    torch.testing.assert_close(_output(student).logits[0], _output(teacher).logits[0], rtol=1e-5, atol=1e-5)
    types = teacher.bert.embeddings.token_type_embeddings.weight[0]
    dropped = student.distilbert.embeddings.position_embeddings.weight - types
    student.distilbert.embeddings.position_embeddings.weight.data.copy_(dropped)
    assert (_output(student).logits[0] - _output(teacher).logits[0]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        ("bert", "bert.encoder.layer.{}.output.dense.weight", "distilbert.transformer.layer.{}.ffn.lin2.weight"),
        ("roberta", "roberta.encoder.layer.{}.output.dense.weight", "roberta.encoder.layer.{}.output.dense.weight"),
        ("gpt2", "transformer.h.{}.mlp.c_proj.weight", "transformer.h.{}.mlp.c_proj.weight"),
    ],
)
def test_any_mapping_of_layers_in_the_order_it_was_written(kind, theirs, ours):
    teacher = _teacher(kind)
    student = extract_student(teacher, [3, 0, 0])
    assert student.config.num_hidden_layers == 3
    for number, layer in enumerate([3, 0, 0]):
        assert torch.equal(student.state_dict()[ours.format(number)], teacher.state_dict()[theirs.format(layer)])
    assert _output(student).logits.isfinite().all()


def test_the_student_is_its_own_and_its_output_stays_tied():
    teacher = _teacher("bert")
    student = extract_student(teacher, [0, 3])
    before = teacher.bert.embeddings.word_embeddings.weight.clone()
    with torch.no_grad():
        student.distilbert.embeddings.word_embeddings.weight.zero_()
    assert torch.equal(teacher.bert.embeddings.word_embeddings.weight, before)
    assert student.vocab_projector.weight is student.distilbert.embeddings.word_embeddings.weight


@pytest.mark.parametrize(("kind", "transform"), [("bert", "vocab_transform"), ("roberta", "lm_head.dense")])
def test_without_vocab_transform_it_is_drawn_from_the_seed(kind, transform):
    teacher = _teacher(kind)
    kept = extract_student(teacher, [0, 3]).get_submodule(transform).weight
    drawn = [
        extract_student(teacher, [0, 3], vocab_transform=False, seed=s).get_submodule(transform).weight
        for s in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], kept)


def test_a_saved_student_loads_as_any_other_model(tmp_path):
    student = extract_student(_teacher("bert"), [0, 2])
    student.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(_output(loaded).logits, _output(student).logits)


def test_half_of_twelve_layers_are_the_published_ones():
    assert default_layers(12) == (0, 2, 4, 7, 9, 11)
    assert default_layers(6) == (0, 2, 5)
    assert default_layers(1) == default_layers(2) == (0,)


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"layers 0\.\.3"):
        extract_student(_teacher("gpt2"), [0, 4])


def test_a_model_of_another_kind_or_without_a_head_is_refused():
    teacher = _teacher("bert")
    with pytest.raises(ConfigError, match="no head"):
        extract_student(teacher.bert, [0])
    with pytest.raises(ConfigError, match="type 'distilbert'"):
        extract_student(extract_student(teacher, [0]), [0])
