"""Published schemas as they come in files, what is dropped of them, and what is cleaned out of answers."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet
import pytest

from joulelab.data.chat.conversations import (
    check_prompts,
    cleaned,
    code_only,
    prompt_of,
    prompts_of,
    row_id,
    rows_of,
    strip_think_blocks,
)
from joulelab.data.chat.datasets import preset
from joulelab.data.splits import split_of
from joulelab.errors import ConfigError, NotFoundError

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
TULU = {"id": "a", "messages": [ASKED, ANSWERED], "source": "math"}
CODEFORCES = {"id": "1", "prompt": "2 + 2?", "generation": "4", "finish_reason": "stop", "messages": [ASKED, ANSWERED]}
OPENR1 = {
    "problem": "2 + 2?",
    "answer": "4",
    "generations": ["5", "4 is it", "4", "4 and"],
    "is_reasoning_complete": [True, False, True, True],
    "correctness_math_verify": [False, True, True, True],
    "correctness_llama": None,
    "finish_reasons": ["stop", "length", "stop", "stop"],
    "messages": [ASKED, {"role": "assistant", "content": "5"}],
}
SHAREGPT = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
PROMPTED = {"prompt": "2 + 2?", "response": "4"}


def parquet(path, rows):
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("record", [TULU, CODEFORCES, OPENR1, SHAREGPT, PROMPTED])
@pytest.mark.parametrize("write", [parquet, lines])
def test_published_schemas_are_known_by_their_columns(tmp_path, record, write):
    source = write(tmp_path / f"data.{'parquet' if write is parquet else 'jsonl'}", [record])
    assert list(rows_of(source)) == [[ASKED, ANSWERED]]


def test_texts_and_a_saved_dataset_are_read_too(tmp_path):
    assert list(rows_of(lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": " "}, {"text": "two"}]))) == [
        "one",
        "two",
    ]
    (tmp_path / "b.json").write_text(json.dumps([{"text": "three"}]))
    assert list(rows_of(str(tmp_path / "b.json"))) == ["three"]
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([TULU]).save_to_disk(str(tmp_path / "saved"))
    assert list(rows_of(str(tmp_path / "saved"))) == [[ASKED, ANSWERED]]


def test_what_should_not_be_taught_is_dropped_and_counted(tmp_path):
    wrong = {**OPENR1, "correctness_math_verify": [False] * 4}
    cut = {**CODEFORCES, "finish_reason": "length"}
    dropped = Counter()
    rows = [wrong, cut, {"messages": [ASKED]}, {"messages": []}, {"text": ""}, TULU]
    assert len(list(rows_of(lines(tmp_path / "a.jsonl", rows), dropped=dropped))) == 1
    assert dropped == {
        "no complete and correct answer": 1,
        "answer was truncated": 1,
        "no assistant answer": 2,
        "empty": 1,
    }
    assert len(list(rows_of(lines(tmp_path / "b.jsonl", [wrong]), only_correct=False))) == 1


def test_of_a_set_that_no_one_has_judged_the_first_complete_answer_is_taught(tmp_path):
    unjudged = {name: OPENR1[name] for name in ("problem", "generations", "is_reasoning_complete")}
    assert list(rows_of(lines(tmp_path / "a.jsonl", [unjudged]))) == [[ASKED, {"role": "assistant", "content": "5"}]]


@pytest.mark.parametrize("content", ['{"text": "a \\ud83d b"}', '[{"text": "a \\uD83D b"}]'])
def test_a_mark_at_the_beginning_and_half_a_character_do_not_end_a_run(tmp_path, content):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + content.encode() + b"\n")
    assert list(rows_of(str(tmp_path / "a.json"))) == ["a \ufffd b"]


@pytest.mark.parametrize("row", [{"label": 1}, {"messages": "hello"}, {"messages": [{"content": "x"}]}, [1]])
def test_rows_of_no_schema_are_refused(tmp_path, row):
    with pytest.raises(ConfigError):
        list(rows_of(lines(tmp_path / "a.jsonl", [row])))


@pytest.mark.parametrize(
    ("content", "output_text"),
    [
        ('{"text": "a"}\n\n{"text": oops}\n', "line 3 is not JSON: .*, at column 10"),
        ('{"text": "a"\n', "line 1 is not JSON: .*, at column 13"),
        ('[{"text": "a"},\n{"text": oops}]', "line 2 column 10"),
        ('{"text": "a"}\n{"txt": "b"}\n', r"a\.jsonl, row 2: a row has the columns txt"),
        ('{"text": "a"}\n[1]\n', "row 2 is .1., expected an object"),
        ('{"text": {"said": "a"}}\n', "row 1: its text is an object; expected text"),
        ('{"messages": [{"content": "a"}]}\n', "row 1: a message has content and no role"),
        ('{"messages": "a"}\n', "row 1: its messages are text"),
        ('{"text": null}\n' * 5, "no row to train on: all were dropped .empty: 5."),
        ('{"prompt": "a", "response": null}\n', "no assistant answer: 1"),
        ("", "no row to train on: it is empty"),
        ('{"text": "the same"}\n' * 100, "no row for train: .* all 100 rows have the same one"),
        ('{"text": "alone"}\n', "there is a single row"),
        ('{"text": "caf\xe9"}\n', "not UTF-8 text: byte 0xe9"),
    ],
)
def test_a_file_that_cannot_be_taught_from_is_reported_with_its_line_and_the_reason(tmp_path, content, output_text):
    (tmp_path / "a.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=output_text) as refused:
        for split in ("train", "test"):
            list(rows_of(str(tmp_path / "a.jsonl"), split=split))
    assert ("iconv" in refused.value.hint) == ("UTF-8" in output_text)


def test_a_limit_takes_part_of_what_a_larger_one_takes_in_any_order_of_the_file(tmp_path):
    rows = [{"prompt": f"question {number}", "response": str(number)} for number in range(50)]
    forward, backward = lines(tmp_path / "a.jsonl", rows), lines(tmp_path / "b.jsonl", rows[::-1])
    small = list(rows_of(forward, limit=5))
    assert small == list(rows_of(backward, limit=5)) == list(rows_of(forward, limit=20))[:5]
    assert small != [row for row, _ in zip(rows_of(forward), range(5), strict=False)]


def test_two_answers_to_one_question_never_lie_on_both_sides_of_a_split(tmp_path):
    rows = [{"prompt": f"q{number // 2}", "response": str(number)} for number in range(60)]
    source = lines(tmp_path / "a.jsonl", rows)
    parts = [list(rows_of(source, split=name)) for name in ("train", "validation", "test")]
    requested = [{row[0]["content"] for row in part} for part in parts]
    assert sum(map(len, parts)) == 60 and all(parts)
    assert not requested[0] & requested[1] and not requested[0] & requested[2] and not requested[1] & requested[2]
    assert [row for row in rows_of(source) if split_of(row_id(row)) == "test"] == parts[2]


def test_rows_that_are_not_used_are_counted_by_reason(tmp_path):
    rows = [{"prompt": f"question {number}", "response": str(number)} for number in range(200)]
    source, dropped = lines(tmp_path / "a.jsonl", rows), Counter()
    kept = list(rows_of(source, split="train", limit=50, dropped=dropped))
    assert len(kept) == 50
    assert set(dropped) == {"in the validation split", "in the test split", "beyond the requested number"}
    assert len(kept) + sum(dropped.values()) == 200


def test_the_prompt_is_what_stands_before_the_last_answer():
    assert prompt_of([ASKED, ANSWERED, ASKED, ANSWERED]) == [ASKED, ANSWERED, ASKED]
    assert prompt_of([ASKED]) == [ASKED]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>\nhm\n</think>\n\nFour.", "Four."),
        ("Well. <think>a</think>Four<think>b</think>.", "Well. Four."),
        ("<think>a <think>b</think> c</think>Four.", "Four."),
        ("the prompt began it</think>Four.", "Four."),
        ("Four, no: <think>cut off", "Four, no:"),
        ("<think>all of it", ""),
        ("Four.", "Four."),
    ],
)
def test_thoughts_are_taken_out(text, left):
    assert strip_think_blocks(text) == left


def test_of_an_answer_with_code_the_last_block_is_left():
    text = "First:\n```python\ndraft()\n```\nThen\n```cpp\nint main() {\n  return `0`;\n}\n```\nDone."
    assert code_only(text) == "```cpp\nint main() {\n  return `0`;\n}\n```"
    assert code_only("no code") == code_only("```python\nnever closed") == ""


def test_answers_are_cleaned_questions_are_not_and_empty_ones_go(tmp_path):
    requested = {"role": "user", "content": "<think>mine</think>"}
    answer = {"role": "assistant", "content": "<think>draft\n```\nno\n```</think>Here:\n```\nyes\n```"}
    dropped = Counter()
    rows = [[requested, answer], [requested, {"role": "assistant", "content": "<think>only"}], "<think>a text</think>"]
    assert list(cleaned(rows, dropped, strip_reasoning=True, only_code=True)) == [
        [requested, {"role": "assistant", "content": "```\nyes\n```"}],
        "<think>a text</think>",
    ]
    assert dropped == {"an answer without code": 1}


def test_a_preset_takes_changes_and_names_what_it_does_not_know():
    assert preset("codeforces-cots").code_only
    changed = preset("openr1-math", source="mine.parquet", limit=3)
    assert (changed.source, changed.subset, changed.limit, changed.only_correct) == ("mine.parquet", "all", 3, True)
    with pytest.raises(NotFoundError, match="did you mean 'tulu-3'"):
        preset("tulu3")
    with pytest.raises(ConfigError, match="did you mean 'limit'"):
        preset("tulu-3", limits=3)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLING = [
    {"role": "user", "content": "Is it raining in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I must look it up."},
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "Yes."},
]


def test_tools_calls_and_reasoning_are_read_also_as_json_text_and_from_parquet(tmp_path):
    as_text = {**CALL, "function": {**CALL["function"], "arguments": '{"city": "Oslo"}'}}
    written = [{**CALLING[1], "tool_calls": [as_text]}]
    (first,) = rows_of(lines(tmp_path / "a.jsonl", [{"messages": CALLING, "tools": [WEATHER]}]))
    rows = [{"messages": CALLING[:1] + written + CALLING[2:], "tools": json.dumps([WEATHER])}]
    (second,) = rows_of(lines(tmp_path / "b.jsonl", rows))
    other = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "CET"}}}
    mixed = [{**CALLING[1], "tool_calls": [CALL, other]}]  # Arrow gives both calls the keys of the other
    (third,) = rows_of(parquet(tmp_path / "c.parquet", [{"messages": CALLING[:1] + mixed, "tools": [WEATHER]}]))
    for row in (first, second):
        assert row.tools == [WEATHER]
        assert row[1]["tool_calls"] == [CALL]
        assert row[1]["reasoning_content"] == "I must look it up."
        assert row[2] == {"role": "tool", "content": "rain", "name": "weather"}
    assert third[1]["tool_calls"] == [CALL, other]
    assert third.tools == [WEATHER]
    assert prompt_of(first).tools == [WEATHER]


def test_an_answer_that_only_calls_is_an_answer_and_cleaning_keeps_the_call(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"messages": CALLING[:2], "tools": [WEATHER]}])
    dropped = Counter()
    (row,) = cleaned(rows_of(source, dropped=dropped), dropped, strip_reasoning=True)
    assert not dropped
    assert row.tools == [WEATHER]
    assert row[1]["tool_calls"] == [CALL]
    assert "reasoning_content" not in row[1]


@pytest.mark.parametrize(
    ("record", "error", "hint"),
    [
        ({"prompt": "2 + 2?"}, "prompt without an answer", "add a column `completion`"),
        ({"prompt": [ASKED], "tools": [WEATHER]}, "prompt without an answer", "add a column `completion`"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "a tool call is", "arguments"),
        ({"messages": [ASKED, {"role": "function_call", "content": "{}"}]}, "role 'function_call'", "tool_calls"),
        ({"messages": [ASKED, ANSWERED], "tools": "no json"}, "tools are not JSON", "JSON"),
    ],
)
def test_rows_without_one_answer_and_malformed_calls_are_refused_in_words(tmp_path, record, error, hint):
    with pytest.raises(ConfigError, match=error) as caught:
        list(rows_of(lines(tmp_path / "a.jsonl", [record])))
    assert "row 1" in caught.value.message
    assert hint in caught.value.hint


def test_prompts_need_no_answer_and_of_conversations_the_last_answer_is_not_used(tmp_path):
    records = [
        {"prompt": "2 + 2?"},
        {"prompt": [{"role": "system", "content": "short"}, ASKED]},
        {"messages": [ASKED, ANSWERED]},
        {"messages": [ASKED]},
        {"prompt": "a", "completion": "b"},
        {"prompt": " "},
        {"text": "plain"},
    ]
    dropped = Counter()
    rows = list(prompts_of(lines(tmp_path / "a.jsonl", records), dropped))
    assert [row if isinstance(row, str) else [turn["content"] for turn in prompt_of(row)] for row in rows] == [
        ["2 + 2?"],
        ["short", ASKED["content"]],
        [ASKED["content"]],
        [ASKED["content"]],
        ["a"],
        "plain",
    ]
    assert dropped == {"empty": 1}


def test_a_file_without_prompts_is_refused_as_prompts(tmp_path):
    with pytest.raises(ConfigError, match="row 1: a row has the columns label"):
        check_prompts(lines(tmp_path / "a.jsonl", [{"label": 1}]))


def test_preference_rows_keep_both_answers_with_or_without_a_prompt(tmp_path):
    asked, good = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    bad = {"role": "assistant", "content": "5"}
    records = [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [asked], "chosen": [good], "rejected": [bad]},
        {"chosen": [asked, good], "rejected": [asked, bad]},
        {"prompt": "2 + 2?", "chosen": [asked, good], "rejected": [asked, bad]},  # UltraFeedback
    ]
    for record in records:
        (row,) = rows_of(lines(tmp_path / "a.jsonl", [record]))
        assert (list(row), row.rejected) == ([asked, good], "5"), record
    (text,) = rows_of(lines(tmp_path / "a.jsonl", [{"chosen": "Q: 2 + 2? A: four", "rejected": "Q: 2 + 2? A: five"}]))
    assert (text, text.prompt, text.chosen, text.rejected) == ("Q: 2 + 2? A: four", "Q: 2 + 2? A:", " four", " five")


def test_answers_to_different_prompts_are_no_pair_and_are_counted(tmp_path):
    asked, other = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    answer = {"role": "assistant", "content": "c"}
    dropped = Counter()
    record = {"chosen": [asked, answer], "rejected": [other, answer]}
    good = {"messages": [asked, answer]}
    assert len(list(rows_of(lines(tmp_path / "a.jsonl", [record, good]), dropped=dropped))) == 1
    assert dropped == {"the two answers do not follow the same prompt": 1}
