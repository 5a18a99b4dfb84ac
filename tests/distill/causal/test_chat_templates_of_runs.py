"""Which chat template a run uses, and that data of different templates are kept apart."""

import json
import shutil

import pytest

from joulelab.data.chat.encoding import DocumentStore
from joulelab.errors import ConfigError

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
FORGETFUL = (  # it drops the words of earlier answers when a turn is added, as some drop their thoughts
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def documents(paths):
    return DocumentStore.open(paths.folder / "artifacts" / "data" / "train")


def test_a_model_with_the_same_vocabulary_and_another_template_gets_its_own_data(lab, tmp_path):
    other = shutil.copytree(lab.teacher, tmp_path / "other")
    (other / "chat_template.jinja").write_text(MARKED)
    store = tmp_path / "runs"
    first = documents(lab.run(store, "sft", until="data")[1])
    second = documents(lab.run(store, "sft", until="data", teacher={"model": str(other)})[1])
    assert first.attributes["template_sha256"] != second.attributes["template_sha256"]
    assert second.tokens_total == first.tokens_total - 2 * len(first)  # no new lines behind the turns


def test_a_user_template_is_used_and_saved_with_the_student(lab, tmp_path):
    (tmp_path / "mine.jinja").write_text(MARKED)
    changes = {"data": {"template": str(tmp_path / "mine.jinja")}, "budget": {"tokens": 200}}
    _, paths = lab.run(tmp_path / "runs", "sft", **changes)
    assert documents(paths).attributes["template"] == "tokenizer"
    assert "generation" in (paths.folder / "artifacts" / "final_model" / "chat_template.jinja").read_text()


def test_a_template_that_rewrites_earlier_turns_is_refused_with_a_hint(lab, tmp_path):
    turns = [{"role": role, "content": f"w{at}"} for at, role in enumerate(("user", "assistant") * 2)]
    rows = [[{**turns[0], "content": f"w{row % 24} w{row // 24}"}, *turns[1:]] for row in range(120)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    data = {"source": str(tmp_path / "chats.jsonl"), "template": str(tmp_path / "forgetful.jinja")}
    with pytest.raises(ConfigError, match="rewrites earlier turns") as refused:
        lab.run(tmp_path / "runs", "sft", until="data", data=data)
    assert "data.last_answer_only=true" in refused.value.hint
    _, paths = lab.run(tmp_path / "runs", "sft", until="data", data={**data, "last_answer_only": True})
    document = documents(paths).document(0)
    assert document.trained_count == 2  # the word of the last answer, and the end of its turn
