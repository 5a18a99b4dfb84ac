import numpy as np
import pytest

from joulelab.data.chat.encoding import DocumentList, EncodedDocument
from joulelab.data.chat.packing import NOT_TRAINED, PADDING, RowsInOrder, pack, training_batches
from joulelab.errors import ConfigError

END = 7  # both the end of a text and the padding


def documents(*lengths):
    """Texts of ids from 10 on, no id twice, each with its end; all trained but the first token."""
    made, following = [], 10
    for length in lengths:
        ids = np.append(np.arange(following, following + length - 1), END)
        following += length
        made.append(EncodedDocument(ids, np.arange(length) > 0))
    return DocumentList(made, pad_id=END)


def test_a_row_keeps_its_documents_apart():
    packed = pack(documents(3, 5), row_length=10, seed=0)
    row = packed.row(0)
    assert len(packed) == 1
    assert row.ids.tolist() == [13, 14, 15, 16, END, 10, 11, END, END, END]
    assert row.document.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, PADDING, PADDING]
    assert row.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert row.trained.tolist() == [False, True, True, True, True, False, True, True, False, False]


def test_every_token_is_trained_once_however_long_its_document():
    source = documents(40, 3, 7, 19, 2, 33)
    packed = pack(source, row_length=8, seed=1)
    rows = [packed.row(number) for number in range(len(packed))]
    trained = np.concatenate([row.ids[row.trained] for row in rows])
    expected = np.concatenate([document.ids[document.trained] for document in source.documents])
    assert sorted(trained) == sorted(expected)
    for row in rows:  # and each comes right after the token that came before it in its document
        for place in np.flatnonzero(row.trained):
            before, target = row.ids[place - 1], row.ids[place]
            assert row.document[place - 1] == row.document[place]
            assert target in (before + 1, END)


def test_little_is_left_empty():
    lengths = np.random.default_rng(0).integers(2, 200, size=2_000)
    packed = pack(documents(*lengths.tolist()), row_length=256, seed=0)
    assert packed.tokens == lengths.sum()
    assert packed.padded_share < 0.01


def test_the_end_of_a_text_is_learned_though_padding_has_the_same_id():
    batch = RowsInOrder(pack(documents(3, 5), row_length=10, seed=0), batch_size=1).at(0, 0)
    assert batch.labels.tolist() == [[NOT_TRAINED, 14, 15, 16, END, NOT_TRAINED, 11, END, NOT_TRAINED, NOT_TRAINED]]
    assert (batch.tokens, batch.count, batch.samples) == (8, 6, 1)
    assert batch.bounds[:5].tolist() == [0, 5, 8, 10, 10]


def test_batches_follow_from_seed_epoch_and_index_alone():
    source = documents(*[2 + number % 9 for number in range(200)])
    packed = pack(source, 64, seed=3)
    batches = training_batches(packed, 4, seed=5)
    seen = [batches.at(epoch, index) for epoch in (0, 1) for index in range(batches.batches_per_epoch)]
    every = np.concatenate([batch.rows for batch in seen[: len(seen) // 2]])
    assert len(set(every.tolist())) == len(every) == len(packed) // 4 * 4
    assert not np.array_equal(seen[0].rows, seen[len(seen) // 2].rows)
    resumed = training_batches(pack(source, 64, seed=3), 4, seed=5)
    again = resumed.at(1, 2)
    before = seen[len(seen) // 2 + 2]
    for name in ("ids", "labels", "positions", "documents", "bounds"):
        assert getattr(again, name).equal(getattr(before, name))
    assert not training_batches(pack(source, 64, seed=4), 4, seed=5).at(1, 2).ids.equal(again.ids)


def test_pieces_of_the_users_words_alone_are_not_read():
    requested = EncodedDocument(np.arange(20), np.arange(20) >= 18)
    packed = pack([requested], row_length=8, seed=0)
    assert [packed.row(number).ids.tolist() for number in range(len(packed))] == [[14, 15, 16, 17, 18, 19, 0, 0]]
    with pytest.raises(ConfigError, match="none of 1 documents has a token to train on"):
        pack([EncodedDocument(np.arange(20), np.zeros(20, bool))], 8, seed=0)


def test_one_document_a_row_for_models_that_cannot_keep_them_apart():
    packed = pack(documents(3, 5, 4), row_length=10, seed=0, together=False)
    assert sorted(int((packed.row(number).document == 0).sum()) for number in range(3)) == [3, 4, 5]
