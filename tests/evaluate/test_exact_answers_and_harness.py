"""Tasks with exact answers, and lm-evaluation-harness itself over local task files, on a tiny model."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distill" / "causal"))
from tiny_llama import WORDS, make_tokenizer, write_teacher

from joulelab.errors import ConfigError, NotFoundError
from joulelab.evaluate import exact_answers, harness
from joulelab.evaluate.exact_answers import (
    Question,
    ScoredContinuation,
    grade_answers,
    mean_log_probabilities,
    read_questions,
    same_answer,
)
from joulelab.evaluate.harness import TaskFigure, _require_known, harness_figures, require_tasks
from joulelab.infer.generation.completions import encode_prompt
from joulelab.zoo.pretrained import load_causal_lm


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """A model that counts on."""
    folder = write_teacher(tmp_path_factory.mktemp("counter"))
    return load_causal_lm(str(folder)), make_tokenizer()


def requested(start):
    words = " ".join(WORDS[(start + k) % 24] for k in range(4))
    return [{"role": "user", "content": f"w1 w2 {words}"}]


def test_choices_are_scored_by_the_mean_so_that_length_wins_nothing(counter):
    model, tokenizer = counter
    texts = [("w1 w2 w3", "w4"), ("w1 w2 w3", "w4 w5 w6"), ("w5 w1 w2 w7 w8", "w9 w2")]
    rows = [ScoredContinuation(tokenizer(prompt).input_ids, tokenizer(ending).input_ids) for prompt, ending in texts]
    for (prompt, ending), mean in zip(rows, mean_log_probabilities(model, rows), strict=True):
        logits = model(input_ids=torch.tensor([prompt + ending])).logits[0].detach().log_softmax(-1)
        each = [float(logits[len(prompt) - 1 + k, word]) for k, word in enumerate(ending)]
        assert mean == pytest.approx(sum(each) / len(each), abs=1e-4)


def test_a_model_that_knows_the_answers_is_right_and_counted_question_by_question(counter):
    model, tokenizer = counter
    true = [WORDS[(start + 4) % 24] for start in range(12)]
    choices = [(WORDS[(start + 9) % 24], word) for start, word in enumerate(true)]
    chosen = [Question(requested(start), word, choices[start]) for start, word in enumerate(true)]
    chosen[3] = replace(chosen[3], prompt=[{"role": "user", "content": "w5 w6 " + requested(3)[0]["content"]}])
    wrong = [Question(requested(start), choices[start][0], choices[start]) for start in range(12)]
    ticks = []
    graded = grade_answers(
        model, tokenizer, [*chosen, *wrong], max_new_tokens=4, tick=lambda *so_far: ticks.append(so_far)
    )
    right = [answer.right for answer in graded]
    assert sum(right[:12]) >= 10 and sum(right[12:]) <= 2
    assert ticks[-1][0] == 24
    output_text = [Question(requested(0), " ".join(WORDS[4:12])), Question(requested(0), "w4 w4")]
    assert grade_answers(model, tokenizer, output_text, max_new_tokens=12)[1].right is False


def test_long_choices_are_scored_in_smaller_calls(counter, monkeypatch):
    """Each of their tokens needs a distribution over the vocabulary."""
    model, tokenizer = counter
    monkeypatch.setattr(exact_answers, "_SCORED_AT_ONCE", 20)
    long = " ".join(WORDS[:6])
    questions = [Question(requested(start), "w4", ("w4", long)) for start in range(4)]
    read = []
    hook = model.register_forward_pre_hook(lambda *call: read.append(len(call[2]["input_ids"])), with_kwargs=True)
    grade_answers(model, tokenizer, questions, max_new_tokens=4)
    hook.remove()
    assert read == [2, 2, 2, 2], "two texts with six scored tokens each; four would have 24"


@pytest.mark.parametrize(("most", "calls"), [(60, 4), (1000, 2)])
def test_a_prompt_is_read_once_for_choices_of_one_token_and_calls_have_a_limit_of_tokens(
    counter, monkeypatch, most, calls
):
    model, tokenizer = counter
    monkeypatch.setattr(exact_answers, "_TOKENS_AT_ONCE", {False: (60, most)})
    questions = [Question(requested(start), "w4", ("w4", "w9", "w2")) for start in range(9)]
    questions.append(Question([{"role": "user", "content": " ".join(WORDS) * 4}], "w4", ("w4", "w5 w6", "w5 w7")))
    read, ticks = [], []
    hook = model.register_forward_pre_hook(lambda *call: read.append(call[2]["input_ids"].shape), with_kwargs=True)
    graded = grade_answers(model, tokenizer, questions, max_new_tokens=4, tick=lambda *so_far: ticks.append(so_far))
    hook.remove()
    assert sum(rows for rows, _ in read) == 9 + 2, "w5 w6 and w5 w7 are predicted from the same text"
    assert len(read) == calls and all(rows * width <= most for rows, width in read[:-1]) and read[-1][0] == 2
    assert ticks[-1][1] <= sum(rows * width for rows, width in read), "tokens that were read, without padding"
    widths = [width for _, width in read]
    assert widths[-1] > 4 * widths[-2], "a long text does not pad the others"
    for question, answer in zip(questions, graded, strict=True):
        ids = encode_prompt(tokenizer, question.prompt)
        endings = [tokenizer(choice).input_ids for choice in question.choices]
        scores = [mean_log_probabilities(model, [ScoredContinuation(ids, ending)])[0] for ending in endings]
        assert answer.given == question.choices[scores.index(max(scores))]


@pytest.mark.parametrize(
    ("reported", "true", "right"),
    [
        ("-5", "5", False),
        ("1.5", "15", False),
        ("5", ".5", False),
        ("0.5", "-.5", False),
        ("5", "-$5", False),
        (" $1,000.", "1000", True),
        ("2.50", "2.5", True),
        ("3/4", "0.75", True),
        ("x^2 - 1", "x^2-1", True),
        ("x^21", "x^2-1", False),
        (r"\frac{11}{2}", r"\frac{1}{12}", False),
        ("The Beatles!", "beatles", True),
        ("July 4 1776", "July 4, 1776", True),
        ("123", "1,2,3", False),
        ("1,2,3", "123", False),
        ("1, 2, 3", "1,2,3", True),
        ("12", "(1,2)", False),
        ("(1, 2)", "(1,2)", True),
        ("1,234", "1234", True),
        ("12,34", "1234", False),
        ("+5", "5", True),
        ("5", "+5", True),
        ("\u22125", "-5", True),
        ("-5", "\u22125", True),
        ("5", "\u22125", False),
        ("x \u2212 5", "x-5", True),
        ("May 5 2020", "May 5, 2020", True),
    ],
)
def test_signs_and_points_count_in_numbers_and_not_in_words(reported, true, right):
    assert same_answer(reported, true) is right


def test_questions_come_from_a_file_and_a_bad_line_is_named(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"prompt": "2 + 2 =", "answer": "4", "choices": ["4", "5"]}) + "\n\n")
    assert read_questions(str(file), 5, chat=False) == [Question("2 + 2 =", "4", ("4", "5"))]
    file.write_text('{"prompt": "2 + 2 =", "answer": "6", "choices": ["4", "5"]}\n')
    with pytest.raises(ConfigError, match="line 1: the answer is not among the choices"):
        read_questions(str(file), 5, chat=False)
    file.write_text('{"prompt": "2 + 2 =", "answer": "4", "choices": ["4", ""]}\n')
    with pytest.raises(ConfigError, match=r"line 1: not a question: one of its choices is empty$"):
        read_questions(str(file), 5, chat=False)
    file.write_text('{"prompt": "2 + 2 ="}\n')
    with pytest.raises(ConfigError, match=r"line 1: not a question: it has no answer$"):
        read_questions(str(file), 5, chat=False)
    file.write_text('{"prompt": oops}\n')
    with pytest.raises(ConfigError, match=r"line 1: not JSON: .* at column 12"):
        read_questions(str(file), 5, chat=False)


@pytest.mark.parametrize(
    ("line", "output_text"),
    [
        (b'{"prompt": 5, "answer": "x"}', "prompt is neither text nor messages"),
        (b'{"prompt": [{"role": "assistant", "content": "a"}], "answer": "x"}', "prompt is neither text nor messages"),
        (b'{"prompt": "a", "answer": ["x"]}', "answer is not text"),
        (b'{"prompt": "caf\xe9", "answer": "x"}', "is not UTF-8 text"),
    ],
)
def test_what_no_model_can_be_asked_is_reported_before_anything_is_trained(tmp_path, line, output_text):
    (tmp_path / "questions.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=output_text):
        read_questions(str(tmp_path / "questions.jsonl"), 5, chat=False)


def test_a_question_may_hold_what_only_python_takes_for_the_end_of_a_line(tmp_path):
    (tmp_path / "questions.jsonl").write_text(
        '{"prompt": "a\u2028b", "answer": "x", "choices": null}\n', encoding="utf-8"
    )
    assert read_questions(str(tmp_path / "questions.jsonl"), 5, chat=False) == [Question("a\u2028b", "x")]


def test_standard_errors_and_items_of_the_harness_are_kept(monkeypatch):
    """What `simple_evaluate` returns for two filters of one task and for a perplexity; both were thrown away."""
    requested = {}
    samples = [
        {"doc_id": 0, "filter": "strict", "exact_match": 1.0},
        {"doc_id": 1, "filter": "strict", "exact_match": 0.0},
        {"doc_id": 0, "filter": "flexible", "exact_match": 1.0},
        {"doc_id": 1, "filter": "flexible", "exact_match": 1.0},
    ]
    returned = {
        "results": {
            "gsm8k": {
                "alias": "gsm8k",
                "exact_match,strict": 0.5,
                "exact_match_stderr,strict": 0.35,
                "exact_match,flexible": 1.0,
                "exact_match_stderr,flexible": 0.0,
            },
            "wikitext": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A"},
        },
        "n-samples": {"gsm8k": {"effective": 2}, "wikitext": {"effective": 1}},
        "higher_is_better": {"gsm8k": {"exact_match": True}, "wikitext": {"word_perplexity": False}},
        "samples": {"gsm8k": samples, "wikitext": [{"doc_id": 0, "filter": "none", "word_perplexity": (-3.0, 4)}]},
    }

    def simple_evaluate(**how):
        requested.update(how)
        return returned

    kinds = {"manager": lambda **how: SimpleNamespace(all_tasks=["gsm8k", "wikitext"]), "model": lambda **how: None}
    monkeypatch.setattr(harness, "import_harness", lambda: (SimpleNamespace(simple_evaluate=simple_evaluate), kinds))
    how = {"folder": None, "limit": None, "batch_size": 2, "device": torch.device("cpu")}
    strict, flexible, perplexity = harness_figures(None, None, ["gsm8k", "wikitext"], **how)
    assert requested["bootstrap_iters"] > 0 and requested["log_samples"] is True
    assert strict == TaskFigure("gsm8k", "exact_match.strict", 0.5, 2, False, 0.35, {"0": 1.0, "1": 0.0})
    assert strict.right_or_wrong and flexible.scores == {"0": 1.0, "1": 1.0}
    assert perplexity == TaskFigure("wikitext", "word_perplexity", 12.5, 1, True, None, {})


def test_the_harness_itself_asks_local_tasks(counter, tmp_path):
    pytest.importorskip("lm_eval")
    model, tokenizer = counter
    rows = [
        {"question": "w3 w4 w5", "label": 0},
        {"question": "w7 w8 w9", "label": 0},
        {"question": "w2 w3 w4", "label": 1},
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "counting.yaml").write_text(
        f"""
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "items.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["w6", "w10"]
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    ask = {"folder": tmp_path, "batch_size": 2, "device": torch.device("cpu")}
    (figure,) = harness_figures(model, tokenizer, ["counting"], limit=2, **ask)
    assert (figure.task, figure.metric, figure.items, figure.lower_is_better) == ("counting", "acc", 2, False)
    assert figure.standard_error is not None and sum(figure.scores.values()) / 2 == pytest.approx(figure.value)
    endings = [tokenizer(word).input_ids for word in ("w6", "w10")]
    requested_names = [tokenizer(row["question"]).input_ids for row in rows[:2]]
    scores = [
        mean_log_probabilities(model, [ScoredContinuation(prompt, ending) for ending in endings])
        for prompt in requested_names
    ]
    assert figure.value == pytest.approx(sum(first > second for first, second in scores) / 2)
    require_tasks(["counting"], tmp_path)
    with pytest.raises(NotFoundError, match="did you mean 'counting'"):
        _require_known(["countin"], ["counting", "gsm8k"])


@pytest.mark.samples
def test_without_a_limit_all_reviews_of_the_test_split_are_questions():
    everything = read_questions("sample:reviews", None, chat=False)
    assert len(everything) > len(read_questions("sample:reviews", 100, chat=False)) == 100
    with pytest.raises(ConfigError, match=f"only {len(everything):,} of"):
        read_questions("sample:reviews", len(everything) + 1, chat=False)
