"""Sequences, masks and batches: what is dropped, what is drawn, and what the host says about it."""

import numpy as np
import pytest

from joulelab.data.token_store import write_store
from joulelab.distill.distilbert.data import (
    Limits,
    LmBatches,
    LmTask,
    MaskRecipe,
    cut_sequences,
    mask_rows,
    pack_rows,
    split_documents,
)
from joulelab.distill.losses import NO_TARGET
from joulelab.errors import ConfigError

SPECIALS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
LIMITS = Limits(max_tokens=16, min_tokens=5, max_unknown_share=0.5)


def document(length, word=10):
    return [2, *range(word, word + length - 2), 3]


def store(tmp_path, rows):
    return write_store(tmp_path / "store", rows, vocab_size=100, specials=SPECIALS, tokenizer="tiny")


def everything(cut):
    return [cut.at(k).tolist() for k in range(len(cut.lengths))]


def test_long_documents_are_split_and_closed_again(tmp_path):
    made = store(tmp_path, [document(40)])
    cut = cut_sequences(made, np.array([0]), LIMITS)
    rows = everything(cut)
    assert [len(row) for row in rows] == cut.lengths.tolist() == [15, 16, 13]
    assert all(row[0] == 2 and row[-1] == 3 for row in rows)
    inner = [token for row in rows for token in row[1:-1]]
    assert inner == document(40)[1:-1]


def test_a_document_of_exactly_the_maximum_stays_whole(tmp_path):
    cut = cut_sequences(store(tmp_path, [document(16)]), np.array([0]), LIMITS)
    assert everything(cut) == [document(16)]


def test_short_and_unknown_sequences_are_dropped(tmp_path):
    half_unknown = [2, 1, 1, 1, 1, 10, 11, 3]
    nearly_half = [2, 1, 1, 1, 12, 10, 11, 3]
    made = store(tmp_path, [document(5), document(6), half_unknown, nearly_half])
    assert everything(cut_sequences(made, np.arange(4), LIMITS)) == [document(6), nearly_half]


def test_nothing_left_is_an_error_with_numbers(tmp_path):
    with pytest.raises(ConfigError, match="none of 1 sequences has more than 5 tokens"):
        cut_sequences(store(tmp_path, [document(4)]), np.array([0]), LIMITS)


def test_packed_rows_are_full_and_hold_the_documents_in_order(tmp_path):
    made = store(tmp_path, [document(9), document(13), document(16)])
    packed = pack_rows(cut_sequences(made, np.arange(3), LIMITS), 10)
    assert packed.lengths.tolist() == [10, 10, 10]
    assert np.concatenate(everything(packed)).tolist() == [*document(9), *document(13), *document(16)][:30]


def recipe(share=0.15, weights=None, keep=0.1):
    usual = np.ones(100) if weights is None else weights
    usual[list(SPECIALS.values())] = 0
    return MaskRecipe(share, shown_as_mask=0.9 - keep, shown_as_random=0.1, mask_id=4, weights_V=usual)


def test_a_fixed_share_of_every_row_is_masked_and_specials_and_padding_never():
    ids = np.tile(np.arange(5, 65), (50, 1))
    ids[:, 0], ids[:, 40:] = 2, 0
    lengths = np.full(50, 40)
    found = mask_rows(ids, lengths, recipe(), np.random.default_rng(0))
    rows, columns = np.divmod(found.positions_K, 60)
    assert np.bincount(rows).tolist() == [6] * 50
    assert columns.min() > 0 and columns.max() < 40
    assert (ids.reshape(-1)[found.positions_K] == found.targets_K).all()
    untouched = np.setdiff1d(np.arange(ids.size), found.positions_K)
    assert (found.input_ids_BT.reshape(-1)[untouched] == ids.reshape(-1)[untouched]).all()


def test_masks_are_shown_80_10_10():
    ids = np.full((400, 100), 50)
    found = mask_rows(ids, np.full(400, 100), recipe(), np.random.default_rng(0))
    shown = found.input_ids_BT.reshape(-1)[found.positions_K]
    assert np.mean(shown == 4) == pytest.approx(0.8, abs=0.02)
    assert np.mean(shown == 50) == pytest.approx(0.1, abs=0.02)


def test_a_token_of_twice_the_weight_is_masked_twice_as_often():
    weights = np.ones(100)
    weights[60] = 2.0
    ids = np.tile(np.array([50] * 50 + [60] * 50), (300, 1))
    found = mask_rows(ids, np.full(300, 100), recipe(0.05, weights), np.random.default_rng(0))
    counts = np.bincount(found.targets_K)
    assert counts[60] / counts[50] == pytest.approx(2, rel=0.15)


def batches(tmp_path, everywhere=True, causal=False, batch_size=4):
    lengths = np.random.default_rng(0).integers(8, 16, size=30)
    made = store(tmp_path, [document(int(n), 10 + k) for k, n in enumerate(lengths)])
    task = LmTask(None if causal else recipe(), everywhere, pad_id=0)
    return LmBatches(cut_sequences(made, np.arange(30), LIMITS), task, batch_size, seed=3)


def test_batches_are_pure_functions_of_seed_epoch_and_index(tmp_path):
    first, again = batches(tmp_path), batches(tmp_path)
    again.at(1, 2)  # another epoch in between
    for name, value in first.at(0, 3).tensors.items():
        assert (value == again.at(0, 3)[name]).all()
    assert not (first.at(0, 0)["targets"].numpy() == first.at(1, 0)["targets"].numpy()[:1]).all()


def test_masked_tokens_come_first_and_padding_last(tmp_path):
    batch = batches(tmp_path).at(0, 0)
    positions, mask = batch.positions, batch.tensors.get("attention_mask")
    assert sorted(positions.order_N.tolist()) == list(range(batch["input_ids"].numel()))
    assert (positions.targets_N != NO_TARGET).nonzero().flatten().tolist() == list(range(positions.with_targets))
    assert batch.predicted == positions.with_targets
    assert positions.count == batch.tokens == int(positions.weights_N.sum())
    if mask is not None:
        assert mask.flatten()[positions.order_N[: positions.count]].all()


def test_a_causal_target_is_the_next_token_of_the_same_row(tmp_path):
    batch = batches(tmp_path, causal=True).at(0, 0)
    ids, targets = batch["input_ids"], batch["targets"].reshape(batch["input_ids"].shape)
    mask = batch.tensors.get("attention_mask", (ids >= 0).long())
    for row in range(len(ids)):
        length = int(mask[row].sum())
        assert targets[row, : length - 1].tolist() == ids[row, 1:length].tolist()
        assert (targets[row, length - 1 :] == NO_TARGET).all()


def test_the_share_of_targets_is_exact_over_an_epoch(tmp_path):
    made = batches(tmp_path)
    every = [made.at(0, k) for k in range(made.batches_per_epoch)]
    share = LmTask(recipe(), True, 0).targets_share(made.lengths)
    assert share == pytest.approx(sum(b.predicted for b in every) / sum(b.tokens for b in every))


def test_grouped_lengths_pad_less_than_any_order(tmp_path):
    made = batches(tmp_path)
    loose = LmBatches(made._sequences, made.task, 4, seed=3, group_by_size=False)
    assert 0 <= made.padded_share < loose.padded_share


def test_held_out_documents_are_spread_evenly_and_not_trained_on():
    train, held_out = split_documents(1000, 9)
    assert held_out.tolist() == [100, 200, 300, 400, 500, 599, 699, 799, 899]
    assert len(train) == 991 and not set(train) & set(held_out)
    with pytest.raises(ConfigError, match="leaves none to train on"):
        split_documents(5, 5)
