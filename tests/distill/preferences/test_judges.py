"""Judges, and the pairs made from their scores."""

import pytest
import torch
from tiny_pairs import make_model

from joulelab.distill.preferences.judges import (
    LikelihoodJudge,
    RubricJudge,
    RuleJudge,
    log_probability_sums,
    mean_log_probability,
    pad_rows,
    write_judgments,
)
from joulelab.distill.preferences.pairs import Candidates, choose_pairs, encode_pairs
from joulelab.errors import ConfigError, UsageError
from joulelab.infer.generation.completions import Completion
from joulelab.infer.generation.settings import GenerationSettings

CPU = torch.device("cpu")


def answer(text, tokens=None, reason="stop", log=None):
    return Completion(text, (), reason, tokens or len(text.split()), log)


class Scripted:
    """A generator that replies what it is told to."""

    identity, settings, prompts_at_once, energy_gap = "scripted", GenerationSettings(), 8, None

    def __init__(self, *replies):
        self.replies, self.requested = list(replies), []

    def generate(self, prompts):
        self.requested += prompts
        return ([answer(self.replies.pop(0))] for _ in prompts)


def test_likelihood_is_a_mean_independent_of_length():
    """Under the sum the short answer wins; under the mean the one that the model finds likelier."""
    model = make_model()
    prompt = [5, 6, 7]
    with torch.no_grad():
        likely = list(prompt)
        for _ in range(10):
            likely.append(int(model(torch.tensor([likely])).logits[0, -1].argmax()))
        unlikely = [int(model(torch.tensor([prompt])).logits[0, -1].argmin())]
        rows = pad_rows([(prompt, likely[3:]), (prompt, likely[3:4] + unlikely)], CPU)
        sums, counts = log_probability_sums(model, *rows)
        means = mean_log_probability(model, *rows)
    assert counts.tolist() == [10, 2]
    assert means[0] > means[1]
    torch.testing.assert_close(means, sums / counts)
    longer = pad_rows([(prompt, likely[3:]), (prompt, likely[3:4])], CPU)
    with torch.no_grad():
        sums, _ = log_probability_sums(model, *longer)
    assert sums[0] < sums[1], "each further token lowers a sum, even the likeliest"


def test_padding_and_the_first_token_are_ignored():
    model = make_model()
    alone, adjacent = [([5], [6, 7])], [([5], [6, 7]), ([5, 6, 7, 8], [9] * 20)]
    with torch.no_grad():
        one, two = (mean_log_probability(model, *pad_rows(rows, CPU)) for rows in (alone, adjacent))
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="no token to judge"):
        mean_log_probability(model, torch.tensor([[5, 6]]), torch.tensor([[True, False]]))


def test_a_model_that_generated_the_answers_does_not_score_them_again():
    judge = LikelihoodJudge(None, None, identity="teacher", written_by="teacher")
    requested = [Candidates("q", [answer("a b", tokens=2, log=-3.0), answer("a", tokens=4, log=-4.0)])]
    assert list(judge.scores(requested)) == [[-1.5, -1.0]]


def test_batched_scores_equal_single_scores():
    """By a word tokenizer; with more prompts than fit into a batch, and one answer without words."""

    class Numbers:
        eos_token_id, eos_token, bos_token_id = 2, "<end>", None

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [int(word) for word in text.split()]}

    requested = [Candidates(f"{k} 9", [answer("5 6 7 8 9"), answer(f"{k} 11", reason="length")]) for k in range(3, 8)]
    requested.append(Candidates("4", [answer(""), answer("12")]))
    model = make_model()
    together, alone = (
        list(LikelihoodJudge(model, Numbers(), identity="judge", batch_size=size).scores(requested)) for size in (5, 1)
    )
    assert together[-1][0] is None
    for one, other in zip(together[:-1], alone[:-1], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_rubric_prompt_is_built_and_the_grade_parsed():
    generator = Scripted("4", "I'd say 9 of 10, so 2/5", "no idea")
    judge = RubricJudge(generator, "Is it true?", 1, 5)
    requested = [
        Candidates([{"role": "user", "content": "q1"}], [answer("a1"), answer("a2")]),
        Candidates("q2", [answer("a3")]),
    ]
    assert list(judge.scores(requested)) == [[4.0, 2.0], [None]]
    shown = generator.requested[1][0]["content"]
    assert all(part in shown for part in ("Is it true?", "q1", "a2", "from 1 to 5"))
    with pytest.raises(ConfigError, match="is not usable"):
        RubricJudge(generator, " ")


def test_rules_score_the_end_and_the_exact_answer():
    cut = answer("it is", reason="length")
    assert list(RuleJudge("ends").scores([Candidates("q", [answer("yes"), cut])])) == [[1.0, 0.0]]
    answers = [answer("so 6 x 7 = 42."), answer("Answer: 41"), answer("\\boxed{42} of 50")]
    assert list(RuleJudge("exact-answer").scores([Candidates("q", answers, "#### 42")])) == [[1.0, 0.0, 1.0]]
    assert list(RuleJudge("exact-answer").scores([Candidates("q", answers)])) == [[None, None, None]]
    boxes = [answer(rf"so \boxed{{\frac{{1}}{{{below}}}}}.") for below in (2, 3)]  # the box has braces of its own
    assert list(RuleJudge("exact-answer").scores([Candidates("q", boxes, r"\boxed{\frac{1}{2}}")])) == [[1.0, 0.0]]
    halves = [answer("it is 1/2"), answer("it is 3/2"), answer("Answer: 0.5")]
    assert list(RuleJudge("exact-answer").scores([Candidates("q", halves, "1/2")])) == [[1.0, 0.0, 1.0]]
    with pytest.raises(UsageError, match="ends"):
        RuleJudge("end")


def test_interrupted_judging_resumes(tmp_path):
    requested = [Candidates(f"q{k}", [answer("a"), answer(f"b{k}")]) for k in range(3)]
    judge = RubricJudge(Scripted("1", "2", "3", "x"), "rubric")
    first = write_judgments(tmp_path / "scores.jsonl", judge, requested[:2])
    seen = []
    whole = write_judgments(
        tmp_path / "scores.jsonl", RubricJudge(Scripted("4", "5"), "rubric"), requested, seen.append
    )
    assert whole == [*first, [4.0, 5.0]] == [[1.0, 2.0], [3.0, None], [4.0, 5.0]]
    assert seen == [2, 3]


def test_a_generating_judge_gets_all_units_that_lack_a_score_at_once(tmp_path):
    requested = [Candidates(f"q{k}", [answer("a"), answer(f"b{k}")]) for k in range(5)]
    file = tmp_path / "scores.jsonl"
    first = write_judgments(file, RubricJudge(Scripted("1", "2"), "rubric"), requested[2:3])
    generator = Scripted("5", "5", "3", "4", "1", "1")
    calls, generate = [], generator.generate
    generator.generate = lambda prompts: calls.append(len(prompts)) or generate(prompts)
    write_judgments(tmp_path / "others.jsonl", RubricJudge(Scripted(*"12345123"), "rubric"), [*requested[:2]])
    whole = write_judgments(
        file, RubricJudge(generator, "rubric"), requested, unit=2, others=[tmp_path / "others.jsonl"]
    )
    assert calls == [6]  # two of the three units; what is known of them keeps its scores
    assert whole == [[1.0, 2.0], [3.0, 4.0], *first, [3.0, 4.0], [1.0, 1.0]]


def test_pairs_ties_and_length_preference_are_counted():
    requested = [
        Candidates("long wins", [answer("a b c d e f"), answer("a b")]),
        Candidates("long wins too", [answer("g"), answer("h i j", reason="length")]),
        Candidates("tie", [answer("k"), answer("l m")]),
        Candidates("identical", [answer("n"), answer("n")]),
        Candidates("unjudged", [answer("o"), answer("p")]),
    ]
    scores = [[2.0, 1.0], [0.0, 5.0], [1.0, 1.05], [0.0, 3.0], [None, 1.0]]
    found, report = choose_pairs(requested, scores, tie_margin=0.1)
    assert [(one.chosen.text, one.rejected.text) for one in found] == [("a b c d e f", "a b"), ("h i j", "g")]
    assert (report.prompts, report.pairs, report.ties, report.identical, report.unjudged) == (5, 2, 1, 1, 1)
    assert (report.answers_unjudged, report.chosen_truncated) == (1, 1)
    assert (report.chosen_tokens_mean, report.rejected_tokens_mean) == (4.5, 1.5)
    assert report.chosen_longer_share == 1.0
    assert report.length_score_correlation > 0.5


def test_encoded_pairs_end_where_the_answers_ended():
    class Letters:
        eos_token_id, eos_token, bos_token_id = 0, "<end>", None

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [ord(letter) for letter in text]}

    both = [
        Candidates("q", [answer("yes"), answer("no", reason="length")]),
        Candidates("q" * 50, [answer("a"), answer("b")]),
    ]
    found, report = choose_pairs(both, [[1.0, 0.0], [1.0, 0.0]])
    pairs, report = encode_pairs(Letters(), found, report, max_tokens=20)
    (_, first), *_ = pairs
    assert first.chosen.tolist() == [*map(ord, "yes"), 0]
    assert first.rejected.tolist() == [*map(ord, "no")], "what was cut off teaches nobody to stop"
    assert (report.pairs, report.too_long) == (1, 1)
