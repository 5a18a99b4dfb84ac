"""On a GPU: a captured graph reads its inputs anew and gives the eager result, whichever recipe made it."""

import gc
from dataclasses import replace

import pytest
import torch

from joulelab.infer.decoding import Decoder
from joulelab.infer.recipes import RECIPES, autotune, cast_model, inference_context, prepare_call
from joulelab.zoo.norms.encoder_shapes import SHAPES
from joulelab.zoo.norms.encoders import build, make_inputs
from joulelab.zoo.norms.pretrained_encoders import fold_for_inference

pytestmark = pytest.mark.gpu
SMALL = replace(SHAPES["deit-t"], layers=4)
GPU = torch.device("cuda")


def off(found, expected):
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("mode", ["cuda-graph", "compiled", "reduce-overhead"])
@pytest.mark.parametrize("dtype", ["bf16", "autocast-fp16"])
def test_every_mode_gives_the_eager_result_and_sees_new_inputs(mode, dtype):
    model = cast_model(build(SMALL).requires_grad_(False).to(GPU), dtype)
    rows = make_inputs(SMALL, 2, 0).to(GPU, torch.bfloat16 if dtype == "bf16" else torch.float32)
    with inference_context(dtype):
        call = prepare_call(model, [rows], RECIPES[mode], dtype, GPU)
        for scale in (1.0, 0.5):
            rows.mul_(scale)
            expected = prepare_call(model, [rows], RECIPES["eager"], dtype, GPU)()
            assert off(call(), expected) < 0.05


def test_a_captured_call_keeps_its_model_alive():
    """The graph knows addresses alone: once the weights were freed, a call read whatever came to lie there."""
    rows = make_inputs(SMALL, 2, 0).to(GPU, torch.bfloat16)
    model = cast_model(build(SMALL).requires_grad_(False).to(GPU), "bf16")
    with inference_context("bf16"):
        expected = model(rows).clone()
        call = prepare_call(model, [rows], RECIPES["cuda-graph"], "bf16", GPU)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.randn(64, 1024, 1024, device=GPU)
        assert off(call(), expected) < 0.05


def test_the_fastest_recipe_is_found_and_right():
    model = cast_model(fold_for_inference(build(SMALL)).requires_grad_(False).to(GPU), "bf16")
    rows = [make_inputs(SMALL, 1, 0).to(GPU, torch.bfloat16)]
    with inference_context("bf16"):
        recipe, tried = autotune(model, rows, "bf16", GPU)
        assert off(prepare_call(model, rows, recipe, "bf16", GPU)(), model(*rows)) < 0.05
    assert recipe.graph
    assert sum(one.seconds is not None for one in tried) >= 3, [str(one) for one in tried]


@pytest.mark.parametrize("mode", ["cuda-graph", "compiled"])
def test_decoding_as_one_piece_gives_the_tokens_of_eager_decoding(mode):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(GPU)
    with inference_context("fp32"):
        decoder = Decoder(model, torch.randint(0, 61, (2, 9), device=GPU), new_tokens=20)
        decoder.response()
        expected = decoder._token_B1.clone()
        decoder.prepare(mode)  # refuses by itself where tokens differ
        decoder.response()
        assert torch.equal(decoder._token_B1, expected)
