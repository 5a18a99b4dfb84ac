"""Batches depend on nothing but the set, the size, the seed, the epoch and the index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joulelab.data.batches import BatchStream, batch_order, iterate_in_order, padded_share
from joulelab.data.labeled_text import LabeledText
from joulelab.data.splits import text_id
from joulelab.data.tokenized_text import TokenizedSet, write
from joulelab.errors import ConfigError

PAD = 0


@pytest.fixture
def dataset(tmp_path: Path) -> TokenizedSet:
    lengths = np.random.default_rng(0).integers(1, 40, size=250)
    texts = tuple(f"{number} " + "x" * int(length) for number, length in enumerate(lengths))
    labels = tuple(number % 2 for number in range(250))
    data = LabeledText(tuple(text_id(text) for text in texts), texts, labels, ("a", "b"))
    return write(tmp_path, data, lambda batch: [[ord(c) for c in text] for text in batch], vocab_size=128, pad_id=PAD)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=0, max_size=300),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 50),
    grouped=st.booleans(),
)
def test_every_row_is_read_exactly_once_and_one_batch_at_most_is_smaller(
    lengths: list[int], batch_size: int, seed: int, epoch: int, grouped: bool
) -> None:
    order = batch_order(np.array(lengths, dtype=np.int64), batch_size, seed, epoch, grouped)
    assert sorted(int(row) for rows in order for row in rows) == list(range(len(lengths)))
    assert sum(len(rows) < batch_size for rows in order) <= 1


def test_the_order_is_the_same_each_time_and_another_for_another_epoch_or_seed() -> None:
    lengths = np.arange(1, 501)

    def flat(seed: int, epoch: int) -> list[int]:
        return [int(row) for rows in batch_order(lengths, 16, seed, epoch) for row in rows]

    assert flat(1, 0) == flat(1, 0)
    assert flat(1, 0) != flat(1, 1)
    assert flat(1, 0) != flat(2, 0)
    assert flat(1, 0) != flat(0, 1)


def test_grouping_by_length_makes_padding_small() -> None:
    # The shape of the short reviews: a long tail of lengths, cut off where the tokenizer truncates.
    lengths = np.minimum(np.random.default_rng(3).lognormal(3, 0.7, size=5_000).astype(np.int64) + 2, 64)
    grouped = padded_share(lengths, batch_order(lengths, 32, 0, 0))
    mixed = padded_share(lengths, batch_order(lengths, 32, 0, 0, group_by_length=False))
    assert grouped < 0.1 < 0.4 < mixed


def test_lengths_do_not_rise_through_the_epoch() -> None:
    lengths = np.random.default_rng(3).integers(1, 500, size=5_000)
    means = [lengths[rows].mean() for rows in batch_order(lengths, 32, 0, 0)]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.25


def test_padded_share_counts_positions() -> None:
    lengths = np.array([1, 3, 4])
    assert padded_share(lengths, [np.array([0, 1]), np.array([2])]) == pytest.approx(2 / 10)
    assert padded_share(lengths, []) == 0.0


def test_a_batch_is_padded_to_its_longest_row_and_counts_real_tokens(dataset: TokenizedSet) -> None:
    batch = BatchStream(dataset, 8, seed=0).at(0, 0)
    lengths = dataset.lengths[batch.rows]
    assert batch.input_ids.shape == batch.attention_mask.shape == (8, lengths.max())
    assert batch.input_ids.dtype == batch.attention_mask.dtype == batch.labels.dtype == torch.int64
    assert batch.tokens == lengths.sum() == int(batch.attention_mask.sum())
    assert batch.samples == 8
    assert batch.labels.tolist() == dataset.labels[batch.rows].tolist()
    for place, row in enumerate(batch.rows):
        real = batch.attention_mask[place].bool()
        assert batch.input_ids[place][real].tolist() == dataset.row(int(row)).tolist()
        assert (batch.input_ids[place][~real] == PAD).all()


def test_a_trainer_that_resumes_sees_the_batch_it_would_have_seen(dataset: TokenizedSet) -> None:
    running = BatchStream(dataset, 16, seed=7)
    seen = [running.at(epoch, index).rows.tolist() for epoch in (0, 1) for index in range(running.batches_per_epoch)]
    resumed = BatchStream(dataset, 16, seed=7)
    assert resumed.at(1, 5).rows.tolist() == seen[running.batches_per_epoch + 5]
    assert resumed.at(0, 3).rows.tolist() == seen[3]


def test_the_last_incomplete_batch_counts(dataset: TokenizedSet) -> None:
    stream = BatchStream(dataset, 16, seed=0)
    assert stream.batches_per_epoch == 16  # 250 rows: 15 batches of 16 and one of 10
    assert sum(stream.at(0, index).samples for index in range(16)) == 250
    for index in (-1, 16):
        with pytest.raises(IndexError):
            stream.at(0, index)


def test_evaluation_reads_every_row_once_with_the_longest_first(dataset: TokenizedSet) -> None:
    batches = list(iterate_in_order(dataset, 32))
    widths = [batch.input_ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert sorted(int(row) for batch in batches for row in batch.rows) == list(range(250))
    assert sum(batch.tokens for batch in batches) == dataset.tokens_total


def test_a_batch_moves_to_a_device_whole(dataset: TokenizedSet) -> None:
    batch = BatchStream(dataset, 4, seed=0).at(0, 0).to("meta")
    assert {batch.input_ids.device.type, batch.attention_mask.device.type, batch.labels.device.type} == {"meta"}


def test_a_batch_size_below_one_is_refused(dataset: TokenizedSet) -> None:
    with pytest.raises(ConfigError, match="batch size is 0"):
        BatchStream(dataset, 0, seed=0)
    with pytest.raises(ConfigError, match="batch size is -2"):
        batch_order(dataset.lengths, -2, 0, 0)
    with pytest.raises(ConfigError, match="batch size is 0"):
        next(iterate_in_order(dataset, 0))
