"""The best spans over overlapping windows, and "no answer" with its threshold."""

import json
import math

import numpy as np
import pytest

from joulelab.data.squad.questions import Answer, Question
from joulelab.evaluate.classification import load_predictions
from joulelab.evaluate.squad_metrics import (
    Candidate,
    Candidates,
    ScoredWindow,
    SearchLimits,
    SquadScores,
    best_threshold,
    find_candidates,
    load_results,
    most_context,
)

CONTEXT = "one two three four five"
WORDS = [(0, 3), (4, 7), (8, 13), (14, 18), (19, 23)]
LIMITS = SearchLimits(n_best_size=20, max_answer_length=30)


def window(first, count, starts, ends, null=0.0):
    """CLS, one question token, `count` words from `first` on, SEP; scores by word, 0 where none is given."""
    characters = [(-1, -1)] * 2 + WORDS[first : first + count] + [(-1, -1)]
    start, end = np.zeros(len(characters), np.float32), np.zeros(len(characters), np.float32)
    start[0] = null
    for scores, given in ((start, starts), (end, ends)):
        scores[1] = 50.0  # the question: never an answer, however sure the model is
        scores[-1] = 50.0
        for word, value in given.items():
            scores[2 + word - first] = value
    return ScoredWindow(start, end, np.array(characters, np.int32), first)


def texts(*windows, limits=LIMITS):
    return [span.text for span in find_candidates(windows, CONTEXT, limits).spans]


def test_the_best_pair_of_start_and_end_is_the_answer_as_it_is_in_the_text():
    assert texts(window(0, 5, {1: 5}, {2: 4}))[0] == "two three"


def test_an_end_before_its_start_is_no_answer():
    found = find_candidates([window(0, 5, {3: 5}, {1: 5})], CONTEXT, LIMITS)
    assert all(span.start < span.end for span in found.spans)
    assert found.spans[0].score == 5.0


def test_answers_longer_than_allowed_are_left_out():
    scored = window(0, 5, {0: 9}, {4: 9, 1: 1})
    assert texts(scored)[0] == CONTEXT
    assert texts(scored, limits=SearchLimits(20, 2))[0] == "one two"


def test_the_list_ends_at_n_best_and_repeats_no_text():
    found = texts(window(0, 5, {}, {}), limits=SearchLimits(3, 30))
    assert len(found) == len(set(found)) == 3


def test_an_answer_is_found_in_whichever_window_has_it():
    assert texts(window(0, 3, {}, {}), window(2, 3, {4: 3}, {4: 3}))[0] == "five"


def test_a_token_begins_an_answer_only_where_it_has_most_context():
    left, right = window(0, 4, {3: 9}, {3: 9}), window(1, 4, {3: 1}, {3: 1})
    allowed = most_context([left, right])
    assert [mask.tolist() for mask in allowed] == [[True, True, True, False], [False, False, True, True]]
    assert find_candidates([left, right], CONTEXT, LIMITS).spans[0].score != 18.0


def test_the_least_sure_window_speaks_for_no_answer():
    found = find_candidates([window(0, 3, {}, {}, null=7), window(2, 3, {4: 2}, {4: 1}, null=4)], CONTEXT, LIMITS)
    assert found.null_score == 4.0
    assert found.null_margin == 1.0


def test_a_window_without_context_has_no_spans():
    assert texts(window(0, 0, {}, {})) == []


# (margin of "no answer", said if anything, marked answer or nothing)
CASES = [(-5.0, "one", "one"), (-1.0, "two", "three"), (1.0, "four", "four"), (3.0, "five", "")]


def scores(threshold=0.0, version_2=True, cases=CASES):
    questions = [
        Question(str(n), "?", CONTEXT, (Answer(true, CONTEXT.index(true)),) if true else ())
        for n, (_, _, true) in enumerate(cases)
    ]
    candidates = [Candidates((Candidate(reported, 0.0, 0, 1),), margin) for margin, reported, _ in cases]
    return SquadScores(questions, candidates, version_2, threshold)


@pytest.mark.parametrize(
    ("threshold", "reported", "right"),
    [
        (0.0, ["one", "two", "", ""], 2),
        (2.0, ["one", "two", "four", ""], 3),
        (1.0, ["one", "two", "four", ""], 3),  # beaten by more than the threshold, not by as much
        (9.0, ["one", "two", "four", "five"], 2),
        (-9.0, ["", "", "", ""], 1),
    ],
)
def test_the_threshold_decides_between_a_span_and_no_answer(threshold, reported, right):
    found = scores(threshold)
    assert found.answers == reported
    assert found.results()["exact_match"].successes == right


def test_version_1_always_answers():
    assert scores(version_2=False).answers == ["one", "two", "four", "five"]
    assert "best_f1" not in scores(version_2=False).results()


def test_the_best_threshold_is_reported_and_gives_what_it_promises():
    results = scores().results()
    assert results["best_exact_match"].value == 0.75
    best = results["best_exact_match.threshold"].value
    assert scores(best).results()["exact_match"].value == 0.75


def test_no_threshold_on_the_data_is_better_than_the_best():
    random = np.random.default_rng(0)
    margins = random.integers(-4, 5, 60).astype(float)  # many are equal
    answered, silent = random.random(60), (random.random(60) > 0.5).astype(float)
    best = best_threshold(margins, answered, silent)
    tried = {t: float(np.where(margins > t, silent, answered).mean()) for t in [*(margins - 0.5), *margins, 99.0]}
    assert best.score == pytest.approx(max(tried.values()))
    assert float(np.where(margins > best.threshold, silent, answered).mean()) == pytest.approx(best.score)


def test_silence_may_be_best():
    best = best_threshold([1.0, 2.0], [0.0, 0.0], [1.0, 1.0])
    assert (best.score, best.threshold) == (1.0, 0.0)


def test_a_question_without_any_span_stays_unanswered():
    found = SquadScores(scores().questions[:1], [Candidates((), 3.0)], False, 0.0)
    assert found.answers == [""]
    assert found.results()["f1"].value == 0.0
    assert set(found.results()) == {"exact_match", "f1"}  # one question has no interval


def test_files_hold_answers_probabilities_and_who_was_right(tmp_path):
    found = scores(2.0)
    found.save(tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text())["2"] == "four"
    listed = json.loads((tmp_path / "nbest_predictions.json").read_text())["3"]
    assert [entry["text"] for entry in listed] == ["", "five"]
    assert listed[0]["probability"] == pytest.approx(1 / (1 + math.exp(-3)))
    assert load_predictions(tmp_path).accuracy().successes == 3
    assert load_results(tmp_path) == found.results()


def test_the_f1_has_an_interval_around_it():
    results = scores(2.0).results()
    assert 0.0 <= results["f1.low"].value < results["f1"].value == 0.75 < results["f1.high"].value <= 1.0
