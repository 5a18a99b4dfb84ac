"""A text keeps its side of the split for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from joulelab.data.labeled_text import LabeledText, load, rows_by_split, split, text_id
from joulelab.errors import ConfigError


def numbered(count: int, classes: int = 2) -> LabeledText:
    texts = tuple(f"text number {number}" for number in range(count))
    return LabeledText(
        ids=tuple(text_id(text) for text in texts),
        texts=texts,
        labels=tuple(number % classes for number in range(count)),
        class_names=tuple(str(number) for number in range(classes)),
    )


def test_the_three_splits_share_no_text_and_hold_all_of_them() -> None:
    rows = rows_by_split(numbered(1_000))
    assert sorted(rows["train"] + rows["validation"] + rows["test"]) == list(range(1_000))
    shares = {name: len(rows[name]) / 1_000 for name in rows}
    assert shares["train"] == pytest.approx(0.7, abs=0.04)
    assert shares["validation"] == pytest.approx(0.1, abs=0.03)
    assert shares["test"] == pytest.approx(0.2, abs=0.04)


def test_a_text_stays_in_its_split_whatever_sizes_and_whatever_other_texts() -> None:
    few, many = split(numbered(500), 100, 20, 40), split(numbered(2_000), 1_200, 150, 300)
    assert not set(few.train.ids) & set(many.test.ids + many.validation.ids)
    assert not set(few.test.ids) & set(many.train.ids + many.validation.ids)


def test_a_smaller_set_is_part_of_a_larger_one() -> None:
    data = numbered(1_000, classes=3)
    small, large = split(data, 100, 0, 0), split(data, 500, 0, 0)
    assert set(small.train.ids) < set(large.train.ids)


def test_the_order_of_the_file_does_not_matter() -> None:
    data = numbered(300)
    backwards = data.take(range(299, -1, -1))
    assert split(data, 100, 10, 20) == split(backwards, 100, 10, 20)


def test_classes_are_balanced_as_far_as_there_are_texts() -> None:
    data = numbered(1_000)
    rare = data.take([row for row in range(1_000) if data.labels[row] == 0 or row % 10 == 1])  # 100 of class 1
    available = Counter(rare.labels[row] for row in rows_by_split(rare)["train"])
    assert Counter(split(rare, 80, 0, 0).train.labels) == {0: 40, 1: 40}
    everything_rare = split(rare, 300, 0, 0).train
    assert Counter(everything_rare.labels)[1] == available[1]
    assert len(everything_rare) == 300


def test_unbalanced_takes_the_first_by_hash() -> None:
    train = split(numbered(500), 50, 0, 0, balanced=False).train
    assert list(train.ids) == sorted(train.ids)
    assert list(train.ids) == sorted(numbered(500).take(rows_by_split(numbered(500))["train"]).ids)[:50]


def test_asking_for_more_than_there_is_says_how_many_there_are() -> None:
    available = len(rows_by_split(numbered(100))["validation"])
    with pytest.raises(ConfigError, match=f"50 rows were requested for validation, but only {available} of") as caught:
        split(numbered(100), 10, 50, 10)
    assert f"at most {available}" in caught.value.hint


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="size -1 of the split test"):
        split(numbered(100), 10, 1, -1)


@pytest.mark.samples
def test_the_short_reviews_allow_a_test_of_a_thousand_and_more() -> None:
    data = load("sample:reviews", "short")
    sizes = {name: len(rows) for name, rows in rows_by_split(data).items()}
    assert sizes == {"train": 5_964, "validation": 862, "test": 1_704}
    splits = split(data, 5_000, 300, 1_000)
    assert Counter(splits.train.labels) == {0: 2_500, 1: 2_500}
    assert Counter(splits.test.labels) == {0: 500, 1: 500}
