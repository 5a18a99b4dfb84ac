"""Which chat template a run uses, and that data of different templates are kept apart."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from joulelab.cli.main import app
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
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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


def calling(row):
    call = {"type": "function", "function": {"name": "w1", "arguments": {"w2": f"w{row % 24}"}}}
    question = {"role": "user", "content": f"w{row % 24} w{row // 24}"}
    return {"messages": [question, {"role": "assistant", "tool_calls": [call]}], "tools": [call]}


@pytest.mark.parametrize(
    ("pipeline", "template", "refused"),
    [
        ("sft-tiny", "", "the chat template does not render tool calls"),
        ("synthetic-tiny", TOOLS, "has tools or tool calls"),
        ("sft-tiny", TOOLS, None),
    ],
)
def test_tool_calls_are_trained_on_or_refused_before_a_run_starts(
    lab, tmp_path, monkeypatch, pipeline, template, refused
):
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path / "runs"))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(calling(row)) + "\n" for row in range(120)))
    (tmp_path / "tools.jinja").write_text(TOOLS)
    settings = [f"data.source={tmp_path}/chats.jsonl", f"teacher.model={lab.teacher}", "data.tokenizer=null"]
    settings += ["student.size=nano", "quality.answers=null", "data.held_out=4", "until=data"]
    settings += [f"data.template={tmp_path}/tools.jinja"] if template else []
    if pipeline == "synthetic-tiny":
        settings[-2 if template else -1] = "until=teacher"
    done = CliRunner().invoke(app, ["run", pipeline, *settings])
    made = list((tmp_path / "runs").glob("*/artifacts/data/train"))
    if refused is not None:
        assert refused in str(done.exception)
        assert done.exception.exit_code == 2
        assert not (tmp_path / "runs").exists()
    else:
        assert done.exit_code == 0
        document = DocumentStore.open(made[0]).document(0)
        assert document.trained_count > 1  # the call, and the end of the turn
