"""Pre-LN, pre-RMSNorm and pre-CRMSNorm compute one function, the lean form too; and ours are the published models."""

from dataclasses import replace

import pytest
import torch

from joulelab.errors import ConfigError
from joulelab.zoo.norms.encoder_shapes import NORMS, SHAPES
from joulelab.zoo.norms.encoders import build, make_inputs
from joulelab.zoo.norms.pretrained_encoders import fold_for_inference, to_pre_crms, to_pre_rms
from joulelab.zoo.objective import build_on_meta, count_parameters

SMALL = {
    "image": replace(SHAPES["deit-t"], width=48, heads=3, head_width=16, layers=3, classes=11, side=32, patch=8),
    "text": replace(
        SHAPES["bert-b"], width=48, heads=3, head_width=16, layers=3, classes=5, vocabulary=99, positions=24
    ),
}


def trained(kind, norm):
    """With weights that are far from their start, norms included, so that nothing cancels by luck."""
    model = build(SMALL[kind], norm).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def inputs(kind):
    made = make_inputs(SMALL[kind], 4, tokens=17)
    return made.double() if made.is_floating_point() else made


@torch.no_grad()
def difference(model, other, kind):
    expected = model(inputs(kind))
    return float((other(inputs(kind)) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["image", "text"])
def test_pre_ln_pre_rms_and_pre_crms_are_one_function(kind):
    model = trained(kind, "pre-ln")
    rms, crms = to_pre_rms(model).double(), to_pre_crms(model).double()
    assert (rms.width, crms.width) == (48, 47)
    assert difference(model, rms, kind) < 1e-10
    assert difference(model, crms, kind) < 1e-10
    # the proof is about converted weights: the same weights under another norm are another function
    assert difference(model, build(SMALL[kind], "pre-rms").double(), kind) > 0.1


def test_the_equivalence_holds_to_rounding_in_float32():
    model = trained("image", "pre-ln").float()
    with torch.no_grad():
        expected = model(inputs("image").float())
        for other in (to_pre_rms(model), to_pre_crms(model)):
            assert torch.allclose(other(inputs("image").float()), expected, rtol=1e-3, atol=1e-3 * expected.abs().max())


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_lean_form_is_the_same_function(kind, norm):
    model = trained(kind, norm)
    assert difference(model, fold_for_inference(model), kind) < 1e-10


def test_only_a_pre_ln_encoder_is_converted():
    with pytest.raises(ConfigError, match="post-ln"):
        to_pre_rms(trained("text", "post-ln"))


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_sizes_have_the_published_parameters(name):
    assert count_parameters(build_on_meta(lambda: build(SHAPES[name]))) == SHAPES[name].parameters


@pytest.mark.parametrize("kind", ["image", "text"])
def test_published_weights_give_the_published_result(kind):
    import transformers

    from joulelab.zoo.norms.pretrained_encoders import copy_published_weights

    shape = SMALL[kind]
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192}
    torch.manual_seed(1)
    if kind == "image":
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=11, layer_norm_eps=1e-6)
        theirs = transformers.ViTForImageClassification(config).eval()
    else:
        config = transformers.BertConfig(**sizes, vocab_size=99, max_position_embeddings=24, num_labels=5)
        theirs = transformers.BertForSequenceClassification(config).eval()
    ours = build(shape)
    copy_published_weights(ours, theirs.state_dict())
    rows = make_inputs(shape, 4, tokens=17)
    with torch.no_grad():
        assert torch.allclose(ours(rows), theirs(rows).logits, atol=1e-5)
    with pytest.raises(ConfigError, match="belong to"):
        copy_published_weights(build(shape, "pre-rms"), theirs.state_dict())
