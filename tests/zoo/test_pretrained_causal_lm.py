"""The sample language model: read from its GGUF file once here, because that takes its time."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import byte_level_tokenizer

from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.pretrained import causal_lm_config, load_causal_lm, load_tokenizer, save_hf


@pytest.mark.samples
def test_the_sample_language_model_answers_and_survives_saving() -> None:
    tokenizer = load_tokenizer("sample:smollm2")
    model: Any = load_causal_lm("sample:smollm2")
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = generate(model, prompt)
    assert "Paris" in tokenizer.decode(answer)

    # 538 MB in float32: not in tmp_path, which pytest keeps for three runs.
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, tokenizer, Path(folder))
        again: Any = load_causal_lm(folder)
        assert torch.equal(generate(again, prompt), answer)
        assert load_tokenizer(folder).chat_template == tokenizer.chat_template


def generate(model: Any, prompt: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return tokens[0, prompt["input_ids"].shape[1] :]


def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model at all, but long enough to be looked at")
    with pytest.raises(NotFoundError, match="cannot load a model from"):
        load_causal_lm(str(file))


def test_code_of_a_model_is_not_run_and_no_question_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail("a question was asked"))
    classes = {
        "AutoConfig": "own.Config",
        "AutoTokenizer": ["own.Tokenizer", None],
        "AutoModelForCausalLM": "own.Model",
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for load in (load_causal_lm, causal_lm_config, load_tokenizer):
        with pytest.raises(ConfigError, match="joulelab does not run code of models"):
            load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


class RunsCode:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_would_run_code_or_are_no_weights_are_refused(tmp_path: Path, name: str) -> None:
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 50, "n_positions": 16}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape})
    )
    (tmp_path / name).write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(ConfigError, match="corrupted, or contains more than tensors"):
        load_causal_lm(str(tmp_path))
    torch.save({"weight": RunsCode(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(ConfigError, match="corrupted, or contains more than tensors"):
        load_causal_lm(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_spaces_before_punctuation_survive_in_a_byte_level_vocabulary(tmp_path: Path) -> None:
    """Files and versions of transformers that ask for cleaning: it would change answers, or warn that it does not."""
    byte_level_tokenizer(["well , it is so ."] * 9).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
    loaded = load_tokenizer(str(tmp_path))
    assert not loaded.clean_up_tokenization_spaces
    assert loaded.decode(loaded("well , it is so .", add_special_tokens=False).input_ids) == "well , it is so ."
