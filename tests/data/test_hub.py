"""Datasets by hub id, read by the hub's real clients from a server that speaks its protocol: no network is needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_tokenizers
import stand_in_hub

from joulelab.data.chat.encoding import DocumentStore

pytest.importorskip("datasets")
sys.path.append(str(Path(__file__).parents[1] / "distill" / "causal"))  # its tiny teacher
import tiny_llama

COMMANDS = """
import json, sys
from typer.testing import CliRunner
from joulelab.cli.main import app
for line in sys.stdin:
    done = CliRunner().invoke(app, line.split())
    sys.__stdout__.write(json.dumps([done.exit_code, str(done.exception)]) + "\\n")
"""
# data script -> its hub id, its configuration there, what an answer is and what is taught of it
PUBLISHED = {
    "tulu": ("allenai/tulu-3-sft-mixture", "default", "said", "said"),
    "codeforces": (
        "open-r1/codeforces-cots", "solutions_py_decontaminated",
        "<think>hm</think> So:\n```python\nprint(1)\n```", "```python\nprint(1)\n```",
    ),
    "openr1_math": ("open-r1/OpenR1-Math-220k", "default", "It is 4.", "It is 4."),
}  # fmt: skip


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def published(config, answer):
    """Conversations under the configuration that the preset asks for, and others beside it that it must not take."""
    files = "  data_files:\n  - split: train\n    path: {0}/train.jsonl\n"
    card = "".join(f"- config_name: {name}\n{files.format(name)}" for name in (config, "other"))
    reported = {"role": "assistant", "content": answer}
    talks = lines({"messages": [{"role": "user", "content": f"question {n}"}, reported]} for n in range(12))
    return {
        "README.md": f"---\nconfigs:\n{card}---\n".encode(),
        f"{config}/train.jsonl": talks,
        "other/train.jsonl": lines([{"text": "not this"}]),
    }


@pytest.fixture
def hub():
    texts = lines({"text": f"document {number} speaks of birds"} for number in range(50))
    reviews = lines({"label": n % 2, "title": f"title {n}", "content": f"content {n} of a review"} for n in range(200))
    server = stand_in_hub.serve(
        {
            "birds/texts": {"data/train.jsonl": texts},
            "birds/reviews": {"data/train.jsonl": reviews},
            **{name: published(config, answer) for name, config, answer, _ in PUBLISHED.values()},
        }
    )
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.slow
def test_texts_reviews_and_published_conversations_come_from_a_hub_id(hub, tmp_path):
    """In one process: importing the hub's clients takes longer than all that they are asked."""
    small_tokenizers.bert().save_pretrained(tmp_path / "tokenizer")
    tokenizer = small_tokenizers.gpt2()
    tokenizer.save_pretrained(tmp_path / "gpt2")
    local = "data.tokenizer=./gpt2 teacher.model=./gpt2 quality.answers=null data.held_out=2"
    commands = [
        "prepare dump birds/texts --split train[:30] --min_chars 5 --dump_file dump.txt",
        "prepare reviews birds/reviews --tokenizer ./tokenizer --limit-train 60 --save-format jsonl --out-dir reviews",
        *(f"run kd-tiny --data-script {name}_preprocess_dataset {local}" for name in PUBLISHED),
        "prepare dump birds/nothing --dump_file none.txt",
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(commands),
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "JOULELAB_RUNS": "runs"},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *output_text, missing = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert output_text == [[0, "None"]] * 5
    assert "the hub did not return the dataset 'birds/nothing'" in missing[1]
    assert (tmp_path / "dump.txt").read_text().splitlines()[29] == "document 29 speaks of birds"
    rows = [json.loads(line) for line in (tmp_path / "reviews" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    assert all(row["labels"] == int(row["text"].split()[1].rstrip(".:")) % 2 for row in rows)
    for name, (_, _, _, taught) in PUBLISHED.items():
        (folder,) = (tmp_path / "runs").glob(f"kd-tiny-{name}_*/artifacts/data")
        store = DocumentStore.open(folder / "train")
        document = store.document(0)
        assert len(store) > 3
        assert tokenizer.decode(document.ids[document.trained]).startswith(taught)


# Models: two revisions of one teacher.

OLD, NEW = "b" * 40, "c" * 40


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def two_teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    for steps, name in ((60, "old"), (80, "new")):
        tiny_llama.write_teacher(folder / name, steps)
    tiny_llama.write_chats(folder / "chats.jsonl", rows=60)
    return folder


@pytest.fixture
def model_hub(two_teachers):
    """`main` is at the old commit; a test may move it."""
    old, new = ((OLD, files_of(two_teachers / "old")), (NEW, files_of(two_teachers / "new")))
    revisions = {"main": old, "first": old, "v2": new}
    server = stand_in_hub.serve({}, {"birds/teacher": revisions})
    server.revisions = revisions
    yield server
    server.shutdown()


def run_commands(commands, folder, server, **environment):
    """(exit code, error) of each command, all in one process."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(commands),
        env={
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(folder / "home"),
            "JOULELAB_RUNS": "runs",
            **environment,
        },
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def kd(teacher, folder, *more):
    return " ".join(
        ["run kd-tiny", f"data.source={folder}/chats.jsonl", f"teacher.model={teacher}", "data.tokenizer=null",
         "data.held_out=4", "data.max_tokens=32", "data.row_length=64", "student.size=nano", "budget.tokens=200",
         "quality.answers=null", "until=teacher", *more]
    )  # fmt: skip


def bills(folder, name):
    """Of each run in the order of their names: the bill of its artifact, None where it reused another run's."""
    runs = sorted((folder / "runs").glob("kd-*"))
    paths = [run / "artifacts" / name / "bill.json" for run in runs]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


@pytest.mark.slow
def test_a_changed_teacher_on_the_hub_is_asked_again_and_the_same_one_is_reused(model_hub, two_teachers, tmp_path):
    first = run_commands([kd("birds/teacher", two_teachers)] * 2, tmp_path, model_hub)
    assert first == [[0, "None"]] * 2
    model_hub.revisions["main"] = model_hub.revisions["v2"]
    second = run_commands(
        [kd("birds/teacher", two_teachers), kd("birds/teacher@v2", two_teachers)], tmp_path, model_hub
    )
    third = run_commands([kd(f"birds/teacher@{OLD}", two_teachers)], tmp_path, model_hub)
    assert second + third == [[0, "None"]] * 3
    old, reused, new, by_tag, by_commit = bills(tmp_path, "logits")
    assert [reused, by_tag, by_commit] == [None] * 3
    assert old["artifact"]["key"] != new["artifact"]["key"]
    for bill, commit in ((old, OLD), (new, NEW)):
        assert f"external:birds/teacher@{commit}" in bill["artifact"]["parents"]
        assert bill["inputs"]["voice"] == f"birds/teacher@{commit}"
    manifest = json.loads(next((tmp_path / "runs").glob("*/artifacts/logits/manifest.json")).read_text())
    assert manifest["teacher_sha256"].startswith("birds/teacher@")


@pytest.mark.slow
def test_offline_a_name_is_the_commit_in_the_cache_and_an_unknown_revision_lists_the_known_ones(
    model_hub, two_teachers, tmp_path
):
    here = run_commands(
        [kd("birds/teacher", two_teachers), kd("birds/teacher@v3", two_teachers), kd("birds/none", two_teachers)],
        tmp_path, model_hub,
    )  # fmt: skip
    assert here[0] == [0, "None"]
    assert "unknown revision of birds/teacher 'v3'; known: first, main, v2" in here[1][1]
    assert "the hub did not return the model 'birds/none'" in here[2][1]
    model_hub.revisions["main"] = model_hub.revisions["v2"]
    offline = run_commands(
        [kd("birds/teacher", two_teachers), kd("birds/teacher@v2", two_teachers)],
        tmp_path, model_hub, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert offline[0] == [0, "None"]
    assert bills(tmp_path, "logits")[1] is None  # the old commit is in the cache, and its logits are reused
    assert "birds/teacher@v2" in offline[1][1] and "cannot be reached" in offline[1][1]
    assert len(list((tmp_path / "runs").glob("kd-*"))) == 2  # refused names leave no run


@pytest.mark.slow
def test_a_resumed_run_keeps_the_commit_that_it_started_with(model_hub, two_teachers, tmp_path):
    assert run_commands([kd("birds/teacher", two_teachers)], tmp_path, model_hub) == [[0, "None"]]
    (run,) = (tmp_path / "runs").glob("kd-*")
    shutil.rmtree(run / "artifacts" / "logits")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "failed"}))
    model_hub.revisions["main"] = model_hub.revisions["v2"]
    assert run_commands([f"run --resume {run}"], tmp_path, model_hub) == [[0, "None"]]
    (again,) = bills(tmp_path, "logits")
    assert f"external:birds/teacher@{OLD}" in again["artifact"]["parents"]
