"""Exact match and F1 on cases worked out by hand."""

import pytest

from joulelab.evaluate.exact_answers import best_scores, exact_match, f1, gold_texts, normalize_answer


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Tarn.", "tarn"),
        ("an apple, a pear and the plum", "apple pear and plum"),
        ("U.S.", "us"),
        ("Theatre another", "theatre another"),
        ("half-time", "halftime"),
        ("  \n ", ""),
        ("the", ""),
        ("Åse's", "åses"),
    ],
)
def test_case_articles_punctuation_and_spacing_do_not_count(text, bare):
    assert normalize_answer(text) == bare


@pytest.mark.parametrize(
    ("reported", "true", "exact", "shared"),
    [
        ("the brass bell", "A Brass Bell!", 1.0, 1.0),
        ("brass bell", "bell", 0.0, 2 / 3),  # precision 1/2, recall 1
        ("in the year 1987", "1987", 0.0, 0.5),  # precision 1/3, recall 1
        ("two two", "two", 0.0, 2 / 3),  # a repeated word is shared once
        ("oak", "stone", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("", "stone", 0.0, 0.0),
        ("stone", "", 0.0, 0.0),
        ("the", "", 1.0, 1.0),
    ],
)
def test_golden_cases(reported, true, exact, shared):
    assert exact_match(reported, true) == exact
    assert f1(reported, true) == pytest.approx(shared)


def test_the_marked_answer_that_fits_best_counts():
    assert best_scores("about 900", ("900", "about 900")) == (1.0, 1.0)
    assert best_scores("nearly 900 kites", ("900", "900 kites")) == (0.0, pytest.approx(0.8))


def test_where_nothing_was_marked_only_the_empty_answer_is_right():
    assert gold_texts([]) == ("",)
    assert gold_texts(["the", "a stone"]) == ("a stone",)
    assert best_scores("", gold_texts([])) == (1.0, 1.0)
