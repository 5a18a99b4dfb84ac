"""Labeled tables are read in batches: the same rows as in memory, stored tokens in place of texts, flat memory."""

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import small_tokenizers

from joulelab.data import labeled_rows, text, tokenized_text
from joulelab.data.labeled_rows import WantedTokens
from joulelab.data.labeled_text import LabeledSource, load_splits
from joulelab.data.splits import SPLITS, HashShares, split_numbers, split_of, text_id
from joulelab.data.tokenize import TruncatingEncoder
from joulelab.data.tokenized_text import load_reviews, save_parts, write, write_tokenization
from joulelab.errors import ConfigError

EVERYTHING = {"subset": "all", "train_size": "all", "validation_size": "all", "test_size": "all"}


def settings(source, **given):
    return LabeledSource(source=str(source), **{**EVERYTHING, **given})


def letters(texts):
    return [[ord(letter) % 100 for letter in text] for text in texts]


def write_csv(path, rows, header="text,label\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "".join(f"text number {row},{row % 2}\n" for row in rows))
    return path


@pytest.mark.parametrize("shares", [HashShares(), HashShares(0.01, 0.2), HashShares(0.0, 0.5)])
def test_splits_of_many_keys_are_those_of_single_ids(shares):
    ids = [text_id(str(number)) for number in range(3000)]
    numbers = split_numbers(np.array([int(one, 16) for one in ids], dtype=np.uint64), shares)
    assert [SPLITS[number] for number in numbers] == [split_of(one, shares) for one in ids]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "hf"])
def test_the_size_of_a_batch_changes_nothing(tmp_path, monkeypatch, kind):
    rows = [{"text": f"text number {row % 290}", "label": row % 2} for row in range(300)]  # ten are there twice
    path = tmp_path / ("data" if kind == "hf" else f"data.{kind}")
    if kind == "csv":
        write_csv(path, [row % 290 for row in range(300)])
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(path))

    def read():
        found = load_splits(settings(path))
        stored = write(tmp_path / "set", found.train, letters, 100, 0)
        return found.train.ids, found.train.texts, [stored.row(place).tolist() for place in range(len(stored))]

    whole = read()
    assert whole[2] == letters(whole[1]), "tokens are in the order of the texts"
    assert whole[0] == tuple(sorted(whole[0])), "texts without splits are in the order of their hash"
    monkeypatch.setattr(text, "_ROWS_PER_BATCH", 7)
    monkeypatch.setattr(text, "_CSV_BLOCK_BYTES", 300)
    assert read() == whole


def test_a_slice_of_a_split_is_read_from_its_rows(tmp_path):
    write_csv(tmp_path / "d" / "train.csv", range(40))
    write_csv(tmp_path / "d" / "test.csv", range(100, 110))
    found = load_splits(settings(tmp_path / "d", train="train[10:]", validation="train[:10]"))
    assert found.validation.texts == tuple(f"text number {row}" for row in range(10))
    assert found.train.texts[0] == "text number 10" and len(found.train) == 30


@pytest.mark.slow
def test_memory_does_not_grow_with_the_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_CSV_BLOCK_BYTES", 2**20)

    def peak(rows):
        path = tmp_path / f"{rows}.csv"
        path.write_text("text,label\n" + "".join(f"{'long words ' * 40}{row},{row % 2}\n" for row in range(rows)))
        tracemalloc.start()
        write(tmp_path / f"set{rows}", load_splits(settings(path)).train, lambda texts: [[1]] * len(texts), 100, 0)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(1_000)  # modules that the first call imports are not texts
    text_bytes = 440 * 40_000
    assert peak(60_000) - peak(20_000) < 0.3 * text_bytes


def test_a_published_file_without_column_names_has_a_title(tmp_path):
    lines = [f'"{1 + row % 2}","Title {row}","A text of several words, number {row}"\n' for row in range(40)]
    (tmp_path / "train.csv").write_text("".join(lines))
    (tmp_path / "test.csv").write_text("".join(lines[:10]).replace("text", "book"))
    found = load_reviews(str(tmp_path), "all")
    assert found.train.texts[3] == "Title 3\nA text of several words, number 3"
    assert (len(found.train), len(found.validation), len(found.test)) == (40, 0, 10), "the publisher's splits"
    assert found.train.class_names == ("negative", "positive")


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
@pytest.mark.parametrize("length", [5, 12, 64])
def test_encoded_texts_are_those_of_the_tokenizer(kind, length):
    tokenizer = getattr(small_tokenizers, kind)()
    texts = [*small_tokenizers.SENTENCES, "x", "Odd  spaces\tand [SEP] tokens", "May " * 50]
    expected = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    assert TruncatingEncoder(tokenizer, length)(texts) == expected


class TestStoredTokens:
    WANTED = WantedTokens("abc", 16)

    @pytest.fixture
    def prepared(self, tmp_path):
        """A function that writes reviews in a format, with their tokenizer noted."""

        def make(save_format, rows=60):
            write_csv(tmp_path / "raw" / "train.csv", range(rows))
            write_csv(tmp_path / "raw" / "test.csv", range(1000, 1012))
            folder = tmp_path / f"made-{save_format}"
            folder.mkdir()
            save_parts(folder, load_reviews(str(tmp_path / "raw"), "all"), letters, save_format, 7)
            write_tokenization(folder, "some/tokenizer", self.WANTED)
            return folder

        return make

    def stored(self, tmp_path, source, wanted, **given):
        found = load_splits(settings(source, **given), wanted=wanted)

        def never(texts):
            raise AssertionError("texts were tokenized")

        return write(tmp_path / "set", found.train, never, 100, 0), found

    @pytest.mark.parametrize("save_format", ["hf", "parquet", "jsonl"])
    def test_tokens_of_the_same_tokenizer_are_used(self, tmp_path, prepared, save_format):
        stored, found = self.stored(tmp_path, prepared(save_format), self.WANTED)
        assert [stored.row(row).tolist() for row in range(len(stored))] == letters(found.train.texts)
        assert tuple(stored.ids) == found.train.ids

    @pytest.mark.parametrize("other", [WantedTokens("other", 16), WantedTokens("abc", 32), None])
    def test_tokens_made_otherwise_are_made_again_from_the_text(self, prepared, other):
        found = load_splits(settings(prepared("parquet")), wanted=other)
        assert not found.train.reader.tokens

    @pytest.mark.parametrize("save_format", ["hf", "parquet", "jsonl"])
    def test_a_folder_without_text_is_read_and_padding_left_out(self, tmp_path, save_format):
        folder = tmp_path / "old"
        folder.mkdir()
        rows = [{"input_ids": [2, 5 + row, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "label": row % 2}
                for row in range(60)]  # fmt: skip
        if save_format == "hf":
            import datasets

            made = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
            made.save_to_disk(str(folder))
        elif save_format == "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
        else:
            (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        stored, _ = self.stored(tmp_path, folder, self.WANTED)
        assert {len(stored.row(row)) for row in range(len(stored))} == {3}
        assert len(set(stored.ids)) == len(stored)

    def test_tokens_without_text_of_another_tokenizer_are_refused(self, tmp_path):
        folder = tmp_path / "old"
        folder.mkdir()
        rows = [{"input_ids": [2, 5 + row, 3], "labels": row % 2} for row in range(60)]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
        write_tokenization(folder, "some/tokenizer", self.WANTED)
        with pytest.raises(ConfigError, match="token ids of some/tokenizer and no text"):
            load_splits(settings(folder), wanted=WantedTokens("other", 16))
        with pytest.raises(ConfigError, match="has token ids but no text to tokenize"):
            load_reviews(str(folder), "all")

    def test_rows_longer_than_the_run_reads_are_refused(self, tmp_path):
        from joulelab.distill.classify.config import TextData

        rows = [{"input_ids": [2] * 20, "labels": row % 2} for row in range(60)]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
        with pytest.raises(ConfigError, match=r"rows of 20 tokens but no text, so .* data.max_tokens=16") as refused:
            load_splits(TextData(source=str(tmp_path), max_tokens=16))
        assert "data.max_tokens=20" in refused.value.hint


def test_many_reviews_are_several_tensor_files(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(tokenized_text, "_ROWS_PER_TENSOR", 20)
    write_csv(tmp_path / "raw" / "train.csv", range(50))
    write_csv(tmp_path / "raw" / "test.csv", range(100, 110))
    (tmp_path / "out").mkdir()
    save_parts(tmp_path / "out", load_reviews(str(tmp_path / "raw"), "all"), letters, "pt", 10)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["test.pt", "train-00000.pt", "train-00001.pt", "train-00002.pt"]
    parts = [torch.load(tmp_path / "out" / name, weights_only=True) for name in names[1:]]
    assert sum(len(part["labels"]) for part in parts) == 50
    assert parts[0]["input_ids"].shape == parts[0]["attention_mask"].shape


def test_a_saved_dataset_has_shards_that_the_library_reads(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(tokenized_text, "_ARROW_SHARD_BYTES", 4_000)
    write_csv(tmp_path / "raw" / "train.csv", range(50))
    write_csv(tmp_path / "raw" / "test.csv", range(100, 110))
    reviews = load_reviews(str(tmp_path / "raw"), "all")
    (tmp_path / "out").mkdir()
    save_parts(tmp_path / "out", reviews, letters, "hf", 10)
    shards = sorted(path.name for path in (tmp_path / "out" / "train").glob("*.arrow"))
    assert len(shards) > 1 and shards[-1] == f"data-{len(shards) - 1:05d}-of-{len(shards):05d}.arrow"
    read = datasets.load_from_disk(str(tmp_path / "out"))
    assert tuple(read["train"]["text"]) == reviews.train.texts
    assert read["train"]["input_ids"] == letters(reviews.train.texts)
    assert read["train"]["labels"] == reviews.train.labels.tolist()
    tested = read["test"][:]
    assert tested["attention_mask"] == [[1] * len(ids) for ids in tested["input_ids"]]
    # what `datasets` caches of one set is never used for another
    assert read["train"]._fingerprint != read["test"]._fingerprint
    again = load_splits(settings(tmp_path / "out"), hold_out=False)
    assert again.train.texts == reviews.train.texts and again.train.ids == reviews.train.ids


def test_a_saved_dataset_is_not_mapped_into_memory_as_a_whole(tmp_path, monkeypatch):
    """Mapped pages count as resident memory, so that a job with a memory limit would be killed."""
    import datasets

    write_csv(tmp_path / "raw" / "train.csv", range(50))
    (tmp_path / "out").mkdir()
    save_parts(tmp_path / "out", load_reviews(str(tmp_path / "raw"), "all"), letters, "hf", 10)

    def refuse(*_):
        raise AssertionError("rows are read through the memory map")

    monkeypatch.setattr(datasets.Dataset, "__getitem__", refuse)
    assert len(load_splits(settings(tmp_path / "out")).train.texts) > 30


def test_odd_and_missing_labels_are_refused_with_their_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": [1]}\n{"text": "b", "label": 0}\n')
    with pytest.raises(ConfigError, match=r"the label \[1\] is not a class"):
        load_splits(settings(tmp_path / "a.jsonl"))
    assert labeled_rows._plain_label(" 2 ") == 2 and labeled_rows._plain_label("") is None
