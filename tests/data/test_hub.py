"""Datasets by hub id, read by the hub's real clients from a server that speaks its protocol: no network is needed."""

import json
import os
import subprocess
import sys

import pytest
import small_tokenizers
import stand_in_hub

from joulelab.data.chat.encoding import DocumentStore

pytest.importorskip("datasets")

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
