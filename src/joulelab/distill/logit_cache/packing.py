"""Between what a codec keeps and its bytes: written with numpy on the host, read with torch on any device.

A position takes, in this order: how many words were drawn (1 byte), the entropy (float16), what the likeliest words
leave over (float32), their ids (3 bytes each) and probabilities (3 bytes each, as a fraction of 2^24 - 1). A drawn word
is a record of its own: in 24 bits, or 32 where ids need more than 18, how far its id is from that of the word before
(rising ids have small gaps, which take less room once compressed) and how often it came.

Shapes: N positions, F bytes of a position, R records, S bytes of a record, K words of a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.distill.logit_cache.codecs import Codec
from joulelab.distill.logit_cache.shards import Bytes

_ONE = 2**24 - 1
_ID_BITS = {3: 18, 4: 26}


@dataclass(frozen=True, eq=False)
class EncodedTargets:
    """Positions of several pieces, one piece after another."""

    targets: Sequence[int]
    """How many positions each piece has."""
    fixed_NF: Bytes
    records_RS: Bytes
    counts_N: NDArray[np.int64]
    """Records of each position."""

    def per_piece(self) -> Iterator[tuple[Bytes, Bytes]]:
        position_bounds = np.concatenate([[0], np.cumsum(self.targets)])
        record_bounds = np.concatenate([[0], np.cumsum(self.counts_N)])[position_bounds]
        for piece in range(len(self.targets)):
            (first, beyond), (start, stop) = position_bounds[piece : piece + 2], record_bounds[piece : piece + 2]
            yield self.fixed_NF[first:beyond], self.records_RS[start:stop]


def encode(
    codec: Codec, picked: Mapping[str, NDArray[np.generic]], record_bytes: int, targets: Sequence[int]
) -> EncodedTargets:
    columns: list[Bytes] = []
    positions = sum(targets)
    counts_N, records_RS = np.zeros(positions, dtype=np.int64), np.zeros((0, record_bytes), dtype=np.uint8)
    if codec.is_exact:
        return EncodedTargets(targets, _bytes_of(picked["hidden"]), records_RS, counts_N)
    if codec.draws:
        counts_N, records_RS = _records(picked["drawn"].astype(np.int64), record_bytes)
        columns += [counts_N.astype(np.uint8)[:, None], _bytes_of(picked["entropy"].astype("<f2")[:, None])]
    if codec.top:
        # a vocabulary smaller than the codec's K is filled up with words of probability 0
        missing = ((0, 0), (0, codec.top - picked["top"].shape[1]))
        ids_NK = np.pad(picked["top"].astype("<u4"), missing)
        share_NK = np.pad(np.rint(picked["share"].astype(np.float64) * _ONE).astype("<u4"), missing)
        columns += [_bytes_of(picked["rest"].astype("<f4")[:, None]), _three_bytes(ids_NK), _three_bytes(share_NK)]
    return EncodedTargets(targets, np.concatenate(columns, axis=1), records_RS, counts_N)


def _records(drawn_Nn: NDArray[np.int64], record_bytes: int) -> tuple[NDArray[np.int64], Bytes]:
    """Equal draws stand together, so a word's count is the length of its run; -1 is no draw."""
    begins_Nn = np.diff(drawn_Nn, axis=1, prepend=-1) != 0
    begins_Nn &= drawn_Nn >= 0
    flat = np.flatnonzero(begins_Nn)
    ends = np.minimum(np.append(flat[1:], drawn_Nn.size), (flat // drawn_Nn.shape[1] + 1) * drawn_Nn.shape[1])
    gaps = np.diff(drawn_Nn, axis=1, prepend=0).ravel()[flat]
    words = gaps | (ends - flat) << _ID_BITS[record_bytes]
    return begins_Nn.sum(1), np.ascontiguousarray(_bytes_of(words.astype("<u4")[:, None])[:, :record_bytes])


def _bytes_of(values: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _three_bytes(values_NK: NDArray[np.generic]) -> Bytes:
    return _bytes_of(values_NK).reshape(*values_NK.shape, 4)[..., :3].reshape(len(values_NK), -1)


@dataclass(frozen=True, eq=False)
class Decoded:
    """The same, as tensors; of these what the codec has."""

    ids_NK: Tensor
    weights_NK: Tensor
    """Probabilities of the likeliest, then those that the drawn stand for; 0 where there is no word."""
    entropy_N: Tensor | None
    rest_N: Tensor | None


def decode(codec: Codec, fixed_NF: Tensor, records_RS: Tensor) -> Decoded:
    """Without a look at any value from the host, so a GPU need not wait."""
    entropy_N = rest_N = None
    ids: list[Tensor] = []
    weights: list[Tensor] = []
    at = 3 if codec.draws else 0
    if codec.draws:
        entropy_N = fixed_NF[:, 1:3].contiguous().view(torch.float16)[:, 0].float()
    if codec.top:
        rest_N = fixed_NF[:, at : at + 4].contiguous().view(torch.float32)[:, 0]
        at += 4
        words = fixed_NF[:, at:].reshape(-1, 2, codec.top, 3)
        ids.append(_number(words[:, 0]))
        weights.append(_number(words[:, 1]).float() / _ONE)
    if codec.draws:
        drawn_Nn, share_Nn = _drawn(codec, fixed_NF[:, 0].long(), records_RS)
        ids.append(drawn_Nn)
        weights.append(share_Nn if rest_N is None else share_Nn * rest_N[:, None])
    return Decoded(torch.cat(ids, 1).long(), torch.cat(weights, 1), entropy_N, rest_N)


def _drawn(codec: Codec, counts_N: Tensor, records_RS: Tensor) -> tuple[Tensor, Tensor]:
    """Records laid out by position: ids, and the share of the draws that each got."""
    bits = _ID_BITS[records_RS.shape[1]]
    words_R = _number(records_RS)
    positions, records = len(counts_N), len(records_RS)
    numbers_N = torch.arange(positions, device=counts_N.device)
    row_R = numbers_N.repeat_interleave(counts_N, output_size=records)
    first_N = counts_N.cumsum(0) - counts_N
    column_R = torch.arange(records, device=counts_N.device) - first_N[row_R]
    place_R = row_R * codec.draws + column_R
    gaps = words_R.new_zeros(positions * codec.draws)
    share = torch.zeros(positions * codec.draws, device=counts_N.device)
    gaps[place_R] = words_R & (2**bits - 1)
    share[place_R] = (words_R >> bits).float() / codec.draws
    return gaps.view(positions, -1).cumsum(1), share.view(positions, -1)


def _number(bytes_S: Tensor) -> Tensor:
    """From little-endian bytes in the last dimension; int64, as 32 bits with a count at the top have no sign."""
    shifts = 8 * torch.arange(bytes_S.shape[-1], device=bytes_S.device)
    return (bytes_S.long() << shifts).sum(-1)
