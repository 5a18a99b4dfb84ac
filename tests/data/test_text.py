"""A user's text as rows of tokens: from any file, by any slice, with what was chosen said."""

import gzip
import json
import time

import numpy as np
import pytest

from joulelab import lookup
from joulelab.data import hub, tokenize
from joulelab.data.splits import parse_split
from joulelab.data.text import open_documents
from joulelab.data.token_store import is_store
from joulelab.data.tokenize import Encoding, decode_bytes, encode_bytes, pack
from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.objective import prepare
from joulelab.zoo.registry import WorkloadRequest

TEXTS = [f"Document number {number} says naïve things." for number in range(200)]
BYTES = Encoding("bytes", encode_bytes, end_id=2, ids=512)


def write_txt(path, texts=TEXTS):
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")  # an empty line is no document
    return path


def write_jsonl(path):
    path.write_text("".join(json.dumps({"url": "u", "text": text}) + "\n" for text in TEXTS))
    return path


def write_json_list(path):
    path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    return path


def write_gzipped_lines(path):
    path.write_bytes(gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)))
    return path


def write_csv(path):
    path.write_text("id,text\n" + "".join(f'{row},"{text}"\n' for row, text in enumerate(TEXTS)), encoding="utf-8")
    return path


def write_parquet(path):
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"id": list(range(len(TEXTS))), "text": TEXTS}), path)
    return path


WRITERS = {
    "a.txt": write_txt,
    "a.jsonl": write_jsonl,
    "a.json": write_json_list,
    "a.json.gz": write_gzipped_lines,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
}


def read(path, split="train"):
    return list(open_documents(str(path)).read(parse_split(split)))


def request(path, name="gpt2", **requested):
    return WorkloadRequest(lookup.ZOO.resolve(name), "tiny", dataset=str(path), **requested)


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_its_documents(tmp_path, name):
    assert read(WRITERS[name](tmp_path / name)) == TEXTS


def test_a_slice_counts_documents(tmp_path):
    file = write_txt(tmp_path / "a.txt")
    assert read(file, "train[:100]") == TEXTS[:100]
    assert read(file, "train[10:12]") == TEXTS[10:12]
    assert read(file, "train[50%:]") == TEXTS[100:]
    assert read(file, "train[-5:]") == TEXTS[-5:]


def test_files_of_a_folder_are_distinguished_by_their_names(tmp_path):
    write_txt(tmp_path / "c4-train.00000.txt", TEXTS[:5])
    write_txt(tmp_path / "more.txt", TEXTS[5:10])
    write_txt(tmp_path / "c4-validation.txt", TEXTS[10:12])
    (tmp_path / "README.md").write_text("not text to train on")
    assert read(tmp_path) == TEXTS[:10]
    assert read(tmp_path, "validation") == TEXTS[10:12]
    with pytest.raises(NotFoundError, match=r"unknown split of .* 'test'"):
        read(tmp_path, "test")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [("a.pdf", "x", "unsupported file type"), ("a.jsonl", '{"body": "x"}', "no text column"), ("a.json", "{", "read")],
)
def test_a_file_without_text_is_explained(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        read(tmp_path / name)


def test_packed_documents_follow_each_other_with_an_end_between(tmp_path):
    line = pack(open_documents(str(write_txt(tmp_path / "a.txt"))), parse_split("train"), BYTES)
    assert line.dtype == np.uint16 and (line == 2).sum() == len(TEXTS) and line[-1] == 2
    assert decode_bytes(line) == "".join(TEXTS)


def test_a_large_text_is_kept_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JOULELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenize, "IN_MEMORY_BYTES", 10)
    documents, split = open_documents(str(write_txt(tmp_path / "a.txt"))), parse_split("train")
    first = pack(documents, split, BYTES)
    assert isinstance(first.base, np.memmap)
    unreadable = Encoding("bytes", encode=None, end_id=2, ids=512)
    np.testing.assert_array_equal(pack(documents, split, unreadable), first)
    (folder,) = (tmp_path / "cache" / "text").iterdir()
    assert is_store(folder)


def test_a_token_outside_the_models_vocabulary_is_refused(tmp_path):
    documents = open_documents(str(write_txt(tmp_path / "a.txt")))
    with pytest.raises(ConfigError, match=r"outside 0\.\.99"):
        pack(documents, parse_split("train"), Encoding("bytes", encode_bytes, end_id=2, ids=100))


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart", "reformer"])
def test_a_models_batches_come_from_the_text(tmp_path, name):
    workload = prepare(request(write_txt(tmp_path / "a.txt"), name))
    batch = workload.batches.at(0, 0)
    assert "says" in "".join(decode_bytes(row) for row in batch["input_ids"].numpy())
    assert any("as bytes" in note for note in workload.notes)
    assert workload.objective(workload.model, batch, lambda name: None).loss_sum.isfinite()


def rows_of(source):
    """Rows of 33 tokens, from which inputs have the first 32."""
    batches = [source.at(0, index)["input_ids"].numpy() for index in range(source.batches_per_epoch)]
    return {row.tobytes() for row in np.concatenate(batches)}


def test_the_last_rows_are_held_out_where_there_is_no_validation_split(tmp_path):
    noise = np.random.default_rng(0)
    texts = [noise.bytes(40).hex() for _ in range(100)]
    workload = prepare(request(write_txt(tmp_path / "a.txt", texts), batch_size=1))
    train, held_out = rows_of(workload.batches), rows_of(workload.validation)
    assert not train & held_out
    assert len(held_out) / (len(train) + len(held_out)) == pytest.approx(0.05, abs=0.01)


def test_a_validation_split_is_what_is_held_out(tmp_path):
    write_txt(tmp_path / "train.txt")
    write_txt(tmp_path / "valid.txt", ["entirely different words " * 8])
    workload = prepare(request(tmp_path, batch_size=1))
    assert "entirely" in decode_bytes(workload.validation.at(0, 0)["input_ids"].numpy().ravel())


def test_a_text_shorter_than_a_row_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"has 9 tokens; one row takes 33"):
        prepare(request(write_txt(tmp_path / "a.txt", ["too few."])))


def test_a_tokenizer_that_is_named_is_used_and_reported(tmp_path):
    folder = make_tokenizer(tmp_path / "tokenizer")
    workload = prepare(request(write_txt(tmp_path / "a.txt"), "bert", tokenizer=str(folder)))
    tokenizer, held_out = workload.notes
    assert tokenizer == f"tokenizer: {folder}"
    assert held_out.endswith("a.txt has no validation split: the last 5 % of rows are held out")
    batch = workload.batches.at(0, 0)
    assert (batch["input_ids"] == 4).any()  # its own [MASK]
    assert batch["targets"].max() < 20


def make_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Document", "number", "says", "things", ".", "naïve"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def test_a_tokenizer_too_large_for_the_model_is_refused(tmp_path):
    from joulelab.zoo.models.language_models import GPT2

    folder = make_tokenizer(tmp_path / "tokenizer")
    tiny = GPT2.sizes["tiny"]
    entry = type(GPT2)(**{**vars(GPT2), "sizes": {"tiny": type(tiny)(**{**vars(tiny), "settings": {"vocab_size": 8}})}})
    requested = WorkloadRequest(entry, "tiny", dataset=str(write_txt(tmp_path / "a.txt")), tokenizer=str(folder))
    with pytest.raises(ConfigError, match="has 11 ids, the model 8"):
        prepare(requested)


def test_without_the_hub_a_dataset_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(NotFoundError, match=r"allenai/c4.* cannot be reached"):
        prepare(request("allenai/c4"))
    assert time.monotonic() - started < 5


def test_an_address_that_never_answers_is_waited_for_briefly(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda address, patience_s: time.sleep(30))
    started = time.monotonic()
    assert not hub.reachable(patience_s=0.1)
    assert time.monotonic() - started < 2


def test_a_row_with_other_keys_is_not_taken_for_an_incomplete_file(tmp_path):
    from joulelab.infer.config import read_prompts

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "why?"}\n')
    with pytest.raises(ConfigError, match="row 1 has question, expected prompt, text, messages") as refusal:
        read_prompts(path)
    assert refusal.value.hint == "correct that row"
    path.write_text('{"prompt": "why?"}\n{"prompt": "wh')
    with pytest.raises(ConfigError, match="line 2 is not JSON") as refusal:
        read_prompts(path)
    assert refusal.value.hint == "check that the file is complete"
