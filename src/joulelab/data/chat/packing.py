"""Documents packed into rows of one length, and the batches made of these rows.

Which documents share a row follows from their lengths and a seed alone and is the same in every epoch, so a teacher's
outputs can be cached by the content of a row.

Attention must separate the documents of a row. On a CPU, and in full precision, transformers builds a mask from
positions that restart at 0, which rules out the fast kernels and computes every pair of tokens of the row. On a GPU in
half precision the document bounds go to the flash kernel instead, which computes only pairs within a document. They are
passed in place of the mask: transformers hands a four-dimensional mask to attention unchanged. Any other mask is
handled as usual, so a model with this attention can still generate.

Rows that all have one document need no bounds: no token sees the padding after it. cuDNN computes them in about 60 % of
the time of the flash kernel on an H200. Its kernel for documents of different lengths is not used (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

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

    @cached_property
    def has_single_documents(self) -> bool:
        """Whether every row is at most one document, or one piece of it, and padding."""
        return bool((np.diff(self.first_pieces) <= 1).all())

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
        for place, (source, start, length) in enumerate(self.pieces_of(number)):
            found = self.documents.document(source)
            there = slice(filled, filled + length)
            ids[there] = found.ids[start : start + length]
            trained[there] = found.trained[start : start + length]
            # The first token of a document has nothing before it that could predict it: its neighbor is another
            # document.
            trained[filled] = False
            document[there] = place
            position[there] = np.arange(length)
            filled += length
        # Padding counts from 0 as if it were a document, so that masks derived from positions separate it, too.
        position[filled:] = np.arange(self.row_length - filled)
        return PackedRow(ids, trained, document, position)

    def pieces_of(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Document, first token and number of tokens of each piece of a row."""
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
    # Shuffled first: sorting by length is stable, so pieces of equal length are placed in random order and rows mix
    # sources.
    shuffled = pieces[np.random.default_rng(seed).permutation(len(pieces))]
    rows = _fit(shuffled[:, 2].tolist(), row_length) if together else [[place] for place in range(len(shuffled))]
    order = [place for row in rows for place in row]
    first_pieces = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return PackedRows(kept, row_length, shuffled[order], first_pieces)


def _cut(lengths: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Document, first token, tokens of every piece."""
    # Consecutive parts share one token: the last of a part predicts the first target of the next
    # one, so that no target lacks its context and none counts twice.
    step = row_length - 1
    counts = np.maximum(1, -(-(lengths - 1) // step))
    source = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * step
    return np.stack([source, start, np.minimum(row_length, lengths[source] - start)], axis=1)


def _with_targets(documents: Documents, pieces: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Drops pieces of split documents that contain no target, for example only a user's turn."""
    # A document that fits into a row has a target, or it would not be in the store; only split ones must be read.
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
        # A bit set of free sizes: shifting by the length leaves the rows with enough room, and the
        # lowest set bit is the tightest of them. Best-fit in constant time per document instead of
        # a search over all open rows.
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
    samples: int  # rows that have a document: a compiled training fills its batches with others
    tokens: int  # without padding
    count: int  # targets
    single_documents: bool  # every row of the packed ones has one document, not only those of this batch

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
        samples=int(np.count_nonzero(documents[:, 0] != PADDING)),
        tokens=int(np.count_nonzero(documents != PADDING)),
        count=int(np.count_nonzero(trained)),
        single_documents=packed.has_single_documents,
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


class RowsInOrder:
    """Packed rows as a batch source of one epoch; the last batch may be smaller."""

    def __init__(self, packed: PackedRows, batch_size: int) -> None:
        self._packed, self._size = packed, batch_size

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self._packed) // self._size)

    def at(self, epoch: int, index: int) -> CausalBatch:
        start = index * self._size
        return causal_batch(self._packed, np.arange(start, min(len(self._packed), start + self._size), dtype=np.int64))


NAME = "joulelab_packed"
_LARGEST_HEAD = 256  # of the flash kernel
_LARGEST_CUDNN_HEAD = 128
_CHECKED_TOKENS = 160  # more than a tile of the kernel, and no multiple of it
_HALF_PRECISION_SHARE = 0.02  # of the norm: bf16 rounds each number by at most 0.4 %
ROUNDING_SHARE = 1e-3  # of the largest logit: more than rounding, less than the effect of a visible document
# int8 products of a row depend slightly on the other rows: LLM.int8() treats columns with outliers separately,
# whichever row has them.
QUANTIZED_SHARE = 0.05


@dataclass(frozen=True)
class PackedAttention:
    """How a model is called with a batch of packed rows."""

    by_bounds: bool
    dense: bool = False
    """With `by_bounds`: rows of one document go to the kernel without bounds."""

    def inputs(self, batch: CausalBatch) -> dict[str, Any]:
        """For model(**inputs). No cache: with one, transformers does not treat restarted positions as documents."""
        inputs: dict[str, Any] = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
        if self.by_bounds:
            # A single bound stands for rows of one document each.
            bounds = batch.bounds[:1] if self.dense and batch.single_documents else batch.bounds
            inputs["attention_mask"] = bounds.view(1, 1, 1, -1)
        return inputs


def use_packed_attention(model: nn.Module, same_share: float = ROUNDING_SHARE) -> PackedAttention:
    """Call with the model on its device, before it is wrapped or compiled. `same_share`: of the largest logit, up to
    which differences count as rounding.

    A model that does not separate documents is refused: recurrent layers carry state into the next document, and some
    models ignore positions.
    """
    by_bounds = _flash_is_here(model) and _is_plain(model)
    if by_bounds:
        register()
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    attention = PackedAttention(by_bounds, dense=by_bounds and _cudnn_agrees(model))
    if not separates_documents(model, attention, same_share):
        raise ConfigError(
            f"{type(model).__name__} does not separate the documents of a packed row",
            "use one document per row",
        )
    return attention


@torch.no_grad()
def separates_documents(model: nn.Module, attention: PackedAttention, same_share: float = ROUNDING_SHARE) -> bool:
    """Checked on six tokens: the logits of the second document must not depend on the first."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=attention.by_bounds):
            one, other = (_second_of_two(model, attention, first, device) for first in ([1, 2, 3], [4, 5, 6]))
    finally:
        model.train(was_training)
    return bool((one - other).abs().max() <= same_share * one.abs().max())


def _second_of_two(model: nn.Module, attention: PackedAttention, first: list[int], device: torch.device) -> Tensor:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    batch = CausalBatch(
        ids=torch.tensor([[*first, 1, 2, 3]]),
        labels=torch.full((1, 6), NOT_TRAINED),
        positions=positions,
        documents=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        bounds=document_bounds(positions),
        rows=np.zeros(1, dtype=np.int64),
        samples=1,
        tokens=6,
        count=0,
        single_documents=False,
    )
    logits: Tensor = model(**attention.inputs(batch.to(device))).logits
    return logits[:, 3:].float()


def _flash_is_here(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _is_plain(model: Any) -> bool:
    """Models with capped logits or custom attention keep the mask."""
    caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return bool(getattr(model, "_supports_sdpa", False)) and caps is None


def register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended: tuple[Tensor, None]
    if attention_mask is None or attention_mask.dtype != torch.int32:
        attended = sdpa_attention_forward(module, query_BHTD, key_BKTD, value_BKTD, attention_mask, **kwargs)
        return attended
    bounds = attention_mask.flatten()
    query, key, value = (_computed(part) for part in (query_BHTD, key_BKTD, value_BKTD))
    rows, length, window = len(query), query.shape[2], kwargs.get("sliding_window")
    if len(bounds) == 1 and (window is None or window >= length):
        return _dense(query, key, value, **kwargs), None
    if len(bounds) == 1:
        bounds = torch.arange(rows + 1, device=query.device, dtype=torch.int32) * length
    if _flash_takes(query, value):
        attended = _flash(query, key, value, bounds, **kwargs), None
    else:
        mask = _mask(bounds, rows, length, window)
        attended = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return attended


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    fits = size == value.shape[-1] and size <= _LARGEST_HEAD and size % 8 == 0
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and fits


def _computed(part: Tensor) -> Tensor:
    """In the autocast type: autocast covers torch's own attention, but not this one."""
    kind = part.device.type
    return part.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else part


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **kwargs: Any) -> Tensor:
    """Concatenates the rows: the kernel takes one sequence of tokens and the document starts in it."""
    rows, heads, length, size = query.shape
    flat = [part.transpose(1, 2).reshape(rows * length, part.shape[1], size) for part in (query, key, value)]
    window = kwargs.get("sliding_window")
    limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        *flat,
        bounds,
        bounds,
        length,
        length,
        kwargs.get("dropout", 0.0),
        True,
        False,
        scale=kwargs.get("scaling"),
        **limits,
    )[0]
    return attended.view(rows, length, heads, size)


def _dense(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """[rows, length, heads, size] of rows with one document each."""
    scale, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
    if _cudnn_takes(query, value):
        attended = _cudnn(query, key, value, scale, dropout)
    else:
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return attended.transpose(1, 2)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
    """Called by name: torch prefers the flash kernel where both are possible."""
    attended: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, dropout, True, False, scale=scale
    )[0]
    return attended


def _cudnn_takes(query: Tensor, value: Tensor) -> bool:
    return _flash_takes(query, value) and query.shape[-1] <= _LARGEST_CUDNN_HEAD


def head_width(config: Any) -> int | None:
    """Numbers of one attention head; None if the model has no heads, or heads that differ by layer."""
    try:
        heads = config.num_attention_heads
        return int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    except (AttributeError, RuntimeError):  # transformers raises the latter for what differs by layer
        return None


def _cudnn_agrees(model: Any) -> bool:
    """Whether cuDNN computes attention of this model's heads, and its gradients, up to rounding. Tried on the device:
    which shapes it accepts depends on its version and on the GPU."""
    config, device = model.config.get_text_config(), next(model.parameters()).device
    size = head_width(config)
    if size is None or size > _LARGEST_CUDNN_HEAD or size % 8:
        return False
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    random = torch.Generator(device).manual_seed(0)

    def drawn(count: int) -> Tensor:
        shape = (2, _CHECKED_TOKENS, count, size)  # as models have it: heads of a token are adjacent
        return torch.randn(shape, generator=random, device=device).bfloat16().transpose(1, 2)

    inputs, gradient = [drawn(heads), drawn(shared), drawn(shared)], drawn(heads)
    try:
        found = _with_gradients(lambda query, key, value: _cudnn(query, key, value, None, 0.0), inputs, gradient)
    except (RuntimeError, AttributeError, TypeError):
        return False
    exact = _with_gradients(_exact_attention, [part.float() for part in inputs], gradient.float())
    pairs = zip(found, exact, strict=True)
    return all(bool((own.float() - other).norm() <= _HALF_PRECISION_SHARE * other.norm()) for own, other in pairs)


def _exact_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Without any kernel: the plain formula."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    attended: Tensor = scores.softmax(-1) @ value
    return attended


def _with_gradients(attention: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """The result and the gradients by query, key and value."""
    with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
        leaves = [part.detach().requires_grad_() for part in inputs]
        attended = attention(*leaves)
        return [attended.detach(), *torch.autograd.grad(attended, leaves, gradient)]


def _mask(bounds: Tensor, rows: int, length: int, window: int | None) -> Tensor:
    """[rows, 1, length, length]: which tokens attend to which, for inputs that the flash kernel does not accept."""
    place = torch.arange(rows * length, device=bounds.device)
    document = torch.searchsorted(bounds, place.to(bounds.dtype), right=True).view(rows, length)
    seen = document[:, :, None] == document[:, None, :]
    distance = torch.arange(length, device=bounds.device)
    distance = distance[:, None] - distance[None, :]
    seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    return seen[:, None]
