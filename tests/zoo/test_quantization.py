"""Quantized weights: close to the originals, smaller, and refused in words where package or device is missing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "infer" / "generation"))  # for tiny_lm.py
from tiny_lm import make_model

from joulelab import lookup
from joulelab.errors import DependencyMissing, DeviceMissing, JoulelabError
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


def test_an_optional_kernel_that_is_not_there_is_no_failure(tmp_path, monkeypatch, caplog):
    """bitsandbytes warns about it when it is imported on some CPUs."""
    warning = 'import logging\nlogging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load a kernel")\n'
    (tmp_path / "bitsandbytes.py").write_text(warning)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level("WARNING", logger="bitsandbytes")  # an earlier test has raised it
    quantize(torch.nn.Sequential(), "nf4")
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    assert not caplog.records


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


def torchao_that(monkeypatch, quantize_):
    configs = []

    def config(**options):
        configs.append(options)
        return options

    names = ("Float8DynamicActivationFloat8WeightConfig", "Float8WeightOnlyConfig", "Int4WeightOnlyConfig")
    fake = SimpleNamespace(**dict.fromkeys(names, config), PerRow=lambda: "row", quantize_=quantize_)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=fake))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return configs


@pytest.mark.parametrize("kind", ["fp8", "fp8-weights", "int4"])
def test_torchao_does_not_change_settings_of_the_process(kind, monkeypatch):
    configs = torchao_that(monkeypatch, lambda model, config, filter_fn: None)
    quantize(make_model(**SHAPE), kind)
    assert configs and all(config["set_inductor_config"] is False for config in configs)
    if kind == "int4":  # torch's own kernel; other formats need mslk
        assert {config["int4_packing_format"] for config in configs} == {"tile_packed_to_4d"}


@pytest.mark.parametrize(
    "error",
    [ImportError("Requires mslk >= 1.0.0"), RuntimeError("\n  no kernel image is available\nmore"), AssertionError()],
)
def test_a_package_that_does_not_fit_torch_is_named(error, monkeypatch):
    def fail(model, config, filter_fn):
        raise error

    torchao_that(monkeypatch, fail)
    reason = str(error).strip().splitlines()[0] if str(error) else "AssertionError"
    with pytest.raises(JoulelabError, match=rf"torchao .* cannot make int4 weights with torch 2.*: {reason}") as found:
        quantize(make_model(**SHAPE), "int4")
    assert "install a version of torchao" in found.value.hint


def test_too_little_memory_is_not_blamed_on_the_package(monkeypatch):
    def fail(model, config, filter_fn):
        raise torch.OutOfMemoryError("CUDA out of memory")

    torchao_that(monkeypatch, fail)
    with pytest.raises(torch.OutOfMemoryError):
        quantize(make_model(**SHAPE), "int4")


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


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "autocast-bf16"])
def test_weights_are_cast_but_not_the_frequencies_of_rotary_embeddings(dtype):
    from joulelab.infer.recipes import cast_model

    model = make_model(**SHAPE)
    exact = model.model.rotary_emb.inv_freq.clone()
    cast_model(model, dtype)
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    assert {weight.dtype for weight in model.parameters()} == {expected}
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert "inv_freq" not in "".join(model.state_dict())
