"""A teacher at work: live, in every step; or once, over all rows, to fill a cache.

Shapes: B rows, T tokens, N trained tokens, C of them in a chunk, E teacher's features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.chat.attention import use_packed_attention
from joulelab.data.chat.packing import CausalBatch, PackedRows, causal_batch
from joulelab.distill.causal.heads import head_of, open_for_loss
from joulelab.distill.chunked import compiled
from joulelab.distill.logit_cache.asking import ToAsk, batches_to_ask, kept_keys, row_keys
from joulelab.distill.logit_cache.batches import batch_pieces
from joulelab.distill.logit_cache.keys import Piece
from joulelab.distill.logit_cache.loss import trained_places
from joulelab.distill.logit_cache.manifest import CacheManifest
from joulelab.distill.logit_cache.packing import encode
from joulelab.distill.logit_cache.picking import Picked, Weigh, pick, starts_of, weigh
from joulelab.distill.logit_cache.targets import DenseTargets, TeacherHead
from joulelab.distill.logit_cache.writer import USUAL_PACE, CacheWriter, Pace, keep_head
from joulelab.errors import ConfigError, JoulelabError
from joulelab.runs.sharding import ALL, Shard
from joulelab.train.optim import compile_in_place

Tick = Callable[[int, int], None]
"""Told the rows and tokens that went through the teacher so far, those of earlier attempts among them."""


class LiveTeacher:
    """A causal model that is only asked. It stays on its device and in its numbers."""

    def __init__(self, model: nn.Module, vocabulary: int | None = None, compile_mode: str = "off") -> None:
        """`vocabulary`: how many ids are words of teacher and student both; nothing: all rows of its head."""
        self.model = open_for_loss(model).eval().requires_grad_(False)
        self._attention = use_packed_attention(self.model)
        self.weight_VE = head_of(self.model)
        self.vocabulary = len(self.weight_VE) if vocabulary is None else vocabulary
        if not 0 < self.vocabulary <= len(self.weight_VE):
            raise ConfigError(
                f"{self.vocabulary:,} words asked of a teacher whose head has {len(self.weight_VE):,} rows",
                "the tokenizer and the teacher belong to different models",
            )
        self.head = TeacherHead(self.weight_VE)
        compile_in_place(self.model, compile_mode)

    @property
    def device(self) -> torch.device:
        return self.weight_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight_VE.dtype

    @torch.no_grad()
    def targets(self, batch: CausalBatch) -> DenseTargets:
        """Of the trained tokens of a batch on its device; the same place in a loss as what a cache gives."""
        with torch.autocast(self.device.type, enabled=False):
            hidden_BTE = self.model(**self._attention.inputs(batch), hidden_only=True)
        order_N, _ = trained_places(batch.labels, batch.count)
        return DenseTargets(hidden_BTE.flatten(0, 1)[order_N], self.head, self.vocabulary)

    def manifest(
        self, codec: str, temperature: float, *, name: str, weights: str, tokenizer: str, seed: int = 0
    ) -> CacheManifest:
        """Of a cache of what it says; `weights` and `tokenizer` are their hashes."""
        exact = codec == "hidden"
        return CacheManifest(
            codec=codec,
            temperature=temperature,
            vocabulary=self.vocabulary,
            teacher=name,
            teacher_sha256=weights,
            tokenizer_sha256=tokenizer,
            seed=seed,
            features=self.weight_VE.shape[1] if exact else None,
            numbers=str(self.dtype).removeprefix("torch.") if exact else None,  # type: ignore[arg-type]
        )


def write_cache(
    folder: Path,
    teacher: LiveTeacher,
    rows: PackedRows,
    manifest: CacheManifest,
    *,
    batch_size: int,
    tick: Tick,
    share: Shard = ALL,
    chunk: int | None = None,
    compile_mode: str = "off",
    pace: Pace = USUAL_PACE,
    asked: ToAsk | None = None,
) -> None:
    """Ask the teacher about all rows of our share that the folder does not hold yet; rows known already cost nothing.

    While the device works on a batch, the host packs and writes the one before. `asked` is what `batches_to_ask` says,
    where somebody has looked already.
    """
    asked = asked or batches_to_ask(folder, rows, batch_size, share)
    look = _Look(manifest, compiled(weigh, compile_mode), chunk or _usual_chunk(teacher.device))
    with CacheWriter(folder, manifest, share, pace, asked.elsewhere) as writer:
        if manifest.how.is_exact:
            keep_head(folder, teacher.weight_VE)
        samples, tokens = asked.samples, asked.tokens
        waiting: _Answer | None = None
        for some in (*asked.batches, None):
            answer = _asked(teacher, causal_batch(rows, some), look) if some is not None else None
            if waiting is not None:
                waiting.write(writer)
                samples, tokens = samples + waiting.samples, tokens + waiting.tokens
                tick(samples, tokens)
            waiting = answer


@dataclass(frozen=True, eq=False)
class _Answer:
    """On its way to the host."""

    pieces: Sequence[Piece]
    picked: Mapping[str, Tensor]
    there: torch.cuda.Event | None
    samples: int
    tokens: int

    def write(self, writer: CacheWriter) -> None:
        if self.there is not None:
            self.there.synchronize()
        manifest = writer.manifest
        arrays = {name: _array(tensor) for name, tensor in self.picked.items()}
        targets = [piece.targets for piece in self.pieces]
        keys = [piece.key for piece in self.pieces]
        encoded = encode(manifest.how, arrays, manifest.layout.record_bytes, targets)
        writer.add(keys, encoded)


@dataclass(frozen=True)
class _Look:
    """How hidden states become what is kept."""

    manifest: CacheManifest
    weigh: Weigh
    chunk: int

    def at(self, said: DenseTargets, starts_N: Tensor) -> Picked:
        if self.manifest.how.is_exact:
            return {"hidden": said.hidden_NE}
        weight_VE = said.head.projection(said.hidden_NE.device, said.hidden_NE.dtype).weight_VD
        words, temperature = self.manifest.vocabulary, self.manifest.temperature
        parts = []
        for start in range(0, said.count, self.chunk):
            rows = slice(start, start + self.chunk)
            logits_CV = F.linear(said.hidden_NE[rows], weight_VE)
            parts.append(pick(self.manifest.how, logits_CV, words, temperature, starts_N[rows], self.weigh))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.no_grad()
def _asked(teacher: LiveTeacher, batch: CausalBatch, look: _Look) -> _Answer:
    pieces, device = batch_pieces(batch), teacher.device
    starts_N = torch.from_numpy(starts_of(pieces, look.manifest.seed)).to(device, non_blocking=True)
    picked = look.at(teacher.targets(batch.to(device)), starts_N)
    picked = {name: tensor.to("cpu", non_blocking=True) for name, tensor in picked.items()}
    there = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return _Answer(pieces, picked, there, batch.samples, batch.tokens)


def _usual_chunk(device: torch.device) -> int:
    """Logits of few positions stay in a CPU's cache; a GPU wants much to do at once."""
    return 1024 if device.type == "cuda" else 64


def _array(tensor: Tensor) -> NDArray[Any]:
    """numpy knows no bfloat16; as hidden states are kept bit by bit, any type of the same size will do."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def require_whole(folder: Path, rows: PackedRows) -> None:
    """That the cache has an answer for every row, before a training of hours stops at the one that it lacks."""
    there = kept_keys([folder])
    lacking = sum(any(key not in there for key in row_keys(rows, number)) for number in range(len(rows)))
    if lacking:
        raise JoulelabError(
            f"the cache {folder} has no answer for {lacking:,} of {len(rows):,} rows",
            "run the teacher again: it asks only for what is missing; with several writers, run each share",
        )
