"""Questions with exact answers: scoring of multiple choice and free answers.

A multiple-choice question is answered by the choice with the highest mean log-probability per token, so that short
choices have no advantage. A question without choices is answered greedily, and the answer is compared as a number if
it is one, as a formula character by character, and otherwise as SQuAD does.

SQuAD's normalization (Rajpurkar et al., 2016) ignores case, punctuation, English articles and spacing. That suits
names, but it would equate 1.5 with 15, -5 with 5 and 1,2,3 with 123. An empty text means "not answerable".

Shapes: B texts, R choices, T tokens, K scored tokens, V vocabulary.
"""

from __future__ import annotations

import json
import re
import string
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from joulelab.data import labeled_text, sources
from joulelab.data.text import UTF8, parsed_json, unreadable
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Prompt, as_messages, encode_prompt
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings

# Tokens that are read in one call when choices are scored, on a CPU and on a GPU: from the first number on, texts that
# would add much padding wait for the next call.
_TOKENS_AT_ONCE = {False: (256, 4_096), True: (4_096, 16_384)}
_LONGEST_TO_SHORTEST = 1.2
# Positions whose distributions over the vocabulary exist at a time, of long choices.
_SCORED_AT_ONCE = 1024
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    # Punctuation is removed without a space: "U.S." is "us", as in SQuAD's evaluation script.
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(predicted: str, true: str) -> float:
    return float(normalize_answer(predicted) == normalize_answer(true))


def f1(predicted: str, true: str) -> float:
    """F1 over words; a text without words matches only another one."""
    predicted_words, true_words = normalize_answer(predicted).split(), normalize_answer(true).split()
    if not predicted_words or not true_words:
        return float(predicted_words == true_words)
    shared = sum((Counter(predicted_words) & Counter(true_words)).values())
    return 2 * shared / (len(predicted_words) + len(true_words))


def gold_texts(answers: Sequence[str]) -> tuple[str, ...]:
    """Accepted answers; the empty text if there is none, or only articles and punctuation."""
    return tuple(text for text in answers if normalize_answer(text)) or ("",)


def best_scores(predicted: str, gold: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1, each against the best accepted answer."""
    return max(exact_match(predicted, true) for true in gold), max(f1(predicted, true) for true in gold)


# A comma separates thousands only before groups of three digits; `1,2,3` is a list.
NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:/\d+)?")
_FORMULA = re.compile(r"[\\^=+*/<>]|-\s*\d|\d\.\d")
_NUMBER_LIST = re.compile(r"[-+\d.,;\s()\[\]{}$]*\d\s*[,;][-+\d.,;\s()\[\]{}$]*")
_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d", "-"))
_LEADING = " \t\n'\"("
_TRAILING = " \t\n%.,;:!?'\")"


def same_answer(predicted: str, true: str) -> bool:
    predicted, true = ascii_minus(predicted), ascii_minus(true)
    number = number_of(true)
    if number is not None:
        return number_of(predicted) == number
    if _FORMULA.search(true) or _NUMBER_LIST.fullmatch(true):
        return _without_spaces(predicted) == _without_spaces(true)
    return exact_match(predicted, true) == 1.0


Grader = Literal["text", "math-verify"]
"""How a free answer is compared: as above, or as a mathematical expression by the package math-verify."""


def same_expression(predicted: str, true: str) -> bool:
    """Whether the last expression of an answer (in \\boxed{}, $...$ or plain) equals the expected one, by math-verify:
    1/2, 0.5 and \\frac{1}{2} are equal, and so are {1, 2} and {2, 1}."""
    from math_verify import parse, verify

    # Its time limit uses signals, which only the main thread may set.
    limit = None if threading.current_thread() is not threading.main_thread() else 5
    marked = true if "$" in true or "\\boxed" in true else f"${true}$"
    expected, found = parse(marked, parsing_timeout=limit), parse(predicted, parsing_timeout=limit)
    return bool(verify(expected, found, timeout_seconds=limit))


def ascii_minus(text: str) -> str:
    return text.translate(_MINUS_SIGNS)


def number_of(text: str) -> float | None:
    """Value of 12, +5, -1,000, 2.50, .5 or 3/4, with or without $, % or a period; None for other texts."""
    found = NUMBER.fullmatch(text.replace("$", "").lstrip(_LEADING).rstrip(_TRAILING))
    if found is None:
        return None
    above, _, below = found.group().replace(",", "").partition("/")
    if not below:
        return float(above)
    return float(above) / float(below) if float(below) else None


def _without_spaces(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$.")).casefold()


Tick = Callable[[int, int], None]
POLARITY = "Is this film review positive or negative?\n\n{text}"


@dataclass(frozen=True)
class Question:
    prompt: Prompt
    answer: str
    choices: tuple[str, ...] = ()


def read_questions(source: str, limit: int | None, chat: bool) -> list[Question]:
    """From a JSONL file with `prompt` (text or messages), `answer` and optional `choices`; or from sample:reviews, as
    messages if the model has a chat template. `limit=None`: all."""
    place = sources.parse(source)
    if place.kind == "sample" and place.name == "reviews":
        return review_questions(limit, chat)
    if place.path is None or not place.path.is_file():
        raise ConfigError(f"{source} is not a file", "pass a JSONL file with prompt, answer and optional choices")
    questions = list(islice(_read_jsonl(place.path), limit))
    if not questions:
        raise ConfigError(f"{source} has no questions", "write one JSON object per line, with prompt and answer")
    return questions


def review_questions(limit: int | None, chat: bool) -> list[Question]:
    """One-sentence reviews of the test split, which is never trained on; of both classes alike unless it is all."""
    reviews = labeled_text.load("sample:reviews", "short")
    size = len(labeled_text.rows_by_split(reviews)["test"]) if limit is None else limit
    data = labeled_text.split(reviews, 0, 0, size, balanced=limit is not None).test
    choices = ("negative", "positive") if chat else (" negative", " positive")
    return [
        Question(_review_prompt(POLARITY.format(text=text), chat), choices[label], choices)
        for text, label in zip(data.texts, data.labels, strict=True)
    ]


def _review_prompt(text: str, chat: bool) -> Prompt:
    return [{"role": "user", "content": text}] if chat else f"{text}\nAnswer:"


def chance_level(questions: Sequence[Question]) -> float | None:
    """Expected accuracy of random choices; None without choices."""
    if not any(question.choices for question in questions):
        return None
    hits = [question.choices.count(question.answer) / max(1, len(question.choices)) for question in questions]
    return sum(hits) / len(hits)


class GradedAnswer(NamedTuple):
    given: str
    right: bool


def grade_answers(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    tick: Tick = lambda samples, tokens: None,
    grader: Grader = "text",
) -> list[GradedAnswer]:
    """The model's answer to each question, in order, and whether it is right; `tick` is called with questions and
    tokens so far. A free answer ends with its line; for `math-verify` with the model's end token, so that the reasoning
    before the result may have several lines."""
    choosing = [number for number, question in enumerate(questions) if question.choices]
    free = [number for number, question in enumerate(questions) if not question.choices]
    graded = [GradedAnswer("", False)] * len(questions)
    done, tokens = 0, 0
    for place, found, read in _likeliest_choices(model, tokenizer, [questions[k] for k in choosing]):
        number = choosing[place]
        graded[number] = GradedAnswer(found, found == questions[number].answer)
        done, tokens = done + 1, tokens + read
        tick(done, tokens)
    if free:
        stop, same = (("\n",), same_answer) if grader == "text" else ((), same_expression)
        settings = GenerationSettings(max_new_tokens=max_new_tokens, stop=stop)
        generator = TransformersGenerator(model, tokenizer, settings, identity="examined")
        for number, answers in zip(free, generator.generate([questions[k].prompt for k in free]), strict=True):
            text = answers[0].text
            graded[number] = GradedAnswer(text, same(text, questions[number].answer))
            done, tokens = done + 1, tokens + answers[0].tokens + (answers[0].prompt_tokens or 0)
            tick(done, tokens)
    return graded


def graded_items(questions: Sequence[Question], graded: Sequence[GradedAnswer]) -> dict[str, Any]:
    """What is stored of an evaluation: right or wrong and the answer to every question."""
    items = [
        {"prompt": question.prompt, "expected": question.answer, "given": one.given}
        for question, one in zip(questions, graded, strict=True)
    ]
    return {"right": [one.right for one in graded], "chance": chance_level(questions), "items": items}


def _likeliest_choices(
    model: nn.Module, tokenizer: Any, questions: Sequence[Question]
) -> Iterator[tuple[int, str, int]]:
    """Index, most likely choice and number of tokens read of each question, sorted by length to reduce padding."""
    rows = [_with_choices(tokenizer, question) for question in questions]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place][0].prompt))
    enough, most = _TOKENS_AT_ONCE[next(model.parameters()).device.type == "cuda"]
    for places in _batches(order, rows, enough, most):
        scores = iter(mean_log_probabilities(model, [row for place in places for row in rows[place]]))
        for place in places:
            own = list(islice(scores, len(rows[place])))
            best = max(range(len(own)), key=own.__getitem__)
            yield place, questions[place].choices[best], sum(map(len, _inputs(rows[place])))


def _batches(
    order: Sequence[int], rows: Sequence[Sequence[ScoredContinuation]], enough: int, most: int
) -> Iterator[list[int]]:
    """Questions that are scored together, at least one."""
    found: list[int] = []
    texts: list[int] = []
    ending = 0
    for place in order:
        own, own_ending = [len(text) for text in _inputs(rows[place])], max(len(row.ending) for row in rows[place])
        count, longest = len(texts + own), max(texts + own)
        is_padded = len(texts) * max(texts, default=0) >= enough and longest > _LONGEST_TO_SHORTEST * min(texts)
        is_full = count * longest > most or count * max(ending, own_ending) > _SCORED_AT_ONCE
        if found and (is_padded or is_full):
            yield found
            found, texts, ending = [], [], 0
        found.append(place)
        texts += own
        ending = max(ending, own_ending)
    if found:
        yield found


class ScoredContinuation(NamedTuple):
    """Prompt tokens, and the tokens after them that are scored."""

    prompt: list[int]
    ending: list[int]

    @property
    def input(self) -> tuple[int, ...]:
        """What the model reads; the last token is only predicted."""
        return (*self.prompt, *self.ending[:-1])


def _inputs(rows: Sequence[ScoredContinuation]) -> list[tuple[int, ...]]:
    """Each once: choices of one token, such as A and B, are predicted from the same text."""
    return list(dict.fromkeys(row.input for row in rows))


def _with_choices(tokenizer: Any, question: Question) -> list[ScoredContinuation]:
    prompt = encode_prompt(tokenizer, question.prompt)
    choices = [list(tokenizer(choice, add_special_tokens=False)["input_ids"]) for choice in question.choices]
    if not all(choices):
        raise ConfigError(f"a choice in {question.choices} has no tokens", "use choices that are not empty")
    return [ScoredContinuation(prompt, choice) for choice in choices]


@torch.no_grad()
def mean_log_probabilities(model: nn.Module, rows: Sequence[ScoredContinuation]) -> list[float]:
    """Mean log-probability per token of each ending. Texts are padded on the left, so that all ends are aligned."""
    device = next(model.parameters()).device
    texts = _inputs(rows)
    place_of = {text: place for place, text in enumerate(texts)}
    longest, width = max(len(row.ending) for row in rows), max(map(len, texts))
    ids_BT = torch.zeros(len(texts), width, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for number, text in enumerate(texts):
        ids_BT[number, width - len(text) :] = torch.tensor(text)
        mask_BT[number, width - len(text) :] = 1
    ending_RK = torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        ending_RK[number, longest - len(row.ending) :] = torch.tensor(row.ending)
    was_training = model.training
    model.eval()
    try:
        logits_BKV: Tensor = model(
            input_ids=ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            position_ids=(mask_BT.cumsum(1) - 1).clamp(min=0).to(device),
            logits_to_keep=longest,
        ).logits
    finally:
        model.train(was_training)
    logits_BKV = logits_BKV.float()
    text_R1 = torch.tensor([place_of[row.input] for row in rows])[:, None]
    places = text_R1.to(device), torch.arange(longest, device=device)
    scores_RK = (logits_BKV[*places, ending_RK.to(device)] - logits_BKV.logsumexp(-1)[places]).cpu()
    return [float(scores_RK[number, longest - len(row.ending) :].mean()) for number, row in enumerate(rows)]


def _read_jsonl(path: Path) -> Iterator[Question]:
    try:
        text = path.read_text(encoding=UTF8)
    except UnicodeDecodeError as error:
        raise unreadable(path, error) from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        row = _json_object(line, f"{path}, line {number}")
        lacking = _invalid_reason(row)
        if lacking:
            raise ConfigError(
                f"{path}, line {number}: not a question: {lacking}",
                'expected {"prompt": ..., "answer": ...} and, for multiple choice, "choices": [...]',
            )
        choices = tuple(str(choice) for choice in row.get("choices") or ())
        question = Question(row["prompt"], str(row["answer"]), choices)
        if choices and question.answer not in choices:
            raise ConfigError(f"{path}, line {number}: the answer is not among the choices", "add it to the choices")
        yield question


def _invalid_reason(row: dict[str, Any]) -> str | None:
    """Why a row is not a valid question; None if it is."""
    absent = [name for name in ("prompt", "answer") if row.get(name) is None]
    if absent:
        return f"it has no {' and no '.join(absent)}"
    if isinstance(row["answer"], list | dict):
        return "its answer is not text"
    if not isinstance(row.get("choices") or [], list):
        return "its choices are not a list"
    if "" in map(str, row.get("choices") or []):
        return "one of its choices is empty"
    try:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else as_messages(row["prompt"])
    except (ConfigError, TypeError):
        prompt = None
    return None if prompt else "its prompt is neither text nor messages that end with a user message"


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = parsed_json(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON: {error.msg}, at column {error.colno}", "use one object per line"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a question: {row!r:.60}", "write one object with prompt and answer per line")
    return row
