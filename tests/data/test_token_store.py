"""A store returns what was written, or an error that names the problem."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from joulelab.data import token_store as store_module
from joulelab.data.chat.encoding import DocumentStore
from joulelab.data.token_store import (
    BITS,
    MANIFEST,
    OFFSETS,
    TOKENS,
    Column,
    RaggedStore,
    is_store,
    open_store,
    store_writer,
    token_column,
    write_blocks,
    write_store,
)
from joulelab.data.tokenized_text import open_set
from joulelab.errors import ConfigError, JoulelabError, NotFoundError

ROWS = [[101, 7, 102], np.array([101, 8, 9, 102], dtype=np.uint16), [], [101, 102]]
FIRST_RELEASE = Path(__file__).parent / "first_release"
COLUMNS = {
    "tokens": token_column(1000),
    "kept": Column(BITS),
    "characters": Column("<i4", width=2),
    "spans": Column("<i8", per="row", width=2),
    "labels": Column("|u1", per="row"),
}


def _write(folder, rows=ROWS, vocab_size=30_522):
    return write_store(folder, iter(rows), vocab_size=vocab_size, specials={"cls": 101, "sep": 102}, tokenizer="some")


def _random_rows(count, seed=0):
    random = np.random.default_rng(seed)
    for length in random.integers(0, 12, size=count):
        yield {
            "tokens": random.integers(0, 1000, size=length),
            "kept": random.random(length) < 0.5,
            "characters": random.integers(-1, 9, size=(length, 2)),
            "spans": random.integers(0, 9, size=(1, 2)),
            "labels": random.integers(0, 3, size=1),
        }


def _write_columns(folder, rows, **attributes):
    with store_writer(folder, COLUMNS) as writer:
        for row in rows:
            writer.append([len(row["tokens"])], **row)
        writer.attributes.update(attributes)
        writer.attach("questions", {"first": "Why?"})
    return RaggedStore(folder)


def test_what_was_written_is_read(tmp_path):
    store = _write(tmp_path / "store")
    assert [store.row(number).tolist() for number in range(len(store))] == [list(row) for row in ROWS]
    assert store.lengths.tolist() == [3, 4, 0, 2]
    assert store.row(0).dtype == store.lengths.dtype == np.int64
    assert (store.tokens_total, store.vocab_size, store.tokenizer) == (9, 30_522, "some")
    assert store.specials == {"cls": 101, "sep": 102}
    store.verify()
    for number in (-1, 4):
        with pytest.raises(IndexError):
            store.row(number)


@pytest.mark.parametrize("items_per_write", [5, 2**20])
def test_columns_per_item_and_per_row_keep_their_values_and_shapes(tmp_path, monkeypatch, items_per_write):
    monkeypatch.setattr(store_module, "_ITEMS_PER_WRITE", items_per_write)
    rows = list(_random_rows(40))
    store = _write_columns(tmp_path / "store", rows, pad_id=3)
    for number, row in enumerate(rows):
        span = store.span(number)
        np.testing.assert_array_equal(store.row(number), row["tokens"])
        np.testing.assert_array_equal(store.bits("kept", span), row["kept"])
        np.testing.assert_array_equal(store.columns["characters"][span], row["characters"])
        np.testing.assert_array_equal(store.columns["spans"][number], row["spans"][0])
        assert store.columns["labels"][number] == row["labels"][0]
    assert store.attributes == {"pad_id": 3}
    assert store.attachment("questions") == {"first": "Why?"}
    store.verify()


def test_blocks_of_rows_give_the_bytes_of_single_rows(tmp_path):
    about = {"vocab_size": 30_522, "specials": {"cls": 101, "sep": 102}, "tokenizer": "some"}
    _write(tmp_path / "rows")
    write_blocks(tmp_path / "blocks", [([3, 4], [*ROWS[0], *ROWS[1]]), ([0, 2], ROWS[3])], **about)
    for path in (tmp_path / "rows").iterdir():
        assert path.read_bytes() == (tmp_path / "blocks" / path.name).read_bytes()


def test_columns_are_views_of_the_files(tmp_path):
    store = _write(tmp_path / "store")
    assert not store.tokens.flags.writeable
    assert isinstance(store.tokens.base, np.memmap) and isinstance(store.offsets.base, np.memmap)


def test_ids_take_16_bits_where_the_vocabulary_allows(tmp_path):
    assert _write(tmp_path / "small", vocab_size=65_536).tokens.dtype == np.uint16
    large = _write(tmp_path / "large", [[65_536, 101]], vocab_size=65_537)
    assert large.tokens.dtype == np.uint32
    assert large.row(0).tolist() == [65_536, 101]
    assert token_column(2**32).dtype == "<u4"
    with pytest.raises(ConfigError, match="vocabulary size"):
        token_column(2**32 + 1)


@pytest.mark.parametrize("rows", [[[1, 300]], [[-1]], [[1.5]], [[[1]]]])
def test_values_that_are_not_ids_are_refused_and_nothing_remains(tmp_path, rows):
    with pytest.raises(ConfigError):
        _write(tmp_path / "store", rows, vocab_size=200)
    assert list(tmp_path.iterdir()) == []


def test_an_id_outside_the_vocabulary_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"column tokens contains 300, which is outside 0\.\.199"):
        _write(tmp_path / "store", [[1], [2, 300]], vocab_size=200)


def test_a_failed_write_leaves_the_previous_store_and_nothing_else(tmp_path):
    before = _write(tmp_path / "store").sha256

    def interrupted():
        yield [1, 2]
        raise KeyboardInterrupt

    for rows, error in (([[99_999]], ConfigError), (interrupted(), KeyboardInterrupt)):
        with pytest.raises(error):
            _write(tmp_path / "store", rows)
        assert open_store(tmp_path / "store").sha256 == before
    assert len(_write(tmp_path / "store", [[1]])) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_write_that_another_process_completed_first_keeps_the_other_store(tmp_path):
    with store_writer(tmp_path / "store", {"tokens": token_column(9)}, keep_existing=True) as writer:
        writer.append([2], tokens=[1, 2])
        first = write_store(tmp_path / "store", [[1, 2]], vocab_size=9, specials={}, tokenizer="first")
        inode = (first.folder / TOKENS).stat().st_ino
    assert (tmp_path / "store" / TOKENS).stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and contains no store"):
        _write(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_no_rows_at_all_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no rows"):
        _write(tmp_path / "store", [])


def test_the_same_rows_give_the_same_bytes(tmp_path):
    for name in "ab":
        _write_columns(tmp_path / name, _random_rows(20))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


_FILES = [OFFSETS, TOKENS, "kept.bin", "spans.bin", "questions.json", MANIFEST]


@pytest.mark.parametrize("name", _FILES)
def test_a_truncated_file_is_detected_when_the_store_is_opened(tmp_path, name):
    file = _write_columns(tmp_path / "store", _random_rows(20)).folder / name
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(JoulelabError, match="corrupted"):
        RaggedStore(tmp_path / "store")


@pytest.mark.parametrize("name", _FILES[1:-1])
def test_a_flipped_bit_is_detected_by_verify(tmp_path, name):
    file = _write_columns(tmp_path / "store", _random_rows(20)).folder / name
    changed = bytearray(file.read_bytes())
    changed[3] ^= 1
    file.write_bytes(changed)
    with pytest.raises(JoulelabError, match="has changed since it was written"):
        RaggedStore(tmp_path / "store").verify()


def test_a_pickle_is_refused_with_the_command_that_replaces_it(tmp_path):
    file = tmp_path / "binarized_text.bert-base-uncased.pickle"
    file.write_bytes(pickle.dumps([[1, 2]], protocol=2))
    with pytest.raises(ConfigError) as refused:
        open_store(file)
    assert "convert token ids of the original script, or build a store" in refused.value.hint
    assert f"joulelab prepare binarize --file_path {file}" in refused.value.hint


def test_a_pickle_in_place_of_the_offsets_is_not_opened(tmp_path):
    folder = _write(tmp_path / "store").folder
    np.save(folder / OFFSETS, np.array([{}, 1], dtype=object), allow_pickle=True)
    with pytest.raises(JoulelabError, match="corrupted"):
        open_store(folder)


@pytest.mark.parametrize("name", ["../outside", "a/b", ""])
def test_a_manifest_cannot_name_files_outside_the_store(tmp_path, name):
    folder = _write(tmp_path / "store").folder
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["columns"][name] = manifest["columns"]["tokens"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(JoulelabError, match="not a name of a column"):
        open_store(folder)


def test_the_old_name_with_pickle_means_the_store_without(tmp_path):
    _write(tmp_path / "text.bert")
    assert len(open_store(tmp_path / "text.bert.pickle")) == 4


def test_missing_stores_other_folders_and_other_stores_are_distinguished(tmp_path):
    with pytest.raises(NotFoundError, match="there is no token store"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"manifest\.json is missing"):
        open_store(tmp_path)
    _write(tmp_path / "store")
    with pytest.raises(JoulelabError, match="column labels is missing"):
        open_set(tmp_path / "store")
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "joulelab-store-99"}))
    with pytest.raises(JoulelabError, match="its format is 'joulelab-store-99', expected 'joulelab-store-1'"):
        open_store(tmp_path)


def test_special_tokens_have_known_names_and_ids_of_the_vocabulary(tmp_path):
    for specials in ({"start": 1}, {"cls": 200}):
        with pytest.raises(ConfigError, match="special token"):
            write_store(tmp_path, [[1]], vocab_size=200, specials=specials, tokenizer="some")


def test_a_token_store_of_the_first_release_opens_and_can_be_replaced(tmp_path):
    shutil.copytree(FIRST_RELEASE / "tokens", tmp_path / "tokens")
    assert is_store(tmp_path / "tokens")
    earlier = open_store(tmp_path / "tokens")
    assert [earlier.row(number).tolist() for number in range(4)] == [[101, 7, 102], [101, 8, 9, 102], [], [101, 102]]
    assert (earlier.vocab_size, earlier.tokenizer, earlier.specials) == (30_522, "some", {"cls": 101, "sep": 102})
    earlier.verify()
    again = _write(tmp_path / "tokens")
    assert again.sha256 == earlier.sha256
    assert sorted(path.name for path in again.folder.iterdir()) == [MANIFEST, OFFSETS, TOKENS]


def test_a_document_store_of_the_first_release_opens():
    store = DocumentStore.open(FIRST_RELEASE / "documents")
    assert [store.document(number).ids.tolist() for number in range(3)] == [[5, 6, 7], [*range(8, 15)], [15, 16]]
    assert store.document(1).trained.tolist() == [False, False, False, True, False, True, True]
    assert (store.pad_id, store.trained_count, store.attributes["template"]) == (2, 6, "none")
    store.verify()


def test_a_tokenized_set_of_the_first_release_is_refused_and_never_misread():
    with pytest.raises(JoulelabError, match="its format is 1, expected 'joulelab-store-1'"):
        open_set(FIRST_RELEASE / "labeled")


def test_a_store_is_accepted_where_text_is_expected(tmp_path):
    """A pipeline that reads text checks its source before the first joule; a store was tokenized before."""
    from joulelab.data.text import check_documents

    _write(tmp_path / "store")
    check_documents(str(tmp_path / "store"))
