"""Documents as tokens, which of them are held out, and the sequences to train on.

Long documents are split, poor sequences dropped; or documents are concatenated and cut into full rows. Only the offsets
of the sequences are kept in memory; tokens are read from the store when a batch is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data import sources
from joulelab.data.batches import TensorBatch, batch_order, padded_share
from joulelab.data.masking import mask_weights, read_counts, write_counts
from joulelab.data.splits import ALL, is_place, parse_split
from joulelab.data.text import open_documents
from joulelab.data.token_store import TokenStore, is_store, open_store
from joulelab.data.tokenize import binarize, describe, usual_workers
from joulelab.distill.chunked import Positions
from joulelab.distill.distilbert.config import LmData, LmDistillation
from joulelab.distill.losses import NO_TARGET
from joulelab.errors import ConfigError
from joulelab.runs.paths import read_json, write_json
from joulelab.zoo.pretrained import load_tokenizer

_TOKENS, _COUNTS, _SPLITS = "tokens", "counts.npy", "splits.json"
_ROWS_AT_A_TIME = 10_000
_TOKENS_AT_A_TIME = 1 << 24

Ids = NDArray[np.int64]


# documents


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Documents of a store; without numbers all of them."""

    store: TokenStore
    rows: Ids | None = None

    @property
    def documents(self) -> Ids:
        return np.arange(len(self.store)) if self.rows is None else self.rows


@dataclass(frozen=True, eq=False)
class Corpus:
    store: TokenStore
    train: Ids
    """Numbers of the documents to train on."""
    validation: HeldOut
    """For evaluations during training, and for reported quality where there is no test text."""
    test: HeldOut | None
    counts_V: Ids
    """Occurrences of each token in the training documents."""


def write_corpus(
    folder: Path, config: LmData, tokenizer_name: str, family: str, count: Callable[[int, int], None]
) -> None:
    """Tokenize the text, unless it is a token store already, and count tokens; `count(documents, tokens)` reports
    progress."""
    own = own_documents(config)
    stores = {}
    for name, (source, split) in {"train": (config.trained_on, config.split), **own}.items():
        target = folder / (_TOKENS if name == "train" else name)
        given = _given_store(source)
        if given is None:
            documents = open_documents(source, config.text_column)
            tokenizer = describe(load_tokenizer(tokenizer_name), tokenizer_name, family)
            texts = documents.read(parse_split(split or documents.source.splits()[0]))
            stores[name] = binarize(texts, target, tokenizer, workers=usual_workers(documents.size_bytes), tick=count)
        else:
            stores[name] = open_store(given)
    store = stores["train"]
    train, rows = _documents_of(store, config, own)
    if config.is_own:
        trained = {_row_hash(store, int(row)) for row in train}
        own_store = stores.get("test", stores.get("validation"))
        held_out = HeldOut(store, rows) if own_store is None else HeldOut(own_store)
        twice = sum(_row_hash(held_out.store, int(row)) in trained for row in held_out.documents)
        write_json(folder / _SPLITS, {"duplicates": twice})
    counts_V = read_counts(Path(config.token_counts)) if config.token_counts else _count_tokens(store, train)
    write_counts(counts_V, folder / _COUNTS)
    open_corpus(folder, config)  # fails here, in the stage that made it, if counts and vocabulary do not match


def open_corpus(folder: Path, config: LmData) -> Corpus:
    own = own_documents(config)
    store = open_store(_given_store(config.trained_on) or folder / _TOKENS)
    held_out = {name: open_store(_given_store(source) or folder / name) for name, (source, _) in own.items()}
    counts_V = read_counts(folder / _COUNTS)
    if len(counts_V) < store.vocab_size:
        raise ConfigError(
            f"token counts of {len(counts_V):,} tokens for a vocabulary of {store.vocab_size:,}",
            "count again: `joulelab prepare token-counts`",
        )
    train, rows = _documents_of(store, config, own)
    validation = HeldOut(held_out["validation"]) if "validation" in held_out else HeldOut(store, rows)
    test = HeldOut(held_out["test"]) if "test" in held_out else None
    return Corpus(store, train, validation, test, counts_V[: store.vocab_size])


def own_documents(config: LmData) -> dict[str, tuple[str, str]]:
    """Validation and test text that the user has: split -> (source, split in it; empty: the first one)."""
    named: dict[str, str] = {split: name for split, name in config.named_files.items() if split != "train"}
    own = {split: (name, "") for split, name in named.items() if is_place(name)}
    source = sources.parse(config.trained_on)
    if source.kind != "folder" or source.path is None or is_store(source.path):
        return own
    there = open_documents(config.trained_on, config.text_column).source.splits()
    inside = {split: named.get(split, split) for split in ("validation", "test") if split not in own}
    return {**{split: (config.trained_on, name) for split, name in inside.items() if name in there}, **own}


def _documents_of(store: TokenStore, config: LmData, own: Mapping[str, object]) -> tuple[Ids, Ids]:
    """(to train on, held out): all of them are trained on where the user has validation text."""
    if "validation" in own:
        return np.arange(len(store)), np.empty(0, np.int64)
    return split_documents(len(store), config.validation_size)


def _row_hash(store: TokenStore, row: int) -> bytes:
    return hashlib.sha256(np.asarray(store.row(row), dtype=np.int64).tobytes()).digest()


def duplicates(folder: Path) -> int:
    return int(read_json(folder / _SPLITS)["duplicates"]) if (folder / _SPLITS).exists() else 0


def _given_store(source: str) -> Path | None:
    """The token store that the user named, if it is one."""
    path = sources.parse(source).path
    return path if path is not None and path.is_dir() and is_store(path) else None


def split_documents(documents: int, size: int | float | str) -> tuple[Ids, Ids]:
    """(to train on, held out); held-out documents are spaced evenly, because files are often sorted."""
    held_out = documents if size == ALL else max(1, round(size * documents)) if isinstance(size, float) else int(size)
    if held_out >= documents:
        raise ConfigError(
            f"{held_out} of {documents} documents would be held out, which leaves none to train on",
            "lower data.validation_size, or use more text",
        )
    places = np.unique(np.linspace(0, documents - 1, held_out + 2)[1:-1].round().astype(np.int64))
    return np.setdiff1d(np.arange(documents), places), places


def _count_tokens(store: TokenStore, rows: Ids) -> Ids:
    counts_V = np.zeros(store.vocab_size, dtype=np.int64)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        ids = np.concatenate([store.row(int(row)) for row in rows[start : start + _ROWS_AT_A_TIME]])
        counts_V += np.bincount(ids, minlength=store.vocab_size)
    return counts_V


# sequences


class Sequences(Protocol):
    @property
    def lengths(self) -> Ids: ...

    def at(self, number: int) -> Ids: ...


@dataclass(frozen=True)
class Limits:
    """Which sequences are trained on."""

    max_tokens: int
    min_tokens: int
    """Sequences of this many tokens or fewer are dropped."""
    max_unknown_share: float
    """Sequences with this share of unknown tokens or more are dropped."""


@dataclass(frozen=True, eq=False)
class CutSequences:
    """Segments of the store's tokens; the tokenizer's first and last special tokens are added where a split removed
    them."""

    store: TokenStore
    starts: Ids
    stops: Ids
    adds_first: NDArray[np.bool_]
    adds_last: NDArray[np.bool_]

    @property
    def lengths(self) -> Ids:
        return self.stops - self.starts + self.adds_first + self.adds_last

    def at(self, number: int) -> Ids:
        ids = np.asarray(self.store.tokens[self.starts[number] : self.stops[number]], dtype=np.int64)
        first, last = boundary_tokens(self.store)
        front = [first] if self.adds_first[number] else []
        back = [last] if self.adds_last[number] else []
        return np.concatenate([front, ids, back]).astype(np.int64)

    def only(self, kept: NDArray[np.bool_]) -> CutSequences:
        return CutSequences(
            self.store, self.starts[kept], self.stops[kept], self.adds_first[kept], self.adds_last[kept]
        )


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Sequences concatenated and cut into rows of one length; the remainder at the end is dropped."""

    cut: CutSequences
    tokens: int
    ends: Ids
    """Where each sequence ends in the concatenation."""

    @property
    def lengths(self) -> Ids:
        return np.full(int(self.ends[-1]) // self.tokens, self.tokens, dtype=np.int64)

    def at(self, number: int) -> Ids:
        start, stop = number * self.tokens, (number + 1) * self.tokens
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        joined = np.concatenate([self.cut.at(place) for place in range(first, last + 1)])
        before = int(self.ends[first - 1]) if first else 0
        return joined[start - before : stop - before]


def sequences_of(store: TokenStore, documents: Ids, config: LmData) -> Sequences:
    limits = Limits(config.max_model_input_size, config.min_tokens, config.max_unknown_share)
    cut = cut_sequences(store, documents, limits)
    return pack_rows(cut, config.max_model_input_size) if config.packing else cut


def cut_sequences(store: TokenStore, rows: Ids, limits: Limits) -> CutSequences:
    """The documents `rows` as sequences of at most max_tokens, without those too short or with too many unknowns."""
    cut = _split(store, rows, limits.max_tokens)
    unknown = _count_unknown(cut)
    kept = (cut.lengths > limits.min_tokens) & (unknown < limits.max_unknown_share * cut.lengths)
    if not kept.any():
        raise ConfigError(
            f"none of {len(cut.starts)} sequences has more than {limits.min_tokens} tokens and less than "
            f"{100 * limits.max_unknown_share:g} % unknown ones",
            "check the tokenizer and the text",
        )
    return cut.only(kept)


def pack_rows(cut: CutSequences, tokens: int) -> PackedRows:
    packed = PackedRows(cut, tokens, np.cumsum(cut.lengths))
    if not len(packed.lengths):
        raise ConfigError(
            f"{int(packed.ends[-1])} tokens do not fill one row of {tokens}", "lower data.max_model_input_size"
        )
    return packed


def boundary_tokens(store: TokenStore) -> tuple[int | None, int | None]:
    """First and last token of a sequence: BERT's [CLS] and [SEP], RoBERTa's <s> and </s>, GPT-2's end of text."""
    special = store.specials
    return special.get("cls", special.get("bos")), special.get("sep", special.get("eos"))


def _split(store: TokenStore, rows: Ids, max_tokens: int) -> CutSequences:
    starts, stops = store.offsets[rows], store.offsets[rows + 1]
    first, last = boundary_tokens(store)
    room = max_tokens - (first is not None) - (last is not None)
    lengths = stops - starts
    pieces = np.where(lengths > max_tokens, -(-lengths // room), (lengths > 0).astype(np.int64))
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.repeat(starts, pieces) + number * room
    whole = np.repeat(lengths <= max_tokens, pieces)
    end = np.where(whole, np.repeat(stops, pieces), np.minimum(begin + room, np.repeat(stops, pieces)))
    nothing = np.zeros(len(begin), dtype=bool)
    adds_first = ~whole & (store.tokens[begin] != first) if first is not None else nothing
    adds_last = ~whole & (store.tokens[end - 1] != last) if last is not None else nothing
    return CutSequences(store, begin, end, adds_first, adds_last)


def _count_unknown(cut: CutSequences) -> Ids:
    """Unknown tokens are rare, so their positions are found once and counted between the ends of each sequence."""
    unknown, tokens = cut.store.specials.get("unk"), cut.store.tokens
    if unknown is None or unknown == cut.store.specials.get("eos"):  # GPT-2 encodes every byte; its unk is its eos
        return np.zeros(len(cut.starts), dtype=np.int64)
    blocks = range(0, len(tokens), _TOKENS_AT_A_TIME)
    found = [np.flatnonzero(tokens[at : at + _TOKENS_AT_A_TIME] == unknown) + at for at in blocks]
    places = np.concatenate(found) if found else np.empty(0, np.int64)
    return np.searchsorted(places, cut.stops) - np.searchsorted(places, cut.starts)


# Batches of masked or causal sequences, and which of their positions enter the losses.
#
# Everything is decided on the host: asking a GPU how many tokens are masked would make the host wait.
#
# How many tokens of a row are masked follows from its length alone. So the share of masked tokens is a constant of
# the data, and a sum over masked positions divided by it is a mean over them, however rows are batched.
#
# Shapes: B rows, T tokens, K masked positions over all rows, N positions that are projected to the vocabulary.


VALIDATION_SEED = 0
"""Held-out tokens are masked in the same way in all runs, so that all models have the same task."""

Arrays = dict[str, NDArray[Any]]


# masking


@dataclass(frozen=True, eq=False)
class MaskRecipe:
    share: float
    """Share of a row's tokens that is predicted."""
    shown_as_mask: float
    shown_as_random: float
    """Fraction of the predicted tokens that are replaced by a random token; the remaining ones are left unchanged."""
    mask_id: int
    weights_V: NDArray[np.float64]
    """Sampling weight of each token, 0 for one that is never masked."""


@dataclass(frozen=True, eq=False)
class MaskedRows:
    input_ids_BT: Ids
    positions_K: Ids
    """Flat, in order."""
    targets_K: Ids
    """The original tokens."""


def masked_per_row(lengths_B: Ids, share: float) -> Ids:
    return np.maximum(1, np.round(share * lengths_B)).astype(np.int64)


def mask_rows(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, random: np.random.Generator) -> MaskedRows:
    """Rows are padded on the right to T; padding is never masked."""
    chosen_BT = _choose(ids_BT, lengths_B, recipe, random)
    positions_K = np.flatnonzero(chosen_BT).astype(np.int64)
    targets_K = ids_BT.reshape(-1)[positions_K]
    uniform_K = random.random(len(positions_K))
    random_K = random.integers(0, len(recipe.weights_V), size=len(positions_K))
    shown_K = np.where(uniform_K < recipe.shown_as_mask + recipe.shown_as_random, random_K, targets_K)
    shown_K = np.where(uniform_K < recipe.shown_as_mask, recipe.mask_id, shown_K)
    input_ids_BT = ids_BT.copy()
    input_ids_BT.reshape(-1)[positions_K] = shown_K
    return MaskedRows(input_ids_BT, positions_K, targets_K)


def _choose(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, random: np.random.Generator) -> NDArray[np.bool_]:
    """Weighted sampling without replacement: the smallest values of Exp(1) / weight in each row (Efraimidis and
    Spirakis, 2006)."""
    weights_BT = recipe.weights_V[ids_BT] * (np.arange(ids_BT.shape[1]) < lengths_B[:, None])
    with np.errstate(divide="ignore"):
        # The smallest of exponential variables with rates w_i is number i with probability w_i /
        # sum w, and the next smallest continues like that among the rest: weighted sampling without
        # replacement in one vectorized pass. A weight of 0 gives an infinite key.
        keys_BT = random.exponential(size=ids_BT.shape) / weights_BT
    ranks_BT = keys_BT.argsort(axis=1).argsort(axis=1)
    return (ranks_BT < masked_per_row(lengths_B, recipe.share)[:, None]) & (weights_BT > 0)


# batches


@dataclass(frozen=True, eq=False)
class LmBatch(TensorBatch):
    """`count` is all tokens without padding; terms at fewer positions are scaled up by their constant share of them."""

    positions_used: int = field(default=0, kw_only=True)
    """How many positions enter the losses, the first ones in processing order."""
    positions_targeted: int = field(default=0, kw_only=True)
    """How many positions, the first ones, may have a target."""
    predicted: int = field(default=0, kw_only=True)
    """Positions with a target."""

    def to(self, device: torch.device) -> LmBatch:
        return cast(LmBatch, super().to(device))

    @property
    def positions(self) -> Positions:
        order_N = self.tensors.get("order")
        return Positions(self["targets"], self["weights"], self.positions_used, self.positions_targeted, order_N)

    @property
    def rows(self) -> Tensor | None:
        """Flat positions whose features are needed; None: all of them."""
        return self.tensors.get("rows")

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {name: self[name] for name in ("input_ids", "attention_mask") if name in self.tensors}


@dataclass(frozen=True, eq=False)
class LmTask:
    """How a batch is made from sequences."""

    recipe: MaskRecipe | None
    """None: every token is predicted from those before it."""
    everywhere: bool
    """All tokens are projected to the vocabulary; else only the masked ones."""
    pad_id: int

    def targets_share(self, lengths: Ids) -> float:
        """Share of the tokens that is predicted: a constant of the data, whatever is sampled."""
        if self.recipe is None:
            return float((lengths - 1).sum() / lengths.sum())
        return float(masked_per_row(lengths, self.recipe.share).sum() / lengths.sum())

    def batch(self, sequences: list[Ids], random: np.random.Generator) -> LmBatch:
        ids_BT, lengths_B = padded(sequences, self.pad_id)
        if self.recipe is None:
            return _causal(ids_BT, lengths_B)
        return _masked(ids_BT, lengths_B, self.recipe, self.everywhere, random)


def make_task(corpus: Corpus, config: LmDistillation, everywhere: bool) -> LmTask:
    special = corpus.store.specials
    pad_id = special.get("pad", special.get("eos", 0))
    if not config.mlm:
        return LmTask(None, True, pad_id)
    if "mask" not in special:
        raise ConfigError(
            f"the tokenizer {corpus.store.tokenizer} has no mask token", "use the tokenizer of a masked model"
        )
    recipe = MaskRecipe(
        share=config.mlm_mask_prop,
        shown_as_mask=config.word_mask,
        shown_as_random=config.word_rand,
        mask_id=special["mask"],
        weights_V=mask_weights(corpus.counts_V, config.mlm_smoothing, special),
    )
    return LmTask(recipe, everywhere, pad_id)


class LmBatches:
    """Batches by (epoch, index): order and masks are pure functions of the seed and these two."""

    def __init__(
        self, sequences: Sequences, task: LmTask, batch_size: int, seed: int, group_by_size: bool = True
    ) -> None:
        self._sequences, self.task, self._seed = sequences, task, seed
        self._size, self._grouped = batch_size, group_by_size
        self.lengths = sequences.lengths
        self._same_length = int(self.lengths.min()) == int(self.lengths.max())
        self._epoch: int | None = None
        self._order: list[Ids] = []

    @property
    def batches_per_epoch(self) -> int:
        """With rows of one length a smaller last batch is dropped, because its shape would be compiled separately."""
        if self._same_length:
            return max(1, len(self.lengths) // self._size)
        return -(-len(self.lengths) // self._size)

    @property
    def padded_share(self) -> float:
        return padded_share(self.lengths, self._ordered(0))

    def at(self, epoch: int, index: int) -> LmBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        rows = self._ordered(epoch)[index]
        random = np.random.default_rng([self._seed, epoch, index, 1])
        return self.task.batch([self._sequences.at(int(row)) for row in rows], random)

    def _ordered(self, epoch: int) -> list[Ids]:
        if epoch != self._epoch:
            grouped = self._grouped and not self._same_length
            self._order = batch_order(self.lengths, self._size, self._seed, epoch, grouped)
            self._epoch = epoch
        return self._order


def held_out_batches(
    corpus: Corpus, held_out: HeldOut, data: LmData, config: LmDistillation, batch_size: int
) -> LmBatches:
    sequences = sequences_of(held_out.store, held_out.documents, data)
    return LmBatches(sequences, make_task(corpus, config, everywhere=False), batch_size, VALIDATION_SEED)


def padded(sequences: list[Ids], pad_id: int) -> tuple[Ids, Ids]:
    lengths_B = np.array([len(ids) for ids in sequences], dtype=np.int64)
    ids_BT = np.full((len(sequences), int(lengths_B.max())), pad_id, dtype=np.int64)
    for row, ids in enumerate(sequences):
        ids_BT[row, : len(ids)] = ids
    return ids_BT, lengths_B


def _masked(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, everywhere: bool, random: np.random.Generator) -> LmBatch:
    masked = mask_rows(ids_BT, lengths_B, recipe, random)
    count = len(masked.positions_K)
    if not everywhere:
        loss: Arrays = {"rows": masked.positions_K, "targets": masked.targets_K, "weights": np.ones(count, np.float32)}
        return _batch(masked.input_ids_BT, lengths_B, loss, used=count, targeted=count)
    real_BT = _real(ids_BT, lengths_B)
    is_masked_BT = np.zeros(ids_BT.shape, dtype=bool)
    is_masked_BT.reshape(-1)[masked.positions_K] = True
    # masked, other tokens, padding: a chunk without masked ones needs no cross-entropy, one of padding nothing
    order_N = np.argsort(np.where(is_masked_BT, 0, np.where(real_BT, 1, 2)).reshape(-1), kind="stable")
    targets_N = np.full(ids_BT.size, NO_TARGET, dtype=np.int64)
    targets_N[:count] = masked.targets_K
    loss = {"order": order_N, "targets": targets_N, "weights": real_BT.reshape(-1)[order_N].astype(np.float32)}
    return _batch(masked.input_ids_BT, lengths_B, loss, used=int(lengths_B.sum()), targeted=count)


def _causal(ids_BT: Ids, lengths_B: Ids) -> LmBatch:
    """Shifted: a position's target is the next token of its row; the last token of a row has none."""
    targets_BT = np.full(ids_BT.shape, NO_TARGET, dtype=np.int64)
    targets_BT[:, :-1] = np.where(_real(ids_BT, lengths_B)[:, 1:], ids_BT[:, 1:], NO_TARGET)
    loss: Arrays = {
        "targets": targets_BT.reshape(-1),
        "weights": _real(ids_BT, lengths_B).reshape(-1).astype(np.float32),
    }
    return _batch(ids_BT, lengths_B, loss, used=ids_BT.size, targeted=ids_BT.size)


def _batch(ids_BT: Ids, lengths_B: Ids, loss: Arrays, used: int, targeted: int) -> LmBatch:
    predicted = int((loss["targets"] != NO_TARGET).sum())
    arrays = {"input_ids": ids_BT, **loss}
    if int(lengths_B.min()) < ids_BT.shape[1]:  # a mask that masks nothing would rule the fast attention out
        arrays["attention_mask"] = _real(ids_BT, lengths_B).astype(np.int64)
    tokens = int(lengths_B.sum())
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return LmBatch(
        tensors, len(lengths_B), tokens,
        count=tokens, positions_used=used, positions_targeted=targeted, predicted=predicted,
    )  # fmt: skip


def _real(ids_BT: Ids, lengths_B: Ids) -> NDArray[np.bool_]:
    real_BT: NDArray[np.bool_] = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
    return real_BT
