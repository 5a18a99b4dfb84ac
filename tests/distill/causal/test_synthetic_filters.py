"""Filters of a teacher's answers: every drop has a reason and a count, and the kept ones carry all energy."""

import json

import pytest

from joulelab.data.splits import split_of, text_id
from joulelab.distill.causal import generated_data
from joulelab.distill.causal.generated_data import AnswerFilters, filter_answers, require_kept, write_training_rows
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Completion

CHAT = [{"role": "user", "content": "q"}]


def answer(text, reason="stop"):
    closing = 1 if reason == "stop" else 0
    return Completion(text, (), reason, len(text.split()) + closing, None, 7)


ANSWERS = [
    [answer("one two three four"), answer("one two")],
    [answer("One  two three FOUR"), answer("five six seven", "length")],
    [answer(""), answer("a b c d e f g h i")],
]
PROMPTS = ["p1", CHAT, "p3"]


def test_every_answer_is_kept_or_counted_under_one_reason():
    kept, report = filter_answers(PROMPTS, ANSWERS, AnswerFilters(min_tokens=3, max_tokens=8))
    assert [one.answer.text for one in kept] == ["one two three four"]
    assert (report.too_short, report.truncated, report.duplicates, report.too_long) == (2, 1, 1, 1)
    assert (
        report.answers == 6 == report.kept + report.too_short + report.truncated + report.duplicates + report.too_long
    )


def test_the_minimum_length_does_not_count_the_end_token():
    counts = [filter_answers(PROMPTS, ANSWERS, AnswerFilters(min_tokens=least))[1].too_short for least in (1, 2, 3, 5)]
    assert counts == [1, 1, 2, 4]
    assert filter_answers(["p"], [[answer("one two three")]], AnswerFilters(min_tokens=4))[1].kept == 0


def test_truncated_and_duplicate_answers_are_kept_on_request():
    _, report = filter_answers(PROMPTS, ANSWERS, AnswerFilters(min_tokens=0, keep_truncated=True, keep_duplicates=True))
    assert (report.kept, report.truncated, report.duplicates) == (5, 0, 0)
    assert report.too_short == 1, "an answer without words is none"


def test_low_scores_and_unjudged_answers_are_dropped():
    scores = [[-1.0, -3.0], [None, None], [-9.0, None]]
    kept, report = filter_answers(PROMPTS, ANSWERS, AnswerFilters(keep_duplicates=True, min_score=-2.0), scores)
    assert [(one.answer.text, one.score) for one in kept] == [("one two three four", -1.0)]
    assert (report.low_score, report.unjudged) == (1, 2)
    with pytest.raises(ConfigError, match="are not judged"):
        filter_answers(PROMPTS, ANSWERS, AnswerFilters(min_score=0.0))


def test_tokens_of_dropped_answers_count_too():
    _, report = filter_answers(PROMPTS, ANSWERS, AnswerFilters(min_tokens=2, keep_duplicates=True))
    assert report.kept == 4
    assert report.generated_tokens == sum(one.tokens for some in ANSWERS for one in some) > report.kept_tokens


def test_dropping_all_answers_is_an_error_with_the_reasons():
    kept, report = filter_answers(["p"], [[answer("a b", "length")] * 3], AnswerFilters())
    with pytest.raises(ConfigError, match=r"all 3 answers were dropped: 3 truncated$") as refused:
        require_kept(kept, report)
    assert "generation.answer.max_new_tokens" in refused.value.hint
    with pytest.raises(ConfigError, match="no answer can pass"):
        AnswerFilters(min_tokens=5, max_tokens=4)


def test_kept_answers_are_written_as_training_rows(tmp_path):
    kept, _ = filter_answers(PROMPTS, ANSWERS, AnswerFilters(min_tokens=2, keep_duplicates=True))
    assert write_training_rows(tmp_path / "rows.jsonl", kept) == 4
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[0] == {"prompt": "p1", "response": "one two three four"}
    assert rows[2] == {"messages": [*CHAT, {"role": "assistant", "content": "One  two three FOUR"}]}


def test_prompts_that_are_whole_documents_of_the_training_split_are_held_out_too():
    """The hash of a document has decided its split, and would put none of them into the last tenth."""
    texts = [f"document {number}" for number in range(4000)]
    trained = [text for text in texts if split_of(text_id(text)) == "train"]
    for prompts in (texts, trained):
        held_out = generated_data._held_out(prompts, 0.1)
        assert 0.07 < sum(held_out) / len(prompts) < 0.13
        assert held_out == generated_data._held_out(prompts, 0.1)
