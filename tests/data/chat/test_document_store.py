import numpy as np
import pytest

from joulelab.data.chat.encoding import DocumentStore, EncodedDocument, write_documents
from joulelab.data.chat.packing import pack
from joulelab.errors import ConfigError, NotFoundError


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
    assert store.tokens_total == sum(map(len, documents()))
    assert store.trained_count == sum(document.trained_count for document in documents())
    assert (store.pad_id, store.attributes["template"], store.attributes["tokenizer"]) == (2, "none", "small")
    store.verify()
    in_memory = pack(list(documents()), 16, seed=0)
    assert pack(store, 16, seed=0).row(1).ids[:12].tolist() == in_memory.row(1).ids[:12].tolist()


def test_documents_that_teach_nothing_are_left_out_and_counted(tmp_path):
    silent = EncodedDocument(np.arange(4), np.array([True, False, False, False]))
    store = write(tmp_path / "store", [silent, *documents(3), silent])
    assert (len(store), store.attributes["documents_without_trained_tokens"]) == (3, 2)


def test_a_set_without_a_trained_token_is_refused(tmp_path):
    silent = EncodedDocument(np.arange(4), np.zeros(4, bool))
    with pytest.raises(ConfigError, match="none of 2 documents has a token to train on"):
        write(tmp_path / "store", [silent, silent])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_documents_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="no complete document store"):
        DocumentStore.open(tmp_path)
