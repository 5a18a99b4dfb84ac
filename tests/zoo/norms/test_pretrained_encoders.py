"""Encoders load quietly, with a head that the seed alone decides."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.zoo import pretrained
from joulelab.zoo.pretrained import load_classifier, load_tokenizer, save_hf, weights_identity

TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(folder)
    return folder


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_the_seed_decides_the_head_and_nothing_else_does(encoder_folder: Path) -> None:
    torch.manual_seed(1)
    first: Any = load_classifier(str(encoder_folder), num_labels=3, seed=5)
    torch.manual_seed(2)
    second: Any = load_classifier(str(encoder_folder), num_labels=3, seed=5)
    other: Any = load_classifier(str(encoder_folder), num_labels=3, seed=6)
    assert first.classifier.weight.shape == (3, 16)
    assert same_weights(first, second)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    assert same_weights(first.bert.encoder, other.bert.encoder)


def test_loading_leaves_the_random_numbers_of_the_caller_alone(encoder_folder: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_classifier(str(encoder_folder), num_labels=2, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_loading_prints_nothing_and_leaves_the_verbosity_as_it_was(
    encoder_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers.utils.logging.get_verbosity()
    load_classifier(str(encoder_folder), num_labels=2, seed=0)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert transformers.utils.logging.get_verbosity() == before
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_a_trained_head_is_kept_and_one_of_another_size_replaced(encoder_folder: Path, tmp_path: Path) -> None:
    trained: Any = load_classifier(str(encoder_folder), num_labels=2, seed=5)
    trained.save_pretrained(tmp_path)
    again: Any = load_classifier(str(tmp_path), num_labels=2, seed=99)
    wider: Any = load_classifier(str(tmp_path), num_labels=4, seed=99)
    assert torch.equal(again.classifier.weight, trained.classifier.weight)
    assert wider.classifier.weight.shape == (4, 16)


def test_a_causal_language_model_is_refused_as_a_classifier(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a causal language model; a classifier needs an encoder") as caught:
        load_classifier(str(tmp_path), num_labels=2, seed=0)
    assert "sample:minilm" in caught.value.hint


@pytest.mark.samples
def test_the_sample_language_model_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="sample:smollm2 is a causal language model"):
        load_classifier("sample:smollm2", num_labels=2, seed=0)


@pytest.mark.samples
def test_labeled_text_is_no_model() -> None:
    with pytest.raises(ConfigError, match="sample:reviews is labeled text, not a model"):
        load_tokenizer("sample:reviews")


def test_fewer_than_two_classes_are_refused(encoder_folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs 2 or more classes, got 1"):
        load_classifier(str(encoder_folder), num_labels=1, seed=0)


def test_a_folder_or_file_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cannot load a model from") as caught:
        load_classifier(str(tmp_path), num_labels=2, seed=0)
    assert "config.json" in caught.value.hint
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ConfigError, match=r"weights\.bin is not a loadable model"):
        load_classifier(str(file), num_labels=2, seed=0)


def test_a_hub_that_cannot_be_reached_is_answered_with_what_works_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFoundError, match=r"'minilm' was not found .*, and http.* cannot be reached$") as caught:
        load_classifier("minilm", num_labels=2, seed=0)
    assert caught.value.hint == "did you mean 'sample:minilm'?"


def test_without_transformers_the_hint_states_what_to_install(
    encoder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DependencyMissing) as caught:
        load_classifier(str(encoder_folder), num_labels=2, seed=0)
    assert caught.value.hint == 'pip install "joulelab[train]"'


def test_the_identity_follows_the_bytes_of_a_folder_and_the_name_on_the_hub(encoder_folder: Path) -> None:
    before = weights_identity(str(encoder_folder))
    assert len(before) == 64
    (encoder_folder / "extra.txt").write_text("changed")
    assert weights_identity(str(encoder_folder)) != before
    assert weights_identity("org/name@" + "a" * 40) == "org/name@" + "a" * 40


@pytest.mark.samples
def test_the_sample_encoder_classifies_and_survives_saving(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("sample:minilm")
    model: Any = load_classifier("sample:minilm", num_labels=2, seed=0)
    assert sum(weight.numel() for weight in model.parameters()) == 22_713_986
    batch = tokenizer(["a fine film", "dull"], padding=True, return_tensors="pt")
    save_hf(model, tokenizer, tmp_path / "model")
    again: Any = load_classifier(str(tmp_path / "model"), num_labels=2, seed=1)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)
    assert load_tokenizer(str(tmp_path / "model"))("a fine film") == tokenizer("a fine film")


def test_the_quiet_ends_even_when_loading_fails(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        pretrained.load_causal_lm(str(tmp_path))
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_every_rank_saves_into_its_own_folder_whatever_transformers_thinks_of_ranks(tmp_path, monkeypatch):
    model = transformers.BertModel(transformers.BertConfig(**TINY))
    monkeypatch.setattr(type(model), "should_save_on_this_rank", lambda self, first: False, raising=False)
    save_hf(model, SimpleNamespace(save_pretrained=lambda folder: None), tmp_path / "rank-1")
    assert (tmp_path / "rank-1" / "model.safetensors").is_file()
    assert not model.should_save_on_this_rank(True)
