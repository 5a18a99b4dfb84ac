"""Counts by id, and the masking weights made of them."""

import pickle

import numpy as np
import pytest

from joulelab.data.masking import count_tokens, counts_file, mask_weights, read_counts, write_counts
from joulelab.data.token_store import write_store
from joulelab.errors import ConfigError, NotFoundError


def _store(folder):
    return write_store(folder, [[2, 5, 5, 3], [2, 7, 3]], vocab_size=9, specials={"cls": 2, "sep": 3}, tokenizer="t")


def test_every_id_of_the_vocabulary_has_its_count(tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.data.masking._TOKENS_PER_STEP", 3)
    output_text = []
    assert count_tokens(_store(tmp_path), tick=output_text.append).tolist() == [0, 0, 2, 2, 0, 2, 0, 1, 0]
    assert output_text == [3, 6, 7]
    assert len(count_tokens(_store(tmp_path), vocab_size=12)) == 12
    assert len(count_tokens(_store(tmp_path), vocab_size=8)) == 8


def test_a_vocabulary_that_ends_before_the_ids_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contains the id 7"):
        count_tokens(_store(tmp_path), vocab_size=7)


def test_rare_tokens_weigh_more_and_special_ones_nothing():
    counts = np.array([0, 1, 100, 10_000, 50])
    weights = mask_weights(counts, 0.7, {"cls": 4})
    np.testing.assert_allclose(weights, [1.0, 1.0, 100**-0.7, 10_000**-0.7, 0.0], rtol=1e-12)
    np.testing.assert_array_equal(weights, mask_weights(counts, 0.7, [4]))
    assert counts.tolist() == [0, 1, 100, 10_000, 50]


def test_without_smoothing_all_but_special_tokens_weigh_alike():
    assert mask_weights(np.array([5, 0, 9]), 0.0, [1]).tolist() == [1.0, 0.0, 1.0]


def test_nothing_to_mask_and_negative_smoothing_are_refused():
    with pytest.raises(ConfigError, match="nothing to mask"):
        mask_weights(np.array([3, 4]), 0.7, [0, 1])
    with pytest.raises(ConfigError, match="mlm_smoothing"):
        mask_weights(np.array([3, 4]), -1.0, [])


@pytest.mark.parametrize("name", ["counts.npy", "counts.json", "counts.pickle", "counts"])
def test_counts_come_back_under_the_name_they_were_given(tmp_path, name):
    counts = np.array([3, 0, 2**40])
    write_counts(counts, counts_file(tmp_path / name))
    assert read_counts(tmp_path / name).tolist() == counts.tolist()
    assert not (tmp_path / "counts.pickle").exists()


def test_a_pickle_of_counts_is_not_opened(tmp_path):
    (tmp_path / "counts.pickle").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ConfigError, match=r"counts\.pickle is a pickle") as refused:
        read_counts(tmp_path / "counts.pickle")
    assert "joulelab prepare token-counts" in refused.value.hint
    with pytest.raises(NotFoundError, match=r"nothing\.npy"):
        read_counts(tmp_path / "nothing.pickle")


@pytest.mark.parametrize("text", ["[1, -2]", "[0.5]", "{", '"x"'])
def test_what_holds_no_counts_is_refused(tmp_path, text):
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(ConfigError):
        read_counts(tmp_path / "counts.json")
