"""Only the assistant's tokens are targets of the loss, and a store returns the documents that were written."""

import chat_tokenizers as made
import numpy as np
import pytest

from joulelab.data.chat.conversations import ToolConversation
from joulelab.data.chat.encoding import (
    DocumentStore,
    EncodedDocument,
    encode_conversation,
    encode_prompt,
    encode_rows,
    tokenizer_sha256,
    write_documents,
)
from joulelab.data.chat.packing import pack
from joulelab.data.chat.templates import ChatTemplate, template_of
from joulelab.errors import ConfigError, NotFoundError

TURNS = [
    ("user", "Hello there!"),
    ("assistant", "How are you?"),
    ("user", "Fine,\n\nthanks."),
    ("assistant", "one two"),
]
TALK = [{"role": role, "content": content} for role, content in TURNS]

GOLDEN = {
    made.llama: "<|begin|><|start_header_id|>user<|end_header_id|>\n\nHello there!<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«How are you?<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nFine,\n\nthanks.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«one two<|eot_id|>»",
    made.qwen: "<|im_start|>system\nYou are Q.<|im_end|>\n<|im_start|>user\nHello there!<|im_end|>\n"
    "<|im_start|>assistant\n«How are you?<|im_end|>»\n<|im_start|>user\nFine,\n\nthanks.<|im_end|>\n"
    "<|im_start|>assistant\n«one two<|im_end|>»\n",
    made.gemma: "<bos><start_of_turn>user\nHello there!<end_of_turn>\n"
    "<start_of_turn>model\n«How are you?<end_of_turn>»\n<start_of_turn>user\nFine,\n\nthanks.<end_of_turn>\n"
    "<start_of_turn>model\n«one two<end_of_turn>»\n",
    made.olmo: "<|endoftext|><|user|>\nHello there!\n<|assistant|>\n«How are you?<|endoftext|>»\n"
    "<|user|>\nFine,\n\nthanks.\n<|assistant|>\n«one two<|endoftext|>»",
    made.smollm: "<|im_start|>system\nYou are a small model.<|im_end|>\n<|im_start|>user\nHello there!<|im_end|>\n"
    "<|im_start|>assistant\n«How are you?<|im_end|>»\n<|im_start|>user\nFine,\n\nthanks.<|im_end|>\n"
    "<|im_start|>assistant\n«one two<|im_end|>»\n",
    made.without_template: "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n«How are you?<|im_end|>»\n"
    "<|im_start|>user\nFine,\n\nthanks.<|im_end|>\n<|im_start|>assistant\n«one two<|im_end|>»\n",
}


def marked(tokenizer, document):
    """The text, with « and » around every run of trained tokens."""
    text, runs = "", []
    for number, trained in zip(document.ids.tolist(), document.trained.tolist(), strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(number)
    for trained, ids in runs:
        words = tokenizer.decode(ids)
        text += f"«{words}»" if trained else words
    return text


@pytest.mark.parametrize("make", GOLDEN, ids=lambda make: make.__name__)
def test_only_what_the_assistant_states_is_trained_with_its_end_of_turn(make):
    tokenizer = make()
    assert marked(tokenizer, encode_conversation(tokenizer, TALK)) == GOLDEN[make]


def test_a_marked_template_gives_the_same_as_the_one_without_marks():
    tokenizer = made.qwen()
    marks = made.QWEN.replace(
        "{{ turn.content }}",
        "{% if turn.role == 'assistant' %}{% generation %}{{ turn.content }}{% endgeneration %}"
        "{% else %}{{ turn.content }}{% endif %}",
    )
    template = template_of(tokenizer, marks)
    assert template.has_markers
    # the mark ends before <|im_end|>, which is trained all the same: a student has to learn to stop
    assert marked(tokenizer, encode_conversation(tokenizer, TALK, template=template)) == GOLDEN[made.qwen]


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_answer_is_enough():
    tokenizer = made.qwen()
    thoughts = {"user": "", "assistant": "<think>hm</think>"}
    thoughtful = [dict(turn, content=thoughts[turn["role"]] + turn["content"]) for turn in TALK]
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        encode_conversation(tokenizer, thoughtful, template=ChatTemplate(made.THOUGHTLESS, "given"))
    last = ChatTemplate(made.THOUGHTLESS, "given", last_answer_only=True)
    assert marked(tokenizer, encode_conversation(tokenizer, thoughtful, template=last)).endswith(
        "assistant\nHow are you?<|im_end|>\n<|im_start|>user\nFine,\n\nthanks.<|im_end|>\n"
        "<|im_start|>assistant\n«<think>hm</think>one two<|im_end|>»\n"
    )


def test_a_prompt_that_begins_the_answer_itself_is_refused():
    tokenizer = made.qwen()
    template = ChatTemplate(made.QWEN.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), "given")
    with pytest.raises(ConfigError, match="answers do not begin there"):
        encode_conversation(tokenizer, TALK[:2], template=template)


def test_what_a_template_refuses_is_reported_as_our_error():
    with pytest.raises(ConfigError, match="no system turns here"):
        encode_conversation(made.gemma(), [{"role": "system", "content": "x"}, *TALK])


def test_a_tokenizer_that_puts_a_space_before_every_text_keeps_its_ids_and_is_cut_rightly():
    tokenizer = made.leading_space(
        "{% for turn in messages %}{% if turn.role == 'user' %}[{{ turn.content }}]{% else %}{{ turn.content }}</s>"
        "{% endif %}{% endfor %}",
        "</s>",
        "[",
        "]",
        eos="</s>",
    )
    assert "▁How" in tokenizer.tokenize("How are you?")
    document = encode_conversation(tokenizer, TALK)
    assert document.ids.tolist() == tokenizer("[Hello there!]How are you?</s>[Fine,\n\nthanks.]one two</s>").input_ids
    trained = [tokenizer.decode([number]) for number in document.ids[document.trained]]
    assert "".join(trained).replace(" ", "") == "Howareyou?</s>onetwo</s>"


def test_no_day_of_the_calendar_gets_into_the_ids():
    tokenizer = made.qwen()
    template = ChatTemplate("Today is {{ strftime_now('%d %B %Y') }}.\n" + made.QWEN, "given")
    assert "Today is 26 Jul 2024.\n" in marked(tokenizer, encode_conversation(tokenizer, TALK, template=template))


def test_a_prompt_is_read_in_training_as_it_is_when_the_model_answers():
    tokenizer = made.llama()  # makes other tokens of the two new lines before an answer than of those before nothing
    document = encode_conversation(tokenizer, TALK[:2])
    prompt = encode_prompt(tokenizer, TALK[:1])
    assert document.ids[: len(prompt)].tolist() == prompt
    assert document.trained.tolist() == [False] * len(prompt) + [True] * (len(document) - len(prompt))


def test_plain_text_is_trained_whole_with_one_end_even_where_padding_is_the_end():
    tokenizer = made.olmo()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    document = encode_rows(tokenizer, ["one two three"])[0]
    assert document.ids.tolist() == [*tokenizer("one two three").input_ids, tokenizer.eos_token_id]
    assert document.trained.tolist() == [False] + [True] * (len(document) - 1)
    assert len(encode_rows(tokenizer, ["one two three"])[0].cut(3)) == 3


def test_the_hash_of_a_tokenizer_is_its_content_and_not_how_it_was_last_called():
    tokenizer = made.qwen()
    before = tokenizer_sha256(tokenizer)
    tokenizer(["one", "two three"], padding=True, truncation=True, max_length=2)
    assert tokenizer_sha256(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_sha256(tokenizer) != before


def documents(count=30, seed=0):
    drawn = np.random.default_rng(seed)
    for length in drawn.integers(2, 15, size=count):
        trained = drawn.random(length) < 0.5
        trained[-1] = True
        yield EncodedDocument(drawn.integers(0, 300, size=length), trained)


def write(folder, found, **notes):
    return write_documents(folder, found, vocab_size=300, pad_id=2, tokenizer="small", notes=notes)


def test_what_is_written_is_read(tmp_path):
    store = write(tmp_path / "store", documents(), template="none")
    assert len(store) == 30
    for number, document in enumerate(documents()):
        assert store.document(number).ids.tolist() == document.ids.tolist()
        assert store.document(number).trained.tolist() == document.trained.tolist()
    assert store.tokens_total == sum(map(len, documents()))
    assert store.trained_count == sum(document.trained_count for document in documents())
    assert (store.pad_id, store.attributes["template"], store.attributes["tokenizer"]) == (2, "none", "small")
    store.verify()
    in_memory = pack(list(documents()), 16, seed=0)
    assert pack(store, 16, seed=0).row(1).ids[:12].tolist() == in_memory.row(1).ids[:12].tolist()


def test_documents_that_teach_nothing_are_left_out_and_counted(tmp_path):
    silent = EncodedDocument(np.arange(4), np.array([True, False, False, False]))
    store = write(tmp_path / "store", [silent, *documents(3), silent])
    assert (len(store), store.attributes["documents_without_trained_tokens"]) == (3, 2)


def test_a_set_without_a_trained_token_is_refused(tmp_path):
    silent = EncodedDocument(np.arange(4), np.zeros(4, bool))
    with pytest.raises(ConfigError, match="none of 2 documents has a token to train on"):
        write(tmp_path / "store", [silent, silent])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_documents_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="no complete document store"):
        DocumentStore.open(tmp_path)


CALLING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for turn in messages %}"
    "<|im_start|>{{ turn.role }}\n{% if turn.reasoning_content %}<think>{{ turn.reasoning_content }}</think>{% endif %}"
    "{{ turn.content }}{% for call in turn.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALLING = ToolConversation(
    [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It says rain."},
    ],
    [TOOL],
)


def test_a_call_is_a_target_of_the_loss_and_its_result_is_not():
    tokenizer = made.qwen()
    document = encode_conversation(tokenizer, CALLING, template=ChatTemplate(CALLING_TEMPLATE, "given"))
    text = tokenizer.decode(document.ids)
    assert '"name": "weather", "parameters"' in text
    trained = tokenizer.decode(document.ids[document.trained])
    assert trained == (
        '<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call><|im_end|>'
        "<think>It says rain.</think>Yes.<|im_end|>"
    )


@pytest.mark.parametrize(
    ("talk", "lost"),
    [
        (ToolConversation(CALLING[:2], []), "tool calls .'weather'"),
        (ToolConversation(TALK, [TOOL]), "tools .'weather'"),
        ([CALLING[0], CALLING[3]], "reasoning_content .'It says rain"),
    ],
)
def test_a_template_that_drops_calls_tools_or_reasoning_is_refused(talk, lost):
    """Without the call the turn is empty, and a student learns to stop instead of calling."""
    with pytest.raises(ConfigError, match=f"does not render {lost}") as caught:
        encode_conversation(made.qwen(), talk)
    assert "data.template=FILE" in caught.value.hint
