"""Texts come from many places and arrive in one shape."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from joulelab.data import hub
from joulelab.data.labeled_text import load, text_id
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError

ROWS = [{"text": "A fine film.", "label": 1}, {"text": "A dull film.", "label": 0}]


def csv(tmp_path: Path, text: str) -> str:
    path = tmp_path / "texts.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def written(tmp_path: Path, suffix: str) -> str:
    path = tmp_path / f"texts{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif suffix == ".csv":
        path.write_text("text,label\nA fine film.,1\nA dull film.,0\n")
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same_texts(suffix: str, tmp_path: Path) -> None:
    data = load(written(tmp_path, suffix))
    assert data.texts == ("A fine film.", "A dull film.")
    assert data.labels == (1, 0)
    assert data.class_names == ("0", "1")
    assert data.ids == (text_id("A fine film."), text_id("A dull film."))


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    assert load(str(Path(written(tmp_path, ".jsonl")).parent)) == load(written(tmp_path, ".jsonl"))


def test_a_folder_saved_by_datasets_keeps_its_class_names_and_loses_unlabelled_rows(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    parts = {
        "train": datasets.Dataset.from_list(ROWS, features=features),
        "test": datasets.Dataset.from_list([{"text": "Unrated.", "label": -1}], features=features),
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    data = load(str(tmp_path / "saved"))
    assert data.texts == ("A fine film.", "A dull film.")
    assert data.class_names == ("bad", "good")


def test_names_of_classes_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    data = load(csv(tmp_path, "review,sentiment\nfine,positive\ndull,negative\nso so,neutral\n"))
    assert data.class_names == ("negative", "neutral", "positive")
    assert data.labels == (2, 0, 1)


def test_numbers_that_do_not_start_at_zero_are_renumbered_and_their_names_kept(tmp_path: Path) -> None:
    data = load(csv(tmp_path, "content,polarity\nfine,2\ndull,1\n"))
    assert data.labels == (1, 0)
    assert data.class_names == ("1", "2")


def test_a_title_goes_before_the_text(tmp_path: Path) -> None:
    data = load(csv(tmp_path, "Title,Content,Label\nGreat,fine film,1\n,dull film,0\n"))
    assert data.texts == ("Great\nfine film", "dull film")


def test_a_line_break_inside_quotes_is_part_of_the_text(tmp_path: Path) -> None:
    assert load(csv(tmp_path, 'text,label\n"two\nlines",1\nb,0\n')).texts[0] == "two\nlines"


def test_a_text_that_is_there_twice_is_kept_once(tmp_path: Path) -> None:
    data = load(csv(tmp_path, "text,label\nA  Fine film,1\na fine FILM,1\nb,0\n"))
    assert data.texts == ("A  Fine film", "b")


def test_a_text_filed_under_two_classes_is_dropped_entirely(tmp_path: Path) -> None:
    data = load(csv(tmp_path, "text,label\na,1\nb,0\nA,0\nc,1\n"))
    assert data.texts == ("b", "c")


def test_missing_columns_are_named_with_those_found_and_those_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text column: found body, label; expected one of text, content"):
        load(csv(tmp_path, "body,label\na,1\n"))
    with pytest.raises(ConfigError, match="no label column: found text, stars; expected one of label, labels"):
        load(csv(tmp_path, "text,stars\na,1\n"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("text,label\na,1\nb,\n", "1 of 2 rows have no text or no label, the first is row 2"),
        ("text,label\n,1\nb,0\n", "the first is row 1"),
        ("text,label\na,0.5\nb,0.25\n", r"the label 0\.5 is not a class"),
        ("text,label\na,1\nb,1\n", "has 1 class"),
        ("text,label\n", "has 0 class"),
        ("text,label\na,1,2,3\n", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_a_file_we_cannot_use_is_refused_with_the_reason(content: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(csv(tmp_path, content))


def test_json_that_is_broken_or_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    for content in ('{"text": "a", "label"', "1\n2\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            load(str(path))


def test_a_file_of_another_kind_and_a_folder_with_two_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "texts.txt"
    other.write_text("a")
    with pytest.raises(ConfigError, match="unsupported file type") as caught:
        load(str(other))
    assert ".parquet" in caught.value.hint
    with pytest.raises(ConfigError, match=r"contains 0 data files \(none\)"):
        load(str(tmp_path))
    written(tmp_path, ".csv")
    written(tmp_path, ".jsonl")
    with pytest.raises(ConfigError, match=r"contains 2 data files \(texts.csv, texts.jsonl\)"):
        load(str(tmp_path))


def test_files_have_no_subsets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="subset 'short'"):
        load(written(tmp_path, ".csv"), "short")


def test_a_hub_that_cannot_be_reached_is_answered_with_what_works_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline:
        def load_dataset(self, *_: str) -> Any:
            raise ConnectionError("Couldn't reach 'org/name' on the Hub\nlong trail")

    monkeypatch.setattr(hub, "import_datasets", Offline)
    with pytest.raises(NotFoundError, match=r"dataset 'org/name': Couldn't reach 'org/name' on the Hub$") as caught:
        load("org/name")
    assert "sample:reviews" in caught.value.hint


def test_the_subset_of_a_hub_dataset_is_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Hub:
        def load_dataset(self, *names: str) -> Any:
            assert names == ("glue", "sst2")
            return datasets.Dataset.from_list([{"sentence": row["text"], "label": row["label"]} for row in ROWS])

    monkeypatch.setattr(hub, "import_datasets", Hub)
    assert load("glue", "sst2").labels == (1, 0)


def test_without_the_datasets_package_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DependencyMissing) as caught:
        load("org/name")
    assert caught.value.hint == 'pip install "joulelab[train]"'


@pytest.mark.samples
def test_the_reviews_come_short_or_long_and_without_markup() -> None:
    short, long = load("sample:reviews", "short"), load("sample:reviews", "long")
    assert Counter(short.labels) == {0: 4265, 1: 4265}
    assert len(long) == 24_902
    assert short.class_names == ("negative", "positive")
    assert not any("<br" in text for text in long.texts)


@pytest.mark.samples
def test_a_subset_or_sample_that_is_no_text_is_refused() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'short'"):
        load("sample:reviews", "shrt")
    with pytest.raises(ConfigError, match=r"sample:minilm is a model \(encoder\)"):
        load("sample:minilm")
