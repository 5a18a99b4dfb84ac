import numpy as np
import pytest

from joulelab.data.chat.documents import EncodedDocument
from joulelab.data.chat.packing import pack
from joulelab.data.chat.store import MANIFEST, TRAINED, DocumentStore, write_documents
from joulelab.data.token_store import OFFSETS, TOKENS
from joulelab.errors import ConfigError, JoulelabError, NotFoundError


def documents(count=30, seed=0):
    drawn = np.random.default_rng(seed)
    for length in drawn.integers(2, 15, size=count):
        trained = drawn.random(length) < 0.5
        trained[-1] = True
        yield EncodedDocument(drawn.integers(0, 300, size=length), trained)


def write(folder, found, **notes):
    return write_documents(folder, found, vocab_size=300, pad_id=2, tokenizer="small", notes=notes)


def test_what_is_written_is_read(tmp_path):
    store = write(tmp_path / "store", documents(), template="none")
    assert len(store) == 30
    for number, document in enumerate(documents()):
        assert store.document(number).ids.tolist() == document.ids.tolist()
        assert store.document(number).trained.tolist() == document.trained.tolist()
    assert store.token_count == sum(map(len, documents()))
    assert store.trained_count == sum(document.trained_count for document in documents())
    assert (store.pad_id, store.manifest["template"], store.manifest["tokenizer"]) == (2, "none", "small")
    store.verify()
    in_memory = pack(list(documents()), 16, seed=0)
    assert pack(store, 16, seed=0).row(1).ids[:12].tolist() == in_memory.row(1).ids[:12].tolist()


def test_the_same_documents_give_the_same_bytes(tmp_path):
    write(tmp_path / "a", documents()), write(tmp_path / "b", documents())
    for name in (TOKENS, OFFSETS, TRAINED, MANIFEST):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_documents_that_teach_nothing_are_left_out_and_counted(tmp_path):
    silent = EncodedDocument(np.arange(4), np.array([True, False, False, False]))
    store = write(tmp_path / "store", [silent, *documents(3), silent])
    assert (len(store), store.manifest["documents_without_trained_tokens"]) == (3, 2)


def test_a_set_without_a_trained_token_is_refused(tmp_path):
    silent = EncodedDocument(np.arange(4), np.zeros(4, bool))
    with pytest.raises(ConfigError, match="none of 2 documents has a token to train on"):
        write(tmp_path / "store", [silent, silent])
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_store_and_nothing_else(tmp_path):
    before = write(tmp_path / "store", documents()).manifest["trained_sha256"]

    def interrupted():
        yield from documents(5, seed=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", interrupted())
    assert DocumentStore.open(tmp_path / "store").manifest["trained_sha256"] == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    after = write(tmp_path / "store", documents(5, seed=1))
    assert len(after) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", [TOKENS, OFFSETS, TRAINED, MANIFEST])
def test_a_cut_file_is_noticed_on_opening(tmp_path, name):
    file = write(tmp_path / "store", documents()).folder / name
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(JoulelabError, match=r"damaged|not valid JSON"):
        DocumentStore.open(tmp_path / "store")


@pytest.mark.parametrize("name", [TOKENS, TRAINED])
def test_a_flipped_bit_is_noticed_by_reading_all(tmp_path, name):
    file = write(tmp_path / "store", documents()).folder / name
    changed = bytearray(file.read_bytes())
    changed[3] ^= 1
    file.write_bytes(changed)
    with pytest.raises(JoulelabError, match="damaged"):
        DocumentStore.open(tmp_path / "store").verify()


def test_no_store_and_other_folders_are_told(tmp_path):
    with pytest.raises(NotFoundError, match="no store of documents"):
        DocumentStore.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": "other"}')
    with pytest.raises(JoulelabError, match="does not say"):
        DocumentStore.open(tmp_path)
