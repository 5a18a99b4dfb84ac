"""`joulelab prepare`, step after step as the old scripts are used, with tokenizer and teacher made on the spot."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.data.masking import read_counts
from joulelab.data.token_store import open_store
from joulelab.errors import NotFoundError, UsageError
from joulelab.report.tables.bill_tables import find_bill
from joulelab.runs.store import load_record

sys.path.insert(0, str(Path(__file__).parents[2] / "data"))  # for small_tokenizers.py
import small_tokenizers


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with texts and a teacher, its tokenizer beside it; then dump and binarize have been run in it."""
    folder = tmp_path_factory.mktemp("prepared")
    texts = [f"{sentence}\n{number}" for number, sentence in enumerate(small_tokenizers.SENTENCES * 5)]
    lines = [json.dumps({"text": text}) for text in [*texts, "tiny", "long " * 100]]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    tokenizer = small_tokenizers.bert()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder / "small-bert")
    tokenizer.save_pretrained(folder / "small-bert")
    _prepare(folder, "dump", "texts.jsonl", "--min_chars", 10, "--max_chars", 200, "--dump_file", "data/dump.txt")
    _prepare(folder, "binarize", *_BINARIZE)
    return folder


_BINARIZE = ["--file_path", "data/dump.txt", "--tokenizer_name", "small-bert", "--dump_file", "data/text"]
_COUNT = ["--data_file", "data/text.small-bert.pickle", "--token_counts_dump", "data/counts.small-bert.pickle"]


def _prepare(folder, *words):
    """In this process: the framework is imported once and not for every command."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, ["prepare", *map(str, words), "--runs-dir", "runs"])
    if done.exception is not None:
        raise done.exception
    return done


def _last(folder):
    return load_record(max((folder / "runs").iterdir(), key=lambda run: run.stat().st_ctime))


def test_the_dump_has_a_line_for_every_document_that_was_kept(prepared):
    lines = (prepared / "data" / "dump.txt").read_text().splitlines()
    assert len(lines) == 15
    assert lines[0] == f"{small_tokenizers.SENTENCES[0]} 0"


def test_each_step_is_a_run_with_a_stage_and_the_old_commands_follow_one_another(prepared):
    done = _prepare(prepared, "token-counts", *_COUNT, "--vocab_size", 150)
    assert "ids occur" in done.stderr
    store = open_store(prepared / "data" / "text.small-bert")
    counts = read_counts(prepared / "data" / "counts.small-bert.pickle")
    assert counts.sum() == store.tokens_total
    assert len(counts) == 150
    record = _last(prepared)
    assert {"data.token_counts", "data.copy"} <= {stage.name for stage in record.stages}
    assert record.results["tokens"].value == store.tokens_total


def test_the_lineage_leads_back_through_every_step(prepared):
    _prepare(prepared, "token-counts", *_COUNT[:3], "data/lineage.json")
    bill = prepared / "runs" / _last(prepared).run_id / "artifacts" / "token-counts" / "bill.json"
    stages = {ancestor["name"]: ancestor["stages"] for ancestor in json.loads(bill.read_text())["ancestry"]}
    assert stages["dump"] == ["data.dump"]
    assert stages["binarized"] == ["data.binarize"]
    assert isinstance(json.loads((prepared / "data" / "lineage.json").read_text()), list)


def test_a_student_is_cut_out_of_its_teacher(prepared):
    words = "--model_type bert --model_name small-bert --layers 0,3 --vocab_transform --dump_checkpoint data/student"
    _prepare(prepared, "extract-student", *words.split())
    student = transformers.AutoModelForMaskedLM.from_pretrained(prepared / "data" / "student")
    assert student.config.model_type == "distilbert"
    assert student.config.n_layers == 2
    assert (prepared / "data" / "student" / "tokenizer.json").exists()
    assert not (prepared / "data" / "student" / "bill.json").exists()


def test_what_was_delivered_has_its_bill_until_it_is_changed(prepared):
    counted = prepared / "data" / "billed.json"
    _prepare(prepared, "token-counts", *_COUNT[:3], "data/billed.json")
    bill = find_bill(prepared / "runs", str(counted))
    assert {"dump", "binarized"} <= {line.name for line in bill.inherited}
    counted.write_text("[1]")
    with pytest.raises(NotFoundError):
        find_bill(prepared / "runs", str(counted))


def test_what_is_there_is_replaced_only_with_force(prepared):
    with pytest.raises(UsageError, match="already exists"):
        _prepare(prepared, "binarize", *_BINARIZE)
    _prepare(prepared, "binarize", *_BINARIZE, "--force")


def test_force_is_not_for_a_folder_of_the_users(prepared):
    (prepared / "data" / "mine").mkdir()
    (prepared / "data" / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="other content"):
        _prepare(prepared, "extract-student", "--model_name", "small-bert", "--dump_checkpoint", "data/mine", "--force")
    assert (prepared / "data" / "mine" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dump nowhere.txt --dump_file o", "there is no file or folder"),
        ("dump texts.jsonl --dump_file o --min_chars 9 --max_chars 5", "no document has 9 to 5"),
        ("dump texts.jsonl --dump_file o --min_chars 9999", "no document is left"),
        ("binarize --file_path nowhere.txt --tokenizer_name small-bert --dump_file o", "there is no file"),
        ("binarize --file_path empty.txt --tokenizer_name small-bert --dump_file o", "is empty"),
        ("binarize --file_path blank.txt --tokenizer_name small-bert --dump_file o", "no rows"),
        ("binarize --file_path texts.jsonl --tokenizer_name small-bert --dump_file o", "joulelab prepare dump"),
        ("binarize --file_path data/dump.txt --tokenizer_type xlm --tokenizer_name small-bert --dump_file o", "gpt2"),
        (
            "binarize --file_path data/dump.txt --tokenizer_type gpt2 --tokenizer_name small-bert --dump_file o",
            "use --tokenizer_type bert",
        ),
        ("token-counts --data_file old.pickle --token_counts_dump o.npy", "joulelab prepare binarize"),
        (
            "token-counts --data_file data/text.small-bert --token_counts_dump o.npy --vocab_size 9",
            "omit --vocab_size",
        ),
        ("extract-student --model_name small-bert --layers 0,9 --dump_checkpoint o", "layers 0..3"),
        ("extract-student --model_name small-bert --layers one --dump_checkpoint o", "0,2,4,7,9,11"),
        ("extract-student --model_type gpt2 --model_name small-bert --dump_checkpoint o", "of type 'bert'"),
    ],
)
def test_usage_errors_have_a_hint(prepared, words, message):
    (prepared / "empty.txt").touch()
    (prepared / "blank.txt").write_text("\n \n")
    (prepared / "old.pickle").write_bytes(b"\x80\x04]q\x00.")
    with pytest.raises(UsageError) as refused:
        _prepare(prepared, *words.split())
    assert refused.value.exit_code == 2
    assert message in f"{refused.value.message} {refused.value.hint}"
    assert not [path for path in prepared.iterdir() if path.name.startswith("o.") or path.name == "o"]
