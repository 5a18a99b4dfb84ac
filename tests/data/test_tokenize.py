"""Documents to ids: the tokenizer's own, with the family's ends, the same whoever does the work."""

import random

import numpy as np
import pytest
import small_tokenizers
import tokenizers
from small_tokenizers import SENTENCES
from tokenizers import models, normalizers, pre_tokenizers

from joulelab.data.text import dump, read_dump
from joulelab.data.tokenize import WordCache, binarize, describe, usual_workers
from joulelab.errors import ConfigError, NotFoundError
from joulelab.zoo.pretrained import load_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "tab\there and\u00a0there\u2003and\x1cthere",
    "[CLS] spelled [SEP]out[MASK]",
    "<s>spelled out</s> <|endoftext|>and<|endoftext|> so",
    "naïve cafe\u0301 !\u0301a ÅNGSTRÖM İstanbul ΟΔΟΣ",
    "東京 is not 京都。",
    "foo_bar€baz™ “quoted” — dash… 👩‍👩‍👧 emoji",
    "isn't I'LL we've''s 's '",
    "a" * 120 + " b" * 3,
    "zero\u200bwidth \u00ad soft\u0000null\ufffd",
    "$1,234.56%^&*()[]{}<>|\\~`",
]


def _random_texts(count=300):
    rng = random.Random(7)
    letters = "abcZé ß\u0301  .,'-_[]()<>|0189\t\n\u00a0东€s"
    return ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(count)]


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_the_ids_are_the_tokenizers_own_whatever_the_text(family):
    tokenizer = getattr(small_tokenizers, family)().backend_tokenizer
    cache = WordCache(tokenizer)
    assert cache.is_used
    texts = [*SENTENCES, *ODD_TEXTS, *_random_texts(), *SENTENCES]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert cache.encode(texts) == expected
    assert cache.encode(texts) == expected  # now from the cache


@pytest.mark.samples
@pytest.mark.parametrize("name", ["sample:minilm", "sample:smollm2"])
def test_the_ids_of_the_samples_are_their_own(name):
    tokenizer = tokenizers.Tokenizer.from_str(describe(load_tokenizer(name), name).definition)
    texts = [*SENTENCES, *ODD_TEXTS, *_random_texts()]
    cache = WordCache(tokenizer)
    assert cache.is_used
    assert cache.encode(texts) == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def test_an_empty_sequence_of_normalizers_is_no_normalizer():
    tokenizer = small_tokenizers.gpt2().backend_tokenizer
    tokenizer.normalizer = normalizers.Sequence([])
    assert WordCache(tokenizer).is_used
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD()])
    assert not WordCache(tokenizer).is_used


def test_a_full_cache_starts_anew(monkeypatch):
    monkeypatch.setattr("joulelab.data.tokenize.MOST_WORDS", 12)
    tokenizer = small_tokenizers.bert().backend_tokenizer
    cache = WordCache(tokenizer)
    for text in SENTENCES * 2:
        assert cache.encode([text]) == [tokenizer.encode(text, add_special_tokens=False).ids]


def test_a_tokenizer_of_another_kind_gets_whole_texts():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a b": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("|", "removed")
    cache = WordCache(tokenizer)
    assert not cache.is_used
    assert cache.encode(["a b|c"]) == [[0, 1]]


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [("bert", "[CLS]", "[SEP]"), ("roberta", "<s>", "</s>"), ("gpt2", "<|endoftext|>", "<|endoftext|>")],
)
def test_each_family_has_its_own_ends(tmp_path, family, first, last):
    tokenizer = getattr(small_tokenizers, family)()
    store = binarize(SENTENCES, tmp_path / "store", describe(tokenizer, "small", family))
    for number, text in enumerate(SENTENCES):
        inner = tokenizer.encode(text, add_special_tokens=False)
        ends = tokenizer.convert_tokens_to_ids([first, last])
        assert store.row(number).tolist() == [ends[0], *inner, ends[1]]
    assert store.vocab_size == len(tokenizer)
    assert store.specials == {name: getattr(tokenizer, f"{name}_token_id") for name in store.specials}


def test_the_bytes_are_the_same_whatever_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.data.tokenize.TEXTS_PER_BLOCK", 7)
    facts = describe(small_tokenizers.bert(), "small")
    texts = [f"{number} {SENTENCES[number % 3]}" for number in range(60)]
    one = binarize(texts, tmp_path / "one", facts, workers=1)
    two = binarize(texts, tmp_path / "two", facts, workers=2)
    assert one.sha256 == two.sha256
    assert np.array_equal(one.offsets, two.offsets)


@pytest.mark.samples
def test_documents_are_stored_whole_though_minilm_cuts_at_128(tmp_path):
    facts = describe(load_tokenizer("sample:minilm"), "sample:minilm", "bert")
    store = binarize(["word " * 300, "short"], tmp_path / "store", facts)
    assert store.lengths.tolist() == [302, 3]


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.data.tokenize.TEXTS_PER_BLOCK", 2)
    output_text = []
    facts = describe(small_tokenizers.gpt2(), "small")
    store = binarize(
        SENTENCES, tmp_path / "store", facts, tick=lambda documents, tokens: output_text.append((documents, tokens))
    )
    assert [documents for documents, _ in output_text] == [2, 3]
    assert output_text[-1][1] == store.tokens_total


@pytest.mark.parametrize(("family", "reported"), [("bert", "gpt2"), ("roberta", "bert"), ("gpt2", "roberta")])
def test_a_tokenizer_of_another_family_is_refused_with_its_own(family, reported):
    with pytest.raises(ConfigError) as refused:
        describe(getattr(small_tokenizers, family)(), "small", reported)
    assert refused.value.hint == f"use --tokenizer_type {family}"


def test_a_small_text_needs_no_other_processes():
    assert usual_workers(1_000) == 1
    assert usual_workers(None) >= 1


def test_a_dump_holds_one_document_per_line(tmp_path):
    texts = ["  a first\n\ndocument\twith  gaps ", "tiny", "\x0bx" * 200, "", "a second document"]
    counts = dump(texts, tmp_path / "deep" / "dump.txt", min_chars=5, max_chars=50)
    assert (counts.kept, counts.too_short, counts.too_long) == (2, 2, 1)
    assert (tmp_path / "deep" / "dump.txt").read_text() == "a first document with gaps\na second document\n"
    assert list(read_dump(tmp_path / "deep" / "dump.txt")) == ["a first document with gaps", "a second document"]
    assert counts.summary() == "2 documents kept, dropped 2 too short and 1 too long"


def test_unicode_line_separators_do_not_make_documents(tmp_path):
    (tmp_path / "dump.txt").write_text("one\u2028still one\x0cand still\ntwo\n", encoding="utf-8")
    assert len(list(read_dump(tmp_path / "dump.txt"))) == 2


def test_a_dump_without_documents_is_refused_and_not_left_behind(tmp_path):
    with pytest.raises(ConfigError, match="no document is left"):
        dump(["short"], tmp_path / "dump.txt", min_chars=100)
    with pytest.raises(ConfigError, match="10 to 5"):
        dump(["short"], tmp_path / "dump.txt", min_chars=10, max_chars=5)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFoundError):
        list(read_dump(tmp_path / "dump.txt"))


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "dump.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        list(read_dump(tmp_path / "dump.txt"))
