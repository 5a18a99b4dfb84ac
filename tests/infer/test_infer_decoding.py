"""Prefill and decode apart give the tokens that they give together, and can be repeated from the prompt's end."""

import pytest
import torch

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.decoding import Decoder, PromptFile
from joulelab.infer.generation.cache import PaddedPrompts


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


def padded(*rows):
    return PaddedPrompts.of(rows, torch.device("cpu"))


@torch.no_grad()
def test_padded_prompts_of_several_batches_give_the_tokens_of_each_alone(model):
    batches = [[[5, 6, 7, 8, 9], [10, 11]], [[3], [20, 21, 22]]]
    decoder = Decoder(model, [padded(*batch) for batch in batches], new_tokens=6)
    alone = [[tokens_of(model, row, 6) for row in batch] for batch in batches]
    for turn in (1, 0, 1):  # the constructor has read the first batch
        decoder.prefill()
        assert torch.equal(responses(decoder), torch.tensor(alone[turn]))
        decoder.rewind_to_prompt()
        decoder._token_B1.copy_(torch.tensor([[row[0]] for row in alone[turn]]))
        assert torch.equal(responses(decoder), torch.tensor(alone[turn]))


def responses(decoder):
    found = [decoder._token_B1.clone()]
    for _ in range(decoder.new_tokens - 1):
        decoder._one_step()
        found.append(decoder._token_B1.clone())
    return torch.cat(found, 1)


def tokens_of(model, prompt, count):
    """By reading everything again for every token."""
    row = torch.tensor([prompt])
    for _ in range(count):
        row = torch.cat([row, model(input_ids=row).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return row[0, len(prompt) :].tolist()


def test_the_last_batch_is_filled_up_from_the_beginning_of_the_file():
    prompts = PromptFile("/data/q.txt", [[1], [2, 2], [3, 3, 3]])
    batches = prompts.batches(2, torch.device("cpu"))
    assert [batch.lengths_P1.flatten().tolist() for batch in batches] == [[1, 2], [3, 1]]
    facts = prompts.facts(2, calls=1)
    assert (facts["file"], facts["count"], facts["batches"], facts["batches_measured"]) == ("q.txt", 3, 2, 1)
    assert (facts["shortest"], facts["longest"], facts["repeated"]) == (1, 3, 1)
