"""Datasets by hub id, read by the hub's real clients from a server that speaks its protocol: no network is needed."""

import json
import os
import subprocess
import sys

import pytest
import small_tokenizers
import stand_in_hub

pytest.importorskip("datasets")

COMMANDS = """
import json, sys
from typer.testing import CliRunner
from joulelab.cli.main import app
for line in sys.stdin:
    done = CliRunner().invoke(app, line.split())
    sys.__stdout__.write(json.dumps([done.exit_code, str(done.exception)]) + "\\n")
"""


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub():
    texts = lines({"text": f"document {number} speaks of birds"} for number in range(50))
    reviews = lines({"label": n % 2, "title": f"title {n}", "content": f"content {n} of a review"} for n in range(200))
    server = stand_in_hub.serve(
        {"birds/texts": {"data/train.jsonl": texts}, "birds/reviews": {"data/train.jsonl": reviews}}
    )
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_dump_and_reviews_come_from_a_hub_id(hub, tmp_path):
    small_tokenizers.bert().save_pretrained(tmp_path / "tokenizer")
    commands = [
        "prepare dump birds/texts --split train[:30] --min_chars 5 --dump_file dump.txt",
        "prepare reviews birds/reviews --tokenizer ./tokenizer --limit-train 60 --save-format jsonl --out-dir reviews",
        "prepare dump birds/nothing --dump_file none.txt",
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(commands),
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert told[:2] == [[0, "None"], [0, "None"]]
    assert "the hub did not give the dataset 'birds/nothing'" in told[2][1]
    assert (tmp_path / "dump.txt").read_text().splitlines()[29] == "document 29 speaks of birds"
    rows = [json.loads(line) for line in (tmp_path / "reviews" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    assert all(row["labels"] == int(row["text"].split()[1].rstrip(".:")) % 2 for row in rows)
