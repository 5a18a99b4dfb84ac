"""Labeled texts are loaded from any source, split by hash, stored as tokens and exported; bad input is refused."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from joulelab.data import hub
from joulelab.data.labeled_text import LabeledText, load, rows_by_split, split
from joulelab.data.splits import text_id
from joulelab.data.text import ColumnChoice, open_documents, open_parts
from joulelab.data.tokenized_text import TokenizedSet, limited_parts, load_reviews, open_set, save_parts, write
from joulelab.errors import ConfigError, DependencyMissing, JoulelabError, NotFoundError

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


def test_a_folder_saved_by_datasets_keeps_its_class_names_and_loses_unlabeled_rows(tmp_path: Path) -> None:
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


def test_minus_one_is_a_class_of_a_dataset_that_does_not_name_its_classes(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"number {number}", "label": number % 3 - 1} for number in range(30)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "plain"))
    assert load(str(tmp_path / "plain")).class_names == ("-1", "0", "1")
    assert open_parts(str(tmp_path / "plain"), "all").notes == (f"{tmp_path}/plain: the label -1 is read as a class",)
    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    datasets.Dataset.from_list(rows, features=classes).save_to_disk(str(tmp_path / "named"))
    assert set(load(str(tmp_path / "named")).labels) == {0, 1}
    (note,) = open_parts(str(tmp_path / "named"), "all").notes
    assert note.endswith("10 of 30 rows are not used: they have no label")


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
        ("text,label\n", "has no classes in 0 rows"),
        ("text,label\na,1,2,3\n", "cannot be read"),
        ("", "is empty"),
        ("text|label\na|1\n", r"single column 'text\|label': its values seem to be separated by '\|'"),
        ("a, b;1\nc, d;0\n", "its columns may be separated by commas or semicolons"),
        ("text;label\ta\nb;1\tc\n", "its columns may be separated by semicolons or tabs"),
    ],
)
def test_a_file_we_cannot_use_is_refused_with_the_reason(content: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(csv(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("a.csv", 'text;label\n"a; b";1\nc, d;0\n', "a.csv is read with semicolons between its columns"),
        ("a.csv", "\ufefftext\tlabel\na; b\t1\nc, d\t0\n", "a.csv is read with tabs between its columns"),
        ("a.tsv", "text\tlabel\na; b\t1\nc, d\t0\n", None),
        ("a.csv", 'text,label\na; b,1\n"c, d",0\n', None),
        # the first line has a comma and a semicolon, and all rows have two columns with semicolons only
        ("a.csv", 'label;text, original\n1;"a; b"\n0;c, d\n1;e\n', "a.csv is read with semicolons"),
    ],
    ids=["semicolons", "tabs", "tsv", "commas", "commas in a name"],
)
def test_columns_may_be_separated_by_commas_semicolons_or_tabs(name, content, note, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    choice = ColumnChoice(text="text, original" if "original" in content else None)
    found = open_parts(str(tmp_path / name), "all", choice)
    table = next(iter(found.parts.values())).read()
    assert list(table.values[choice.text or "text"])[:2] == ["a; b", "c, d"]
    assert list(table.values["label"])[:2] == [1, 0]
    assert (note in found.notes[0]) if note else not found.notes


def test_documents_of_a_file_with_semicolons_are_its_texts(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("id;text\n1;a, b\n2;c\n")
    (tmp_path / "b.tsv").write_text("text\tid\nd, e\t1\n")
    assert list(open_documents(str(tmp_path)).source.read("train")) == ["a, b", "c", "d, e"]


@pytest.mark.parametrize(
    ("content", "complaint", "hint"),
    [
        ("text,label\na,1\n".encode("utf-16"), "is UTF-16 text", "iconv -f utf-16"),
        ("text\tlabel\na\t1\n".encode("utf-16"), "is UTF-16 text", "iconv -f utf-16"),  # what Excel writes
        (gzip.compress(b"text,label\na,1\nb,0\n", mtime=0), "is compressed", "gunzip"),
        (b"text,label\na,1\nb\0,2,3\n", "is not text: it has null bytes", "expected UTF-8 text"),
        (b"text,label\na,1\nb,2,3\n", "cannot be read", "needs quotes"),
    ],
    ids=["UTF-16", "UTF-16 with tabs", "gzip", "null bytes", "a comma too many"],
)
def test_the_first_bytes_of_an_unreadable_file_give_the_reason(
    content: bytes, complaint: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "texts.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load(str(path))
    assert hint in (caught.value.hint or "")


def test_json_lines_in_utf_16_or_without_a_row_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    for content, complaint in (('{"text": "a", "label": 1}\n'.encode("utf-16"), "is UTF-16 text"), (b"", "is empty")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=complaint):
            load(str(path))


def test_a_few_rows_of_each_class_are_enough(tmp_path: Path) -> None:
    rows = "".join(f"text {number},class {number % 25}\n" for number in range(40))
    assert len(load(csv(tmp_path, "text,label\n" + rows)).class_names) == 25


def test_json_that_is_broken_or_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    for content in ('{"text": "a", "label"', "1\n2\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            load(str(path))


@pytest.mark.parametrize("name", ["texts.csv", "texts.parquet", "texts.jsonl"])
def test_a_file_without_read_permission_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch) -> None:
    def refused(*_args: object, **_options: object) -> None:
        # Arrow's own text; root can read everything, so the permissions of a real file do not matter here.
        raise PermissionError(13, "Failed to open local file. Detail: [errno 13] Permission denied")

    monkeypatch.setattr("pyarrow.csv.open_csv", refused)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refused)
    monkeypatch.setattr("joulelab.data.text._opened", refused)
    path = tmp_path / name
    path.write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert caught.value.message == f"{path}: Permission denied"
    assert caught.value.hint == "check its permissions"


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
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotFoundError, match=r"'org/name' was not found .*, and http.* cannot be reached$") as caught:
        load("org/name")
    assert "sample:reviews" in caught.value.hint


def test_the_subset_of_a_hub_dataset_is_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Hub:
        def load_dataset(self, *names: str, revision: str) -> Any:
            assert (*names, revision) == ("glue", "sst2", "a" * 40)
            return datasets.Dataset.from_list([{"sentence": row["text"], "label": row["label"]} for row in ROWS])

    monkeypatch.setattr(hub, "import_datasets", Hub)
    monkeypatch.setattr(hub, "_commits", {("dataset", "glue", "main"): "a" * 40})
    assert load("glue", "sst2").labels == (1, 0)


def test_without_the_datasets_package_the_hint_states_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_asking_for_more_than_there_is_states_how_many_there_are() -> None:
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


TEXTS = ("one", "three", "fourteen")


def data(texts: tuple[str, ...] = TEXTS) -> LabeledText:
    labels = tuple(number % 2 for number in range(len(texts)))
    return LabeledText(tuple(text_id(text) for text in texts), texts, labels, ("odd", "even"))


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def written_set(folder: Path, vocab_size: int = 128) -> TokenizedSet:
    return write(folder, data(), letters, vocab_size=vocab_size, pad_id=0)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written_set(tmp_path / "set")
    again = open_set(tmp_path / "set")
    assert len(again) == 3
    assert tuple(again.ids) == data().ids
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
    written_set(tmp_path / "set")
    (tmp_path / "set" / "labels.bin").write_bytes(bytes(16))
    with pytest.raises(JoulelabError, match=r"tokenized set .* is corrupted: labels\.bin has 16 bytes, expected 24"):
        open_set(tmp_path / "set")


def test_a_folder_that_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no complete tokenized set"):
        open_set(tmp_path / "gone")


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"outside 0\.\.99"):
        written_set(tmp_path, vocab_size=100)


def test_texts_without_tokens_and_sets_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text 0 .* has no tokens"):
        write(tmp_path, data(), lambda texts: [[] for _ in texts], vocab_size=128, pad_id=0)
    with pytest.raises(ConfigError, match="no texts to tokenize"):
        write(tmp_path, data(()), letters, vocab_size=128, pad_id=0)


def write_reviews(folder, labels, rows=120):
    lines = ["title,content,label"]
    lines += [f"Title {number},Text number {number} says it,{labels[number % len(labels)]}" for number in range(rows)]
    (folder / "reviews.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "reviews.csv")


def encode(texts):
    return [[101, *range(5, 5 + len(text.split())), 102] for text in texts]


def all_texts(reviews):
    return reviews.train.texts + reviews.validation.texts + reviews.test.texts


def test_title_and_content_are_one_text(tmp_path):
    assert "Title 0\nText number 0 says it" in all_texts(load_reviews(write_reviews(tmp_path, [0, 1]), "all"))


@pytest.mark.parametrize("labels", [[0, 1], ["bad", "good"]])
def test_labels_are_0_and_1_or_names(tmp_path, labels):
    data = load_reviews(write_reviews(tmp_path, labels), "all").train
    assert set(data.labels) == {0, 1}
    assert data.class_names == tuple(str(label) for label in labels)


def test_numbers_that_do_not_begin_at_0_must_be_named(tmp_path):
    source = write_reviews(tmp_path, [1, 2])
    with pytest.raises(ConfigError, match=r"labels of .* are 1, 2; expected 0 to 1, or names"):
        load_reviews(source, "all")
    assert load_reviews(source, "all", ("negative", "positive")).test.class_names == ("negative", "positive")
    with pytest.raises(ConfigError, match="3 class names were given"):
        load_reviews(source, "all", ("a", "b", "c"))


@pytest.mark.parametrize("save_format", ["hf", "parquet", "jsonl"])
def test_what_is_saved_is_read_again_and_falls_into_the_same_parts(tmp_path, save_format):
    if save_format == "hf":
        pytest.importorskip("datasets")
    data = load_reviews(write_reviews(tmp_path, [0, 1]), "all")
    parts = limited_parts(data, limit_train=20, limit_eval=5)
    folder = tmp_path / "out"
    folder.mkdir()
    rows = save_parts(folder, parts, encode, save_format, 7, lambda samples, tokens: None)
    assert rows == {"train": 20, "validation": 5, "test": 5}
    again = load_reviews(str(folder), "all")
    for name in ("train", "validation", "test"):
        written, read = getattr(parts, name), getattr(again, name)
        assert dict(zip(read.ids, read.labels, strict=True)) == dict(zip(written.ids, written.labels, strict=True))


def test_a_limit_above_what_is_there_takes_what_is_there(tmp_path):
    parts = limited_parts(load_reviews(write_reviews(tmp_path, [0, 1]), "all"), limit_train=10_000, limit_eval=None)
    assert len(parts.train) + len(parts.validation) + len(parts.test) == 120
