import json
from collections import Counter

import chat_tokenizers as made
import pytest

from joulelab.data.chat.conversations import rows_of
from joulelab.data.chat.datasets import prepare_store, preset, write_rows
from joulelab.data.chat.encoding import DocumentStore
from joulelab.errors import ConfigError


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(*words):
    roles = ("user", "assistant") * len(words)
    return {"messages": [{"role": role, "content": word} for role, word in zip(roles, words, strict=False)]}


def trained_text(tokenizer, store):
    found = [store.document(number) for number in range(len(store))]
    return [tokenizer.decode(document.ids[document.trained]) for document in found]


def test_tulu_rows_become_a_store_that_states_what_became_of_them(tmp_path):
    tokenizer = made.qwen()
    rows = [talk("Hello", "one", "two", "three"), talk("nobody answers"), talk("one " * 200, "cut away")]
    source = lines(tmp_path / "tulu.jsonl", rows)
    settings = preset("tulu-3", source=source, split=None, max_tokens=100)
    store = prepare_store(tmp_path / "store", tokenizer, "mine", settings)
    assert trained_text(tokenizer, store) == ["one<|im_end|>three<|im_end|>"]
    output_text = DocumentStore.open(tmp_path / "store").attributes
    assert output_text["rows"] == {"conversations": 2, "cut at max_tokens": 1}
    assert output_text["dropped"] == {"no assistant answer": 1}
    assert output_text["documents_without_trained_tokens"] == 1
    assert (output_text["template"], output_text["tokenizer"], output_text["settings"]["source"]) == (
        "tokenizer",
        "mine",
        source,
    )
    assert len(output_text["tokenizer_sha256"]) == len(output_text["template_sha256"]) == 64


def test_codeforces_teaches_the_program_and_openr1_the_correct_answer(tmp_path):
    tokenizer = made.without_template()
    program = "<think>draft</think>So:\n```cpp\nmain()\n```\n"
    source = lines(tmp_path / "code.jsonl", [{"prompt": "Hello", "generation": program, "finish_reason": "stop"}])
    settings = preset("codeforces-cots", source=source, split=None)
    store = prepare_store(tmp_path / "code", tokenizer, "mine", settings)
    assert trained_text(tokenizer, store) == ["```cpp\nmain()\n```<|im_end|>"]
    assert store.attributes["template"].startswith("ChatML default")
    math = {"problem": "one?", "generations": ["three", "two"], "correctness_math_verify": [False, True]}
    settings = preset("openr1-math", source=lines(tmp_path / "math.jsonl", [math]), split=None)
    store = prepare_store(tmp_path / "math", tokenizer, "mine", settings)
    assert trained_text(tokenizer, store) == ["two<|im_end|>"]


def test_conversations_that_a_template_refuses_are_counted_and_a_set_of_them_is_an_error(tmp_path):
    tokenizer = made.gemma()
    good = talk("Hello", "one")["messages"]
    bad = [{"role": "system", "content": "x"}, *good]
    store = write_rows(tmp_path / "some", tokenizer, [good, bad, "two"], tokenizer_name="mine")
    assert trained_text(tokenizer, store) == [
        "one<end_of_turn>",
        tokenizer.decode(tokenizer("two").input_ids[1:]) + "<eos>",
    ]
    assert store.attributes["dropped"] == {"the chat template refused it": 1}
    with pytest.raises(ConfigError, match="refuses a conversation with the turns system, user, assistant"):
        write_rows(tmp_path / "none", tokenizer, [bad, bad], tokenizer_name="mine")


def test_nothing_to_train_on_is_an_error_and_leaves_no_store(tmp_path):
    with pytest.raises(ConfigError, match="none of 1 documents has a token to train on"):
        write_rows(tmp_path / "store", made.qwen(), [[{"role": "user", "content": "Hi"}]], tokenizer_name="mine")
    assert not (tmp_path / "store").exists()
    with pytest.raises(ConfigError, match=r"no row to train on \(no answer: 7\)"):
        write_rows(tmp_path / "store", made.qwen(), [], tokenizer_name="mine", dropped=Counter({"no answer": 7}))


@pytest.mark.samples
def test_the_sample_reviews_are_texts_or_questions_and_the_same_ones_are_held_out():
    texts = list(rows_of("sample:reviews", split="test", subset="short"))
    chats = list(rows_of("sample:reviews", split="test", subset="short", form="chat"))
    assert len(texts) == len(chats) > 1_000
    for text, (requested, answered) in zip(texts[:50], chats, strict=False):
        assert requested["content"].split(": ", 1)[1].split() + answered["content"].split() == text.split() or (
            len(text.split()) <= 6
        )
