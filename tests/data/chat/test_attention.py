"""The loss of packed rows is the loss of their documents one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from joulelab.data.chat import packing
from joulelab.data.chat.encoding import EncodedDocument
from joulelab.data.chat.packing import (
    NAME,
    PackedAttention,
    RowsInOrder,
    causal_batch,
    pack,
    register,
    separates_documents,
    use_packed_attention,
)
from joulelab.errors import ConfigError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def mistral():
    """Every token sees the five before it and itself, within its document."""
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6)).eval()


def texts():
    drawn = np.random.default_rng(0)
    made = []
    for length in (5, 17, 9, 3, 12, 20, 2):
        trained = drawn.random(length) < 0.7
        trained[[0, -1]] = False, True
        made.append(EncodedDocument(drawn.integers(1, 64, size=length), trained))
    return made


def summed_loss(model, attention, packed, batch_size):
    total, count = torch.zeros(()), 0
    rows = RowsInOrder(packed, batch_size)
    for batch in (rows.at(0, index) for index in range(rows.batches_per_epoch)):
        logits = model(**attention.inputs(batch)).logits
        total = total + functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum"
        )
        count += batch.count
    return total, count


def alone(model):
    """Every document by itself, through the model's ordinary call."""
    total, count = torch.zeros(()), 0
    for document in texts():
        ids = torch.from_numpy(document.ids)[None]
        labels = torch.where(torch.from_numpy(document.trained)[None], ids, -100)
        logits = model(input_ids=ids).logits
        total = total + functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        count += document.trained_count
    return total, count


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("by_bounds", [False, True])
def test_packed_documents_give_the_loss_and_gradient_they_give_alone(make, by_bounds):
    model = make()
    expected, count = alone(model)
    expected_gradients = gradients(model, expected)
    if by_bounds:
        register()
        model.set_attn_implementation(NAME)
    attention = PackedAttention(by_bounds) if by_bounds else use_packed_attention(model)
    packed = pack(texts(), row_length=24, seed=0)
    assert len(packed) < len(texts())
    found, found_count = summed_loss(model, attention, packed, batch_size=2)
    assert found_count == count
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradients(model, found), expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [llama, mistral])
def test_rows_of_one_document_give_the_same_without_bounds(make, monkeypatch):
    """A window of 6 tokens is shorter than the rows of mistral, so bounds are made for it."""
    calls = []
    monkeypatch.setattr(
        packing, "_dense", lambda *parts, dense=packing._dense, **kw: calls.append(1) or dense(*parts, **kw)
    )
    model = make()
    expected, count = alone(model)
    expected_gradients = gradients(model, expected)
    register()
    model.set_attn_implementation(NAME)
    packed = pack(texts(), row_length=24, seed=0, together=False)
    assert packed.has_single_documents and len(packed) == len(texts())
    found, found_count = summed_loss(model, PackedAttention(by_bounds=True, dense=True), packed, batch_size=2)
    assert found_count == count and bool(calls) == (make is llama)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradients(model, found), expected_gradients, rtol=1e-4, atol=1e-5)


def test_bounds_are_left_out_only_for_rows_of_one_document_and_a_kernel_that_was_tried():
    together, separate = (pack(texts(), row_length=24, seed=0, together=choice) for choice in (True, False))
    assert not together.has_single_documents

    def bounds(packed, dense):
        mask = PackedAttention(by_bounds=True, dense=dense).inputs(RowsInOrder(packed, 2).at(0, 0))["attention_mask"]
        return mask.numel()

    assert [bounds(together, True), bounds(separate, False), bounds(separate, True)] == [64, 64, 1]
    assert "attention_mask" not in PackedAttention(by_bounds=False).inputs(RowsInOrder(separate, 2).at(0, 0))


def test_rows_without_a_document_do_not_make_the_others_single():
    """A compiled on-policy training fills its batches with empty rows."""
    together = pack(texts(), row_length=24, seed=0)
    empty = np.full(len(texts()) - len(together), together.first_pieces[-1])
    filled = replace(together, first_pieces=np.concatenate([together.first_pieces, empty]))
    assert len(filled) == len(filled.pieces) and not filled.has_single_documents
    batch = causal_batch(filled, np.arange(len(filled)))
    assert (len(batch.ids), batch.samples) == (len(filled), len(together))
    assert PackedAttention(by_bounds=True, dense=True).inputs(batch)["attention_mask"].numel() > 1


def test_a_kernel_is_used_only_if_it_agrees_with_the_formula(monkeypatch):
    assert not packing._cudnn_agrees(llama())  # torch has no such kernel for a CPU

    def kernel(change):
        def attend(query, key, value, scale, dropout):
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return change(attended)

        return attend

    cases = {
        "right": (lambda attended: attended, True),
        "wrong result": (lambda attended: 1.1 * attended, False),
        "wrong gradient": (lambda attended: attended + (attended - attended.detach()), False),
        "not a number": (lambda attended: attended * float("nan"), False),
    }
    for name, (change, agrees) in cases.items():
        monkeypatch.setattr(packing, "_cudnn", kernel(change))
        assert packing._cudnn_agrees(llama()) == agrees, name
    model = llama()
    model.config.head_dim = 256
    assert not packing._cudnn_agrees(model)


@pytest.mark.gpu
def test_cudnn_on_rows_of_one_document_gives_the_loss_and_gradients_of_the_flash_kernel():
    found = []
    packed = pack(texts(), row_length=24, seed=0, together=False)
    for dense in (False, True):
        model = llama().cuda()
        attention = replace(use_packed_attention(model), dense=dense)
        batch = RowsInOrder(packed, len(packed)).at(0, 0).to(torch.device("cuda"))
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(**attention.inputs(batch)).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), reduction="sum"
        )
        found.append((loss.detach(), gradients(model, loss)))
    (flash, flash_gradients), (cudnn, cudnn_gradients) = found
    torch.testing.assert_close(cudnn, flash, rtol=2e-3, atol=0.0)
    assert float((cudnn_gradients - flash_gradients).norm() / flash_gradients.norm()) < 0.02


def test_a_model_with_this_attention_still_takes_ordinary_masks():
    model, plain = llama(), llama()
    register()
    model.set_attn_implementation(NAME)
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    requested = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert model.generate(**requested).tolist() == plain.generate(**requested).tolist()


def test_a_model_that_lets_documents_see_each_other_is_refused():
    class Leaky(transformers.LlamaForCausalLM):
        def forward(self, input_ids, position_ids=None, **kwargs):
            return super().forward(input_ids, **kwargs)  # as models do that know no positions

    leaky = Leaky(transformers.LlamaConfig(**SIZES)).train()
    assert not separates_documents(leaky, PackedAttention(by_bounds=False))
    assert leaky.training
    with pytest.raises(ConfigError, match="does not separate the documents"):
        use_packed_attention(leaky)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [llama, mistral])
def test_the_flash_kernel_on_bounds_gives_the_same_loss(make):
    model = make().cuda()
    expected, _ = alone(make())
    attention = use_packed_attention(model)
    assert attention.by_bounds
    packed = pack(texts(), row_length=24, seed=0)
    total = torch.zeros((), device="cuda")
    rows = RowsInOrder(packed, 2)
    for batch in (rows.at(0, index) for index in range(rows.batches_per_epoch)):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(**attention.inputs(batch.to(torch.device("cuda")))).logits
        labels = batch.labels[:, 1:].flatten().cuda()
        total = total + functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum")
    total.backward()
    torch.testing.assert_close(total.detach().cpu(), expected.detach(), rtol=2e-3, atol=0.0)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
