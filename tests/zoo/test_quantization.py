"""Quantized weights: close to the originals, smaller, and refused in words where package or device is missing."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "infer" / "generation"))  # for tiny_lm.py
from tiny_lm import make_model

from joulelab import lookup
from joulelab.errors import DependencyMissing, DeviceMissing
from joulelab.zoo.quantization import QUANTIZATIONS, require_quantization
from joulelab.zoo.quantized_layers import quantize

ON_CPU = {"int8": "bitsandbytes", "nf4": "bitsandbytes", "fp8-weights": "torchao"}
SHAPE = {"hidden_size": 128, "intermediate_size": 256}
IDS = torch.arange(1, 25)[None]


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def linear_bytes(model):
    layers = model.model.layers
    return sum(p.numel() * p.element_size() for p in layers.parameters() if p.ndim > 1)


@pytest.mark.parametrize("kind", ON_CPU)
def test_a_quantized_model_computes_nearly_the_same_from_fewer_bytes(kind):
    pytest.importorskip(ON_CPU[kind])
    plain = make_model(scale=1.0, **SHAPE).to(torch.bfloat16)
    model = quantize(make_model(scale=1.0, **SHAPE), kind)
    error = (logits(model) - logits(plain)).norm() / logits(plain).norm()
    assert 0 < error < 0.2, error
    if kind != "fp8-weights":  # torchao's tensors report the type that they compute in
        assert linear_bytes(model) < 0.55 * linear_bytes(plain)
    assert type(model.lm_head) is torch.nn.Linear and model.lm_head.weight.dtype == torch.bfloat16
    assert quantize(model, kind) is model, "a second call has no effect"


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_formats_without_a_cpu_kernel_are_refused_on_a_cpu(kind, monkeypatch):
    monkeypatch.setattr(lookup, "require_packages", lambda *names: None)
    with pytest.raises(DeviceMissing, match=f"{kind} weights need an NVIDIA GPU") as found:
        require_quantization(kind, on_gpu=False)
    assert "int8, nf4, fp8-weights" in found.value.hint
    require_quantization(kind, on_gpu=True)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_missing_package_is_named_with_its_extra(kind, monkeypatch):
    monkeypatch.setattr(lookup, "absent_packages", lambda *names: list(names))
    with pytest.raises(DependencyMissing, match=f"{kind} weights needs? (bitsandbytes|torchao)") as found:
        require_quantization(kind, on_gpu=True)
    assert "joulelab[bitsandbytes]" in found.value.hint or "joulelab[torchao]" in found.value.hint


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_every_format_computes_nearly_the_same_on_a_gpu(kind):
    pytest.importorskip("bitsandbytes" if kind in ("int8", "nf4") else "torchao")
    plain = make_model(scale=1.0, **SHAPE).to("cuda", torch.bfloat16)
    model = quantize(make_model(scale=1.0, **SHAPE).to("cuda"), kind)
    with torch.no_grad():
        expected = plain(IDS.cuda()).logits.float()
        error = (model(IDS.cuda()).logits.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.2
