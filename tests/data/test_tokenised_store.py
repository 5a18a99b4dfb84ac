"""A tokenised set is read back as it was written, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from joulelab.data.labeled_text import LabeledText, TokenizedSet, open_set, text_id, write
from joulelab.errors import ConfigError, JoulelabError, NotFoundError

TEXTS = ("one", "three", "fourteen")


def data(texts: tuple[str, ...] = TEXTS) -> LabeledText:
    labels = tuple(number % 2 for number in range(len(texts)))
    return LabeledText(tuple(text_id(text) for text in texts), texts, labels, ("odd", "even"))


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def written(folder: Path, vocab_size: int = 128) -> TokenizedSet:
    return write(folder, data(), letters, vocab_size=vocab_size, pad_id=0)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written(tmp_path / "set")
    again = open_set(tmp_path / "set")
    assert len(again) == 3
    assert again.ids == data().ids
    assert again.labels.tolist() == [0, 1, 0]
    assert again.class_names == ("odd", "even")
    assert again.lengths.tolist() == [3, 5, 8]
    assert again.tokens_total == 16
    assert (again.vocab_size, again.pad_id) == (128, 0)
    assert ["".join(map(chr, again.row(number))) for number in range(3)] == list(TEXTS)


def test_texts_are_encoded_in_portions_and_kept_in_order(tmp_path: Path) -> None:
    many = tuple(f"t{number}" for number in range(2_500))
    portions: list[int] = []

    def encode(texts: list[str]) -> list[list[int]]:
        portions.append(len(texts))
        return letters(texts)

    opened = write(tmp_path, data(many), encode, vocab_size=128, pad_id=0)
    assert portions == [1_000, 1_000, 500]
    assert "".join(map(chr, opened.row(2_400))) == "t2400"


def test_a_corrupted_set_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "set")
    (tmp_path / "set" / "labels.bin").write_bytes(bytes(16))
    with pytest.raises(JoulelabError, match=r"tokenized set .* is corrupted: labels\.bin has 16 bytes, expected 24"):
        open_set(tmp_path / "set")


def test_a_folder_that_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no complete tokenized set"):
        open_set(tmp_path / "gone")


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"outside 0\.\.99"):
        written(tmp_path, vocab_size=100)


def test_texts_without_tokens_and_sets_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text 0 .* has no tokens"):
        write(tmp_path, data(), lambda texts: [[] for _ in texts], vocab_size=128, pad_id=0)
    with pytest.raises(ConfigError, match="no texts to tokenize"):
        write(tmp_path, data(()), letters, vocab_size=128, pad_id=0)
