"""The ten language models: they learn, they have the published size, and what is trained has a gradient."""

import copy
import math

import numpy as np
import pytest
import torch

from joulelab import lookup
from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks
from joulelab.zoo import objective
from joulelab.zoo.objective import build_on_meta, count_parameters, prepare
from joulelab.zoo.registry import WorkloadRequest
from joulelab.zoo.tasks import masked_lm

NAMES = ("gpt2", "bert", "reformer", "t5", "opt", "bart", "bigbird", "albert", "distilbert", "longformer")
SIZES = [(name, size) for name in NAMES for size in lookup.ZOO.resolve(name).sizes]
PUBLISHED_MILLIONS = {
    "gpt2": {"base": 124.4, "medium": 354.8, "large": 774.0, "xl": 1557.6},
    "bert": {"base": 109.5, "large": 335.2},
    "t5": {"small": 60.5, "base": 222.9, "large": 737.7},
    "opt": {"125m": 125.2, "350m": 331.2},
    "bart": {"base": 139.4, "large": 406.3},
    "distilbert": {"base": 67.0},
    "albert": {"base": 11.2},
    "longformer": {"base-4096": 148.7},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on shared cores make a tiny model twenty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(name, size="tiny", **requested):
    return WorkloadRequest(lookup.ZOO.resolve(name), size, **requested)


def losses_of_training(workload, steps=20):
    losses = []
    config = TrainingConfig(max_steps=steps, learning_rate=3e-3, log_every_steps=1)
    around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
    torch.manual_seed(0)
    SimpleTrainer(workload.model, workload.batches, workload.objective, config, NoOpStats(), around).train()
    return losses


def forward(workload, source=None):
    batch = (source or workload.batches).at(0, 0)
    return workload.objective(workload.model, batch, lambda name: None)


@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_of_tiny_lower_the_loss(name):
    losses = losses_of_training(prepare(request(name)))
    assert len(losses) == 20 and all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(512), abs=0.8)  # at first it knows nothing of 512 ids
    assert sum(losses[-3:]) / 3 < losses[0] - 0.6


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_the_size_is_exactly_what_the_entry_states(name, size):
    requested = request(name, size)
    assert count_parameters(build_on_meta(lambda: objective.build(requested))) == requested.size.parameters


def test_the_entries_state_what_was_published():
    for name, sizes in PUBLISHED_MILLIONS.items():
        for size, millions in sizes.items():
            assert round(lookup.ZOO.resolve(name).sizes[size].parameters / 1e6, 1) == millions, (name, size)


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_parameter_has_a_gradient_under_autocast(name):
    """One without would keep the ranks of a parallel training waiting."""
    workload = prepare(request(name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = forward(workload)
    output.loss_sum.backward()
    assert output.loss_sum.dtype == torch.float32 and math.isfinite(output.loss_sum.item())
    without = [n for n, p in workload.model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_a_function_of_its_place(name):
    first, again = prepare(request(name)).batches, prepare(request(name)).batches
    there, twice, next_one, next_epoch = first.at(0, 3), again.at(0, 3), first.at(0, 4), first.at(1, 3)
    for key, value in there.tensors.items():
        assert torch.equal(value, twice[key])
        assert not torch.equal(value, next_epoch[key])
        assert not torch.equal(value, next_one[key])


@pytest.mark.parametrize("name", NAMES)
def test_held_out_data_can_be_looked_at_without_dropout(name):
    workload = prepare(request(name))
    workload.model.eval()
    with torch.no_grad():
        output = forward(workload, workload.validation)
    assert output.loss_sum.item() / output.count == pytest.approx(math.log(512), abs=0.8)


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "longformer"])
def test_logits_at_a_few_positions_are_those_of_the_whole_model(name):
    workload = prepare(request(name))
    model, batch = workload.model.eval(), workload.batches.at(0, 0)
    with torch.no_grad():
        few = model(input_ids=batch["input_ids"], positions=batch["positions"])
        whole = model(input_ids=batch["input_ids"]).logits
    index = batch["positions"][..., None].expand(-1, -1, whole.shape[-1])
    torch.testing.assert_close(few, whole.gather(1, index))


def test_a_model_with_chosen_positions_is_saved_as_what_it_was(tmp_path):
    from transformers import BertForMaskedLM

    model = prepare(request("bert")).model
    model.save_pretrained(tmp_path)
    again = BertForMaskedLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["BertForMaskedLM"]
    for (name, before), (same_name, after) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == same_name and torch.equal(before, after)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("tokens", "settings"), [(32, {}), (1024, {"block_size": 64, "num_random_blocks": 3})])
def test_bigbirds_fused_attention_is_that_of_transformers(training, tokens, settings):
    settings = {"max_position_embeddings": tokens, "hidden_dropout_prob": 0.0, **settings}
    torch.manual_seed(0)
    theirs = objective.build(request("bigbird"), **settings).train(training)
    ours = copy.deepcopy(theirs)
    masked_lm.fuse_block_sparse(ours, tokens)
    ids = torch.randint(10, 512, (2, tokens))
    np.random.seed(1)
    ahead = np.random.get_state()[1].tolist()
    logits = ours(ids).logits
    assert np.random.get_state()[1].tolist() == ahead  # nobody else's random numbers are touched
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    assert ours.bert.attention_type == "block_sparse"


@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_longformers_fused_attention_is_that_of_transformers(tokens):
    torch.manual_seed(0)
    theirs = objective.build(request("longformer")).eval()
    ours = copy.deepcopy(theirs)
    masked_lm.fuse_sliding_window(ours, tokens)
    ids = torch.randint(10, 512, (2, tokens))
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "opt", "t5", "bart", "albert", "distilbert"])
def test_attention_without_masks_is_that_of_transformers(name):
    ours = prepare(request(name)).model.eval()
    theirs = objective.build(request(name)).eval()
    if name == "t5" and not theirs._supports_sdpa:
        pytest.skip("T5 has an attention of its own in this version of transformers and keeps it")
    assert ours.config._attn_implementation == "joulelab_unpadded" and theirs.config._attn_implementation == "sdpa"
    inputs = {"input_ids": torch.randint(10, 512, (2, 32))}
    if name in ("t5", "bart"):
        inputs["decoder_input_ids"] = torch.randint(10, 512, (2, 16))
    torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("reformer", "longformer")])
def test_model_and_loss_are_one_graph(name):
    """Reformer keeps no activations by means of its own, and Longformer asks whether any token is global."""
    torch._dynamo.reset()
    workload = prepare(request(name))
    compiled = torch.compile(lambda batch: forward_of(workload, batch), backend="eager", fullgraph=True)
    assert math.isfinite(compiled(workload.batches.at(0, 0)).loss_sum.item())


def forward_of(workload, batch):
    return workload.objective(workload.model, batch, lambda name: None)


def test_barts_embeddings_are_dropped_out_in_training_alone():
    model = prepare(request("bart")).model
    ids = torch.randint(10, 512, (2, 8))
    for training, share in ((True, 0.1), (False, 0.0)):
        model.train(training)
        seen = []
        handle = model.model.encoder.layers[0].register_forward_pre_hook(lambda m, inputs, s=seen: s.append(inputs[0]))
        model(input_ids=ids, decoder_input_ids=ids)
        handle.remove()
        assert (seen[0] == 0).float().mean().item() == pytest.approx(share, abs=0.05)
        assert model.model.encoder.layers[0].training is training


@pytest.mark.parametrize(
    ("name", "size", "shape", "says"),
    [
        ("gpt2", "tiny", {"tokens": 65}, "64 positions"),
        ("longformer", "tiny", {"tokens": 65}, "64 positions"),
        ("bigbird", "tiny", {"tokens": 28}, "more than 28 tokens"),
        ("reformer", "tiny", {"tokens": 36}, "chunks of 8"),
        ("t5", "tiny", {"tokens": 4}, "no room"),
        ("bart", "tiny", {"tokens": 3}, "too few"),
    ],
)
def test_a_length_that_the_model_cannot_take_is_reported_before_training(name, size, shape, says):
    with pytest.raises(ConfigError, match=says):
        prepare(request(name, size, requested_shape=shape))


def test_reformers_grid_of_positions_follows_the_length():
    workload = prepare(request("reformer", requested_shape={"tokens": 64}))
    assert workload.model.config.axial_pos_shape == (8, 8)
    assert math.isfinite(forward(workload).loss_sum.item())


def test_an_unknown_synthetic_split_is_named_with_the_known_ones():
    from joulelab.errors import NotFoundError

    with pytest.raises(NotFoundError, match="did you mean 'validation'"):
        prepare(request("gpt2", split="valid"))
