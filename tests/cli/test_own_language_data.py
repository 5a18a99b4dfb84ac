"""Own splits of conversations, text, questions and images, and the group files that `new compare` writes."""

import json
import sys
from pathlib import Path

import pytest
from commands import joulelab_here, shown
from tiny_reviews import write_encoder, write_reviews

sys.path.insert(0, str(Path(__file__).parent.parent / "distill" / "causal"))

QUICK = ["device=cpu", "energy.estimate_cpu=false"]


def results():
    return {name: found["value"] for name, found in shown("runs")["results"].items()}


def notes():
    return " ".join(note["text"] for note in shown("runs")["validity"]["notes"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from tiny_llama import write_teacher

    folder = tmp_path_factory.mktemp("models") / "llama"
    write_teacher(folder)
    return folder


def chats(path, numbers):
    from tiny_llama import conversation

    path.write_text("".join(json.dumps({"messages": conversation(number)}) + "\n" for number in numbers))
    return path.name


def test_conversations_keep_their_splits(tmp_path, monkeypatch, llama):
    monkeypatch.chdir(tmp_path)
    files = [f"data.train={chats(tmp_path / 'a.jsonl', range(120))}",
             f"data.validation={chats(tmp_path / 'b.jsonl', range(200, 212))}",
             f"data.test={chats(tmp_path / 'c.jsonl', [*range(300, 315), *range(5)])}"]  # fmt: skip
    done = joulelab_here(
        "run", "sft-tiny", *files, f"teacher.model={llama}", "student={size: nano}", f"data.tokenizer={llama}",
        "budget.tokens=3000", "chunk=64", "data.max_tokens=64", "data.row_length=64", *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = results()
    assert (found["data.train_rows"], found["data.validation_rows"], found["data.test_rows"]) == (120, 12, 20)
    assert found["data.test_rows_in_train"] >= 5
    assert "are also in the training data" in done.stderr


def test_problems_of_conversations_come_at_once(tmp_path, monkeypatch, llama):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.jsonl").write_text('{"height": 1}\n')
    done = joulelab_here(
        "run", "kd-tiny", "data.train=odd.jsonl", f"teacher.model={llama}", "student={size: null, layers: [0, 9]}",
        "device=cuda",
    )  # fmt: skip
    assert done.returncode == 2
    for problem in (
        "a row has the columns height, which are neither a conversation nor a text",
        "student.layers [0, 9] cannot be taken",
        "no NVIDIA GPU was found",
    ):
        assert problem in done.stderr
    assert not (tmp_path / "runs").exists()
    typed = joulelab_here(
        "run", "kd-tiny", "data.train=odd.jsonl", f"teacher.model={llama}", "training.learning_rate=abc", "sede=3"
    )
    for problem in ("learning_rate: expected a number", "did you mean seed?", "a row has the columns height"):
        assert problem in typed.stderr, "wrong settings do not hide what else is wrong"
    assert typed.returncode == 2 and not (tmp_path / "runs").exists()
    few = chats(tmp_path / "few.jsonl", range(80))
    large = joulelab_here("run", "sft-tiny", f"data.source={few}", "data.documents=5000", f"teacher.model={llama}")
    assert large.returncode == 2 and "data.documents=5000: few.jsonl has only" in large.stderr


def squad(path, paragraphs, start=0):
    made = []
    for number in range(start, start + paragraphs):
        context = f"good warm bright number{number} bad cold"
        qas = [{"id": str(number), "question": "good or bad", "answers": [{"text": "warm", "answer_start": 5}]}]
        made.append({"context": context, "qas": qas})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": made}]}))
    return path.name


SQUAD = [
    "teacher.model=./my-bert", "student={model: ./my-bert, layers: [0]}", "data.max_seq_length=32", "data.doc_stride=8",
    "data.max_query_length=8", "training={epochs: 1, batch_size: 8, learning_rate: 1.0e-3}",
    "teacher.training={epochs: 1, batch_size: 8, learning_rate: 1.0e-3}", *QUICK,
]  # fmt: skip


def test_questions_are_never_evaluated_on_synthetic_stories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    train, test = squad(tmp_path / "train.json", 60), squad(tmp_path / "test.json", 7, start=58)
    done = joulelab_here("run", "squad-tiny-labels", f"data.train={train}", f"data.test={test}", *SQUAD)
    assert done.returncode == 0, done.stderr
    found = results()
    assert found["data.test_rows"] == 7 and found["data.train_rows"] + found["data.validation_rows"] == 60
    assert "a tenth of its paragraphs is held out by hash" in notes()
    refused = joulelab_here("run", "squad-tiny", f"data.train={train}", *SQUAD, "student.layers=[0, 5]")
    assert refused.returncode == 2 and "student.layers [0, 5] cannot be taken" in refused.stderr


def test_text_keeps_its_validation_and_test_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    lines = (write_reviews(tmp_path / "r.csv", 300)).read_text().splitlines()[1:]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, part in (("train", lines[:200]), ("validation", lines[200:220]), ("test", lines[220:250])):
        (corpus / f"{name}.txt").write_text("\n".join(line.partition(",")[0] for line in part))
    done = joulelab_here(
        "run", "distilbert-tiny-quick-alone", "data.source=corpus", "teacher.model=./my-bert", "data.min_tokens=2",
        "student={layers: [0], layers_of: ./my-bert}", "training={max_steps: 4, evaluate_every_steps: 2}",
        "data.max_model_input_size=16", *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = results()
    assert (found["data.train_rows"], found["data.validation_rows"], found["data.test_rows"]) == (200, 20, 30)


def test_images_without_splits_are_divided_by_name_and_duplicates_counted(tmp_path, monkeypatch):
    import numpy as np
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for number in range(40):
            pixels = generator.integers(0, 255, (8, 8, 3)).astype("uint8")
            Image.fromarray(pixels).save(tmp_path / "pets" / label / f"{number}.png")
    small = "{channels: [4], blocks: [1], stem: 4, training: {epochs: 1, batch_size: 16}}"
    done = joulelab_here(
        "run", "fitnets-images", "data.source=pets", "data.side=8", f"teacher={small}", f"student={small}", "hint=null",
        "distill={alpha: 1.0, feat_beta: 0.0, t_layer: -1, s_layer: -1}", *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = results()
    assert found["data.train_rows"] + found["data.validation_rows"] + found["data.test_rows"] == 80
    assert "no images for validation and test; held out by the hash of the file name" in notes()


def test_train_reads_its_own_validation_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("body\n" + "\n".join("some words of text " * 20 for _ in range(40)))
    (tmp_path / "b.csv").write_text("body\n" + "\n".join("other words of text " * 20 for _ in range(10)))
    words = ("train", "gpt2", "--size", "tiny", "--max_steps", "2", "--device", "cpu", "shape.tokens=32")
    done = joulelab_here(*words, "data.train=a.csv", "data.validation=b.csv", "data.text_column=body")
    assert done.returncode == 0, done.stderr
    assert "held out" not in notes()
    alone = joulelab_here(*words, "data.train=a.csv", "data.text_column=body")
    assert alone.returncode == 0 and "has no validation split: the last 5 % of rows are held out" in notes()
    refused = joulelab_here(*words, "data.train=a.csv")
    assert refused.returncode == 2 and "data.text_column=NAME" in refused.stderr


def test_train_names_the_command_for_a_folder_of_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    done = joulelab_here("train", "./my-bert")
    assert done.returncode == 2
    assert "my-bert is a folder with weights of a bert model" in done.stderr
    assert "joulelab train bert --weights my-bert" in done.stderr


def test_explain_finds_a_setting_without_its_section():
    done = joulelab_here("explain", "learning_rate")
    assert done.returncode == 0
    assert done.stdout.startswith("training.learning_rate (number")
    assert "settings of the same name: " in done.stdout and "hint.learning_rate" in done.stdout


def test_new_compare_writes_a_group_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    lines = write_reviews(tmp_path / "my.csv", 200).read_text().replace("text,label", "body,kind")
    (tmp_path / "my.csv").write_text(lines)
    command = ("new", "compare", "my.yaml", "--data", "my.csv", "--teacher", "./my-bert", "--seeds", "1")
    done = joulelab_here(*command)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "my.yaml").read_text()
    assert 'text_column: "body"' in text and 'label_column: "kind"  # 2 classes' in text and "layers: [0]" in text
    again = joulelab_here(*command)
    assert again.returncode == 2 and "my.yaml already exists" in again.stderr
    shown_settings = joulelab_here("run", "my.yaml", "--dry-run")
    assert shown_settings.returncode == 0, shown_settings.stderr
    ran = joulelab_here("run", "my.yaml", *QUICK, "training.epochs=1", "teacher.training.epochs=1")
    assert ran.returncode == 0, ran.stderr
    for label in ("labels only", "response KD", "response + feature KD"):
        assert f"{label}, seed 0" in ran.stderr


def test_new_compare_numbers_the_columns_of_a_file_without_column_names(tmp_path, monkeypatch):
    """It wrote `text_column: "text"`, a column that its own check did not find."""
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    (tmp_path / "my.csv").write_text(write_reviews(tmp_path / "my.csv", 200).read_text().partition("\n")[2])
    done = joulelab_here("new", "compare", "my.yaml", "--data", "my.csv", "--teacher", "./my-bert", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "my.yaml").read_text()
    assert "header: false" in text and 'text_column: "1"' in text and 'label_column: "2"  # 2 classes' in text
    assert joulelab_here("run", "my.yaml", "--dry-run").returncode == 0


def test_new_compare_says_what_it_compares_and_why(tmp_path, monkeypatch):
    """A table without classes gave a comparison of language modeling without a word."""
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    (tmp_path / "ids.csv").write_text("text,id\n" + "".join(f"a text of number {n},{n}\n" for n in range(200)))
    done = joulelab_here("new", "compare", "my.yaml", "--data", "ids.csv", "--teacher", "./my-bert")
    assert done.returncode == 0, done.stderr
    assert "Masked language modeling, because no column of ids.csv has classes." in done.stderr.splitlines()[0]


@pytest.mark.parametrize("kind", ["chats", "squad", "text"])
def test_new_compare_picks_the_pipeline_by_data_and_teacher(tmp_path, monkeypatch, llama, kind):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    data, teacher, pipeline = {
        "chats": (lambda: chats(tmp_path / "c.jsonl", range(120)), llama, "pipeline: kd"),
        "squad": (lambda: squad(tmp_path / "q.json", 60), "./my-bert", "pipeline: squad"),
        "text": (lambda: (write_reviews(tmp_path / "t.csv", 90).rename(tmp_path / "t.txt")).name, "./my-bert",
                 "pipeline: distilbert"),
    }[kind]  # fmt: skip
    done = joulelab_here("new", "compare", "my.yaml", "--data", data(), "--teacher", teacher)
    assert done.returncode == 0, done.stderr
    settings = joulelab_here("run", "my.yaml", "--dry-run")
    assert settings.returncode == 0, settings.stderr
    assert pipeline in settings.stdout
    assert "sample:" not in settings.stdout.replace("do_sample:", "")


def test_new_compare_refuses_what_would_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "my-bert")
    (tmp_path / "one.csv").write_text("text,label\n" + "\n".join(f"text {n},same" for n in range(20)))
    done = joulelab_here("new", "compare", "my.yaml", "--data", "one.csv", "--teacher", "./my-bert")
    assert done.returncode == 2 and "has 1 class" in done.stderr
    assert not (tmp_path / "my.yaml").exists()
    missing = joulelab_here("new", "compare", "my.yaml", "--data", "none.csv", "--teacher", "./my-bert")
    assert missing.returncode == 2 and "there is no file or folder" in missing.stderr
