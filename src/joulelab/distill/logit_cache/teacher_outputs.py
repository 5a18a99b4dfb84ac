"""A teacher's distributions for a student's training: cached once over all rows, or computed live in every step.

    LiveTeacher            a frozen model that gives the targets of a batch
    write_cache            one pass of it over all rows, into a cache
    DistillationBatches    training batches with their targets from a cache

Shapes: B rows, T tokens, N trained tokens, C of them in a chunk, E teacher's features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.batches import BatchSource
from joulelab.data.chat.packing import NOT_TRAINED, CausalBatch, PackedRows, causal_batch
from joulelab.distill.causal.models import expose_hidden_states, lm_head_weight, packed_attention
from joulelab.distill.chunked import compiled
from joulelab.distill.logit_cache.cache_store import (
    DEFAULT_FLUSH,
    CacheWriter,
    FlushPolicy,
    LogitCache,
    PendingRows,
    pending_rows,
    row_document_keys,
    save_head,
    stored_keys,
)
from joulelab.distill.logit_cache.codecs import CacheManifest
from joulelab.distill.logit_cache.kd_loss import CachedTargets, DenseTargets, TeacherHead, target_positions
from joulelab.distill.logit_cache.target_encoding import (
    DocumentSpan,
    ProbabilityFunction,
    SelectedTargets,
    document_spans,
    encode_targets,
    sampling_offsets,
    select_targets,
    teacher_probabilities,
)
from joulelab.errors import ConfigError, JoulelabError
from joulelab.runs.phases import ALL, Shard
from joulelab.train.optim import compile_in_place

ProgressCallback = Callable[[int, int], None]
"""Called with the rows and tokens that the teacher has processed so far, including those of earlier attempts."""


# batches with targets from a cache


@dataclass(frozen=True, eq=False)
class DistillationBatch(CausalBatch):
    """A batch with the cache's bytes for it as separate fields: the loader pins and copies a batch's tensors."""

    cached_fixed: Tensor
    cached_records: Tensor
    manifest: CacheManifest
    head: TeacherHead | None

    @property
    def targets(self) -> CachedTargets:
        return CachedTargets(self.cached_fixed, self.cached_records, self.manifest, self.head)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> CausalBatch:
        changed: dict[str, Any] = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **changed)


class DistillationBatches:
    """A source of batches for the training loop; the loader looks the targets up ahead of the step that needs them."""

    def __init__(self, source: BatchSource[CausalBatch], cache: LogitCache) -> None:
        self._source, self._cache = source, cache

    @property
    def batches_per_epoch(self) -> int:
        return self._source.batches_per_epoch

    def at(self, epoch: int, index: int) -> DistillationBatch:
        return with_targets(self._source.at(epoch, index), self._cache)


def with_targets(batch: CausalBatch, cache: LogitCache) -> DistillationBatch:
    targets = cache.targets([span.key for span in batch_spans(batch)])
    own = {field.name: getattr(batch, field.name) for field in fields(CausalBatch)}
    return DistillationBatch(
        **own,
        cached_fixed=targets.fixed_NF,
        cached_records=targets.records_RS,
        manifest=targets.manifest,
        head=targets.head,
    )


def batch_spans(batch: CausalBatch) -> list[DocumentSpan]:
    """The documents of a batch in host memory."""
    trained_BT = (batch.labels != NOT_TRAINED).numpy()
    return document_spans(batch.ids.numpy(), trained_BT, batch.documents.numpy())


# the teacher


class LiveTeacher:
    """A frozen causal model; it stays on its device and in its dtype."""

    def __init__(self, model: nn.Module, vocabulary: int | None = None, compile_mode: str = "off") -> None:
        """`vocabulary`: number of ids that are tokens of both teacher and student; None: all rows of its head."""
        self.model = expose_hidden_states(model).eval().requires_grad_(False)
        self._attention = packed_attention(self.model)
        self.weight_VE = lm_head_weight(self.model)
        self.vocabulary = len(self.weight_VE) if vocabulary is None else vocabulary
        if not 0 < self.vocabulary <= len(self.weight_VE):
            raise ConfigError(
                f"a vocabulary of {self.vocabulary:,} tokens; the teacher's head has {len(self.weight_VE):,} rows",
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
        """Targets of the trained tokens of a batch on its device; a loss takes them in place of cached ones."""
        with torch.autocast(self.device.type, enabled=False):
            hidden_BTE = self.model(**self._attention.inputs(batch), hidden_only=True)
        order_N, _ = target_positions(batch.labels, batch.count)
        return DenseTargets(hidden_BTE.flatten(0, 1)[order_N], self.head, self.vocabulary)

    def manifest(
        self, codec: str, temperature: float, *, name: str, weights: str, tokenizer: str, seed: int = 0
    ) -> CacheManifest:
        """Manifest of a cache of this teacher; `weights` and `tokenizer` are hashes."""
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


# filling a cache


def write_cache(
    folder: Path,
    teacher: LiveTeacher,
    rows: PackedRows,
    manifest: CacheManifest,
    *,
    batch_size: int,
    tick: ProgressCallback,
    shard: Shard = ALL,
    chunk: int | None = None,
    compile_mode: str = "off",
    flush_policy: FlushPolicy = DEFAULT_FLUSH,
    pending: PendingRows | None = None,
) -> None:
    """Run the teacher over all rows of this shard that the folder does not hold yet.

    While the device computes a batch, the host compresses and writes the one before. `pending` is the result of
    `pending_rows`, if the caller has it already.
    """
    pending = pending or pending_rows(folder, rows, batch_size, shard)
    selection = _TargetSelection(
        manifest, compiled(teacher_probabilities, compile_mode), chunk or _default_chunk(teacher.device)
    )
    with CacheWriter(folder, manifest, shard, flush_policy, pending.elsewhere) as writer:
        if manifest.codec_spec.is_exact:
            save_head(folder, teacher.weight_VE)
        samples, tokens = pending.samples, pending.tokens
        previous: _BatchOutput | None = None
        # A pipeline of depth two: the next batch is launched before the host waits for the copy of
        # the previous one, so that compression and the device overlap.
        for numbers in (*pending.batches, None):
            output = _teacher_output(teacher, causal_batch(rows, numbers), selection) if numbers is not None else None
            if previous is not None:
                previous.write(writer)
                samples, tokens = samples + previous.samples, tokens + previous.tokens
                tick(samples, tokens)
            previous = output


@dataclass(frozen=True, eq=False)
class _BatchOutput:
    """The selected targets of a batch, being copied to the host."""

    spans: Sequence[DocumentSpan]
    selected: Mapping[str, Tensor]
    copied: torch.cuda.Event | None
    samples: int
    tokens: int

    def write(self, writer: CacheWriter) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        manifest = writer.manifest
        arrays = {name: _array(tensor) for name, tensor in self.selected.items()}
        targets = [span.targets for span in self.spans]
        keys = [span.key for span in self.spans]
        writer.add(keys, encode_targets(manifest.codec_spec, arrays, manifest.layout.record_bytes, targets))


@dataclass(frozen=True)
class _TargetSelection:
    """From hidden states to what the cache stores."""

    manifest: CacheManifest
    probabilities: ProbabilityFunction
    chunk: int

    def select(self, targets: DenseTargets, offsets_N: Tensor) -> SelectedTargets:
        if self.manifest.codec_spec.is_exact:
            return {"hidden": targets.hidden_NE}
        weight_VE = targets.head.projection(targets.hidden_NE.device, targets.hidden_NE.dtype).weight_VD
        vocabulary, temperature = self.manifest.vocabulary, self.manifest.temperature
        parts = []
        for start in range(0, targets.count, self.chunk):
            rows = slice(start, start + self.chunk)
            logits_CV = F.linear(targets.hidden_NE[rows], weight_VE)
            parts.append(
                select_targets(
                    self.manifest.codec_spec, logits_CV, vocabulary, temperature, offsets_N[rows], self.probabilities
                )
            )
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.no_grad()
def _teacher_output(teacher: LiveTeacher, batch: CausalBatch, selection: _TargetSelection) -> _BatchOutput:
    spans, device = batch_spans(batch), teacher.device
    offsets_N = torch.from_numpy(sampling_offsets(spans, selection.manifest.seed)).to(device, non_blocking=True)
    selected = selection.select(teacher.targets(batch.to(device)), offsets_N)
    selected = {name: tensor.to("cpu", non_blocking=True) for name, tensor in selected.items()}
    # An event after the copies: waiting for it does not wait for the batch that was launched
    # afterwards.
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return _BatchOutput(spans, selected, copied, batch.samples, batch.tokens)


def _default_chunk(device: torch.device) -> int:
    """Logits of few positions fit into a CPU's cache; a GPU needs large matrix products."""
    return 1024 if device.type == "cuda" else 64


def _array(tensor: Tensor) -> NDArray[Any]:
    """numpy has no bfloat16; hidden states are stored bit by bit, so an integer type of the same size serves."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def require_complete(folder: Path, rows: PackedRows) -> None:
    """Raise if the cache lacks a row, before a training of hours fails at it."""
    stored = stored_keys([folder])
    missing = sum(any(key not in stored for key in row_document_keys(rows, number)) for number in range(len(rows)))
    if missing:
        raise JoulelabError(
            f"the cache {folder} lacks {missing:,} of {len(rows):,} rows",
            "run the teacher again, which computes only what is missing; with several writers, run each shard",
        )
