"""A token store gives back what was written, and says so where it cannot."""

import json
import pickle

import numpy as np
import pytest

from joulelab.data.token_store import META, OFFSETS, TOKENS, open_store, token_dtype, verify_store, write_store
from joulelab.errors import ConfigError, JoulelabError, NotFoundError

ROWS = [[101, 7, 102], np.array([101, 8, 9, 102], dtype=np.uint16), [], [101, 102]]


def _write(folder, rows=ROWS, vocab_size=30_522):
    return write_store(folder, iter(rows), vocab_size=vocab_size, specials={"cls": 101, "sep": 102}, tokenizer="some")


def test_what_was_written_is_read(tmp_path):
    store = _write(tmp_path / "store")
    assert [store.row(number).tolist() for number in range(len(store))] == [list(row) for row in ROWS]
    assert store.lengths.tolist() == [3, 4, 0, 2]
    assert store.row(0).dtype == store.lengths.dtype == np.int64
    assert (store.tokens_total, store.vocab_size, store.tokenizer) == (9, 30_522, "some")
    assert store.specials == {"cls": 101, "sep": 102}
    verify_store(store)
    with pytest.raises(IndexError):
        store.row(4)


def test_ids_take_16_bits_where_the_vocabulary_allows(tmp_path):
    assert _write(tmp_path / "small", vocab_size=65_536).tokens.dtype == np.uint16
    large = _write(tmp_path / "large", [[65_536, 101]], vocab_size=65_537)
    assert large.tokens.dtype == np.uint32
    assert large.row(0).tolist() == [65_536, 101]
    assert token_dtype(2**32) == "<u4"
    with pytest.raises(ConfigError, match="vocabulary of"):
        token_dtype(2**32 + 1)


def test_many_rows_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.data.token_store._TOKENS_PER_WRITE", 5)
    rows = [[number] * (number % 4) for number in range(50)]
    store = _write(tmp_path / "store", rows, vocab_size=200)
    assert [store.row(number).tolist() for number in range(50)] == rows
    verify_store(store)


@pytest.mark.parametrize("rows", [[[1, 300]], [[-1]], [[1.5]], [[[1]]]])
def test_what_is_no_id_is_refused_and_nothing_is_left_behind(tmp_path, rows):
    with pytest.raises(ConfigError):
        _write(tmp_path / "store", rows, vocab_size=200)
    assert list((tmp_path / "store").iterdir()) == []


def test_a_failed_rewrite_leaves_the_old_store(tmp_path):
    before = _write(tmp_path / "store").sha256
    with pytest.raises(ConfigError):
        _write(tmp_path / "store", [[99_999]])
    assert open_store(tmp_path / "store").sha256 == before


def test_no_rows_at_all_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no documents"):
        _write(tmp_path / "store", [])


def test_the_same_rows_give_the_same_bytes(tmp_path):
    _write(tmp_path / "a"), _write(tmp_path / "b")
    for name in (TOKENS, OFFSETS, META):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", [TOKENS, OFFSETS, META])
def test_a_cut_file_is_noticed_on_opening(tmp_path, name):
    file = _write(tmp_path / "store").folder / name
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(JoulelabError, match="damaged"):
        open_store(tmp_path / "store")


def test_changed_ids_are_noticed_by_the_checksum(tmp_path):
    store = _write(tmp_path / "store")
    (store.folder / TOKENS).write_bytes(bytes(18))
    with pytest.raises(JoulelabError, match="not those that were written"):
        verify_store(open_store(store.folder))


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    file = tmp_path / "binarized_text.bert-base-uncased.pickle"
    file.write_bytes(pickle.dumps([[1, 2]], protocol=2))
    with pytest.raises(ConfigError) as refused:
        open_store(file)
    assert "joulelab prepare binarize" in refused.value.hint
    assert "can run code" in refused.value.hint


def test_a_pickle_in_place_of_the_offsets_is_not_opened(tmp_path):
    folder = _write(tmp_path / "store").folder
    np.save(folder / OFFSETS, np.array([{}, 1], dtype=object), allow_pickle=True)
    with pytest.raises(JoulelabError, match="damaged"):
        open_store(folder)


def test_the_old_name_with_pickle_means_the_store_without(tmp_path):
    _write(tmp_path / "text.bert")
    assert len(open_store(tmp_path / "text.bert.pickle")) == 4


def test_other_folders_and_missing_ones_are_told_apart(tmp_path):
    with pytest.raises(NotFoundError):
        open_store(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"meta.json is missing"):
        open_store(tmp_path)
    (tmp_path / META).write_text(json.dumps({"format": 1}))
    with pytest.raises(JoulelabError, match="does not say"):
        open_store(tmp_path)


def test_special_tokens_have_known_names_and_ids_of_the_vocabulary(tmp_path):
    for specials in ({"start": 1}, {"cls": 200}):
        with pytest.raises(ConfigError, match="special token"):
            write_store(tmp_path, [[1]], vocab_size=200, specials=specials, tokenizer="some")
