"""Documents packed into rows of one length, and the batches made of these rows.

Which documents share a row follows from their lengths and a seed alone and is the same in every epoch, so a teacher's
outputs can be cached by the content of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batches import Rows, ShuffledRows
from joulelab.data.chat.encoding import DocumentList, Documents, EncodedDocument
from joulelab.errors import ConfigError

PADDING = -1
"""The document number of padding."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    document: NDArray[np.int64]
    """Number of the document within the row; PADDING at the end."""
    position: NDArray[np.int64]
    """Position within the document; padding also counts from 0."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    documents: Documents
    row_length: int
    pieces: NDArray[np.int64]
    """Three columns: document, first token, number of tokens; pieces of a row are adjacent."""
    first_pieces: NDArray[np.int64]
    """Row i is pieces[first_pieces[i] : first_pieces[i + 1]]."""

    def __len__(self) -> int:
        return len(self.first_pieces) - 1

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.pieces[:, 2].sum())

    @property
    def padded_share(self) -> float:
        return 1.0 - self.tokens / (len(self) * self.row_length)

    def row(self, number: int) -> PackedRow:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        ids = np.full(self.row_length, self.documents.pad_id, dtype=np.int64)
        trained = np.zeros(self.row_length, dtype=np.bool_)
        document = np.full(self.row_length, PADDING, dtype=np.int64)
        position = np.zeros(self.row_length, dtype=np.int64)
        filled = 0
        for place, (source, start, length) in enumerate(self._pieces_of(number)):
            found = self.documents.document(source)
            there = slice(filled, filled + length)
            ids[there] = found.ids[start : start + length]
            trained[there] = found.trained[start : start + length]
            trained[filled] = False
            document[there] = place
            position[there] = np.arange(length)
            filled += length
        position[filled:] = np.arange(self.row_length - filled)
        return PackedRow(ids, trained, document, position)

    def _pieces_of(self, number: int) -> Iterator[tuple[int, int, int]]:
        first, beyond = self.first_pieces[number : number + 2]
        yield from self.pieces[first:beyond].tolist()


def pack(
    documents: Documents | Sequence[EncodedDocument], row_length: int, seed: int, *, together: bool = True
) -> PackedRows:
    """`together=False` gives every document a separate row, for models that cannot separate documents in a row.

    A document longer than a row is split. A later piece begins with the last token of the previous one, which is not a
    target there, so that every token of the document is a target once.
    """
    if row_length < 2:
        raise ConfigError(f"row length {row_length}; expected 2 or more", "the first token of a row is never a target")
    kept = DocumentList(documents) if isinstance(documents, Sequence) else documents
    pieces = _with_targets(kept, _cut(kept.lengths, row_length), row_length)
    shuffled = pieces[np.random.default_rng(seed).permutation(len(pieces))]
    rows = _fit(shuffled[:, 2].tolist(), row_length) if together else [[place] for place in range(len(shuffled))]
    order = [place for row in rows for place in row]
    first_pieces = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return PackedRows(kept, row_length, shuffled[order], first_pieces)


def _cut(lengths: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Document, first token, tokens of every piece."""
    step = row_length - 1
    counts = np.maximum(1, -(-(lengths - 1) // step))
    source = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * step
    return np.stack([source, start, np.minimum(row_length, lengths[source] - start)], axis=1)


def _with_targets(documents: Documents, pieces: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Drops pieces of split documents that contain no target, for example only a user's turn."""
    doubtful = np.flatnonzero(documents.lengths[pieces[:, 0]] > row_length) if len(pieces) else pieces[:, 0]
    if isinstance(documents, DocumentList):  # a store contains no document without targets
        doubtful = np.arange(len(pieces))
    kept = np.ones(len(pieces), dtype=np.bool_)
    for place in doubtful.tolist():
        source, start, length = pieces[place].tolist()
        kept[place] = documents.document(source).trained[start + 1 : start + length].any()
    if not kept.any():
        raise ConfigError(
            f"none of {len(documents):,} documents has a token to train on", "check that there are assistant turns"
        )
    return pieces[kept]


def _fit(lengths: list[int], row_length: int) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the fullest row with room; about 1 % padding remains."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row_length + 1)]  # rows by free tokens
    rooms = 0  # bit n is set if some row has exactly n free tokens
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(place)
        left = room - length
        with_room[left].append(row)
        rooms |= 1 << left
    return rows


NOT_TRAINED = -100
"""The label that torch's losses ignore."""
_BOUNDS_STEP = 64  # bounds are padded to few different lengths, because each length is compiled separately


@dataclass(frozen=True, eq=False)
class CausalBatch:
    """B rows of T tokens. The loss compares logits[:, :-1] with labels[:, 1:]."""

    ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, NOT_TRAINED where there is no target
    positions: Tensor  # [B, T] int64, from 0 in each document
    documents: Tensor  # [B, T] int64, number of the document in the row; PADDING at the end
    bounds: Tensor  # int32, document starts in the concatenated rows; padded with the total length
    rows: Rows  # numbers of the packed rows
    tokens: int  # without padding
    count: int  # targets

    @property
    def samples(self) -> int:
        """Number of rows."""
        return len(self.ids)

    def to(self, device: torch.device) -> CausalBatch:
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> CausalBatch:
        """Page-locked, so that the copy to a GPU does not make the host wait."""
        return self._with_each(Tensor.pin_memory)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> CausalBatch:
        return replace(
            self,
            ids=change(self.ids),
            labels=change(self.labels),
            positions=change(self.positions),
            documents=change(self.documents),
            bounds=change(self.bounds),
        )


def causal_batch(packed: PackedRows, rows: Rows) -> CausalBatch:
    found = [packed.row(int(number)) for number in rows]
    ids = np.stack([row.ids for row in found])
    trained = np.stack([row.trained for row in found])
    positions = np.stack([row.position for row in found])
    documents = np.stack([row.document for row in found])
    return CausalBatch(
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(np.where(trained, ids, NOT_TRAINED)),
        positions=torch.from_numpy(positions),
        documents=torch.from_numpy(documents),
        bounds=document_bounds(torch.from_numpy(positions)),
        rows=rows,
        tokens=int(np.count_nonzero(documents != PADDING)),
        count=int(np.count_nonzero(trained)),
    )


def document_bounds(positions: Tensor) -> Tensor:
    """A document, or padding, begins wherever a position is 0."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    size = -(-(len(starts) + 1) // _BOUNDS_STEP) * _BOUNDS_STEP
    bounds = torch.full((size,), positions.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts.to(torch.int32)
    return bounds


def training_batches(packed: PackedRows, batch_size: int, seed: int) -> ShuffledRows[CausalBatch]:
    """Every row once per epoch, in an order given by (seed, epoch); a smaller last batch is dropped."""
    every = np.arange(len(packed), dtype=np.int64)
    return ShuffledRows(every, batch_size, seed, lambda rows, draw: causal_batch(packed, rows))


def batches_in_order(packed: PackedRows, batch_size: int) -> Iterator[CausalBatch]:
    """For evaluation and for caching teacher outputs: every row once; the last batch may be smaller."""
    every = np.arange(len(packed), dtype=np.int64)
    for start in range(0, len(packed), batch_size):
        yield causal_batch(packed, every[start : start + batch_size])
