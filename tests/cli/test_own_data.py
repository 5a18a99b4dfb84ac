"""A user's own data and models: all refusals at once, before a run exists; splits and chance level in the record."""

import pytest
from commands import joulelab_here, shown
from tiny_reviews import write_encoder, write_reviews

FAST = [
    "device=cpu", "data.max_tokens=16", "teacher.training={epochs: 1, batch_size: 32, learning_rate: 3.0e-3}",
    "training={epochs: 1, batch_size: 32, learning_rate: 3.0e-3}", "student.layers=[0]", "energy.estimate_cpu=false",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    write_reviews(tmp_path / "mine.csv", rows=300)
    return tmp_path


def test_another_source_brings_its_own_sizes_and_subset(folder):
    done = joulelab_here("run", "demo-kd", "data.source=mine.csv", "--dry-run")
    assert done.returncode == 0, done.stderr
    for line in ("source: mine.csv", "subset: all", "train_size: all", "test_size: all", "max_tokens: 64"):
        assert line in done.stdout
    kept = joulelab_here("run", "demo-kd", "data.train_size=50", "data.source=mine.csv", "--dry-run")
    assert "train_size: 50" in kept.stdout


def test_all_problems_are_refused_at_once_and_no_run_is_left(folder):
    (folder / "poor.csv").write_text("text,label\na,1\nb,1\n")
    done = joulelab_here(
        "run", "demo-kd", "data.source=poor.csv", "teacher.model=./my-bert", "student.model=./my-bert",
        "student.layers=[0, 7]", "device=cuda", "data.max_tokens=99", "distill.t_layer=9",
    )  # fmt: skip
    assert done.returncode == 2
    assert "problems were found" in done.stderr
    for problem in (
        "poor.csv has 1 class in 2 rows; expected at least 2",
        "student.layers [0, 7] cannot be taken: ./my-bert has layers 0..1",
        "device=cuda was requested but no NVIDIA GPU was found",
        "data.max_tokens=99: ./my-bert has 32 positions",
        "distill.t_layer=9: the model has 3 hidden states",
    ):
        assert problem in done.stderr
    assert "nothing was started" in done.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (["data.text_column=text", "data.label_column=text"], "data.text_column and data.label_column are both text"),
        (["data.text_column=text", "data.label_column=id"], "wide.csv has 40 classes in 40 rows"),
    ],
)
def test_a_column_that_is_no_label_is_refused(folder, columns, text):
    rows = [f"text {number},{number % 2},{number}" for number in range(40)]
    (folder / "wide.csv").write_text("\n".join(["text,label,id", *rows]))
    done = joulelab_here("run", "demo-kd", "data.source=wide.csv", *columns, "--dry-run")
    assert done.returncode == 2 and text in done.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("text", ['{"num_hidden_layers": ', "[1]"])
def test_a_model_with_a_corrupted_configuration_is_refused_by_new_compare(folder, text):
    (folder / "my-bert" / "config.json").write_text(text)
    done = joulelab_here("new", "compare", "my.yaml", "--data", "mine.csv", "--teacher", "./my-bert")
    assert done.returncode == 2 and "my-bert/config.json" in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "my.yaml").exists()


def test_a_labels_only_run_names_its_student_alone(folder):
    done = joulelab_here("run", "demo-labels", "data.source=mine.csv", "student.model=./no-such-model")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "teacher" not in done.stderr and "tokenizer" not in done.stderr
    assert not (folder / "runs").exists()
    # the named student is enough: the teacher of the experiment is neither read nor required
    student = ("student.model=./my-bert", "teacher.model=./none")
    other = joulelab_here("run", "demo-labels", "data.source=mine.csv", *student, *FAST, "--json")
    assert other.returncode == 0, other.stderr


def test_own_splits_and_duplicates_are_in_the_record(folder):
    lines = (folder / "mine.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\n".join(lines[:201]))
    (folder / "test.csv").write_text("\n".join([lines[0], *lines[191:261]]))
    done = joulelab_here(
        "run", "demo-kd", "data.train=train.csv", "data.test=test.csv", "teacher.model=./my-bert",
        "student.model=./my-bert", *FAST,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no split for validation; held out from the training texts by hash" in done.stderr
    results = {name: found["value"] for name, found in shown("runs")["results"].items()}
    assert results["data.test_rows"] == 70
    assert results["data.train_rows"] + results["data.validation_rows"] == 200
    assert results["data.test_rows_in_train"] in range(5, 11)  # 10, less those held out for validation
    notes = " ".join(note["text"] for note in shown("runs")["validity"]["notes"])
    assert "test rows" in notes and "are also in the training data" in notes


def test_a_student_at_chance_level_is_flagged_in_output_and_record(folder):
    done = joulelab_here(
        "run", "demo-labels", "data.source=mine.csv", "student.model=./my-bert", *FAST,
        "training={epochs: 1, batch_size: 32, learning_rate: 1.0e-9}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the student is at chance level" in done.stderr
    assert "the student is at chance level" not in done.stdout, "the same note is printed once"
    notes = " ".join(note["text"] for note in shown("runs")["validity"]["notes"])
    assert "the student is at chance level" in notes
    assert "always predicting the most frequent class gives" in notes


def refused(*words):
    done = joulelab_here(*words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("nothing was started") == 1
    return done.stderr


def test_two_wrong_columns_are_one_list(folder):
    columns = ("data.text_column=txt", "data.label_column=lab")
    errors = refused("run", "demo-kd", "data.source=mine.csv", *columns, "--dry-run")
    assert errors.startswith("error: 2 problems were found:\n  - ")
    assert "data.text_column=txt: mine.csv has no such column" in errors
    assert "data.label_column=lab: mine.csv has no such column" in errors


@pytest.mark.parametrize("names", [("nodev.csv", "notest.csv"), ("nodev", "notest")])
def test_two_missing_files_are_one_list(folder, names):
    validation, test = names
    files = (f"data.validation={validation}", f"data.test={test}")
    errors = refused("run", "demo-kd", "data.source=mine.csv", *files, "--dry-run")
    assert "2 problems were found" in errors and validation in errors and test in errors


def test_baseline_data_and_model_of_a_group_are_one_list(folder):
    (folder / "poor.csv").write_text("text,label\na,1\nb,1\n")
    (folder / "group.yaml").write_text(
        "baseline: nobody\nmembers:\n  - experiment: demo-kd\n    overrides:\n      data: {source: poor.csv}\n"
        "      teacher: {model: ./my-bert}\n      student: {model: ./my-bert, layers: [9]}\n"
    )
    errors = refused("run", "group.yaml")
    assert "no member of group group has the label 'nobody'" in errors
    assert "poor.csv has 1 class in 2 rows" in errors
    assert "student.layers [9] cannot be taken" in errors
    assert not (folder / "runs").exists()


def test_new_compare_names_the_sample_that_was_meant(folder):
    errors = refused("new", "compare", "b.yaml", "--data", "poor.csv", "--teacher", "minilm")
    assert "did you mean 'sample:minilm'?" in " ".join(errors.split())


def test_new_compare_lists_missing_data_and_missing_teacher(folder):
    errors = refused("new", "compare", "b.yaml", "--data", "missing.csv", "--teacher", "./nope")
    assert "2 problems were found" in errors and "missing.csv" in errors and "/nope" in errors
    assert not (folder / "b.yaml").exists()


def test_a_mistyped_path_is_a_missing_file_and_no_name_of_the_hub(folder):
    done = joulelab_here("new", "compare", "z.yaml", "--data", "my-bert/nope", "--teacher", "my-bert/none")
    assert done.returncode == 2 and "on the hub" not in done.stderr and "downloaded" not in done.stderr
    for name in ("nope", "none"):
        assert f"there is no file or folder {folder / 'my-bert' / name}" in done.stderr


def test_settings_errors_are_listed_like_all_others(folder):
    errors = refused("run", "demo-kd", "training.epochs=-3", "training.batch_sze=4")
    assert errors.startswith("error: 2 problems were found:\n  - ")
    assert "did you mean training.batch_size?" in errors and "found -3" in errors
    errors = refused("measure", "--grid", "XX", "--price", "abc", "--", "true")
    assert errors.startswith("error: 2 problems were found:\n  - ")
