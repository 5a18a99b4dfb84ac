"""A task with exact answers: questions of which it can be said whether a model was right.

A question with choices is answered by the likeliest of them, by mean log-probability a token, so that a short choice
has no advantage; one without is answered in words, greedily: numbers are compared as numbers, words as SQuAD does.

Shapes: B rows, T tokens, K tokens that are scored.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from joulelab.data import labeled_text, sources
from joulelab.data.text import UTF8, parsed_json, unreadable
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Prompt, as_messages, encode_prompt
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings

# Two answers as texts: the same or not, and how many words they share, as SQuAD counts it.
#
# Case, punctuation, English articles and spacing do not count. An empty text means "the paragraph does not tell".


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    # punctuation first and joined up: "U.S." is "us", as in SQuAD's own scores
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(said: str, true: str) -> float:
    return float(normalize_answer(said) == normalize_answer(true))


def f1(said: str, true: str) -> float:
    """Harmonic mean of precision and recall over words; of a text without words only its like is right."""
    said_words, true_words = normalize_answer(said).split(), normalize_answer(true).split()
    if not said_words or not true_words:
        return float(said_words == true_words)
    shared = sum((Counter(said_words) & Counter(true_words)).values())
    return 2 * shared / (len(said_words) + len(true_words))


def gold_texts(answers: Sequence[str]) -> tuple[str, ...]:
    """What counts as right: each marked answer; where nothing was marked, or only articles and dots, the empty text."""
    return tuple(text for text in answers if normalize_answer(text)) or ("",)


def best_scores(said: str, gold: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 against the marked answer that fits best, each for itself."""
    return max(exact_match(said, true) for true in gold), max(f1(said, true) for true in gold)


# Whether a short answer is the right one: numbers as numbers, formulas sign by sign, other words as SQuAD has them.
#
# SQuAD's way takes all punctuation for noise. It is right for names, and takes 1.5 for 15, -5 for 5 and 1,2,3 for
# 123.


# A comma separates thousands only before groups of three digits; `1,2,3` is a list.
NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:/\d+)?")
_FORMULA = re.compile(r"[\\^=+*/<>]|-\s*\d|\d\.\d")
_NUMBER_LIST = re.compile(r"[-+\d.,;\s()\[\]{}$]*\d\s*[,;][-+\d.,;\s()\[\]{}$]*")
_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d", "-"))
_LEADING = " \t\n'\"("
_TRAILING = " \t\n%.,;:!?'\")"


def same_answer(said: str, true: str) -> bool:
    said, true = ascii_minus(said), ascii_minus(true)
    number = number_of(true)
    if number is not None:
        return number_of(said) == number
    if _FORMULA.search(true) or _NUMBER_LIST.fullmatch(true):
        return _without_spaces(said) == _without_spaces(true)
    return exact_match(said, true) == 1.0


def ascii_minus(text: str) -> str:
    return text.translate(_MINUS_SIGNS)


def number_of(text: str) -> float | None:
    """12, +5, -1,000, 2.50, .5, 3/4, with or without dollars, a percent sign or a full stop; None for other texts."""
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


def read_questions(source: str, limit: int, chat: bool) -> list[Question]:
    """From a JSONL file with `prompt` (a text, or messages), `answer` and perhaps `choices`; or from the reviews, which
    become messages where the model knows a `chat`."""
    place = sources.parse(source)
    if place.kind == "sample" and place.name == "reviews":
        return review_questions(limit, chat)
    if place.path is None or not place.path.is_file():
        raise ConfigError(f"{source} is no file of questions", "a JSONL file with prompt, answer and perhaps choices")
    questions = list(islice(_read_jsonl(place.path), limit))
    if not questions:
        raise ConfigError(f"{source} has no questions", "one JSON object a line, with prompt and answer")
    return questions


def review_questions(limit: int, chat: bool) -> list[Question]:
    """Held-out reviews of one sentence; those of the test split, which no run of ours trains on."""
    data = labeled_text.split(labeled_text.load("sample:reviews", "short"), 0, 0, limit).test
    choices = ("negative", "positive") if chat else (" negative", " positive")
    return [
        Question(_review_prompt(POLARITY.format(text=text), chat), choices[label], choices)
        for text, label in zip(data.texts, data.labels, strict=True)
    ]


def _review_prompt(text: str, chat: bool) -> Prompt:
    return [{"role": "user", "content": text}] if chat else f"{text}\nAnswer:"


def chance_level(questions: Sequence[Question]) -> float | None:
    """The share that blind choosing gets right; none where nothing is to be chosen, as words are not hit by chance."""
    if not any(question.choices for question in questions):
        return None
    hits = [question.choices.count(question.answer) / max(1, len(question.choices)) for question in questions]
    return sum(hits) / len(hits)


def grade_answers(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    batch_size: int,
    max_new_tokens: int,
    tick: Tick = lambda samples, tokens: None,
) -> list[bool]:
    """For every question, in order, whether the model was right; `tick` hears of questions and tokens so far."""
    choosing = [number for number, question in enumerate(questions) if question.choices]
    telling = [number for number, question in enumerate(questions) if not question.choices]
    right = [False] * len(questions)
    done, tokens = 0, 0
    for place, found, read in _likeliest_choices(model, tokenizer, [questions[k] for k in choosing], batch_size):
        number = choosing[place]
        right[number] = found == questions[number].answer
        done, tokens = done + 1, tokens + read
        tick(done, tokens)
    if telling:
        settings = GenerationSettings(max_new_tokens=max_new_tokens, stop=("\n",))
        generator = TransformersGenerator(model, tokenizer, settings, identity="examined", batch_size=batch_size)
        for number, answers in zip(telling, generator.generate([questions[k].prompt for k in telling]), strict=True):
            right[number] = same_answer(answers[0].text, questions[number].answer)
            done, tokens = done + 1, tokens + answers[0].tokens + (answers[0].prompt_tokens or 0)
            tick(done, tokens)
    return right


def _likeliest_choices(
    model: nn.Module, tokenizer: Any, questions: Sequence[Question], batch_size: int
) -> Iterator[tuple[int, str, int]]:
    """The place of each question, its likeliest choice, and how many tokens were read for it. Short ones come first:
    questions are read together, and of nearly one length there is little to pad."""
    rows = [_with_choices(tokenizer, question) for question in questions]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place][0].prompt))
    flat = [row for place in order for row in rows[place]]
    starts = range(0, len(flat), batch_size)
    scores = chain.from_iterable(mean_log_probabilities(model, flat[start : start + batch_size]) for start in starts)
    for place in order:
        own = list(islice(scores, len(rows[place])))
        best = max(range(len(own)), key=own.__getitem__)
        yield place, questions[place].choices[best], sum(len(row.prompt) + len(row.ending) for row in rows[place])


class ScoredContinuation(NamedTuple):
    """Tokens that are read, and tokens that are scored after them."""

    prompt: list[int]
    ending: list[int]


def _with_choices(tokenizer: Any, question: Question) -> list[ScoredContinuation]:
    asked = encode_prompt(tokenizer, question.prompt)
    said = [list(tokenizer(choice, add_special_tokens=False)["input_ids"]) for choice in question.choices]
    if not all(said):
        raise ConfigError(f"a choice among {question.choices} has no tokens", "write something as a choice")
    return [ScoredContinuation(asked, choice) for choice in said]


@torch.no_grad()
def mean_log_probabilities(model: nn.Module, rows: Sequence[ScoredContinuation]) -> list[float]:
    """Of each row's ending, a token. Padded on the left, so that all endings end in the same place."""
    device = next(model.parameters()).device
    was_training, longest = model.training, max(len(row.ending) for row in rows)
    width = max(len(row.prompt) for row in rows) + longest
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for number, row in enumerate(rows):
        whole = torch.tensor([*row.prompt, *row.ending])
        ids_BT[number, width - len(whole) :] = whole
        mask_BT[number, width - len(whole) :] = 1
    model.eval()
    try:
        logits_BKV: Tensor = model(
            input_ids=ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            position_ids=(mask_BT.cumsum(1) - 1).clamp(min=0).to(device),
            logits_to_keep=longest + 1,
        ).logits
    finally:
        model.train(was_training)
    log_BKV = torch.log_softmax(logits_BKV[:, :-1].float(), -1)
    said_BK = log_BKV.gather(-1, ids_BT[:, -longest:, None].to(device)).squeeze(-1).cpu()
    return [float(said_BK[number, longest - len(row.ending) :].mean()) for number, row in enumerate(rows)]


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
                'expected {"prompt": ..., "answer": ...}, and where it is a choice "choices": [...]',
            )
        choices = tuple(str(choice) for choice in row.get("choices") or ())
        question = Question(row["prompt"], str(row["answer"]), choices)
        if choices and question.answer not in choices:
            raise ConfigError(f"{path}, line {number}: the answer is none of the choices", "add it to the choices")
        yield question


def _invalid_reason(row: dict[str, Any]) -> str | None:
    """What keeps it from being a question; nothing: it is one."""
    absent = [name for name in ("prompt", "answer") if row.get(name) is None]
    if absent:
        return f"it has no {' and no '.join(absent)}"
    if isinstance(row["answer"], list | dict):
        return "its answer is not words"
    if not isinstance(row.get("choices") or [], list):
        return "its choices are no list"
    try:
        asked = row["prompt"] if isinstance(row["prompt"], str) else as_messages(row["prompt"])
    except (ConfigError, TypeError):
        asked = None
    return None if asked else "its prompt is neither words nor messages that end with a user's"


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = parsed_json(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg}, at column {error.colno}", "one object a line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a question: {row!r:.60}", "one object with prompt and answer a line")
    return row
