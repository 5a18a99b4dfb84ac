"""A tokenised set is read back as it was written, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from joulelab.data import tokenised
from joulelab.data.labelled_text import LabelledText, text_id
from joulelab.data.tokenised import TokenisedSet, open_set, write
from joulelab.errors import ConfigError, JoulelabError, NotFoundError

TEXTS = ("one", "three", "fourteen")


def data(texts: tuple[str, ...] = TEXTS) -> LabelledText:
    labels = tuple(number % 2 for number in range(len(texts)))
    return LabelledText(tuple(text_id(text) for text in texts), texts, labels, ("odd", "even"))


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def written(folder: Path, vocab_size: int = 128) -> TokenisedSet:
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


def test_the_tokens_stay_on_disk(tmp_path: Path) -> None:
    assert isinstance(written(tmp_path).tokens, np.memmap)


def test_a_token_takes_two_bytes_while_the_vocabulary_allows_it(tmp_path: Path) -> None:
    assert written(tmp_path / "small", vocab_size=65_535).tokens.dtype == np.uint16
    assert written(tmp_path / "large", vocab_size=65_536).tokens.dtype == np.int32


def test_the_same_texts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        written(tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert files == ["ids.json", "labels.npy", "meta.json", "offsets.npy", "tokens.npy"]
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_texts_are_encoded_in_portions_and_kept_in_order(tmp_path: Path) -> None:
    many = tuple(f"t{number}" for number in range(2_500))
    portions: list[int] = []

    def encode(texts: list[str]) -> list[list[int]]:
        portions.append(len(texts))
        return letters(texts)

    opened = write(tmp_path, data(many), encode, vocab_size=128, pad_id=0)
    assert portions == [1_000, 1_000, 500]
    assert "".join(map(chr, opened.row(2_400))) == "t2400"


def test_a_set_whose_writing_was_cut_short_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)

    def disk_full(path: Path, value: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tokenised, "_replace_json", disk_full)
    with pytest.raises(OSError, match="no space"):
        written(tmp_path)
    with pytest.raises(NotFoundError, match=r"meta\.json is missing"):
        open_set(tmp_path)
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_a_damaged_set_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    np.save(tmp_path / "labels.npy", np.zeros(2, dtype=np.int64))
    with pytest.raises(JoulelabError, match="damaged: ids, labels and offsets have different lengths"):
        open_set(tmp_path)
    written(tmp_path)
    (tmp_path / "tokens.npy").write_bytes(b"not an array")
    with pytest.raises(JoulelabError, match="damaged"):
        open_set(tmp_path)
    written(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 99}')
    with pytest.raises(JoulelabError, match="its format is 99, expected 1"):
        open_set(tmp_path)


def test_a_set_with_a_pickle_inside_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    np.save(tmp_path / "labels.npy", np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(JoulelabError, match="damaged"):
        open_set(tmp_path)


def test_a_folder_that_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no \\(complete\\) tokenised set"):
        open_set(tmp_path / "gone")


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text 0 .* has a token outside 0\.\.99"):
        written(tmp_path, vocab_size=100)


def test_texts_without_tokens_and_sets_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text 0 .* has no tokens"):
        write(tmp_path, data(), lambda texts: [[] for _ in texts], vocab_size=128, pad_id=0)
    with pytest.raises(ConfigError, match="no texts to tokenise"):
        write(tmp_path, data(()), letters, vocab_size=128, pad_id=0)


def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path) -> None:
    opened = written(tmp_path)
    for number in (-1, 3):
        with pytest.raises(IndexError):
            opened.row(number)
