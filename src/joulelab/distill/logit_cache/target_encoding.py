"""From documents and teacher logits to the bytes of a cache, and back.

Keys. A packed row holds several documents that do not attend to each other. The teacher's output for one depends on its
own tokens only, so each document of a row has its own key, a hash of its content: a different shuffle, packing or seed
finds the same outputs again, and no order can misalign them.

Sampling. Samples from many distributions are drawn at once by systematic sampling: n draws at the points (0 + u) / n,
(1 + u) / n, ... of the cumulative probability with one uniform u (Madow, 1949). A token of probability p is drawn n p
times on average, as with independent draws, so a mean over the draws is unbiased. But it is drawn at least floor(n p)
times and at most once more, so the variance of likely tokens is small: 50 such draws are worth more than 50 independent
ones.

Bytes. Written with numpy on the host, read with torch on any device. A position takes, in this order: the number of
distinct sampled tokens (1 byte), the entropy (float16), the probability outside the top K (float32), the ids of the top
K (3 bytes each) and their probabilities (3 bytes each, as a fraction of 2^24 - 1). A sampled token is a separate
record: in 24 bits, or 32 if ids need more than 18, the difference to the previous id (ascending ids have small
differences, which compress better) and the count.

Shapes: N positions, C positions of a chunk, V vocabulary, n draws, K tokens of a position, J blocks of the vocabulary,
F bytes of a position, R records, S bytes of a record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from joulelab.distill.logit_cache.codecs import Codec, record_bytes
from joulelab.errors import ConfigError

KEY_BYTES = 16
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]


# keys of documents


def document_key(ids: NDArray[Any], trained: Bools | None = None) -> bytes:
    """Hash of the token ids and of the trained mask, whose first value is ignored. None: all tokens are trained."""
    mask = np.ones(len(ids), dtype=np.bool_) if trained is None else np.asarray(trained, dtype=np.bool_)
    if len(mask) != len(ids):
        raise ConfigError(f"{len(ids)} ids and a trained mask of {len(mask)}; expected equal lengths")
    digest = hashlib.blake2b(np.uint64(len(ids)).tobytes(), digest_size=KEY_BYTES)
    digest.update(np.asarray(ids).astype("<u4").tobytes())
    digest.update(np.packbits(mask[1:]).tobytes())
    return digest.digest()


@dataclass(frozen=True)
class DocumentSpan:
    """A document within a packed row."""

    key: bytes
    row: int
    start: int
    stop: int
    targets: int
    """Number of its trained tokens."""


def document_spans(
    ids_BT: NDArray[Any], trained_BT: Bools, documents_BT: NDArray[Any] | None = None
) -> list[DocumentSpan]:
    """The documents with targets, in reading order; without `documents_BT` each row is one document.

    The trained tokens, read row by row, are the targets of these documents one after another.
    """
    spans = []
    for row, (ids_T, trained_T) in enumerate(zip(ids_BT, trained_BT, strict=True)):
        documents_T = np.zeros(len(ids_T)) if documents_BT is None else documents_BT[row]
        for start, stop in _equal_runs(documents_T):
            targets = int(np.count_nonzero(trained_T[start + 1 : stop]))
            if targets:
                key = document_key(ids_T[start:stop], trained_T[start:stop])
                spans.append(DocumentSpan(key, row, start, stop, targets))
    return spans


def _equal_runs(documents_T: NDArray[Any]) -> list[tuple[int, int]]:
    """(start, stop) of runs of equal document numbers; padding has a negative number and is skipped."""
    edges = np.flatnonzero(np.diff(documents_T)) + 1
    bounds = [0, *edges.tolist(), len(documents_T)]
    return [(a, b) for a, b in pairwise(bounds) if b > a and documents_T[a] >= 0]


def first_occurrences(keys: Sequence[bytes]) -> list[int]:
    """Index of the first occurrence of each key: two documents with the same text are stored once."""
    first: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    return list(first.values())


# sampling and selection, on the device of the logits

_BLOCK = 64
"""Probabilities are summed in blocks first: a running float32 sum over 128,256 tokens would lose the small ones, and
only blocks with a draw need a second look."""
_LOWEST_LOGIT = -1e30

ProbabilityFunction = Callable[[Tensor, int, float, bool], tuple[Tensor, Tensor | None]]
SelectedTargets = dict[str, Tensor]
"""By name: `entropy` [C], `records` [C, n], `rest` [C], `top` [C, K] and `share` [C, K]; the codec decides which."""


def systematic_sample(weights_CV: Tensor, count: int, offsets_C: Tensor) -> Tensor:
    """Token ids [C, count], ascending; -1 in rows without any weight. `offsets_C` is u, in [0, 1)."""
    missing = -weights_CV.shape[1] % _BLOCK
    padded_CV = F.pad(weights_CV, (0, missing)) if missing else weights_CV
    weights_CJb = padded_CV.reshape(len(padded_CV), -1, _BLOCK)
    cumulative_CJ = weights_CJb.sum(-1).double().cumsum(-1)
    steps_n = torch.arange(count, device=weights_CV.device, dtype=torch.float64)
    # Systematic sampling (Madow, 1949): one random offset u and n equally spaced points (k + u) / n
    # of the cumulative distribution. A token of probability p is drawn floor(np) or ceil(np) times
    # with mean np, so the estimate is unbiased like that of independent draws, and each count
    # varies by less than 1.
    points_Cn = (steps_n + offsets_C.double()[:, None]) / count * cumulative_CJ[:, -1:]
    block_Cn = torch.searchsorted(cumulative_CJ, points_Cn, right=True).clamp_(max=cumulative_CJ.shape[1] - 1)
    before_Cn = torch.where(block_Cn > 0, cumulative_CJ.gather(1, (block_Cn - 1).clamp_(min=0)), 0.0)
    rows_C1 = torch.arange(len(weights_CV), device=weights_CV.device)[:, None]
    within_Cnb = weights_CJb[rows_C1, block_Cn].cumsum(-1)
    # rounding may move a point to the end of its block, past the last token that has weight
    left_Cn = torch.minimum((points_Cn - before_Cn).float(), within_Cnb[..., -1] * (1 - 1e-6))
    ids_Cn = block_Cn * _BLOCK + (within_Cnb <= left_Cn[..., None]).sum(-1)
    ids_Cn = ids_Cn.clamp(max=weights_CV.shape[1] - 1).sort(-1).values  # ascending already, except for rounding
    return torch.where(cumulative_CJ[:, -1:] > 0, ids_Cn, -1)


def teacher_probabilities(
    logits_CV: Tensor, vocabulary: int, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Probabilities [C, V] and, if requested, their entropy [C]. Logits that pad the teacher's head are ignored."""
    scaled_CV = logits_CV[:, :vocabulary].float()
    scaled_CV = scaled_CV if temperature == 1 else scaled_CV / temperature
    share_CV = scaled_CV.softmax(-1)
    if not entropy:
        return share_CV, None
    # with p = exp(z - norm) the entropy is norm - sum p z, and the most likely token gives the norm
    # logsumexp without another pass over the vocabulary: the largest logit minus the log of its
    # probability.
    norm_C = scaled_CV.amax(-1) - share_CV.amax(-1).log()
    # a token with logit -inf adds nothing: 0 times a finite number
    return share_CV, norm_C - (share_CV * scaled_CV.clamp(min=_LOWEST_LOGIT)).sum(-1)


def select_targets(
    codec: Codec,
    logits_CV: Tensor,
    vocabulary: int,
    temperature: float,
    offsets_C: Tensor,
    probabilities: ProbabilityFunction = teacher_probabilities,
) -> SelectedTargets:
    """What the codec stores of these logits. `probabilities` may be compiled: it reads the whole vocabulary."""
    share_CV, entropy_C = probabilities(logits_CV, vocabulary, temperature, codec.draws > 0)
    selected: SelectedTargets = {} if entropy_C is None else {"entropy": entropy_C}
    if codec.top:
        share_CK, top_CK = share_CV.topk(min(codec.top, vocabulary), -1)
        # The top K are stored exactly and must not be drawn again; the samples represent the
        # remainder only.
        share_CV = share_CV.scatter(1, top_CK, 0.0)
        selected |= {"rest": share_CV.sum(-1), "top": top_CK, "share": share_CK}
    if codec.draws:
        drawn_Cn = systematic_sample(share_CV, codec.draws, offsets_C)
        selected["records"] = draw_records(drawn_Cn, record_bytes(vocabulary))
    return selected


_ID_BITS = {3: 18, 4: 26}
_NO_RECORD = np.uint32(2**32 - 1)


def draw_records(drawn_Cn: Tensor, record_bytes: int) -> Tensor:
    """The record of every distinct token where it is drawn first, as int32 [C, n]; -1 elsewhere.

    Made on the device of the draws: the host would need 3.6 us per position, more than a small teacher on a GPU.
    """
    draws = drawn_Cn.shape[1]
    # Ids are ascending, so their differences are stored: small numbers compress better than ids.
    gaps_Cn = drawn_Cn - F.pad(drawn_Cn[:, :-1], (1, 0))
    place_n = torch.arange(draws, device=drawn_Cn.device)
    begins_Cn = ((gaps_Cn != 0) | (place_n == 0)) & (drawn_Cn >= 0)
    # Equal draws are adjacent, so a token's count is the distance to the next one's first draw.
    next_Cn = torch.where(begins_Cn, place_n, draws).flip(1).cummin(1).values.flip(1)
    counts_Cn = F.pad(next_Cn[:, 1:], (0, 1), value=draws) - place_n
    records_Cn = gaps_Cn | counts_Cn << _ID_BITS[record_bytes]
    return torch.where(begins_Cn, records_Cn, -1).to(torch.int32)


def sampling_offsets(spans: Sequence[DocumentSpan], seed: int) -> NDArray[np.float64]:
    """One uniform number per target, from the document's key: the same in any order and with any number of writers."""
    # Philox is counter-based: a key gives the same numbers on every machine and in every order, and
    # streams of different keys are independent (Salmon et al., 2011). One generator is set back for
    # each document: a new one takes longer than its numbers.
    source = np.random.Philox(key=[seed, 0])
    draw, state = np.random.Generator(source), source.state
    offsets = []
    for span in spans:
        number = int.from_bytes(span.key[:8], "little")
        # From 2^63 on, numpy rounds a number in a list with smaller ones to a float; existing caches were drawn so.
        state["state"]["key"][1] = number if number < 2**63 else min(int(float(number)), 2**64 - 1)
        source.state = state
        offsets.append(draw.random(span.targets))
    return np.concatenate(offsets) if offsets else np.empty(0)


# bytes

_PROBABILITY_ONE = 2**24 - 1


@dataclass(frozen=True, eq=False)
class EncodedTargets:
    """Positions of several documents, one document after another."""

    targets: Sequence[int]
    """Number of positions of each document."""
    fixed_NF: Bytes
    records_RS: Bytes
    counts_N: NDArray[np.int64]
    """Number of records of each position."""

    def per_document(self) -> Iterator[tuple[Bytes, Bytes]]:
        position_bounds = np.concatenate([[0], np.cumsum(self.targets)])
        record_bounds = np.concatenate([[0], np.cumsum(self.counts_N)])[position_bounds]
        for number in range(len(self.targets)):
            (first, beyond), (start, stop) = position_bounds[number : number + 2], record_bounds[number : number + 2]
            yield self.fixed_NF[first:beyond], self.records_RS[start:stop]


def encode_targets(
    codec: Codec, selected: Mapping[str, NDArray[np.generic]], record_bytes: int, targets: Sequence[int]
) -> EncodedTargets:
    columns: list[Bytes] = []
    positions = sum(targets)
    counts_N, records_RS = np.zeros(positions, dtype=np.int64), np.zeros((0, record_bytes), dtype=np.uint8)
    if codec.is_exact:
        return EncodedTargets(targets, _bytes_of(selected["hidden"]), records_RS, counts_N)
    if codec.draws:
        records_Nn = np.ascontiguousarray(selected["records"]).view("<u4")
        is_record_Nn = records_Nn != _NO_RECORD
        counts_N = is_record_Nn.sum(1)
        records_RS = np.ascontiguousarray(_bytes_of(records_Nn[is_record_Nn][:, None])[:, :record_bytes])
        columns += [counts_N.astype(np.uint8)[:, None], _bytes_of(selected["entropy"].astype("<f2")[:, None])]
    if codec.top:
        # a vocabulary smaller than the codec's K is padded with tokens of probability 0
        missing = ((0, 0), (0, codec.top - selected["top"].shape[1]))
        ids_NK = np.pad(selected["top"].astype("<u4"), missing)
        # 24 bits as a fraction of 2^24 - 1: an absolute error of 3e-8, that of float32 near 1, in
        # three bytes.
        share_NK = np.pad(np.rint(selected["share"].astype(np.float64) * _PROBABILITY_ONE).astype("<u4"), missing)
        columns += [_bytes_of(selected["rest"].astype("<f4")[:, None]), _three_bytes(ids_NK), _three_bytes(share_NK)]
    return EncodedTargets(targets, np.concatenate(columns, axis=1), records_RS, counts_N)


def _bytes_of(values: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _three_bytes(values_NK: NDArray[np.generic]) -> Bytes:
    return _bytes_of(values_NK).reshape(*values_NK.shape, 4)[..., :3].reshape(len(values_NK), -1)


@dataclass(frozen=True, eq=False)
class DecodedTargets:
    """The stored values as tensors; the codec decides which exist."""

    ids_NK: Tensor
    weights_NK: Tensor
    """Probabilities of the top K, then the probability that each sampled token represents; 0 where there is none."""
    entropy_N: Tensor | None
    rest_N: Tensor | None


def decode_targets(codec: Codec, fixed_NF: Tensor, records_RS: Tensor) -> DecodedTargets:
    """Reads no value on the host, so it does not synchronize with a GPU."""
    entropy_N = rest_N = None
    ids: list[Tensor] = []
    weights: list[Tensor] = []
    offset = 3 if codec.draws else 0
    if codec.draws:
        entropy_N = _copy(fixed_NF[:, 1:3]).view(torch.float16)[:, 0].float()
    if codec.top:
        rest_N = _copy(fixed_NF[:, offset : offset + 4]).view(torch.float32)[:, 0]
        offset += 4
        top = fixed_NF[:, offset:].reshape(len(fixed_NF), 2, codec.top, 3)
        ids.append(_integers(top[:, 0]))
        weights.append(_integers(top[:, 1]).float() / _PROBABILITY_ONE)
    if codec.draws:
        drawn_Nn, share_Nn = _sampled(codec, fixed_NF[:, 0].long(), records_RS)
        ids.append(drawn_Nn)
        weights.append(share_Nn if rest_N is None else share_Nn * rest_N[:, None])
    return DecodedTargets(torch.cat(ids, 1).long(), torch.cat(weights, 1), entropy_N, rest_N)


def _copy(bytes_NF: Tensor) -> Tensor:
    """Aligned for numbers of any size; `contiguous` copies nothing if there is no row."""
    return bytes_NF.clone(memory_format=torch.contiguous_format)


def _sampled(codec: Codec, counts_N: Tensor, records_RS: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of the sampled tokens by position, and each one's share of the draws."""
    bits = _ID_BITS[records_RS.shape[1]]
    values_R = _integers(records_RS)
    positions, records = len(counts_N), len(records_RS)
    numbers_N = torch.arange(positions, device=counts_N.device)
    row_R = numbers_N.repeat_interleave(counts_N, output_size=records)
    first_N = counts_N.cumsum(0) - counts_N
    column_R = torch.arange(records, device=counts_N.device) - first_N[row_R]
    place_R = row_R * codec.draws + column_R
    gaps = values_R.new_zeros(positions * codec.draws)
    share = torch.zeros(positions * codec.draws, device=counts_N.device)
    gaps[place_R] = values_R & (2**bits - 1)
    share[place_R] = (values_R >> bits).float() / codec.draws
    return gaps.view(positions, codec.draws).cumsum(1), share.view(positions, codec.draws)


def _integers(bytes_S: Tensor) -> Tensor:
    """From little-endian bytes in the last dimension; int64, because 32 bits with a count at the top are unsigned."""
    shifts = 8 * torch.arange(bytes_S.shape[-1], device=bytes_S.device)
    return (bytes_S.long() << shifts).sum(-1)
