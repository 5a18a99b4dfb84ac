"""Decoding with slots of fixed size gives the tokens of transformers, whatever the batch and however rows leave it."""

from functools import partial

import numpy as np
import pytest
import torch
from tiny_lm import make_model, make_tokenizer

from joulelab.infer.generation import engine as engine_module
from joulelab.infer.generation import static_decoder
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.fused_layers import FusedLayers
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.static_decoder import StaticDecoder, check_model, compiling_pays, sizes_that_pay

PROMPTS = [[5, 6, 7, 8, 9], [11], [12, 13], [20, 21, 22, 23, 24, 25, 26], [30, 31, 32]]
SAMPLED = GenerationSettings(max_new_tokens=24, do_sample=True, temperature=0.9, top_p=0.9, n=2)


def never(tokens, begin, end):
    return None


def numbers_of(prompts, settings, seed=0):
    return np.random.default_rng(seed).random((len(prompts) * settings.n, settings.max_new_tokens))


def test_greedy_tokens_equal_those_of_generate():
    """In float32 on a CPU, for prompts of different lengths that share a batch."""
    model = make_model()
    found, _ = StaticDecoder(model, len(PROMPTS), 32, GenerationSettings(max_new_tokens=20)).decode(
        PROMPTS, None, never
    )
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert tokens.tolist() == expected[0, len(prompt) :].tolist()


def test_attention_of_the_model_is_restored():
    model = make_model()
    before = model.config._attn_implementation
    StaticDecoder(model, 5, 32, GenerationSettings(max_new_tokens=2)).decode(PROMPTS, None, never)
    assert model.config._attn_implementation == before


def test_a_row_does_not_depend_on_the_batch():
    model = make_model()
    numbers = numbers_of(PROMPTS, SAMPLED)
    together, _ = StaticDecoder(model, 10, 40, SAMPLED).decode(PROMPTS, numbers, never)
    for place, prompt in enumerate(PROMPTS):
        alone, _ = StaticDecoder(model, 2, 40, SAMPLED).decode([prompt], numbers[2 * place : 2 * place + 2], never)
        assert [tokens.tolist() for tokens in alone] == [tokens.tolist() for tokens in together[2 * place :][:2]]


@pytest.mark.parametrize("smallest", [1, 64])
def test_rows_that_move_to_a_smaller_batch_continue_unchanged(monkeypatch, smallest):
    """Answers end at different steps, so that half of the rows are finished more than once."""
    monkeypatch.setattr(static_decoder, "_SMALLEST_BUCKET", smallest)
    monkeypatch.setattr(static_decoder, "_MIN_STEPS_LEFT", 1)
    model, numbers = make_model(), numbers_of(PROMPTS, SAMPLED)
    whole, whole_logs = StaticDecoder(model, 10, 40, SAMPLED).decode(PROMPTS, numbers, never)
    last_of = {tuple(tokens.tolist()): 3 * place % 24 for place, tokens in enumerate(whole)}
    texts = [tuple(tokens.tolist()) for tokens in whole]

    def finished_at(tokens, begin, end):
        place = next(place for place, text in enumerate(texts) if text[:end] == tuple(tokens[:end].tolist()))
        last = last_of[texts[place]]
        return last if begin <= last < end else None

    decoder = StaticDecoder(model, 10, 40, SAMPLED)
    found, logs = decoder.decode(PROMPTS, numbers, finished_at)
    assert [tokens.tolist() for tokens in found] == [list(text[: last_of[text] + 1]) for text in texts]
    assert (len(decoder._run) > 1) == (smallest == 1)
    assert all(np.allclose(own, every[: len(own)], atol=1e-5) for own, every in zip(logs, whole_logs, strict=True))
    assert [len(own) for own in logs] == [len(tokens) for tokens in found]
    again, _ = decoder.decode(PROMPTS[:2], numbers[:4], never)
    assert [tokens.tolist() for tokens in again] == [tokens.tolist() for tokens in whole[:4]]


def test_a_compiled_layer_gives_the_same_tokens(monkeypatch):
    """One compilation serves all layers."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model, numbers = make_model(), numbers_of(PROMPTS, SAMPLED)
    expected, _ = StaticDecoder(model, 10, 40, SAMPLED).decode(PROMPTS, numbers, never)
    decoder = StaticDecoder(model, 10, 40, SAMPLED)
    decoder.decode(PROMPTS, numbers, never)  # allocates the slots
    numbers_before = [layer.self_attn.layer_idx for layer in model.model.layers]

    layer = static_decoder.compile_layer(model, "step", backend="eager", dynamic=False)

    def compiled(bucket):
        def step():
            with decoder._prepared_model(), static_decoder.compiled_layers(model, decoder._cache.slots, layer):
                decoder._decode_one(bucket)

        return step

    monkeypatch.setattr(decoder, "_graph", compiled)
    found, _ = decoder.decode(PROMPTS, numbers, never)
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]
    assert len(numbers_before) > 1 and dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == numbers_before


def test_a_compiled_step_serves_other_sizes_and_other_models_of_the_shape(monkeypatch):
    """Two compilations of the layer: the first size as it is, the next for any number of rows."""
    import torch._dynamo as dynamo

    monkeypatch.setattr(static_decoder, "_SMALLEST_BUCKET", 1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    dynamo.reset()
    static_decoder.compile_copy.cache_clear()
    settings = GenerationSettings(max_new_tokens=24, do_sample=True, n=2)
    model, numbers = make_model(), numbers_of(PROMPTS, settings)
    expected, _ = StaticDecoder(model, 32, 40, settings).decode(PROMPTS, numbers, never)
    dynamo.utils.counters.clear()
    decoder = StaticDecoder(model, 32, 40, settings, compile_step=True)
    for some in (PROMPTS, PROMPTS[:3], PROMPTS[:1], PROMPTS):
        found, _ = decoder.decode(some, numbers[: 2 * len(some)], never)
        assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected[: len(found)]]
    assert sorted(decoder._run) == [2, 8, 16]
    graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 4  # two of the layer and two of the sampler
    with torch.no_grad():
        other = make_model(seed=1)
    expected, _ = StaticDecoder(other, 32, 40, settings).decode(PROMPTS, numbers, never)
    found, _ = StaticDecoder(other, 32, 40, settings, compile_step=True).decode(PROMPTS, numbers, never)
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    static_decoder.compile_copy.cache_clear()


def test_sizes_are_captured_where_answers_that_end_early_save_more():
    assert sizes_that_pay(rows=1536, new_tokens=96, batches=1, compiled=True) == [1536]
    assert sizes_that_pay(rows=1536, new_tokens=96, batches=26, compiled=True) == [1536, 192, 96]
    assert sizes_that_pay(rows=1536, new_tokens=96, batches=26, compiled=False) == [1536, 768, 384, 192, 96]
    assert sizes_that_pay(rows=64, new_tokens=96, batches=1000, compiled=True) == [64]
    decoder = StaticDecoder(make_model(), 256, 40, SAMPLED, sizes=[256, 64])
    assert [decoder._bucket(rows) for rows in (1, 64, 65, 256)] == [64, 64, 256, 256]


def test_joined_layers_give_the_same_tokens_and_follow_the_weights():
    model, numbers = make_model(), numbers_of(PROMPTS, SAMPLED)
    layers, attention = FusedLayers(model), type(model.model.layers[0].self_attn)
    joined = StaticDecoder(model, 10, 40, SAMPLED, fused=layers)
    assert layers.present
    for _ in range(2):
        expected, _ = StaticDecoder(model, 10, 40, SAMPLED).decode(PROMPTS, numbers, never)
        found, _ = joined.decode(PROMPTS, numbers, never)
        assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]
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


def test_prompts_read_by_a_compiled_layer_give_the_same_tokens():
    """One compilation for all lengths and numbers of prompts."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model, numbers = make_model(), numbers_of(PROMPTS, SAMPLED)
    expected, _ = StaticDecoder(model, 10, 40, SAMPLED).decode(PROMPTS, numbers, never)
    decoder = StaticDecoder(model, 10, 40, SAMPLED, compile_prompts=True)
    decoder._prompt_layer = static_decoder.compile_layer(model, "prompts", backend="eager", dynamic=True)
    for some in (PROMPTS, PROMPTS[2:], PROMPTS[::-1], PROMPTS):
        found, _ = decoder.decode(some, numbers[: 2 * len(some)], never)
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


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
    assert not check_model(MistralForCausalLM(config).eval()).slots
    assert check_model(make_model()).slots


def test_a_quantized_model_that_cannot_be_captured_generates_without_graphs(monkeypatch):
    def fails(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(static_decoder, "capture_cuda_graph", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model, numbers, notes = make_model(), numbers_of(PROMPTS, SAMPLED), []
    expected, _ = StaticDecoder(model, 10, 40, SAMPLED).decode(PROMPTS, numbers, never)

    def decode():
        decoder = StaticDecoder(model, 10, 40, SAMPLED, note=notes.append)
        decoder._can_capture = True  # as on a GPU
        return decoder.decode(PROMPTS, numbers, never)[0]

    with pytest.raises(RuntimeError, match="not permitted"):
        decode()
    monkeypatch.setattr(static_decoder, "quantization_of", lambda model: "int8")
    assert [tokens.tolist() for tokens in decode()] == [tokens.tolist() for tokens in expected]
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

    found = generate("fixed", compile_step=compile_step, note_setup=lambda *note: noted.append(note))
    same = sum(one == other for one, other in zip(found, generate("growing"), strict=True))
    assert same >= 0.9 * len(found)
    assert noted[-1][0] == ("compile" if compile_step else "capture")
