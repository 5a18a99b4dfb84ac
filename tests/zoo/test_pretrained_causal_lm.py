"""The sample language model: read from its GGUF file once here, because that takes its time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from joulelab.errors import NotFoundError
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer, save_hf


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
