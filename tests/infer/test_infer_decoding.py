"""Prefill and decode apart give the tokens that they give together, and can be repeated from the prompt's end."""

import pytest
import torch

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.decoding import Decoder


@pytest.fixture(scope="module")
def model():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def prompts():
    return torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))


def expected(model, steps):
    """By reading everything again for every token."""
    rows = prompts()
    for _ in range(steps + 1):
        rows = torch.cat([rows, model(input_ids=rows).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return rows[:, 7:]


@torch.no_grad()
def test_decoding_by_steps_gives_the_tokens_of_reading_everything_again(model):
    decoder = Decoder(model, prompts(), new_tokens=9)
    found = [decoder._token_B1.clone()]
    for _ in range(8):
        decoder._one_step()
        found.append(decoder._token_B1.clone())
    assert torch.equal(torch.cat(found, 1), expected(model, 8))


@torch.no_grad()
def test_decoding_starts_again_at_the_end_of_the_prompt(model):
    decoder = Decoder(model, prompts(), new_tokens=9)
    first = decoder._token_B1.clone()
    decoder.decode()
    last = decoder._token_B1.clone()
    decoder.rewind_to_prompt()
    decoder._token_B1.copy_(first)
    decoder.decode()
    assert torch.equal(decoder._token_B1, last)
    decoder.response()
    assert torch.equal(decoder._token_B1, last)


@torch.no_grad()
def test_a_step_that_gives_other_tokens_is_refused(model, monkeypatch):
    decoder = Decoder(model, prompts(), new_tokens=9)
    monkeypatch.setattr(decoder, "_compiled", lambda: lambda: decoder._token_B1.zero_())
    with pytest.raises(JoulelabError, match="different tokens"):
        decoder.prepare("compiled")


def test_a_response_that_does_not_fit_is_refused(model):
    with pytest.raises(ConfigError, match="96 positions"):
        Decoder(model, prompts(), new_tokens=90)
