"""Pairs of a better and a worse answer to one prompt: chosen by score, stored, laid out as rows and batched.

The best and the worst answer of each prompt make a pair. A judge's preference for length becomes the student's, so it
is measured and reported with the pairs.

Rows. By default the prompt appears once with both answers after it. In `prompt chosen rejected` the rejected answer has
the positions it would have directly after the prompt and does not attend to the chosen one, so every token is computed
as in a separate row, and the prompt, often half of the work, is computed once. The first token of each answer is
predicted by the prompt's last. The alternative is two rows with the prompt in each.

Shapes: B rows, T tokens, P pairs, N answer tokens of all pairs; the last axis of `_P2` is (chosen, rejected).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batches import TensorBatch
from joulelab.data.token_store import RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.generation.completions import Completion, Prompt, answer_ids, as_messages, encode_prompt
from joulelab.meter.figures import Frozen

Score = float | None
"""Higher is better; None: the answer could not be judged."""
Ids = NDArray[np.int64]
_REMAKE_HINT = "rebuild the pairs"


# candidates, and the pairs chosen from them


@dataclass(frozen=True)
class Candidates:
    """A prompt with the answers to be judged."""

    prompt: Prompt
    answers: Sequence[Completion]
    expected: str | None = None
    """The correct answer, if the data has it; only rules use it."""

    @property
    def question(self) -> str:
        """The prompt as plain text."""
        messages = as_messages(self.prompt)
        if messages is None:
            return str(self.prompt)
        return "\n\n".join(message["content"] for message in messages)


@dataclass(frozen=True)
class Preference:
    prompt: Prompt
    chosen: Completion
    rejected: Completion
    chosen_score: Score = None
    """None if no judge has scored them: the data states which is better."""
    rejected_score: Score = None


@dataclass(frozen=True)
class CandidateFilters:
    """Which answers may form a pair. Empty answers and repetitions of an answer never do: nothing is learned from
    them."""

    min_tokens: int = 0
    """Without the token that ends an answer."""
    max_tokens: int | None = None
    keep_truncated: bool = True

    def drop_reason(self, answer: Completion, earlier: Collection[str]) -> str | None:
        """Why an answer is not used; `earlier` are the texts of those before it."""
        tokens = answer.tokens - (answer.finish_reason == "stop")
        checks = (
            ("answers_empty", not answer.text.strip()),
            ("answers_truncated", answer.finish_reason == "length" and not self.keep_truncated),
            ("answers_short", tokens < self.min_tokens),
            ("answers_long", self.max_tokens is not None and tokens > self.max_tokens),
            ("answers_repeated", answer.text in earlier),
        )
        return next((name for name, holds in checks if holds), None)


class PairReport(Frozen):
    """Counts of prompts unless noted otherwise: prompts = pairs + ties + identical + filtered + unjudged + too_long."""

    prompts: int
    pairs: int
    ties: int
    """Scores of best and worst differ by no more than the tie margin."""
    identical: int
    """All judged answers have the same text."""
    unjudged: int
    """Fewer than two answers could be judged."""
    too_long: int = 0
    """Did not fit into a row."""
    filtered: int = 0
    """Fewer than two answers passed the filters."""
    held_out: int = 0
    """Pairs that are not trained on, for the preference accuracy; they are among `pairs`."""
    answers_empty: int = 0
    """Number of answers, like the following counts: each is counted under the first filter that drops it."""
    answers_truncated: int = 0
    answers_short: int = 0
    answers_long: int = 0
    answers_repeated: int = 0
    answers_unjudged: int
    """Number of answers."""
    chosen_truncated: int
    """Pairs whose better answer was truncated."""
    chosen_tokens_mean: float | None
    rejected_tokens_mean: float | None
    chosen_longer_share: float | None
    """Fraction among the pairs with answers of different length; 0.5 means no preference for length."""
    length_score_correlation: float | None
    """Between tokens and score within prompts; None if either is constant."""


NO_FILTERS = CandidateFilters()


def choose_pairs(
    candidates: Sequence[Candidates],
    scores: Sequence[Sequence[Score]],
    tie_margin: float = 0.0,
    filters: CandidateFilters = NO_FILTERS,
) -> tuple[list[Preference], PairReport]:
    if tie_margin < 0:
        raise ConfigError(f"tie_margin is {tie_margin}; expected 0 or more")
    counts = Counter({"ties": 0, "identical": 0, "unjudged": 0})
    chosen: list[Preference] = []
    for one, own in zip(candidates, scores, strict=True):
        scored, reasons = _scored_answers(one, own, filters)
        counts.update(reasons)
        if len(scored) < 2:
            counts[_no_pair_reason(len(scored), reasons)] += 1
        else:
            best, worst = max(scored, key=lambda pair: pair[1]), min(scored, key=lambda pair: pair[1])
            if best[1] - worst[1] <= tie_margin:
                counts["ties"] += 1
            else:
                chosen.append(Preference(one.prompt, best[0], worst[0], best[1], worst[1]))
    return chosen, _report(candidates, scores, chosen, counts, filters)


def _no_pair_reason(usable: int, dropped: Counter[str]) -> str:
    if usable == 1 and set(dropped) == {"answers_repeated"}:
        return "identical"
    return "filtered" if dropped else "unjudged"


def encode_pairs(
    tokenizer: Any, preferences: Sequence[Preference], report: PairReport, max_tokens: int
) -> tuple[list[tuple[Preference, Pair]], PairReport]:
    """Pairs in the student's tokens; those whose row (prompt and both answers) is too long are dropped and counted."""
    both = zip(preferences, _encoded(tokenizer, preferences), strict=True)
    pairs = [(one, pair) for one, pair in both if pair.tokens <= max_tokens]
    dropped = len(preferences) - len(pairs)
    update = {"pairs": len(pairs), "too_long": report.too_long + dropped}
    return pairs, report.model_copy(update=update)


def readable_pair(one: Preference, split: str) -> dict[str, Any]:
    """A pair as people and other tools read it: TRL's preference type, with the scores of the judge."""
    messages = as_messages(one.prompt)

    def answer(text: str) -> Any:
        return text if messages is None else [{"role": "assistant", "content": text}]

    scores = {"score_chosen": one.chosen_score, "score_rejected": one.rejected_score}
    return {
        "prompt": one.prompt if messages is None else messages,
        "chosen": answer(one.chosen.text),
        "rejected": answer(one.rejected.text),
        **{name: score for name, score in scores.items() if score is not None},
        "split": split,
    }


def _encoded(tokenizer: Any, preferences: Sequence[Preference]) -> Iterator[Pair]:
    for one in preferences:
        chosen, rejected = (
            np.array(answer_ids(tokenizer, one.prompt, answer.text, answer.finish_reason == "stop"), np.int64)
            for answer in (one.chosen, one.rejected)
        )
        yield Pair(np.array(encode_prompt(tokenizer, one.prompt), np.int64), chosen, rejected)


def _scored_answers(
    one: Candidates, scores: Sequence[Score], filters: CandidateFilters
) -> tuple[list[tuple[Completion, float]], Counter[str]]:
    """Answers with a score that pass the filters, and why the others do not."""
    kept: list[tuple[Completion, float]] = []
    dropped: Counter[str] = Counter()
    for answer, score in zip(one.answers, scores, strict=True):
        if score is None or not np.isfinite(score):
            continue
        reason = filters.drop_reason(answer, [earlier.text for earlier, _ in kept])
        if reason is None:
            kept.append((answer, score))
        else:
            dropped[reason] += 1
    return kept, dropped


def _report(
    candidates: Sequence[Candidates],
    scores: Sequence[Sequence[Score]],
    pairs: Sequence[Preference],
    counts: Mapping[str, int],
    filters: CandidateFilters,
) -> PairReport:
    chosen = np.array([one.chosen.tokens for one in pairs], float)
    rejected = np.array([one.rejected.tokens for one in pairs], float)
    differ = chosen != rejected
    return PairReport(
        prompts=len(candidates),
        pairs=len(pairs),
        answers_unjudged=sum(score is None for own in scores for score in own),
        chosen_truncated=sum(one.chosen.finish_reason == "length" for one in pairs),
        chosen_tokens_mean=float(chosen.mean()) if len(pairs) else None,
        rejected_tokens_mean=float(rejected.mean()) if len(pairs) else None,
        chosen_longer_share=float((chosen > rejected)[differ].mean()) if differ.any() else None,
        length_score_correlation=_length_correlation(candidates, scores, filters),
        **counts,
    )


def _length_correlation(
    candidates: Sequence[Candidates], scores: Sequence[Sequence[Score]], filters: CandidateFilters
) -> float | None:
    """Each prompt's mean is subtracted first: long answers to hard questions are not a preference for length."""
    lengths, values = [], []
    for one, own in zip(candidates, scores, strict=True):
        scored, _ = _scored_answers(one, own, filters)
        if len(scored) > 1:
            tokens, score = np.array([(answer.tokens, value) for answer, value in scored], float).T
            lengths.append(tokens - tokens.mean())
            values.append(score - score.mean())
    if not lengths:
        return None
    all_lengths, all_values = np.concatenate(lengths), np.concatenate(values)
    # Pearson's correlation of deviations from each prompt's mean (a within-group correlation).
    spread = float(np.sqrt((all_lengths**2).sum() * (all_values**2).sum()))
    return float((all_lengths * all_values).sum() / spread) if spread > 0 else None


# pairs as tokens, and their store


@dataclass(frozen=True, eq=False)
class Pair:
    prompt: Ids
    chosen: Ids
    """The answer's tokens, with the token that ends it."""
    rejected: Ids

    def __post_init__(self) -> None:
        if not (len(self.prompt) and len(self.chosen) and len(self.rejected)):
            lengths = tuple(len(ids) for ids in (self.prompt, self.chosen, self.rejected))
            raise ConfigError(
                f"a pair of {lengths} tokens (prompt, chosen, rejected); each needs at least 1", _REMAKE_HINT
            )

    @property
    def key(self) -> str:
        """Hash of the content, so that a cached value cannot be assigned to another pair."""
        digest = hashlib.sha256()
        for ids in (self.prompt, self.chosen, self.rejected):
            # The length before the ids: without it, moving a token from the end of the prompt to
            # the start of an answer would give the same bytes.
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
        return digest.hexdigest()[:32]

    @property
    def tokens(self) -> int:
        """With the prompt counted once."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, eq=False)
class PairStore:
    """Pairs on disk, each as three rows of a token store: prompt, chosen, rejected."""

    tokens: RaggedStore
    report: Mapping[str, Any]
    """The `PairReport` of these pairs."""

    @classmethod
    def open(cls, folder: Path) -> PairStore:
        store = RaggedStore(folder)
        if len(store) % 3:
            raise JoulelabError(f"{folder.absolute()} has {len(store)} rows; expected three per pair", _REMAKE_HINT)
        return cls(store, store.attributes.get("report", {}))

    def __len__(self) -> int:
        return len(self.tokens) // 3

    def __iter__(self) -> Iterator[Pair]:
        return (self.pair(number) for number in range(len(self)))

    def pair(self, number: int) -> Pair:
        prompt, chosen, rejected = (self.tokens.row(3 * number + part) for part in range(3))
        return Pair(prompt, chosen, rejected)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[pairs, 3]: tokens of prompt, chosen and rejected."""
        return self.tokens.lengths.reshape(-1, 3)


def write_pairs(
    folder: Path, pairs: Iterable[Pair], *, vocab_size: int, tokenizer: str, report: Mapping[str, Any] | None = None
) -> PairStore:
    empty = True
    with store_writer(folder, {"tokens": token_column(vocab_size)}) as writer:
        for pair in pairs:
            empty = False
            parts = (pair.prompt, pair.chosen, pair.rejected)
            writer.append([len(ids) for ids in parts], tokens=np.concatenate(parts))
        if empty:
            raise ConfigError(f"no preference pair could be made{_drop_counts(report or {})}", _best_hint(report or {}))
        writer.attributes.update(vocab_size=vocab_size, tokenizer=tokenizer, report=dict(report or {}))
    return PairStore.open(folder)


_HINTS = {
    "ties": "generate more candidates (generation.answer.n), lower preferences.tie_margin, or use another judge",
    "identical": "generate more candidates (generation.answer.n), or raise generation.answer.temperature",
    "filtered": "generate more or longer answers (generation.answer.n, .max_new_tokens), or relax the filters "
    "preferences.min_tokens, max_tokens, keep_truncated",
    "unjudged": "the judge returned no grade: use a larger judge (preferences.judge.model), another rubric or judge",
    "too_long": "raise data.row_length, or lower generation.answer.max_new_tokens",
}


def _best_hint(report: Mapping[str, Any]) -> str:
    """For the most frequent reason why a prompt gave no pair."""
    most = max(_HINTS, key=lambda name: report.get(name) or 0)
    return _HINTS[most if report.get(most) else "identical"]


def _drop_counts(report: Mapping[str, Any]) -> str:
    reasons = {name: report.get(name) for name in _HINTS}
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in reasons.items() if count)
    return f" from {report['prompts']} prompts: {counts or 'none had two answers'}" if report.get("prompts") else ""


# rows of a batch

PROMPT, CHOSEN, REJECTED, PADDING = 0, 1, 2, -1
_ALIGNED = 64
"""Row lengths are multiples of this: fast kernels of masked attention need aligned masks, and few shapes mean few
compilations."""


class PairLayout:
    """Makes a batch of pairs. The padding token may be any, because nothing attends to it."""

    def __init__(self, shared_prompt: bool = True, aligned: int = _ALIGNED) -> None:
        self.shared_prompt, self._aligned = shared_prompt, aligned

    def batch(self, pairs: Sequence[Pair], reference_P2: NDArray[np.float64] | None = None) -> TensorBatch:
        rows = [row for pair in pairs for row in self._rows(pair)]
        length = -(-max(len(ids) for ids, _ in rows) // self._aligned) * self._aligned
        tensors = self._padded(rows, length) | self._answers(pairs, length)
        if reference_P2 is not None:
            tensors["reference"] = torch.from_numpy(reference_P2).float()
        tokens = sum(len(ids) for ids, _ in rows)
        expand = _with_mask if self.shared_prompt else None
        return TensorBatch(tensors, samples=len(pairs), tokens=tokens, count=len(pairs), expand=expand)

    def _rows(self, pair: Pair) -> list[tuple[NDArray[np.int64], NDArray[np.int8]]]:
        parts = {PROMPT: pair.prompt, CHOSEN: pair.chosen, REJECTED: pair.rejected}
        layouts = [(PROMPT, CHOSEN, REJECTED)] if self.shared_prompt else [(PROMPT, CHOSEN), (PROMPT, REJECTED)]
        return [
            (
                np.concatenate([parts[name] for name in layout]),
                np.concatenate([np.full(len(parts[name]), name, np.int8) for name in layout]),
            )
            for layout in layouts
        ]

    def _padded(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int8]]], length: int) -> dict[str, Tensor]:
        ids_BT = np.zeros((len(rows), length), np.int64)
        segments_BT = np.full((len(rows), length), PADDING, np.int8)
        positions_BT = np.zeros((len(rows), length), np.int64)
        for row, (ids, segments) in enumerate(rows):
            ids_BT[row, : len(ids)], segments_BT[row, : len(ids)] = ids, segments
            prompt = int((segments == PROMPT).sum())
            positions_BT[row, : len(ids)] = np.arange(len(ids))
            if self.shared_prompt:
                rejected = int((segments == REJECTED).sum())
                positions_BT[row, len(ids) - rejected : len(ids)] = prompt + np.arange(rejected)
        arrays = {"input_ids": ids_BT, "segments": segments_BT, "position_ids": positions_BT}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _answers(self, pairs: Sequence[Pair], length: int) -> dict[str, Tensor]:
        """Flat indices of the hidden states that predict answer tokens, the tokens, and the sum that each belongs to:
        2 * pair + (0 or 1)."""
        places, targets, owners = [], [], []
        for number, pair in enumerate(pairs):
            for side, ids in enumerate((pair.chosen, pair.rejected)):
                row = number if self.shared_prompt else 2 * number + side
                first = len(pair.prompt) + (len(pair.chosen) if self.shared_prompt and side else 0)
                before = np.arange(first - 1, first - 1 + len(ids))
                before[0] = len(pair.prompt) - 1
                places.append(row * length + before)
                targets.append(ids)
                owners.append(np.full(len(ids), 2 * number + side))
        lengths_P2 = np.array([[len(pair.chosen), len(pair.rejected)] for pair in pairs], np.float32)
        arrays = {
            "places": np.concatenate(places),
            "targets": np.concatenate(targets),
            "owners": np.concatenate(owners),
            "answer_tokens": lengths_P2,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def shared_prompt_mask(segments_BT: Tensor) -> Tensor:
    """[B, 1, T, T], True where the query (third axis) attends to the key: earlier tokens of the prompt and of its own
    answer.

    Padding attends to the prompt, which has no effect: attention over nothing would be NaN.
    """
    length = segments_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=segments_BT.device).tril()
    key_B1T, query_BT1 = segments_BT[:, None, :], segments_BT[:, :, None]
    related_BTT = (key_B1T == PROMPT) | ((key_B1T == query_BT1) & (key_B1T != PADDING))
    return (causal_TT & related_BTT)[:, None]


def _with_mask(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**tensors, "attention_mask": shared_prompt_mask(tensors["segments"])}


# batches in the order of training

_SORT_WINDOW = 16
"""Batches among which pairs are sorted by length: wide enough to avoid padding, narrow enough to remain a shuffle."""
Reference = Callable[[Sequence[Pair]], NDArray[np.float64]]


class Pairs(Protocol):
    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def pair(self, number: int) -> Pair: ...


class PairBatches:
    """Batches of pairs of similar length, in an order that is a pure function of seed and epoch.

    An incomplete last batch is dropped; a set smaller than one batch is one batch.
    """

    def __init__(
        self,
        pairs: Pairs,
        batch_size: int,
        seed: int,
        reference: Reference | None = None,
        layout: PairLayout | None = None,
    ) -> None:
        """`reference` returns log-probabilities [pairs, 2]; None: the objective has a live reference."""
        if batch_size < 1 or not len(pairs):
            raise ConfigError(f"{len(pairs)} pairs in batches of {batch_size}; expected at least 1 of each")
        self._pairs, self._batch_size, self._seed = pairs, batch_size, seed
        self._reference, self._layout = reference, layout or PairLayout()
        self._epoch, self._order = -1, np.arange(len(pairs))

    @property
    def batches_per_epoch(self) -> int:
        return max(1, len(self._pairs) // self._batch_size)

    def at(self, epoch: int, index: int) -> TensorBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffled(epoch), epoch
        start = index * self._batch_size
        pairs = [self._pairs.pair(int(at)) for at in self._order[start : start + self._batch_size]]
        return self._layout.batch(pairs, self._reference(pairs) if self._reference else None)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng([self._seed, epoch])
        drawn = random.permutation(len(self._pairs))[: self.batches_per_epoch * self._batch_size]
        lengths = self._pairs.lengths.sum(1)
        window = _SORT_WINDOW * self._batch_size
        windows = [drawn[start : start + window] for start in range(0, len(drawn), window)]
        by_length = np.concatenate([numbers[np.argsort(lengths[numbers], kind="stable")] for numbers in windows])
        if len(by_length) < self._batch_size:
            return by_length
        batches = by_length.reshape(-1, self._batch_size)
        return batches[random.permutation(len(batches))].reshape(-1)
