"""The user's own splits are kept row by row; missing ones are made by hash and stated; bad data is refused."""

import json

import pytest
from pydantic import ValidationError

from joulelab.data.labeled_text import LabeledSource, check_labeled_text, load_splits
from joulelab.data.splits import HashShares, hash_shares, parse_size, split_of, split_word, text_id
from joulelab.errors import ConfigError

EVERYTHING = {"subset": "all", "train_size": "all", "validation_size": "all", "test_size": "all"}


def settings(**given):
    return LabeledSource(**{**EVERYTHING, **given})


def write(path, rows, header="text,label"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows] if header else rows) + "\n", encoding="utf-8")
    return str(path)


def rows(start, count):
    return [f"text number {number},{'ab'[number % 2]}" for number in range(start, start + count)]


def test_three_files_are_kept_row_by_row(tmp_path):
    train, validation, test = rows(0, 40), rows(100, 7), [*rows(200, 9), *rows(200, 2)]
    found = load_splits(
        settings(
            train=write(tmp_path / "a.csv", train),
            validation=write(tmp_path / "b.csv", validation),
            test=write(tmp_path / "c.csv", test),
        )
    )
    assert found.train.texts == tuple(row.split(",")[0] for row in train)
    assert found.validation.texts == tuple(row.split(",")[0] for row in validation)
    assert found.test.texts == tuple(row.split(",")[0] for row in test)  # the repeated rows too
    assert len(set(found.test.ids)) == 11
    assert found.duplicates == 0 and found.notes == ()


def test_a_folder_with_files_of_the_three_names_is_kept(tmp_path):
    for name, start, count in (("train-00000-of-00002", 0, 20), ("train-00001-of-00002", 50, 20), ("dev", 100, 5),
                               ("test", 200, 6)):  # fmt: skip
        write(tmp_path / "data" / f"{name}.csv", rows(start, count))
    found = load_splits(settings(source=str(tmp_path)))
    assert (len(found.train), len(found.validation), len(found.test)) == (40, 5, 6)
    assert found.test.texts[0] == "text number 200"


def test_the_splits_of_a_saved_dataset_are_kept_and_an_unlabeled_one_is_not_used(tmp_path):
    import datasets

    features = datasets.Features(
        {"body": datasets.Value("string"), "stars": datasets.ClassLabel(names=["bad", "good"])}
    )

    def part(start, count, label=None):
        items = [{"body": f"text {n}", "stars": n % 2 if label is None else label} for n in range(start, start + count)]
        return datasets.Dataset.from_list(items, features=features)

    parts = {"train": part(0, 60), "validation_matched": part(100, 8), "test": part(200, 5, -1)}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    given = settings(source=str(tmp_path / "saved"), text_column="body", label_column="stars")
    found = load_splits(given)
    assert len(found.validation) == 8
    assert len(found.train) + len(found.test) == 60 and len(found.test) >= 5
    assert found.train.class_names == ("bad", "good")
    assert any("its rows have no label" in note for note in found.notes)
    assert any("no split for test; held out from the training texts by hash" in note for note in found.notes)
    chosen = load_splits(given.model_copy(update={"test": "validation_matched", "validation": "train[:10]"}))
    assert len(chosen.test) == 8 and len(chosen.validation) == 10


def test_two_splits_of_one_kind_are_not_merged(tmp_path):
    import datasets

    part = datasets.Dataset.from_list([{"text": f"t{n}", "label": n % 2} for n in range(10)])
    names = ("train", "validation_matched", "validation_mismatched")
    datasets.DatasetDict(dict.fromkeys(names, part)).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="several splits for validation") as refused:
        load_splits(settings(source=str(tmp_path / "saved")))
    assert refused.value.hint == "choose one: data.validation=validation_matched"


def test_a_split_column_assigns_the_rows(tmp_path):
    lines = [f"text number {n},{n % 2},{('train', 'dev', 'test')[n % 3]}" for n in range(30)]
    found = load_splits(settings(source=write(tmp_path / "all.csv", lines, "text,label,split")))
    assert (len(found.train), len(found.validation), len(found.test)) == (10, 10, 10)
    renamed = write(tmp_path / "named.csv", lines, "text,label,fold")
    assert len(load_splits(settings(source=renamed, split_column="fold")).test) == 10
    with pytest.raises(ConfigError, match="has the value 0"):
        load_splits(settings(source=renamed, split_column="label"))


def test_without_splits_the_hash_decides_and_reports_it(tmp_path):
    source = write(tmp_path / "all.csv", rows(0, 300))
    found = load_splits(settings(source=source))
    assert len(found.train) + len(found.validation) + len(found.test) == 300
    assert all(split_of(identity) == "test" for identity in found.test.ids)
    assert "has no splits: split by the hash of each text (train 70 %, validation 10 %, test 20 %)" in (found.notes[0])


def test_only_the_missing_split_is_held_out(tmp_path):
    found = load_splits(
        settings(source=write(tmp_path / "a.csv", rows(0, 200)), test=write(tmp_path / "t.csv", rows(900, 12)))
    )
    assert len(found.test) == 12
    assert all(split_of(identity) == "validation" for identity in found.validation.ids)
    assert len(found.train) + len(found.validation) == 200
    assert "no split for validation" in found.notes[0]


def test_columns_by_name_by_number_and_without_a_header(tmp_path):
    named = write(tmp_path / "named.csv", rows(0, 60), "Body,Kind")
    found = load_splits(settings(source=named, text_column="body", label_column="Kind"))
    assert found.train.class_names == ("a", "b")
    bare = write(tmp_path / "bare.csv", [f"{'ab'[n % 2]},text number {n}" for n in range(60)], header="")
    by_number = load_splits(settings(source=bare, header=False, text_column=2, label_column=1))
    assert by_number.train.class_names == ("a", "b") and by_number.notes[0].startswith(bare)
    detected = load_splits(settings(source=bare))
    assert set(detected.train.texts) == set(by_number.train.texts)
    assert "bare.csv has no column names: column 2 is read as the text, column 1 as the label" in detected.notes


@pytest.mark.parametrize(
    ("given", "parsed"), [("all", "all"), (25, 25), (0.1, 0.1), ("10 %", 0.1), ("100%", "all"), (1.0, "all")]
)
def test_sizes_are_counts_shares_or_all(given, parsed):
    assert parse_size(given) == parsed


@pytest.mark.parametrize("given", [0, -3, 1.5, "many", "0 %", "120 %", True, None])
def test_other_sizes_are_refused(given):
    with pytest.raises(ValidationError, match=r"not a|rows; expected"):
        LabeledSource(train_size=given)


def test_shares_decide_how_rows_without_a_split_are_divided(tmp_path):
    source = write(tmp_path / "all.csv", rows(0, 2000))
    found = load_splits(settings(source=source, train_size=0.85, validation_size=0.05, test_size=0.1))
    assert len(found.train) == pytest.approx(1700, abs=40)
    assert len(found.validation) == pytest.approx(100, abs=30)
    assert len(found.test) == pytest.approx(200, abs=40)
    few = load_splits(settings(source=source, test=write(tmp_path / "t.csv", rows(5000, 50)), test_size=0.2))
    assert len(few.test) == 10  # of the test file's rows
    with pytest.raises(ConfigError, match="more than 100 %"):
        hash_shares(0.3, 0.3, 0.5)


def test_the_usual_shares_are_the_splits_of_earlier_releases():
    tenths = {"train": range(7), "validation": range(7, 8), "test": range(8, 10)}
    for number in range(2000):
        identity = text_id(str(number))
        assert int(identity[-8:], 16) % 10 in tenths[split_of(identity)]
    assert split_of(text_id("a"), HashShares(0.0, 0.0)) == "train"


def test_duplicates_between_train_and_test_are_counted(tmp_path):
    same = write(tmp_path / "same.csv", rows(0, 30))
    found = load_splits(settings(train=same, validation=same, test=same))
    assert found.duplicates == 30
    assert found.warnings == (
        "30 of 30 test rows (100 %) are also in the training data: quality on the test data is overestimated",
    )


@pytest.mark.parametrize(
    ("files", "given", "complaint"),
    [
        ({"a.csv": rows(0, 30)}, {"label_column": "kind"}, "data.label_column=kind: .*has no such column"),
        ({"a.csv": []}, {}, "has no classes in 0 rows"),
        ({"a.csv": [f"t{n},x" for n in range(9)]}, {}, "has 1 class"),
        ({"a.csv": rows(0, 30), "test.csv": ["new,c"]}, {"test": "test.csv"}, r"no training text has: c \(1 rows\)"),
        ({"a.csv": rows(0, 30), "test.csv": []}, {"test": "test.csv"}, "has no rows"),
        ({"a.csv": rows(0, 30), "test.csv": ["t,"]}, {"test": "test.csv"}, "have no text or no label"),
        ({"a.csv": rows(0, 30)}, {"train_size": 500}, "data.train_size=500: .* has only"),
        ({"a.csv": rows(0, 30)}, {"train_size": 0.9, "test_size": 0.5}, "more than 100 %"),
        ({"a.csv": rows(0, 30)}, {"test": "missing.csv"}, "there is no file or folder"),
        ({"a.csv": rows(0, 30)}, {"test": "nowhere"}, "there is no such file, and .* has no splits"),
    ],
)
def test_data_that_cannot_be_used_is_refused(files, given, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lines in files.items():
        write(tmp_path / name, lines)
    from joulelab.errors import UsageError

    with pytest.raises(UsageError, match=complaint):
        check_labeled_text(settings(source="a.csv", **given))


def test_text_that_is_not_utf_8_is_refused_not_trained_on(tmp_path):
    """Arrow returns such a column as bytes, whose Python notation became the text."""
    path = tmp_path / "latin.csv"
    path.write_bytes("text,label\ncaf\xe9,1\nthe\xe2tre,0\n".encode("latin1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 0xe9"):
        check_labeled_text(settings(source=str(path)))


def test_unset_settings_are_left_out_so_that_artifacts_keep_their_keys():
    assert set(LabeledSource().model_dump()) == {"source", "subset", "train_size", "validation_size", "test_size"}
    assert json.loads(LabeledSource(test="t.csv").model_dump_json())["test"] == "t.csv"


def test_words_for_splits_in_names():
    names = ("data/train-00000.parquet", "c4-validation.json.gz", "dev", "validation_matched", "test_b", "latest", "x")
    splits = ["train", "validation", "validation", "validation", "test", None, None]
    assert [split_word(name) for name in names] == splits
