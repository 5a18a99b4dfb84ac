"""Decoding with slots of fixed size gives the tokens of transformers, whatever else is in the batch."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_lm import make_model, make_tokenizer

from joulelab.infer.generation import engine as engine_module
from joulelab.infer.generation import static_decoder
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.fused_layers import FusedLayers
from joulelab.infer.generation.sampler import AnswerEnds
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.static_decoder import (
    PromptReader,
    SlotCache,
    StaticDecoder,
    check_model,
    compiling_pays,
    compiling_prompts_pays,
    prompts_at_once,
)
from joulelab.zoo.pretrained import load_causal_lm

PROMPTS = [[5, 6, 7, 8, 9], [11], [12, 13], [20, 21, 22, 23, 24, 25, 26], [30, 31, 32]]
SAMPLED = GenerationSettings(max_new_tokens=24, do_sample=True, temperature=0.9, top_p=0.9, n=2)


NEVER = AnswerEnds((), None)


def decode(decoder, prompts, numbers, ends=NEVER):
    """(tokens, log-probabilities) of all answers, in their order."""
    n = decoder._settings.n
    given = None if numbers is None else lambda prompt, answer: numbers[n * prompt + answer]
    found = {number: (tokens.tolist(), logs) for number, tokens, logs in decoder.decode(prompts, given, ends)}
    assert sorted(found) == list(range(len(prompts) * n))
    return [found[number][0] for number in sorted(found)], [found[number][1] for number in sorted(found)]


class LengthsByToken(AnswerEnds):
    """Every answer ends after a number of tokens that its first token determines."""

    def __init__(self):
        super().__init__((), None)

    def length(self, first):
        return 1 + 5 * int(first) % 24

    def may_end(self, tokens):
        return np.ones(tokens.shape, dtype=bool)

    def first(self, tokens, begin, end):
        last = self.length(tokens[0]) - 1
        return last if begin <= last < end else None


def numbers_of(prompts, settings, seed=0):
    return np.random.default_rng(seed).random((len(prompts) * settings.n, settings.max_new_tokens))


def test_greedy_tokens_equal_those_of_generate():
    """In float32 on a CPU, for prompts of different lengths that share a batch."""
    model = make_model()
    decoder = StaticDecoder(model, len(PROMPTS), 32, GenerationSettings(max_new_tokens=20))
    for prompt, tokens in zip(PROMPTS, decode(decoder, PROMPTS, None)[0], strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_attention_of_the_model_is_restored():
    model = make_model()
    before = model.config._attn_implementation
    decode(StaticDecoder(model, 5, 32, GenerationSettings(max_new_tokens=2)), PROMPTS, None)
    assert model.config._attn_implementation == before


def test_a_row_does_not_depend_on_the_batch():
    model = make_model()
    numbers = numbers_of(PROMPTS, SAMPLED)
    together, _ = decode(StaticDecoder(model, 10, 40, SAMPLED), PROMPTS, numbers)
    for place, prompt in enumerate(PROMPTS):
        own = numbers[2 * place : 2 * place + 2]
        alone, _ = decode(StaticDecoder(model, 2, 40, SAMPLED), [prompt], own)
        assert alone == together[2 * place :][:2]


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_slots_of_answers_that_have_ended_are_used_again(rows):
    """Answers end at different steps, and each has the tokens that it has if all are decoded at once to the end."""
    prompts = [*PROMPTS, *([number, number + 1] for number in range(1, 20))]
    model, numbers, ends = make_model(), numbers_of(prompts, SAMPLED), LengthsByToken()
    whole, whole_logs = decode(StaticDecoder(model, 2 * len(prompts), 40, SAMPLED), prompts, numbers)
    expected = [tokens[: ends.length(tokens[0])] for tokens in whole]
    assert len({len(tokens) for tokens in expected}) > 5
    decoder = StaticDecoder(model, rows, 40, SAMPLED)
    found, logs = decode(decoder, prompts, numbers, ends)
    assert found == expected
    assert all(np.allclose(own, every[: len(own)], atol=1e-5) for own, every in zip(logs, whole_logs, strict=True))
    assert [len(own) for own in logs] == [len(tokens) for tokens in found]
    assert decode(decoder, prompts[:2], numbers[:4])[0] == whole[:4]  # nothing is left of the prompts before


def test_answers_are_given_while_others_are_decoded():
    """A slot is used as soon as it is free: answers that end early leave before the first long one."""
    model, numbers, ends = make_model(), numbers_of(PROMPTS, SAMPLED), LengthsByToken()
    n, steps = SAMPLED.n, []
    decoder = StaticDecoder(model, 4, 40, SAMPLED)
    count, one = [], decoder._decode_one
    decoder._decode_one = lambda rows: count.append(rows) or one(rows)
    for _ in decoder.decode(PROMPTS, lambda prompt, answer: numbers[n * prompt + answer], ends):
        steps.append(len(count))
    assert len(set(steps)) > 3 and max(count) <= 4
    assert len(count) < 3 * SAMPLED.max_new_tokens  # three batches of four rows would each run to the longest answer


def test_a_check_finds_the_first_end_of_an_answer():
    ends = AnswerEnds((7, 9), None)
    tokens = np.array([1, 7, 9, 2, 9])
    assert ends.may_end(tokens).tolist() == [False, True, True, False, True]
    assert ends.may_end(np.array([[100, 9]])).tolist() == [[False, True]]
    assert (ends.first(tokens, 0, 5), ends.first(tokens, 2, 5), ends.first(tokens, 3, 4)) == (1, 2, None)


def test_prompts_are_read_in_groups_of_one_shape_for_each_length(monkeypatch):
    """Shapes decide which kernels run and in which order they add, so that a prompt must not see its neighbors'."""
    model, shapes = make_model(), []
    cache = SlotCache(8, 128, torch.device("cpu"))

    def capture(run):
        run()
        shapes.append(tuple(run.args[0].shape))
        return run

    reader = PromptReader(
        model, cache, lambda length: [4, 1], capture=capture, prepared=lambda: static_decoder.decode_attention(model)
    )
    prompts = [[1 + place % 30 for place in range(1 + length)] for length in (3, 40, 30, 5, 31, 60, 7)]
    reader.read(prompts, np.arange(7)[:, None])
    assert sorted(shapes) == [(1, 32), (4, 32), (4, 64)]
    plain = SlotCache(8, 128, torch.device("cpu"))
    reader = PromptReader(model, plain, lambda length: [7], prepared=lambda: static_decoder.decode_attention(model))
    reader.read(prompts, np.arange(7)[:, None])
    for own, other in zip(cache.slots, plain.slots, strict=True):
        for slot, prompt in enumerate(prompts):
            torch.testing.assert_close(own.keys[slot, : len(prompt) - 1], other.keys[slot, : len(prompt) - 1])
            torch.testing.assert_close(own.values[slot, : len(prompt) - 1], other.values[slot, : len(prompt) - 1])


def test_compiled_prompts_are_written_in_place():
    """A compiler writes in place what is put at indices, not what is put into a slice: that copied the whole cache."""
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    states_PKTD, slots_PN = torch.randn(3, 2, 5, 4), torch.tensor([[1, 2], [7, 0], [4, 5]])
    slots = static_decoder.LayerSlots(states_PKTD, states_PKTD, torch.zeros(8, dtype=torch.long), 16)

    def write(keys, values):
        slots.keys, slots.values = keys, values
        slots.write_prompts(states_PKTD, states_PKTD + 1, slots_PN)

    caches = slots.keys, slots.values
    write(*caches)
    for prompt, own in enumerate(slots_PN):
        for cache, states_KTD in zip(caches, (states_PKTD[prompt], states_PKTD[prompt] + 1), strict=True):
            assert all(torch.equal(cache[slot, :5], states_KTD.transpose(0, 1)) for slot in own)
    assert not caches[0][[3, 6]].any() and not caches[0][:, 5:].any()
    nodes = make_fx(functionalize(write))(*caches).graph.nodes
    whole = [node.target for node in nodes if getattr(node.meta.get("val"), "shape", None) == caches[0].shape]
    assert [target for target in whole if callable(target)] == [
        torch.ops.aten.index_put.default, torch.ops.aten.index_put.default,
        torch.ops.aten.copy_.default, torch.ops.aten.copy_.default,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "lengths, expected", [(1, [32, 32, 64, 256, 256, 1024, 1024]), (4, [32, 32, 64, 160, 256, 640, 1024])]
)
def test_lengths_of_prompts_are_rounded_up(lengths, expected):
    cache = SlotCache(1, 1088, torch.device("cpu"))
    reader = PromptReader(make_model(), cache, lambda length: [1], lengths=lengths, capture=lambda run: run)
    found = [reader.length([1] * (1 + exact)) for exact in (1, 32, 33, 129, 256, 513, 1000)]
    assert found == expected
    assert reader.length([1] * 1080) == 1088  # the end of a slot


def test_many_prompts_have_more_lengths():
    prompt, settings = [1] * 130, GenerationSettings(max_new_tokens=2)
    few, many = (StaticDecoder(make_model(), 8, 512, settings, prompts=prompts) for prompts in (64, 5000))
    few._prompts._capture = many._prompts._capture = lambda run: run
    assert (few._prompts.length(prompt), many._prompts.length(prompt)) == (256, 160)


def test_compiling_the_reading_of_prompts_pays_sooner_for_larger_models():
    small, large = make_model(), make_model()
    small.config.num_hidden_layers, small.config.hidden_size = 30, 576  # SmolLM2-135M
    large.config.num_hidden_layers, large.config.hidden_size = 24, 2048  # 1.7B
    assert [compiling_prompts_pays(model, 2_000_000) for model in (small, large)] == [False, True]
    assert compiling_prompts_pays(small, 5_000_000)


def test_prompts_of_one_length_share_a_group_wherever_they_are(monkeypatch):
    """Short and long prompts take turns; a group that is not full costs as much as a full one."""
    model = make_model()
    prompts = [[1 + place % 30 for place in range(3 if number % 2 else 40)] for number in range(32)]
    decoder = StaticDecoder(model, 32, 64, GenerationSettings(max_new_tokens=2))
    decoder._prompts._capture, decoder._can_capture = (lambda run: run() or run), True  # as on a GPU
    groups = [some for some, _ in decoder._groups_with_room(decoder._by_length(prompts), prompts, np.full(32, -1))]
    assert groups == [list(range(0, 16, 2)), list(range(1, 32, 2)), list(range(16, 32, 2))]


def test_few_rows_are_filled_by_one_group_and_refilled_one_by_one():
    """A call for one prompt takes as long as one for eight, so a group of that shape is read for what has room."""
    prompts = [[1, 2, 3]] * 20
    decoder = StaticDecoder(make_model(), 8, 64, GenerationSettings(max_new_tokens=2))
    decoder._prompts._capture, decoder._can_capture = (lambda run: run() or run), True
    waiting, answers = decoder._by_length(prompts), np.full(8, -1)
    ((first, slots),) = decoder._groups_with_room(waiting, prompts, answers)
    assert first == list(range(8)) and sorted(slots.flatten()) == list(range(8))
    answers[:] = np.where(np.arange(8) == 5, -1, 0)
    assert [(some, slots.tolist()) for some, slots in decoder._groups_with_room(waiting, prompts, answers)] == [
        ([8], [[5]])
    ]
    answers[5] = 0
    assert not list(decoder._groups_with_room(waiting, prompts, answers))


def test_many_rows_wait_until_a_group_has_room():
    prompts = [[1, 2, 3]] * 64
    decoder = StaticDecoder(make_model(), 64, 64, GenerationSettings(max_new_tokens=2))
    decoder._prompts._capture, decoder._can_capture = (lambda run: run() or run), True
    answers = np.where(np.arange(64) < 7, -1, 0)
    assert not list(decoder._groups_with_room(decoder._by_length(prompts), prompts, answers))
    answers[7] = -1
    ((some, _),) = decoder._groups_with_room(decoder._by_length(prompts), prompts, answers)
    assert some == list(range(8))


def test_group_sizes_leave_few_rows_waiting_and_fit_into_memory():
    assert prompts_at_once(32, 768) == 64
    assert prompts_at_once(1024, 1024) == 16
    assert prompts_at_once(32_768, 4) == 1
    assert prompts_at_once(32, 1) == 1
    assert prompts_at_once(32, 8) == 8 and prompts_at_once(256, 8) == 2


class OnGpu:
    """A model that says that it is on a GPU."""

    def __init__(self, model):
        self._model = model

    def parameters(self):
        yield SimpleNamespace(device=torch.device("cuda"))

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize(
    "prompts, n, batch_size, fit, expected",
    [
        (5000, 1, None, 4096, 1024),
        (5000, 3, None, 4096, 1023),  # whole prompts
        (100, 2, None, 4096, 200),
        (5000, 2, None, 320, 320),
        (5000, 2, 32, 320, 64),
        (5000, 2, None, 1, 2),
        (8, 2, None, 4096, None),  # one batch of few tokens: capturing a step would not pay
    ],
)
def test_on_a_gpu_as_many_answers_as_fit_are_generated_at_once(monkeypatch, prompts, n, batch_size, fit, expected):
    made = []

    def decoder(model, rows, tokens, *_, **__):
        made.append(rows)
        return SimpleNamespace(tokens=tokens, capacity=rows)

    monkeypatch.setattr(engine_module, "StaticDecoder", decoder)
    monkeypatch.setattr(engine_module, "rows_that_fit", lambda model, tokens: fit)
    monkeypatch.setattr(TransformersGenerator, "_supported", lambda self: static_decoder.ModelSupport(slots=True))
    settings = GenerationSettings(max_new_tokens=16, do_sample=True, n=n)
    generator = TransformersGenerator(
        OnGpu(make_model()), make_tokenizer(), settings, identity="tiny", batch_size=batch_size
    )
    reader = generator._reader([[1, 2, 3]] * prompts)
    assert made == ([] if expected is None else [expected])
    assert isinstance(reader, engine_module.GrowingCacheDecoder) is (expected is None)
    if expected is not None:
        assert generator._reader([[1, 2]] * prompts) is reader  # kept


def test_joined_weights_leave_fewer_rows_and_large_models_have_none(monkeypatch):
    made, free = [], iter([4096, 320])
    monkeypatch.setattr(
        engine_module, "StaticDecoder", lambda model, rows, tokens, *_, **__: made.append(rows) or SimpleNamespace()
    )
    monkeypatch.setattr(engine_module, "rows_that_fit", lambda model, tokens: next(free))
    joined = static_decoder.ModelSupport(slots=True, fused=object())
    monkeypatch.setattr(TransformersGenerator, "_supported", lambda self: joined)
    settings = GenerationSettings(max_new_tokens=16, do_sample=True)
    TransformersGenerator(OnGpu(make_model()), make_tokenizer(), settings, identity="tiny")._reader([[1, 2]] * 5000)
    assert made == [320]
    own = sum(weight.nbytes for weight in make_model().parameters())
    for free_bytes, fits in ((2 * own, True), (2 * own - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free_bytes=free_bytes: (free_bytes, 0))
        assert static_decoder._joining_fits(make_model()) is fits


def test_a_compiled_layer_gives_the_same_tokens(monkeypatch):
    """One compilation serves all layers."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model, numbers = make_model(), numbers_of(PROMPTS, SAMPLED)
    expected, _ = decode(StaticDecoder(model, 10, 40, SAMPLED), PROMPTS, numbers)
    decoder = StaticDecoder(model, 10, 40, SAMPLED)
    numbers_before = [layer.self_attn.layer_idx for layer in model.model.layers]

    layer = static_decoder.compile_layer(model, "step", backend="eager", dynamic=False)

    def compiled(rows):
        def step():
            with decoder._prepared_model(), static_decoder.compiled_layers(model, decoder._cache.slots, layer):
                decoder._decode_one(rows)

        return step

    monkeypatch.setattr(decoder, "_step", compiled)
    found, _ = decode(decoder, PROMPTS, numbers)
    assert found == expected
    assert len(numbers_before) > 1 and dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == numbers_before


def test_a_compiled_step_serves_other_models_of_the_shape(monkeypatch):
    import torch._dynamo as dynamo

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    dynamo.reset()
    static_decoder.compile_copy.cache_clear()
    settings = GenerationSettings(max_new_tokens=24, do_sample=True, n=2)
    model, numbers = make_model(), numbers_of(PROMPTS, settings)
    expected, _ = decode(StaticDecoder(model, 10, 40, settings), PROMPTS, numbers)
    dynamo.utils.counters.clear()
    decoder = StaticDecoder(model, 10, 40, settings, compile_step=True)
    for _ in range(2):
        assert decode(decoder, PROMPTS, numbers)[0] == expected
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2  # the layer and the sampler
    with torch.no_grad():
        other = make_model(seed=1)
    expected, _ = decode(StaticDecoder(other, 10, 40, settings), PROMPTS, numbers)
    assert decode(StaticDecoder(other, 10, 40, settings, compile_step=True), PROMPTS, numbers)[0] == expected
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    static_decoder.compile_copy.cache_clear()


def test_joined_layers_give_the_same_tokens_and_follow_the_weights():
    model, numbers = make_model(), numbers_of(PROMPTS, SAMPLED)
    layers, attention = FusedLayers(model), type(model.model.layers[0].self_attn)
    joined = StaticDecoder(model, 10, 40, SAMPLED, fused=layers)
    assert layers.present
    for _ in range(2):
        expected, _ = decode(StaticDecoder(model, 10, 40, SAMPLED), PROMPTS, numbers)
        found, _ = decode(joined, PROMPTS, numbers)
        assert found == expected
        with torch.no_grad():  # as a training step does
            for parameter in model.parameters():
                parameter.mul_(1.3)
    assert type(model.model.layers[0].self_attn) is attention
    assert isinstance(model.model.layers[0].self_attn.q_proj, torch.nn.Linear)


def test_layers_that_only_look_alike_are_found_by_their_logits():
    """In OLMo 2 the norm of this name follows the attention."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = Olmo2ForCausalLM(Olmo2Config(**shape, intermediate_size=32, vocab_size=64, pad_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    assert static_decoder._same_logits(model)
    assert not static_decoder._same_logits(model, FusedLayers(model))


@pytest.mark.samples
def test_rounding_in_half_precision_is_no_wrong_mask(monkeypatch):
    """After special tokens, bfloat16 rounds SmolLM2's logits by 7 % of the largest one."""
    model = load_causal_lm("sample:smollm2").to(torch.bfloat16).eval()
    assert check_model(model).slots
    read_all = StaticDecoder.decode

    def without_the_second_token(self, prompts, numbers, ends):
        return read_all(self, [[prompt[0], *prompt[2:]] for prompt in prompts], numbers, ends)

    monkeypatch.setattr(StaticDecoder, "decode", without_the_second_token)
    refused = check_model(model)
    assert not refused.slots and "other logits" in refused.problem


def test_prompts_read_by_a_compiled_layer_give_the_same_tokens(monkeypatch):
    """One compilation for all lengths."""
    import torch._dynamo as dynamo

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    dynamo.reset()
    dynamo.utils.counters.clear()
    static_decoder.compile_copy.cache_clear()
    prompts = [*PROMPTS, [1 + place % 30 for place in range(49)]]
    # torch takes a length that equals another dimension for the same one, and would compile again for the next
    model, numbers = make_model(hidden_size=40), numbers_of(prompts, SAMPLED)
    expected, _ = decode(StaticDecoder(model, 12, 80, SAMPLED), prompts, numbers)
    decoder = StaticDecoder(model, 12, 80, SAMPLED, compile_prompts=True)
    decoder._prompts._capture, decoder._can_capture = decoder._captured_prompts, True  # as on a GPU
    decoder._run = partial(decoder._eager, partial(decoder._decode_one, 12))

    def capture(run):
        """A graph contains the calls as they were at the capture."""

        def replay():
            with decoder._prepared_model(), decoder._prompt_layers(run.args[1]):
                run()

        run()
        return replay

    monkeypatch.setattr(static_decoder, "capture_cuda_graph", capture)
    for _ in range(2):  # a shape is captured when it occurs again
        assert decode(decoder, prompts, numbers)[0] == expected
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    static_decoder.compile_copy.cache_clear()


def test_a_generator_keeps_its_decoder_and_checks_its_model_once(monkeypatch):
    checked = []
    monkeypatch.setattr(engine_module, "check_model", lambda model: checked.append(1) or check_model(model))
    generator = TransformersGenerator(
        make_model(), make_tokenizer(), SAMPLED, identity="tiny", batch_size=4, cache="fixed"
    )
    first = [answer.ids for answers in generator.generate(["w1 w2", "w3"]) for answer in answers]
    decoder = generator._kept.decoder
    assert [answer.ids for answers in generator.generate(["w1 w2"]) for answer in answers] == first[:2]
    assert generator._kept.decoder is decoder and len(checked) == 1
    list(generator.generate(["w1", "w2", "w3"]))
    assert generator._kept.decoder is not decoder  # more rows


def test_a_model_without_full_attention_is_noted(monkeypatch):
    notes = []
    monkeypatch.setattr(engine_module, "check_model", lambda model: static_decoder.ModelSupport(False))
    generator = TransformersGenerator(make_model(), make_tokenizer(), SAMPLED, identity="tiny", note=notes.append)
    assert not generator._supported().slots
    assert "it generates with a cache that grows" in notes[0]


def test_a_model_with_a_sliding_window_uses_the_growing_cache():
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(**shape, intermediate_size=32, vocab_size=64, sliding_window=4)
    refused = check_model(MistralForCausalLM(config).eval())
    assert not refused.slots and "full attention" in refused.problem
    assert check_model(make_model()).slots


def test_a_sliding_window_is_also_found_in_a_model_that_reads_images():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**shape, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "sliding_window": 8}
    vision = {**shape, "image_size": 28, "patch_size": 14}
    places = {"image_token_index": 61, "boi_token_index": 62, "eoi_token_index": 63, "mm_tokens_per_image": 4}
    for kinds in (["sliding_attention", "full_attention"], ["full_attention"] * 2):
        config = Gemma3Config(text_config={**text, "layer_types": kinds}, vision_config=vision, **places)
        refused = check_model(Gemma3ForConditionalGeneration(config).eval())
        assert not refused.slots and "full attention" in refused.problem


def test_a_short_context_and_other_attention_have_their_own_reasons():
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    short = check_model(GPT2LMHeadModel(GPT2Config(**shape, n_positions=4)).eval())
    assert not short.slots and "context of fewer than 16 tokens" in short.problem
    model = make_model()
    model._supports_sdpa = False
    assert "no fixed slots" in check_model(model).problem


def test_a_model_on_which_the_context_has_no_effect_uses_slots():
    model = make_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    assert check_model(model).slots


def test_a_quantized_model_that_cannot_be_captured_generates_without_graphs(monkeypatch):
    def fails(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(static_decoder, "capture_cuda_graph", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model, numbers, notes = make_model(), numbers_of(PROMPTS, SAMPLED), []
    expected, _ = decode(StaticDecoder(model, 10, 40, SAMPLED), PROMPTS, numbers)

    def generate():
        decoder = StaticDecoder(model, 10, 40, SAMPLED, note=notes.append)
        decoder._can_capture = True  # as on a GPU
        return decode(decoder, PROMPTS, numbers)[0]

    with pytest.raises(RuntimeError, match="not permitted"):
        generate()
    monkeypatch.setattr(static_decoder, "quantization_of", lambda model: "nf4")
    assert generate() == expected
    assert len(notes) == 1 and notes[0].endswith("operation not permitted when stream is capturing")


def test_compiling_pays_for_many_rows_or_many_steps():
    assert not compiling_pays(rows=8, steps=500)
    assert compiling_pays(rows=1536, steps=192)
    assert compiling_pays(rows=1, steps=5000)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "positions"), [(37, 192), (1, 1152), (3, 512)])
@pytest.mark.parametrize(("heads", "heads_kv", "size"), [(9, 3, 64), (8, 8, 128), (16, 1, 32)])
def test_kernel_equals_attention_of_torch(heads, heads_kv, size, rows, positions):
    from joulelab.infer.generation.decode_kernel import attend_slots

    torch.manual_seed(0)
    query = torch.randn(rows, heads, size, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, rows, positions, heads_kv, size, device="cuda", dtype=torch.bfloat16).unbind(0)
    lengths = torch.randint(1, positions + 1, (rows,), device="cuda", dtype=torch.int32)
    found = attend_slots(query, key, value, lengths, size**-0.5)
    groups = heads // heads_kv
    seen = torch.arange(positions, device="cuda") < lengths[:, None, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None].float(),
        key.transpose(1, 2).repeat_interleave(groups, 1).float(),
        value.transpose(1, 2).repeat_interleave(groups, 1).float(),
        attn_mask=seen,
    )[:, :, 0]
    assert (found.float() - expected).abs().max() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "norm"),
    [(960, 576, False, True), (576, 1536, True, False), (100, 2050, False, False)],
)
def test_linear_kernel_equals_the_layers_of_torch(outputs, inputs, gated, norm):
    from torch.nn.functional import linear, rms_norm, silu

    from joulelab.infer.generation.decode_kernel import linear_row

    torch.manual_seed(0)
    x = torch.randn(1, 1, inputs * (1 + gated), device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    scale = torch.rand(inputs, device="cuda", dtype=torch.bfloat16) + 0.5 if norm else None
    found = linear_row(x, weight, None, scale, 1e-5, gated).float()
    given = x.float()
    if gated:
        given = silu(given[..., :inputs]) * given[..., inputs:]
    if scale is not None:
        given = rms_norm(given, (inputs,), scale.float(), 1e-5)
    expected = linear(given, weight.float())
    assert (found - expected).norm() / expected.norm() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("compile_step", [False, True])
def test_a_captured_step_gives_the_tokens_of_the_growing_cache(compile_step):
    """In float32; setup is reported and the same decoder serves the next batch."""
    model, tokenizer, noted = make_model().cuda(), make_tokenizer(), []
    settings = GenerationSettings(max_new_tokens=40, do_sample=True, temperature=0.9, top_p=0.9, n=2)
    texts = [f"w{number} w{number + 1}" for number in range(1, 12)]

    def generate(cache, **options):
        generator = TransformersGenerator(
            model, tokenizer, settings, identity="tiny", batch_size=4, cache=cache, **options
        )
        return [answer.ids for answers in generator.generate(texts) for answer in answers]

    def setup(activity):
        noted.append(activity)
        return nullcontext()

    found = generate("fixed", compile_step=compile_step, setup=setup)
    same = sum(one == other for one, other in zip(found, generate("growing"), strict=True))
    assert same >= 0.9 * len(found)
    assert noted[-1] == ("compile" if compile_step else "capture")
