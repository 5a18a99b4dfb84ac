"""A batch that is too large for the memory is refused in words, before the kernel ends the process."""

from dataclasses import replace

import psutil
import pytest
import torch

from joulelab.errors import ConfigError, OutOfMemory
from joulelab.infer.config import Case
from joulelab.infer.workload import InferenceWorkload, explain_out_of_memory, item_bytes, require_memory
from joulelab.zoo.norms.encoder_shapes import SHAPES
from joulelab.zoo.norms.encoders import build, make_inputs

SMALL = replace(SHAPES["deit-t"], width=48, heads=3, head_width=16, layers=2, side=32, patch=8)
CPU = torch.device("cpu")
CASE = Case(99_999_999, 0, "eager", "fp32")


def subject(images):
    return InferenceWorkload(build(SMALL).requires_grad_(False), (make_inputs(SMALL, images, 0),), images, "image")


def test_an_item_needs_itself_and_its_largest_activations():
    image, tokens = 3 * 32 * 32 * 4, 17
    widest = tokens * 4 * 48 * 4  # the numbers between the two matrices of a block
    assert image + 2 * widest <= item_bytes(subject(1)) < image + 4 * widest
    assert item_bytes(subject(8)) == pytest.approx(item_bytes(subject(1)), rel=0.1)


def test_a_batch_beyond_the_memory_is_refused_before_it_is_made(monkeypatch):
    with pytest.raises(ConfigError, match=r"b99999999-eager-fp32 needs at least .*; this machine has"):
        require_memory(CASE, CPU, lambda: subject(1))
    require_memory(replace(CASE, batch_size=64), CPU, lambda: subject(1))
    full = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: full)
    with pytest.raises(OutOfMemory, match=r"; 1.00 kB is free"):
        require_memory(replace(CASE, batch_size=64), CPU, lambda: subject(1))


def test_what_torch_cannot_allocate_is_reported_as_the_row_that_does_not_fit():
    with pytest.raises(OutOfMemory, match="b99999999-eager-fp32 does not fit"), explain_out_of_memory(CASE, CPU):
        torch.empty(1 << 50)
    with pytest.raises(RuntimeError, match="shape"), explain_out_of_memory(CASE, CPU):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
