"""Reviews made ready: labels checked, parts as every run of ours splits them, and read again from each format."""

import pytest

from joulelab.data import labeled_text
from joulelab.data.labeled_text import limited_parts, load_reviews, save_parts
from joulelab.errors import ConfigError


def write(folder, labels, rows=120):
    lines = ["title,content,label"]
    lines += [f"Title {number},Text number {number} says it,{labels[number % len(labels)]}" for number in range(rows)]
    (folder / "reviews.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "reviews.csv")


def encode(texts):
    return [[101, *range(5, 5 + len(text.split())), 102] for text in texts]


def test_title_and_content_are_one_text(tmp_path):
    assert load_reviews(write(tmp_path, [0, 1]), "all").texts[0] == "Title 0\nText number 0 says it"


@pytest.mark.parametrize("labels", [[0, 1], ["bad", "good"]])
def test_labels_are_0_and_1_or_names(tmp_path, labels):
    data = load_reviews(write(tmp_path, labels), "all")
    assert set(data.labels) == {0, 1}
    assert data.class_names == tuple(str(label) for label in labels)


def test_numbers_that_do_not_begin_at_0_must_be_named(tmp_path):
    source = write(tmp_path, [1, 2])
    with pytest.raises(ConfigError, match=r"labels of .* are 1, 2; expected 0 to 1, or names"):
        load_reviews(source, "all")
    assert load_reviews(source, "all", ("negative", "positive")).class_names == ("negative", "positive")
    with pytest.raises(ConfigError, match="3 class names were given"):
        load_reviews(source, "all", ("a", "b", "c"))


@pytest.mark.parametrize("save_format", ["hf", "parquet", "jsonl"])
def test_what_is_saved_is_read_again_and_falls_into_the_same_parts(tmp_path, save_format):
    if save_format == "hf":
        pytest.importorskip("datasets")
    data = load_reviews(write(tmp_path, [0, 1]), "all")
    parts = limited_parts(data, limit_train=20, limit_eval=5)
    folder = tmp_path / "out"
    folder.mkdir()
    rows = save_parts(folder, parts, encode, save_format, lambda samples, tokens: None)
    assert rows == {"train": 20, "validation": 5, "test": 5}
    again = labeled_text.load(str(folder))
    assert dict(zip(again.ids, again.labels, strict=True)) == {
        identity: label
        for part in (parts.train, parts.validation, parts.test)
        for identity, label in zip(part.ids, part.labels, strict=True)
    }
    back = labeled_text.rows_by_split(again)
    assert {name: len(found) for name, found in back.items()} == rows


def test_a_limit_above_what_is_there_takes_what_is_there(tmp_path):
    parts = limited_parts(load_reviews(write(tmp_path, [0, 1]), "all"), limit_train=10_000, limit_eval=None)
    assert len(parts.train) + len(parts.validation) + len(parts.test) == 120
