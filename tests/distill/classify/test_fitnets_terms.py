"""Every switch of the student's loss: on it is the formula, off it is not there."""

import numpy as np
import pytest
import torch
from test_classify_objective import TinyEncoder, encode, texts
from torch import nn

from joulelab.data import tokenized_text
from joulelab.data.batches import collate
from joulelab.distill.classify import objective as objective_module
from joulelab.distill.classify.config import ClassifySpec, DistillConfig, StudentConfig
from joulelab.distill.classify.data import CachedTeacher
from joulelab.distill.classify.objective import (
    ClassifyObjective,
    HintObjective,
    TextForward,
    make_connector,
    make_regressor,
    to_same_size,
)
from joulelab.distill.losses import cross_entropy_sum, feature_mse_sum, soft_target_kl_sum
from joulelab.errors import ConfigError
from joulelab.train.trainer import TrainerCallbacks

LOSSES = {
    "ce": "cross_entropy_sum", "kl": "soft_target_kl_sum", "features": "feature_mse_sum",
    "distances": "distance_relation_sum", "angles": "angle_relation_sum",
}  # fmt: skip


@pytest.fixture
def batch(tmp_path):
    dataset = tokenized_text.write(
        tmp_path / "set", texts("a", "bb", "ccc", "dddd", "eeeee"), encode, vocab_size=50, pad_id=0
    )
    return collate(dataset, np.arange(5))


@pytest.fixture
def cache():
    features = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    return CachedTeacher(np.arange(10, dtype=np.float32).reshape(5, 2), features)


def objective_of(config, cache, connector=None):
    return ClassifyObjective(config, TextForward(-1, config.feat_pool), cache, connector or nn.Identity())


@pytest.mark.parametrize(
    ("settings", "terms"),
    [
        ({"alpha": 1.0, "feat_beta": 0.0}, {"ce"}),
        ({"alpha": 0.0, "feat_beta": 0.0}, {"kl"}),
        ({"alpha": 0.5, "feat_beta": 0.0}, {"ce", "kl"}),
        ({"alpha": 1.0, "feat_beta": 2.0}, {"ce", "features"}),
        ({"alpha": 1.0, "feat_beta": 0.0, "rel_distance": 1.0}, {"ce", "distances"}),
        ({"alpha": 0.0, "feat_beta": 0.0, "rel_angle": 1.0}, {"kl", "angles"}),
    ],
)
def test_a_term_that_is_off_is_never_computed(batch, cache, monkeypatch, settings, terms):
    def refuse(*_):
        raise AssertionError("computed although its weight is 0")

    for name, function in LOSSES.items():
        if name not in terms:
            monkeypatch.setattr(objective_module, function, refuse)
    net = TinyEncoder()
    out = objective_of(DistillConfig(**settings), cache)(net, batch, TrainerCallbacks().phase)
    assert set(out.parts) == terms
    assert net.requested_hidden == [bool(terms & {"features", "distances", "angles"})]


def test_without_a_teacher_term_the_teacher_is_not_asked(batch):
    class Silent:
        def outputs(self, batch, features):
            raise AssertionError("asked for nothing")

    config = DistillConfig(alpha=1.0, feat_beta=0.0)
    ClassifyObjective(config, TextForward(-1, "mean"), Silent())(TinyEncoder(), batch, TrainerCallbacks().phase)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_0_and_1_equal_the_reduced_formula_gradients_included(batch, cache, alpha):
    net, other = TinyEncoder(), TinyEncoder()
    objective_of(DistillConfig(alpha=alpha, feat_beta=0.0, temperature=3.0), cache)(
        net, batch, TrainerCallbacks().phase
    ).loss_sum.backward()
    logits = other(batch.input_ids, batch.attention_mask).logits
    reported = cache.outputs(batch, False).logits_BC
    (cross_entropy_sum(logits, batch.labels) if alpha == 1 else soft_target_kl_sum(logits, reported, 3.0)).backward()
    for mine, plain in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)


def test_kd_t2_off_leaves_the_square_of_the_temperature_out(batch, cache):
    def kl(on):
        config = DistillConfig(alpha=0.0, feat_beta=0.0, temperature=3.0, kd_T2=on)
        return float(objective_of(config, cache)(TinyEncoder(), batch, TrainerCallbacks().phase).loss_sum.detach())

    assert kl(True) == pytest.approx(9 * kl(False), rel=1e-6)


def test_feat_normalize_compares_directions_only():
    features = torch.tensor([[3.0, 4.0]])
    assert float(feature_mse_sum(features, 5 * features, normalize=True)) == pytest.approx(0.0, abs=1e-7)
    assert float(feature_mse_sum(features, -features, normalize=True)) == pytest.approx(4.0 / 2)


def test_feat_ln_ends_the_connector_with_a_layer_norm():
    made = make_connector(4, 6, layer_norm=True)(torch.randn(3, 4))
    torch.testing.assert_close(made.mean(-1), torch.zeros(3), atol=1e-5, rtol=0)
    assert isinstance(make_connector(4, 4, layer_norm=True)[0], nn.Identity)


def test_the_regressor_of_maps_is_a_1x1_convolution_and_maps_meet_at_the_smaller_size():
    regressor = make_regressor(4, 6)
    assert regressor.kernel_size == (1, 1)
    own, hint = to_same_size(regressor(torch.ones(2, 4, 8, 8)), torch.ones(2, 6, 4, 4))
    assert own.shape == hint.shape == (2, 6, 4, 4)
    assert make_regressor(4, 6, layer_norm=True)(torch.randn(2, 4, 3, 3)).shape == (2, 6, 3, 3)


def test_the_hint_objective_is_the_feature_loss_alone(batch, cache):
    out = HintObjective(DistillConfig(), TextForward(-1, "cls"), cache, nn.Identity())(
        TinyEncoder(), batch, TrainerCallbacks().phase
    )
    assert set(out.parts) == {"features"}
    own = TinyEncoder()(batch.input_ids, batch.attention_mask, True).hidden_states[-1][:, 0]
    torch.testing.assert_close(out.loss_sum, feature_mse_sum(own, cache.outputs(batch, True).features))


def test_a_hint_stage_needs_a_teacher_even_where_the_loss_does_not():
    spec = {"pipeline": "classify", "student": {"hint": {"epochs": 1}}, "distill": {"alpha": 1, "feat_beta": 0}}
    assert ClassifySpec.model_validate(spec).has_teacher


def test_width_and_heads_are_for_randomly_initialized_students():
    assert StudentConfig(layers=3, width=64, heads=4).width == 64
    for wrong in ({"layers": (0, 1), "width": 64}, {"layers": 0}, {"layers": 2, "width": 10, "heads": 4}):
        with pytest.raises(ValueError, match=r"width|layers"):
            StudentConfig(**wrong)


def test_layers_are_found_by_index_and_by_name():
    from tiny_reviews import tiny_model

    from joulelab.distill.classify.objective import hidden_index, hidden_width

    model = tiny_model(layers=3)
    assert [hidden_index(model, layer, "t_layer") for layer in (-1, -2, 0, 3)] == [3, 2, 0, 3]
    assert [hidden_index(model, name, "t_layer") for name in ("encoder.layer.1", "bert.encoder.layer.1")] == [2, 2]
    assert hidden_index(model, "embeddings", "t_layer") == 0
    assert hidden_width(model, 2) == 16
    with pytest.raises(ConfigError, match="t_layer=-5: the model has 4 hidden states"):
        hidden_index(model, -5, "t_layer")
    with pytest.raises(ConfigError, match="the model has no layer of that name"):
        hidden_index(model, "encoder.layer.7", "t_layer")
