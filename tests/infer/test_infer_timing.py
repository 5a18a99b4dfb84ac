"""Counting, timing, and choosing among recipes without being fooled by a quick wrong one."""

import time
from dataclasses import replace

import pytest
import torch

from joulelab.infer import recipes as fastest
from joulelab.infer.recipes import RECIPES, Recipe, cast_inputs, cast_model, inference_context, prepare_call
from joulelab.infer.timing import Latency, run_round, synchronized_latency
from joulelab.zoo.norms.encoder_shapes import SHAPES
from joulelab.zoo.norms.encoders import build, make_inputs
from joulelab.zoo.pretrained import seeded_init

SMALL = replace(SHAPES["deit-t"], width=48, heads=3, head_width=16, layers=4, side=32, patch=8)
CPU = torch.device("cpu")


def test_a_round_counts_every_call_in_its_window():
    seen = []
    found = run_round(lambda: (seen.append(1), time.sleep(0.01)), 0.1, threads=1)
    assert found.calls == len(seen)
    assert found.median_s == pytest.approx(0.01, rel=0.5)
    assert found.duration_s >= 0.1
    assert Latency.of([found, found]).measurements == 2 * len(found.times_s)


def test_a_later_round_keeps_the_size_of_the_blocks():
    seen = []
    first = replace(run_round(lambda: seen.append(1), 0.05, threads=1), calls_per_block=200)
    seen.clear()
    again = run_round(lambda: seen.append(1), 0.05, threads=1, before=first)
    assert (again.calls, again.calls_per_block) == (len(seen), 200)
    assert 200 * sum(again.times_s) >= 0.05


def test_waiting_for_each_result_takes_its_time():
    assert synchronized_latency(lambda: time.sleep(0.01), CPU) == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast-bf16"])
def test_precisions_differ_in_what_is_cast_and_not_in_what_is_computed(dtype):
    plain, rows = build(SMALL), make_inputs(SMALL, 2, 0)
    with torch.no_grad():
        expected = plain(rows)
    model = cast_model(plain, dtype)
    weights = {parameter.dtype for parameter in model.parameters()}
    assert weights == {torch.bfloat16 if dtype == "bf16" else torch.float32}
    with inference_context(dtype):
        found = prepare_call(model, cast_inputs([rows], dtype), RECIPES["eager"], dtype, CPU)()
    assert found.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert torch.allclose(found.float(), expected, atol=0.05 * float(expected.abs().max()))
    assert not torch.is_inference_mode_enabled()


def test_rounding_is_distinguished_from_a_wrong_kernel():
    """Of a classifier's two numbers one can be near 0, and then rounding looks ten times as bad."""
    shape = replace(SHAPES["bert-b"], layers=2, width=192, heads=3, vocabulary=100)
    for seed in range(8):
        with seeded_init(seed):
            model = build(shape).requires_grad_(False)
        words = make_inputs(shape, 1, 32, seed)
        exact = prepare_call(fastest.truncate_layers(model, 2), [words], RECIPES["eager"], "fp32", CPU)()
        rounded = prepare_call(
            cast_model(fastest.truncate_layers(model, 2), "bf16"), [words], RECIPES["eager"], "bf16", CPU
        )()
        assert 0.001 < fastest.relative_error(rounded, exact) < 0.012


def test_the_fastest_recipe_must_also_be_right(monkeypatch):
    model, rows = build(SMALL).requires_grad_(False), (make_inputs(SMALL, 1, 0),)
    recipes = (Recipe("slow"), Recipe("quick and wrong"), Recipe("broken"))

    def made(model, inputs, recipe, dtype, device):
        if recipe.name == "broken":
            raise RuntimeError("no such kernel")
        if recipe.name == "quick and wrong":
            return lambda: torch.zeros(1, SMALL.width)
        return lambda: model(*inputs)

    monkeypatch.setattr(fastest, "CPU_RECIPES", recipes)
    monkeypatch.setattr(fastest, "prepare_call", made)
    with inference_context("fp32"):
        chosen, tried = fastest.autotune(model, rows, "fp32", CPU)
    assert chosen == Recipe("fastest")
    assert [one.seconds is None for one in tried] == [False, True, True]
    assert "differs by" in tried[1].problem
    assert tried[2].problem == "no such kernel"
    assert len(model.blocks) == 4  # the tries were on a copy
    assert str(tried[0]).startswith("eager kernels on 3 of 4 layers: "), "its time is not that of the model"
