"""Masked language modeling. Only masked positions are projected to the vocabulary, which saves 85 % of the projection.

Also here: BigBird's block-sparse attention and Longformer's sliding window in torch's fused attention kernels.

Shapes: B rows, T tokens, K masked positions of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.masking import mask_rows
from joulelab.data.tokenize import Vocabulary
from joulelab.zoo import objective
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.registry import WorkloadRequest
from joulelab.zoo.tasks.token_rows import (
    TokenRows,
    open_rows,
    require_positions,
    summed_cross_entropy,
    use_unpadded_attention,
)


def prepare(request: WorkloadRequest) -> Workload:
    """Options of the entry: `head`, the modules after the encoder in their order; `idle`, substrings of names of
    parameters that this task does not use; `settings`, architecture settings that depend on the input length."""
    options, tokens = request.entry.options, request.shape["tokens"]
    fitting = options["settings"](request.size.settings, tokens) if "settings" in options else {}
    model: Any = add_logits_at_positions(objective.build(request, **fitting), options["head"])
    use_unpadded_attention(model)
    require_positions(request, model.config, tokens)
    model.config.use_cache = False
    # Ranks would wait indefinitely for a parameter without a gradient.
    for name, parameter in model.named_parameters():
        if any(word in name for word in options.get("idle", ())):
            parameter.requires_grad_(False)
    data = open_rows(request, model.config, tokens)
    held_out = _batches(request, data.held_out, data.vocabulary) if data.held_out else None
    batches = _batches(request, data.train, data.vocabulary)
    return Workload(model, PlainObjective(masked_loss), batches, held_out, notes=data.notes)


def masked_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BKV = model(input_ids=batch["input_ids"], positions=batch["positions"])
    return ObjectiveOutput(summed_cross_entropy(logits_BKV, batch["targets"]), batch.count)


class LogitsAtPositions(nn.Module):
    """Mixin for a masked language model of transformers: `model(ids, positions=...)` returns logits at these positions
    only. At 15 % of the positions, the projection to the vocabulary, its logits and their gradient cost 15 %."""

    head_modules: tuple[str, ...]

    def forward(self, input_ids: Tensor | None = None, positions: Tensor | None = None, **kwargs: Any) -> Any:
        if positions is None:
            return super().forward(input_ids=input_ids, **kwargs)
        encoder: Any = self.base_model
        hidden_BTD = encoder(input_ids=input_ids).last_hidden_state
        features_BK = hidden_BTD.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden_BTD.shape[-1]))
        for name in self.head_modules:
            features_BK = getattr(self, name)(features_BK)
        return features_BK


def add_logits_at_positions(model: nn.Module, head: tuple[str, ...]) -> nn.Module:
    """Add the mixin to a model. Class name and parameters are unchanged, so it saves, loads and shards as before."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (LogitsAtPositions, kind), {"head_modules": head})
    return model


def _batches(request: WorkloadRequest, source: TokenRows, vocabulary: Vocabulary) -> ShuffledRows:
    def make(rows: Rows, draw: int) -> TensorBatch:
        masked = mask_rows(source.sequences(rows), vocabulary, draw)
        tensors = {
            "input_ids": torch.from_numpy(masked.input_ids),
            "positions": torch.from_numpy(masked.positions),
            "targets": torch.from_numpy(masked.targets),
        }
        return TensorBatch(tensors, len(rows), tokens=masked.input_ids.size, count=masked.targets.size)

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)


# BigBird (Zaheer et al., 2020): block-sparse attention in fused kernels.
#
# transformers (5.22) samples the random blocks again in every layer of every step and writes all attention weights into
# a dense tokens x tokens matrix: at 4,096 tokens that costs the memory and time that sparse attention saves, and it
# fails under autocast. Here the blocks are sampled once (they are the same in every step), and one call of torch's
# attention computes each block of queries with its blocks of keys. A test compares the two implementations.
#
# Shapes: B rows, H heads, T tokens in N blocks of Q tokens, R random blocks of each, D features of a head.


_PAPER_LENGTHS = (1024, 3072, 4096)


def prepare_block_sparse(request: WorkloadRequest) -> Workload:
    workload = prepare(request)
    fuse_block_sparse(workload.model, request.shape["tokens"])
    return workload


def fuse_block_sparse(model: nn.Module, tokens: int) -> None:
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    fused = type("FusedBlockSparseAttention", (FusedBlockSparse, BigBirdBlockSparseAttention), {})
    for module in model.modules():
        if isinstance(module, BigBirdBlockSparseAttention):
            module.register_buffer("random_blocks", _sample_random_blocks(module, tokens), persistent=False)
            module.__class__ = fused
            module.tokens = tokens


class FusedBlockSparse(nn.Module):
    """Mixin for BigBird's attention, for rows of one length without padding."""

    tokens: int
    random_blocks: Tensor
    """[H, N - 2, R]: random blocks of all query blocks except the first and the last, which attend to everything."""
    num_attention_heads: int
    block_size: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] != self.tokens:
            return super().forward(hidden_states, *args, **kwargs)
        # in eval mode transformers samples no blocks and attends to block 0 instead
        chosen_HNR = self.random_blocks if self.training else torch.zeros_like(self.random_blocks)
        modules: Any = (self.query, self.key, self.value)
        query_BHNQD, key_BHNQD, value_BHNQD = (self._blocks(project(hidden_states)) for project in modules)
        parts = zip(
            (query_BHNQD[:, :, part] for part in _PARTS),
            _visible_blocks(key_BHNQD, chosen_HNR),
            _visible_blocks(value_BHNQD, chosen_HNR),
            strict=True,
        )
        context_BHNQD = torch.cat([_attend(query, key, value) for query, key, value in parts], dim=2)
        return context_BHNQD.flatten(2, 3).transpose(1, 2).flatten(2), None

    def _blocks(self, features: Tensor) -> Tensor:
        """[B, T, H * D] as [B, H, N, Q, D]."""
        rows, tokens, width = features.shape
        heads = self.num_attention_heads
        split = features.view(rows, tokens // self.block_size, self.block_size, heads, width // heads)
        return split.permute(0, 3, 1, 2, 4)


_PARTS = (slice(0, 1), slice(1, 2), slice(2, -2), slice(-2, -1), slice(-1, None))
"""Query blocks with the same pattern of visible blocks: first, second, all in the middle, second to last, last."""


def _visible_blocks(blocks_BHNQD: Tensor, chosen_HNR: Tensor) -> list[Tensor]:
    """Visible keys (or values) of each group of query blocks, [B, H, blocks of the group, visible tokens, D]."""
    heads_H11 = torch.arange(len(chosen_HNR), device=chosen_HNR.device)[:, None, None]
    random = blocks_BHNQD[:, heads_H11, chosen_HNR].flatten(3, 4)
    everything = blocks_BHNQD.flatten(2, 3).unsqueeze(2)
    first, last = blocks_BHNQD[:, :, :1], blocks_BHNQD[:, :, -1:]
    before, here, after = (blocks_BHNQD[:, :, shift : shift - 4] for shift in (1, 2, 3))
    # First and last block are global; a middle block also sees its window of three and its random
    # blocks. The windows of the second and the second to last block contain a global block already,
    # which must not count twice in the softmax.
    middle = [first.expand_as(here), before, here, after, last.expand_as(here), random[:, :, 1:-1]]
    low = torch.cat([blocks_BHNQD[:, :, :3], last], dim=2).flatten(2, 3).unsqueeze(2)
    high = torch.cat([first, blocks_BHNQD[:, :, -3:]], dim=2).flatten(2, 3).unsqueeze(2)
    return [
        everything,
        torch.cat([low, random[:, :, :1]], dim=3),
        torch.cat(middle, dim=3),
        torch.cat([high, random[:, :, -1:]], dim=3),
        everything,
    ]


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each block of queries to its keys; for the kernel, blocks are additional heads."""
    context = functional.scaled_dot_product_attention(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2))
    return context.view(query.shape)


def _sample_random_blocks(attention: Any, tokens: int) -> Tensor:
    """The blocks that transformers samples for this layer at every step, sampled once. transformers seeds numpy's
    global generator for it; the generator's state is restored."""
    block, count, longest = attention.block_size, attention.num_random_blocks, attention.max_seqlen
    before = np.random.get_state()
    np.random.seed(attention.seed)
    try:
        if tokens in _PAPER_LENGTHS:
            draw = attention._bigbird_block_rand_mask
            drawn = [
                draw(longest, longest, block, block, count, last_idx=1024)[: tokens // block - 2]
                for _ in range(attention.num_attention_heads)
            ]
        else:
            lengths, counts = attention._get_rand_attn_plan(tokens, block, count)
            drawn = attention._bigbird_block_rand_mask_with_head(
                tokens, tokens, block, block, attention.num_attention_heads, lengths, counts
            )
    finally:
        np.random.set_state(before)
    return torch.from_numpy(np.stack(drawn).astype(np.int64))


# Longformer (Beltagy et al., 2020): sliding-window attention in fused kernels.
#
# transformers extracts the window from skewed matrices by copying; at 4,096 tokens that is most of a step. Here one
# call of torch's attention computes each block of queries (half a window long) with three blocks of keys under a mask
# of the window's shape. A test compares the two implementations.
#
# Shapes: B rows, H heads, T tokens in N blocks of W tokens, D features of a head.


def prepare_sliding_window(request: WorkloadRequest) -> Workload:
    workload = prepare(request)
    fuse_sliding_window(workload.model, request.shape["tokens"])
    return workload


def fuse_sliding_window(model: nn.Module, tokens: int) -> None:
    """If the length is a multiple of the window; otherwise transformers pads, and its own attention is kept."""
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    fused = type("FusedWindowAttention", (FusedSlidingWindow, LongformerSelfAttention), {})
    for module in model.modules():
        if isinstance(module, LongformerSelfAttention) and tokens % (2 * module.one_sided_attn_window_size) == 0:
            window = module.one_sided_attn_window_size
            module.register_buffer("visible", _visible(tokens // window, window), persistent=False)
            module.__class__ = fused
            module.tokens = tokens


class FusedSlidingWindow(nn.Module):
    """Mixin for Longformer's attention, for rows of one length without padding."""

    tokens: int
    visible: Tensor
    """[N, 1, W, 3 W]: which keys of the three blocks are visible to a query."""
    one_sided_attn_window_size: int
    num_heads: int
    dropout: float

    def forward(self, hidden_states: Tensor, *args: Any, is_global_attn: Any = None, **kwargs: Any) -> Any:
        if hidden_states.shape[1] != self.tokens or is_global_attn or args or kwargs.get("output_attentions"):
            return super().forward(hidden_states, *args, is_global_attn=is_global_attn, **kwargs)
        modules: Any = (self.query, self.key, self.value)
        query, key, value = (self._blocks(project(hidden_states)) for project in modules)
        rows = len(query)
        context = functional.scaled_dot_product_attention(
            query.flatten(0, 1),
            _with_neighbors(key).flatten(0, 1),
            _with_neighbors(value).flatten(0, 1),
            attn_mask=self.visible.expand(rows, *self.visible.shape).flatten(0, 1),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return (context.view(query.shape).transpose(2, 3).flatten(3).flatten(1, 2),)

    def _blocks(self, features: Tensor) -> Tensor:
        """[B, T, H * D] as [B, N, H, W, D]."""
        rows, tokens, width = features.shape
        window = self.one_sided_attn_window_size
        split = features.view(rows, tokens // window, window, self.num_heads, width // self.num_heads)
        return split.transpose(2, 3)


def _with_neighbors(blocks_BNHWD: Tensor) -> Tensor:
    """Each block with its two neighbors, [B, N, H, 3 W, D]; zeros beyond the ends."""
    padded = functional.pad(blocks_BNHWD, (0, 0, 0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :-2], blocks_BNHWD, padded[:, 2:]], dim=3)


def _visible(blocks: int, window: int) -> Tensor:
    # Query i of a block at position W of the three: keys 0 to 3W - 1 are at the distances -W - i to
    # 2W - 1 - i.
    distance = torch.arange(3 * window) - window - torch.arange(window)[:, None]
    place = torch.arange(blocks)[:, None] * window + torch.arange(3 * window) - window  # of a key in the row
    inside = (place >= 0) & (place < blocks * window)
    return ((distance.abs() <= window) & inside[:, None, :]).unsqueeze(1)
