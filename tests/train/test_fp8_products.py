"""Linear layers with 8-bit products: values, gradients, training, and where they are refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from pydantic import ValidationError
from ragged_language import Language, language_trainer
from torch import nn
from torch.nn import functional

from joulelab.errors import ConfigError
from joulelab.train import fp8_products
from joulelab.train.config import TrainingConfig
from joulelab.train.fp8_products import check_products, fp8_linear, quantize, require_fp8, use_fp8_products
from joulelab.train.trainer import TrainerCallbacks, trainer_checks

FP8 = {"matmul": "fp8", "precision": "bf16"}
BOTH = [{}, {"weights": "bf16"}]


def results(function, tokens, weights):
    """Output and gradients of one layer of 64 inputs and 48 outputs, under autocast as in a training."""
    torch.manual_seed(0)
    values = torch.randn(2, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.05 * torch.randn(48, 64)).to(weights).requires_grad_()
    bias = torch.randn(48).to(weights).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = function(values, weight, bias)
    return [output, *torch.autograd.grad(output, (values, weight, bias), torch.randn(2, tokens, 48).bfloat16())]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [32, 5])
def test_output_and_gradients_are_those_of_the_plain_layer_up_to_the_rounding_of_8_bits(weights, tokens):
    """e4m3 rounds by at most 1/16 and e5m2 by 1/8; over a product that is 3 to 6 % in the norm. 10 tokens are padded
    to 16."""
    found, plain = (results(function, tokens, weights) for function in (fp8_linear, functional.linear))
    for own, expected in zip(found, plain, strict=True):
        assert own.dtype == expected.dtype and own.shape == expected.shape
        assert float((own.float() - expected.float()).detach().norm() / expected.detach().float().norm()) < 0.08
    assert not torch.equal(found[0], plain[0])


def test_the_products_are_exact_where_8_bits_represent_all_numbers():
    """Powers of 2 and a largest number of 448 or 57,344 times one: the scales are powers of 2, and nothing is
    rounded. A wrong transposition or scale would show."""
    torch.manual_seed(0)

    def numbers(rows, columns, dtype):
        made = 2.0 ** torch.randint(-2, 3, (rows, columns)) * torch.randint(0, 2, (rows, columns)).mul(2).sub(1)
        made[0, 0] = torch.finfo(dtype).max / 64
        return made.requires_grad_()

    values, weight = numbers(32, 16, torch.float8_e4m3fn), numbers(48, 16, torch.float8_e4m3fn)
    gradient = numbers(32, 48, torch.float8_e5m2).detach()
    own, plain = fp8_linear(values, weight), functional.linear(values, weight)
    assert torch.equal(own, plain)
    for found, expected in zip(
        torch.autograd.grad(own, (values, weight), gradient), torch.autograd.grad(plain, (values, weight), gradient),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(found, expected)


def test_a_scale_maps_the_largest_number_to_the_largest_of_the_format():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        quantized, scale = quantize(torch.tensor([[-3.0, 1.5], [0.0, 1e-3]]), dtype)
        assert quantized.dtype == dtype and float(quantized.float().min()) == -torch.finfo(dtype).max
        assert float(quantized[0, 1].float() * scale) == pytest.approx(1.5, rel=0.07)
    zeros, scale = quantize(torch.zeros(2, 2), torch.float8_e4m3fn)
    assert not zeros.float().any() and torch.isfinite(scale)
    broken, scale = quantize(torch.tensor([float("inf"), 1.0]), torch.float8_e5m2)
    assert (broken.float() * scale).isnan().any()  # a diverged training is seen in its loss


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))


def test_only_the_linear_layers_of_the_blocks_change_and_their_names_and_types_do_not(tmp_path):
    model, plain = llama(), llama()
    assert use_fp8_products(model) == 2 * 7
    changed = {name for name, part in model.named_modules() if "forward" in vars(part)}
    assert len(changed) == 14 and all(name.startswith("model.layers.") for name in changed)
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_an_evaluation_computes_as_the_saved_model_does_and_a_copy_has_its_own_weights():
    model, plain = llama(), llama()
    use_fp8_products(model)
    ids = torch.arange(16)[None]
    assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)
    assert not torch.equal(model.train()(ids).logits, plain.train()(ids).logits)
    other = copy.deepcopy(model)
    for weight in other.parameters():
        nn.init.zeros_(weight)
    assert model(ids).logits.any() and not other(ids).logits.any()


def test_layers_that_are_frozen_adapted_or_of_other_sizes_are_left_alone():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer, self.lora_a = nn.Linear(16, 16), nn.Linear(16, 16)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.adapted, self.odd, self.frozen = Adapted(), nn.Linear(16, 24), nn.Linear(16, 16).requires_grad_(False)

    model = nn.Sequential(nn.ModuleList([Block(), Block()]), nn.Linear(16, 16))
    with pytest.raises(ConfigError, match="no trained linear layer") as refused:
        use_fp8_products(model)
    assert refused.value.hint == "set training.matmul=precision"
    model[0][1].frozen.requires_grad_(True)
    assert use_fp8_products(model) == 1


@pytest.fixture
def on_cpu(monkeypatch):
    """torch computes 8-bit products on a CPU too, slowly: enough for a test."""
    monkeypatch.setattr("joulelab.train.trainer.require_fp8", lambda device: None)


@pytest.mark.parametrize("weights", BOTH)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_of_a_training_follows_that_of_bf16(on_cpu, weights, checkpointing):
    def last_loss(**settings):
        losses = []
        around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
        common = {"max_steps": 20, "log_every_steps": 20, "optimizer": "adamw", "learning_rate": 0.01, **weights}
        trainer = language_trainer(8, around, precision="bf16", **common, **settings)
        trainer.train()
        changed = ["forward" in vars(block.inner[0]) for block in trainer.model.blocks]
        return losses[-1], changed

    plain, none = last_loss()
    found, both = last_loss(matmul="fp8", activation_checkpointing=checkpointing)
    assert none == [False, False] and both == [True, True]
    assert found == pytest.approx(plain, rel=0.02) and found != plain


def test_a_compiled_layer_is_one_graph():
    model = Language().blocks
    use_fp8_products(nn.Sequential(model))
    values = torch.randn(4, 8, 16, requires_grad=True)
    plain = model[0](values)
    compiled = torch.compile(model[0], backend="aot_eager", fullgraph=True)(values)
    torch.testing.assert_close(compiled, plain)
    own, expected = (torch.autograd.grad(output.square().sum(), values)[0] for output in (compiled, plain))
    torch.testing.assert_close(own, expected)


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_computes():
    torch.manual_seed(0)
    values, weight, gradient = (0.1 * torch.randn(*shape) for shape in ((64, 128), (96, 128), (64, 96)))
    found = []
    for device in ("cpu", "cuda"):
        inputs = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in (values, weight)]
        output = fp8_linear(*inputs)
        grads = torch.autograd.grad(output, inputs, gradient.to(device, torch.bfloat16))
        found.append([tensor.detach().cpu().float() for tensor in (output, *grads)])
    for own, other in zip(*found, strict=True):
        assert float((own - other).norm() / other.norm()) < 0.01


def test_it_is_refused_without_a_gpu_that_has_8_bit_products(monkeypatch):
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, but the device is cpu"):
        require_fp8(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has 8.0"):
        require_fp8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_fp8(torch.device("cuda"))


def test_it_is_refused_before_a_run_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted, plain = TrainingConfig(**FP8), TrainingConfig()
    check_products("cpu", [plain])
    with pytest.raises(ConfigError, match="the device is cpu"):
        check_products("auto", [plain, wanted])
    with pytest.raises(ConfigError, match="the device is cpu"):
        for refuse in trainer_checks(SimpleNamespace(device="cpu", training=wanted, trainer="")):
            refuse()
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8_products, "require_fp8", lambda device: asked.append(device.type))
    check_products("auto", [wanted])
    assert asked == ["cuda"]
    with pytest.raises(ConfigError, match="the device is cpu"):
        language_trainer(8, **FP8)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_it_replaces_products_in_bf16_only(precision):
    with pytest.raises(ValidationError, match="set precision=bf16"):
        TrainingConfig(matmul="fp8", precision=precision)


def test_it_warns_where_it_uses_more_energy(on_cpu):
    warnings = []
    common = {"max_steps": 1, "precision": "bf16"}
    language_trainer(8, TrainerCallbacks(warn=warnings.append), matmul="fp8", **common)
    assert len(warnings) == 1 and warnings[0].endswith("set training.compile=blocks or default")
    language_trainer(8, TrainerCallbacks(warn=warnings.append), **common)
    assert len(warnings) == 1


def test_it_is_refused_for_sharded_models():
    with pytest.raises(ValidationError, match="does not support parallel=fsdp"):
        TrainingConfig(matmul="fp8", precision="bf16", parallel="fsdp")
