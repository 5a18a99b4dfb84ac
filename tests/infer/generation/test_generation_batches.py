"""Batches of prompts: what a row says must not depend on who stands beside it, and its tokens are its own."""

import math

import pytest
import torch
from tiny_lm import make_model, make_tokenizer

from joulelab.distill.causal.models import expose_hidden_states
from joulelab.errors import ConfigError
from joulelab.infer.generation.cache import PaddedPrompts
from joulelab.infer.generation.completions import encode_prompt, end_ids, with_chain_of_thought
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings

PROMPTS = ["w1 w2 w3", "w4", [{"role": "user", "content": "w5 w6"}], "w7 w8 w9 w1 w2", "w11 w3 w9 w8"]
GREEDY = GenerationSettings(max_new_tokens=16)
SAMPLED = GenerationSettings(max_new_tokens=16, do_sample=True, temperature=0.9, top_p=0.95, n=3, seed=4)
BEAMS = GenerationSettings(max_new_tokens=16, num_beams=3, n=2)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model():
    return make_model()


def reported(model, tokenizer, settings, batch_size, prompts=PROMPTS, cache="growing"):
    generator = TransformersGenerator(model, tokenizer, settings, identity="tiny", batch_size=batch_size, cache=cache)
    return list(generator.generate(prompts))


def plain(model, ids, end, limit):
    """Greedy, one prompt alone, without cache, mask or padding: nothing that could be wrong."""
    found = []
    with torch.no_grad():
        while len(found) < limit and (not found or found[-1] not in end):
            found.append(int(model(torch.tensor([[*ids, *found]])).logits[0, -1].argmax()))
    return tuple(found)


@pytest.mark.parametrize("cache", ["growing", "fixed"])
def test_greedy_answers_of_a_batch_equal_those_of_single_prompts(model, tokenizer, cache):
    end = end_ids(model, tokenizer)
    found = reported(model, tokenizer, GREEDY, 3, cache=cache)
    alone = [plain(model, encode_prompt(tokenizer, prompt), end, 16) for prompt in PROMPTS]
    assert [answers[0].ids for answers in found] == alone
    assert {len(ids) for ids in alone} != {16}, "some answer must end early for this to mean something"


@pytest.mark.parametrize("settings", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_model_opened_for_losses_still_sees_its_mask(model, tokenizer, settings):
    """Whatever is put around `forward` may hide its arguments; padding must stay masked."""
    opened = expose_hidden_states(make_model())
    assert [[one.ids for one in some] for some in reported(opened, tokenizer, settings, 5)] == [
        [one.ids for one in some] for some in reported(model, tokenizer, settings, 1)
    ]


@pytest.mark.parametrize(("settings", "cache"), [(SAMPLED, "growing"), (SAMPLED, "fixed"), (BEAMS, "auto")])
def test_answers_do_not_depend_on_the_rest_of_the_batch(model, tokenizer, settings, cache):
    together, alone = (reported(model, tokenizer, settings, size, cache=cache) for size in (5, 1))
    assert [[one.ids for one in answers] for answers in together] == [[one.ids for one in answers] for answers in alone]
    assert all(len(answers) == settings.n for answers in together)


def test_padding_after_the_end_is_nobodys_token(model, tokenizer):
    """A short answer beside long ones: its tokens are counted up to its end and not to theirs."""
    answers = [answers[0] for answers in reported(model, tokenizer, GREEDY, 5)]
    short = [one for one in answers if one.finish_reason == "stop"]
    long = [one for one in answers if one.finish_reason == "length"]
    assert short and long
    assert all(one.tokens == len(one.ids) < 16 for one in short)
    assert all(one.ids[-1] in end_ids(model, tokenizer) for one in short)
    assert all(one.tokens == 16 for one in long)


@pytest.mark.parametrize(
    ("settings", "cache"),
    [(GREEDY, "growing"), (GREEDY, "fixed"), (SAMPLED, "growing"), (SAMPLED, "fixed"), (BEAMS, "auto")],
)
def test_log_probability_is_that_of_the_model_over_the_answers_tokens(model, tokenizer, settings, cache):
    answers = reported(model, tokenizer, settings, 5, cache=cache)
    for prompt, some in zip(PROMPTS, answers, strict=True):
        ids = encode_prompt(tokenizer, prompt)
        for one in some:
            with torch.no_grad():
                logs = torch.log_softmax(model(torch.tensor([[*ids, *one.ids]])).logits[0], -1)
            expected = sum(float(logs[len(ids) - 1 + place, token]) for place, token in enumerate(one.ids))
            assert one.log_probability_sum == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, BEAMS], ids=["greedy", "sampled", "beams"])
def test_rows_that_pad_a_vocabulary_are_never_generated(tokenizer, settings):
    """Their weights are whatever they are; here they would win every time."""
    padded = make_model(vocab_size=64)
    with torch.no_grad():
        padded.lm_head.weight[48:] = padded.lm_head.weight[:16] * 3
    found = [one for some in reported(padded, tokenizer, settings, 3) for one in some]
    assert max(max(one.ids) for one in found) < 48
    assert all(math.isfinite(one.log_probability_sum) for one in found)


def test_prompts_are_padded_on_the_left():
    padded = PaddedPrompts.of([[5, 6, 7], [8]], torch.device("cpu"))
    assert padded.ids_PT.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert padded.mask_PT.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert padded.positions_PT.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_each_row_stops_at_a_text_of_its_own(model, tokenizer):
    free = reported(model, tokenizer, GREEDY, 5)
    word = free[0][0].text.split()[5]
    stopped = reported(model, tokenizer, GenerationSettings(max_new_tokens=16, stop=(word,)), 5)
    for (before,), (after,) in zip(free, stopped, strict=True):
        if word in before.text:
            assert after.text == before.text[: before.text.find(word)]
            assert after.finish_reason == "stop"
            assert after.ids == before.ids[: after.tokens]
        else:
            assert after.ids == before.ids


def test_a_beam_stops_at_a_text_too(model, tokenizer):
    free = reported(model, tokenizer, BEAMS, 5)[0][0]
    word = free.text.split()[3]
    found = reported(model, tokenizer, BEAMS.model_copy(update={"stop": (word,)}), 5)
    assert all(word not in one.text for some in found for one in some)
    stopped = [one for some in found for one in some if one.finish_reason == "stop"]
    assert any(tokenizer.decode(one.ids[-1]) == word for one in stopped)


def test_sampling_follows_seed_and_shape(model, tokenizer):
    again = reported(model, tokenizer, SAMPLED, 2)
    assert again == reported(model, tokenizer, SAMPLED, 2)
    other = reported(model, tokenizer, SAMPLED.model_copy(update={"seed": 5}), 2)
    assert [one.ids for some in again for one in some] != [one.ids for some in other for one in some]
    one_choice = SAMPLED.model_copy(update={"top_k": 1, "n": 1})
    assert [some[0].ids for some in reported(model, tokenizer, one_choice, 2)] == [
        some[0].ids for some in reported(model, tokenizer, GREEDY, 2)
    ]


def test_generating_leaves_the_model_as_it_was(tokenizer):
    model = make_model(dropout=0.5).train()
    assert reported(model, tokenizer, GREEDY, 5) == reported(make_model(), tokenizer, GREEDY, 5)
    assert model.training


def test_a_prompt_without_room_and_settings_without_effect_are_refused(model, tokenizer):
    with pytest.raises(ConfigError, match="128 positions"):
        reported(model, tokenizer, GenerationSettings(max_new_tokens=126), 1)
    for settings in ({"temperature": 0.5}, {"n": 2}, {"do_sample": True, "num_beams": 2}, {"stop": ("",)}):
        with pytest.raises(ValueError):
            GenerationSettings(**settings)
    with pytest.raises(ConfigError, match="does not end with a user message"):
        reported(model, tokenizer, GREEDY, 1, [[{"role": "assistant", "content": "w1"}]])


def test_a_part_of_the_work_is_computed_in_the_shapes_of_the_whole(model, tokenizer):
    def shapes(whole, part):
        generator = TransformersGenerator(
            model, tokenizer, GREEDY, identity="tiny", batch_size=4, cache="fixed", whole=whole
        )
        made, reader = [], generator._reader
        generator._reader = lambda encoded: made.append(reader(encoded)) or made[0]
        list(generator.generate(part))
        return made[0].capacity, made[0].tokens

    long = [*PROMPTS, "w1 " * 70]
    assert shapes(long, PROMPTS[:1]) == shapes(long, PROMPTS) == shapes((), long)
    assert shapes((), PROMPTS[:1]) != shapes((), long)


def test_a_chain_of_thought_is_requested_in_the_last_message():
    requested = with_chain_of_thought([{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}])
    assert requested[0]["content"] == "s"
    assert requested[1]["content"].startswith("2 + 2?\n\nThink step by step")
    assert with_chain_of_thought("2 + 2?").startswith("2 + 2?")


@pytest.mark.gpu
def test_a_compiled_step_states_the_same_on_a_gpu(tokenizer):
    model = make_model().cuda()
    assert [some[0].ids for some in reported(model, tokenizer, GREEDY, 3, cache="fixed")] == [
        some[0].ids for some in reported(model, tokenizer, GREEDY, 3)
    ]
