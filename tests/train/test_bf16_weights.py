"""Weights in bf16 learn what weights in fp32 learn, and a resumed training continues bit for bit."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from ragged_language import Language, language_trainer
from torch import nn

from joulelab.errors import ConfigError
from joulelab.train.bf16_weights import COMPENSATION, Bf16Updates, cast_weights, copy_stochastically_, require_castable
from joulelab.train.checkpoint import CheckpointFolder
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import make_optimizer
from joulelab.train.trainer import TrainerCallbacks

BF16 = {"weights": "bf16", "precision": "bf16"}
PLAIN_SGD = {"optimizer": "sgd", "betas": (0.0, 0.9), "weight_decay": 0, **BF16}
OPTIMIZERS = ["adamw", "adamw-8bit", "adafactor", "sgd"]


def test_stochastic_rounding_has_the_exact_value_on_average_and_keeps_representable_numbers():
    exact = torch.tensor([1.0 + 2**-10, -3.1415927, 1e-30, 0.0])
    generator = torch.Generator().manual_seed(0)
    rounded = torch.empty(20_000, 4, dtype=torch.bfloat16)
    copy_stochastically_(rounded, exact.expand(20_000, 4), generator)
    neighbors = [set(column.tolist()) for column in rounded.T]
    assert [len(values) for values in neighbors] == [2, 2, 2, 1]
    # the mean of 20,000 draws between two neighbors 2^-7 apart: a standard error below 2.8e-5 of the value
    torch.testing.assert_close(rounded.double().mean(0), exact.double(), rtol=2e-4, atol=0)
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    kept = torch.empty(3, dtype=torch.bfloat16)
    copy_stochastically_(kept, special, generator)
    assert kept[0] == float("inf") and kept[1] == -float("inf") and kept[2].isnan()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_updates_below_the_resolution_of_bf16_are_not_lost(rounding):
    """Each update is 1/5,000 of the weight. Rounded to the nearest bf16 number it would never be seen."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    config = TrainingConfig(learning_rate=2e-4, rounding=rounding, **PLAIN_SGD)
    optimizer = make_optimizer([weight], config)
    for _ in range(500):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(0.9, abs=0.004)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_the_loss_follows_that_of_fp32_weights(optimizer, rounding):
    def last_loss(**settings):
        losses = []
        around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
        rate = {"sgd": 0.1, "adafactor": 0.05}.get(optimizer, 0.01)
        common = {"max_steps": 20, "log_every_steps": 20, "optimizer": optimizer, "learning_rate": rate}
        language_trainer(8, around, **{**common, **settings}).train()
        return losses[-1]

    whole = last_loss(precision="bf16")
    assert last_loss(**BF16, rounding=rounding) == pytest.approx(whole, rel=0.01)


def test_weights_and_gradients_are_bf16_and_the_moments_fp32():
    trainer = language_trainer(8, max_steps=2, optimizer="adamw", **BF16)
    seen = set()
    for parameter in trainer.trained.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: seen.add(weight.grad.dtype))
    trainer.train()
    assert {weight.dtype for weight in trainer.model.parameters()} == seen == {torch.bfloat16}
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in moments} == {torch.float32}


BF16_MOMENTS = {**BF16, "moments": "bf16", "optimizer": "adamw"}


def test_moments_in_bf16_follow_small_gradients():
    """The square of the gradient falls from 1 to 0: the second moment loses 1/1000 a step, a quarter of the distance to
    the next bf16 number. Rounded to the nearest one it would stay at its first value."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = make_optimizer([weight], TrainingConfig(learning_rate=1e-6, **BF16_MOMENTS))
    for step in range(300):
        weight.grad = torch.ones_like(weight) if step == 0 else torch.zeros_like(weight)
        optimizer.step()
    moments = optimizer.state[weight]
    assert {moments[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    assert float(moments["exp_avg_sq"].float().mean()) == pytest.approx(1e-3 * 0.999**299, rel=0.01)


def test_the_loss_with_bf16_moments_follows_that_of_fp32():
    def last_loss(**settings):
        losses = []
        around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
        language_trainer(8, around, max_steps=20, log_every_steps=20, learning_rate=0.01, **settings).train()
        return losses[-1]

    assert last_loss(**BF16_MOMENTS) == pytest.approx(last_loss(precision="bf16", optimizer="adamw"), rel=0.01)


@pytest.mark.parametrize("other", [{"rounding": "kahan"}, {"optimizer": "sgd"}, {"weights": "fp32"}])
def test_bf16_moments_are_refused_without_random_rounding_of_adamw(other):
    (name,) = other
    with pytest.raises(ValidationError, match=f"moments=bf16 needs {name}=.*, found {other[name]}; set {name}="):
        TrainingConfig(**{**BF16_MOMENTS, **other})


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_the_kernel_computes_the_update_of_the_copies(moments, monkeypatch):
    """The average over many weights with the same value and gradient, which are rounded independently."""
    found = []
    for by_kernel in (True, False):
        weight = nn.Parameter(torch.full((1 << 20,), 1.2345, dtype=torch.bfloat16, device="cuda"))
        optimizer = make_optimizer([weight], TrainingConfig(learning_rate=1e-3, **{**BF16_MOMENTS, "moments": moments}))
        assert optimizer._takes_kernel(weight)
        if not by_kernel:
            monkeypatch.setattr(optimizer, "_takes_kernel", lambda weight: False)
        for size in (0.5, -0.25, 1.0):
            weight.grad = torch.full_like(weight, size)
            optimizer.step()
        state = optimizer.state[weight]
        found.append(
            [float(value.detach().double().mean()) for value in (weight, state["exp_avg"], state["exp_avg_sq"])]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_weights_that_share_random_bits_are_rounded_independently(moments):
    """A weight is rounded up with the probability p of its distance to the lower neighbor; two of them, 1,024 apart
    or next to each other, both with p^2, and a weight and its moment with the product of their probabilities."""
    weight = nn.Parameter(torch.ones(1 << 20, dtype=torch.bfloat16, device="cuda"))
    config = TrainingConfig(learning_rate=1e-3, weight_decay=0, **{**BF16_MOMENTS, "moments": moments})
    optimizer = make_optimizer([weight], config, rounding_seed=3)
    weight.grad = torch.full_like(weight, 0.3)
    optimizer.step()
    up = [weight.detach().float() == 1]
    if moments == "bf16":
        mean = optimizer.state[weight]["exp_avg"].float()
        up += [mean == mean.max(), optimizer.state[weight]["exp_avg_sq"] == optimizer.state[weight]["exp_avg_sq"].max()]
    shares = [float(one.double().mean()) for one in up]
    assert all(0.01 < share < 0.99 for share in shares)
    for distance in (1, 1024, 2048):
        both = float((up[0] & up[0].roll(distance)).double().mean())
        assert both == pytest.approx(shares[0] ** 2, abs=4e-3)
    for other, share in zip(up[1:], shares[1:], strict=True):
        assert float((up[0] & other).double().mean()) == pytest.approx(shares[0] * share, abs=4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16)])
@pytest.mark.parametrize("elements", [5, 1024, 3000, 1 << 16])
def test_the_kernel_multiplies_the_gradients_by_the_factor(factor, elements):
    """Halving is exact, so the bits are those of halved gradients; sizes end within and after a block of the kernel."""
    found = []
    for half, given in ((1.0, factor), (0.5, 1.0)):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(elements).bfloat16().cuda())
        optimizer = make_optimizer([weight], TrainingConfig(learning_rate=1e-3, **BF16_MOMENTS), rounding_seed=3)
        for _ in range(3):
            weight.grad = half * torch.randn(elements).bfloat16().cuda()
            optimizer.step(factor=given.cuda() if isinstance(given, torch.Tensor) else given)
        found.append([weight.detach(), *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))])
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))


def python_update(weight, gradient, mean, square, factor, *, step, seed, rate, decay, betas, epsilon):
    """What the kernel computes, in torch and rounded to the nearest number."""
    gradient = gradient.float() * factor
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    size = (square / (1 - betas[1] ** step)).sqrt() + epsilon
    weight.copy_(weight.float() * (1 - rate * decay) - rate / (1 - betas[0] ** step) * mean / size)


@pytest.mark.parametrize("clip_norm", [0.01, None])
def test_the_kernel_scales_the_gradients_that_it_reads(monkeypatch, clip_norm):
    """A pass over all gradients less; the moments are those of a training that scales them first."""
    scaled = []
    scale = torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *arguments: (scaled.append(1), scale(*arguments)))
    monkeypatch.setitem(sys.modules, "joulelab.train.adamw_kernel", SimpleNamespace(update=python_update))
    settings = {"max_steps": 3, "learning_rate": 0.05, "optimizer": "adamw", "clip_norm": clip_norm, **BF16}
    found = {}
    for by_kernel in (False, True):
        trainer = language_trainer(8, **settings)
        if by_kernel:
            monkeypatch.setattr(trainer.optimizer, "_takes_kernel", lambda weight: True)
        trainer.train()
        # The update does not depend on the size of all gradients, the first moment does.
        found[by_kernel] = torch.cat([state["exp_avg"].flatten() for state in trainer.optimizer.state.values()])
        assert len(scaled) == 3
    assert float((found[True] - found[False]).norm() / found[False].norm()) < 0.02


def test_gradients_are_scaled_first_where_another_way_than_the_kernel_updates_some_weights(monkeypatch):
    trainer = language_trainer(8, max_steps=1, optimizer="adamw", **BF16)
    first = next(trainer.model.parameters())
    monkeypatch.setattr(trainer.optimizer, "_takes_kernel", lambda weight: weight is first)
    for weight in trainer.model.parameters():
        weight.grad = torch.ones_like(weight)
    assert not trainer.optimizer.takes_factor()
    for weight in trainer.model.parameters():
        weight.grad = torch.ones_like(weight) if weight is first else None
    assert trainer.optimizer.takes_factor()


def test_kahan_keeps_16_bits_of_a_weight():
    """Two bf16 numbers with 8 bits each: the sum of weight and remainder is a float32 number up to 2^-17 of it."""
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    expected = weight.detach().float()
    config = TrainingConfig(learning_rate=1e-3, rounding="kahan", **PLAIN_SGD)
    optimizer = make_optimizer([weight], config)
    weight.grad = torch.randn(1000).bfloat16()
    expected -= 1e-3 * weight.grad.float()
    optimizer.step()
    both = weight.detach().float() + optimizer.state[weight][COMPENSATION].float()
    torch.testing.assert_close(both, expected, rtol=2**-16, atol=1e-9)
    assert (weight.detach().float() - expected).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("optimizer", "rounding", "moments"),
    [*((name, rounding, "fp32") for name in OPTIMIZERS for rounding in ("stochastic", "kahan")),
     ("adamw", "stochastic", "bf16")],
)  # fmt: skip
def test_a_resumed_training_has_the_same_bits(tmp_path, optimizer, rounding, moments):
    settings = {
        "moments": moments,
        "optimizer": optimizer,
        "learning_rate": 0.01,
        "rounding": rounding,
        "dropout": 0.2,
        "max_steps": 6,
        **BF16,
    }
    whole = language_trainer(8, **settings)
    whole.train()
    first = language_trainer(8, TrainerCallbacks(checkpoints=CheckpointFolder(tmp_path)), **settings)
    for _ in range(3):
        first.step()
    first.save(wait=True)
    torch.manual_seed(99)  # another process would have other random numbers
    rest = language_trainer(8, TrainerCallbacks(checkpoints=CheckpointFolder(tmp_path)), **settings)
    rest.train()
    assert rest.position == whole.position
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, rest.model.state_dict()[name]), name
    for own, other in zip(whole.optimizer.state.values(), rest.optimizer.state.values(), strict=True):
        assert own.keys() == other.keys()
        assert (COMPENSATION in own) == (rounding == "kahan")
        for key, value in own.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


@pytest.mark.parametrize("weights", [{}, BF16])
def test_8_bit_adamw_stores_its_moments_in_a_byte_and_reads_them_back(weights):
    """bitsandbytes quantizes tensors of at least 4,096 elements; those of the other tests are smaller."""
    dtype = torch.bfloat16 if weights else torch.float32

    def made():
        weight = nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128).to(dtype))
        return weight, make_optimizer([weight], TrainingConfig(optimizer="adamw-8bit", learning_rate=0.01, **weights))

    def step(weight, optimizer, number):
        weight.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(number)).to(dtype)
        optimizer.step()

    whole, optimizer = made()
    for number in range(4):
        step(whole, optimizer, number)
        if number == 1:
            saved = copy.deepcopy((whole.detach(), optimizer.state_dict()))
    assert {optimizer.state[whole][name].dtype for name in ("state1", "state2")} == {torch.uint8}
    resumed, other = made()
    resumed.data.copy_(saved[0])
    other.load_state_dict(saved[1])
    for number in (2, 3):
        step(resumed, other, number)
    assert torch.equal(whole, resumed)


def test_replicas_round_alike_and_shards_do_not():
    def stepped(shard):
        weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        config = TrainingConfig(optimizer="sgd", learning_rate=1e-3, **BF16)
        optimizer = make_optimizer([weight], config, rounding_seed=5, shard=shard)
        weight.grad = torch.ones_like(weight)
        torch.manual_seed(shard)  # ranks differ in their random state
        torch.rand(shard)
        optimizer.step()
        return weight.detach()

    assert torch.equal(stepped(0), stepped(0))
    assert not torch.equal(stepped(0), stepped(1))


def test_only_parameters_are_cast():
    module = Language()
    module.register_buffer("frequencies", torch.rand(3))
    cast_weights(module, torch.bfloat16)
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
    assert module.frequencies.dtype == torch.float32


def test_fp32_parameters_among_them_are_updated_in_fp32():
    plain, half = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = Bf16Updates(torch.optim.SGD([plain, half], lr=1e-4), "stochastic", seed=0)
    plain.grad, half.grad = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(plain.detach(), torch.full((8,), 1 - 1e-4))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValidationError, match="set precision=bf16"):
        TrainingConfig(weights="bf16")
    with pytest.raises(ValidationError, match="use adafactor or adamw"):
        TrainingConfig(optimizer="adamw-8bit", parallel="fsdp")
    with pytest.raises(ValidationError, match="does not support precision=fp16"):
        TrainingConfig(precision="fp16", parallel="fsdp")
    with pytest.raises(ConfigError, match="batch normalization"):
        require_castable(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(700,), (70, 1100), (16, 33), (5, 4100), (2048, 512)], ids=str)
def test_the_kernels_of_adafactor_compute_the_update_of_torch(shape):
    """Every weight is one of the two neighbors of the exact one, and on average the exact one."""
    torch.manual_seed(0)
    weight = nn.Parameter((0.02 * torch.randn(shape)).bfloat16().cuda())
    settings = {"learning_rate": 0.01, "weight_decay": 0.1, "optimizer": "adafactor", **BF16}
    optimizer = make_optimizer([weight], TrainingConfig(**settings), rounding_seed=3)
    assert optimizer._takes_kernel(weight) and optimizer.takes_factor()
    exact = nn.Parameter(weight.detach().float())
    decay = 0.1 if len(shape) > 1 else 0.0
    reference = torch.optim.Adafactor([exact], lr=0.01, weight_decay=decay)
    for _ in range(3):
        before = weight.detach().float()
        exact.data.copy_(before)
        weight.grad = (torch.randn(shape) * torch.rand(shape)).bfloat16().cuda()
        exact.grad = 0.5 * weight.grad.float()
        optimizer.step(factor=0.5)
        reference.step()
        apart = weight.detach().float() - exact.detach()
        assert (apart.abs() <= exact.detach().abs() * 2**-7 + 1e-9).all()
        assert abs(float(apart.mean())) < 0.05 * float((exact.detach() - before).abs().mean())
    for name, value in reference.state[exact].items():
        torch.testing.assert_close(optimizer.state[weight][name].cpu(), value.cpu(), rtol=1e-5, atol=1e-7)


def test_adafactor_by_kernels_keeps_the_state_of_torch(monkeypatch):
    """So that a checkpoint can be continued with and without the kernels."""

    def matrix(weight, gradient, rows, columns, factor, *, step, seed, rate, decay, beta2_decay, epsilons, threshold):
        exact = nn.Parameter(weight.float())
        exact.grad = gradient.float() * factor
        inner = torch.optim.Adafactor([exact], rate, beta2_decay, epsilons, threshold, decay)
        inner.state[exact] = {"step": torch.tensor(step - 1.0), "row_var": rows, "col_var": columns}
        inner.step()
        weight.copy_(exact.detach())

    def vector(weight, gradient, variance, factor, *, step, seed, rate, decay, beta2_decay, epsilons, threshold):
        exact = nn.Parameter(weight.float())
        exact.grad = gradient.float() * factor
        inner = torch.optim.Adafactor([exact], rate, beta2_decay, epsilons, threshold, decay)
        inner.state[exact] = {"step": torch.tensor(step - 1.0), "variance": variance}
        inner.step()
        weight.copy_(exact.detach())

    stand_in = SimpleNamespace(update_matrix=matrix, update_vector=vector)
    monkeypatch.setitem(sys.modules, "joulelab.train.adafactor_kernel", stand_in)
    found = {}
    for by_kernel in (False, True):
        trainer = language_trainer(8, max_steps=3, learning_rate=0.01, optimizer="adafactor", clip_norm=0.1, **BF16)
        if by_kernel:
            monkeypatch.setattr(trainer.optimizer, "_takes_kernel", lambda weight: True)
        trainer.train()
        found[by_kernel] = trainer.optimizer.state_dict()["state"]
    assert found[True].keys() == found[False].keys()
    for own, other in zip(found[True].values(), found[False].values(), strict=True):
        assert own.keys() == other.keys()
        for name in own:
            assert own[name].shape == other[name].shape and own[name].dtype == other[name].dtype
            # the weights differ by their rounding, hence the gradients of later steps a little
            torch.testing.assert_close(own[name], other[name], rtol=0.2, atol=1e-4)
