"""Stage teacher.logits: what a teacher says about every trained token, once for all students; and learning from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from joulelab.data.chat.packing import CausalBatch, PackedRows, training_batches
from joulelab.distill.causal.bench import TRAIN, Bench
from joulelab.distill.causal.heads import head_of
from joulelab.distill.causal.objectives import Targets, TokenObjective
from joulelab.distill.causal.split_work import worked
from joulelab.distill.causal.students import Desk, Lesson
from joulelab.distill.logit_cache.asking import ToAsk, batches_to_ask
from joulelab.distill.logit_cache.batches import TaughtBatches
from joulelab.distill.logit_cache.loss import KdLoss
from joulelab.distill.logit_cache.manifest import MANIFEST
from joulelab.distill.logit_cache.reader import LogitCache
from joulelab.distill.logit_cache.shards import set_damaged_aside
from joulelab.distill.logit_cache.teaching import LiveTeacher, require_whole, write_cache
from joulelab.distill.logit_cache.writer import merge_caches
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec, progress_counter
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import Stage
from joulelab.runs.record import Result
from joulelab.runs.sharding import Shard

STAGE = StageSpec("teacher.logits", "teacher", "cache")


@dataclass(frozen=True)
class Voice:
    """Whose distributions are learnt: how to load it, what it is, and its bill."""

    name: str
    identity: str
    load: Callable[[], nn.Module]
    bill: Bill


def logit_cache(bench: Bench, data: Artifact, voice: Voice) -> Artifact:
    """Found again by its content, or made; work that was cut off goes on where it stopped, and can be split."""
    made = worked(bench, _listening(bench, data, voice))
    if bench.share is None:
        cache = LogitCache.open(made.folder)
        bench.run.result("logits.bytes_per_token", Result(value=cache.bytes_per_token))
        bench.run.progress.say(
            f"logits: {cache.positions:,} tokens in {cache.manifest.codec}, {cache.bytes_per_token:.1f} bytes a token"
        )
    return made


def _listening(bench: Bench, data: Artifact, voice: Voice) -> ShardedWork:
    distill, rows, size = bench.spec.distill, bench.rows(data, TRAIN), bench.spec.teacher.batch_size

    def begin(place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        for told in [damage for folder in (place, *others) for damage in set_damaged_aside(folder)]:
            bench.run.warn(f"{told}; what it held is asked again")
        asked = batches_to_ask(place, rows, size, share, others)
        if not asked.batches:
            return RemainingWork(None, {"samples": asked.samples, "tokens": asked.tokens} if asked.samples else {})
        teacher = _speaking(bench, voice)
        return RemainingWork(lambda stage: ask(place, share, teacher, asked, stage), {})

    def ask(place: Path, share: Shard, teacher: LiveTeacher, asked: ToAsk, stage: Stage) -> None:
        manifest = teacher.manifest(
            distill.codec, distill.kept_temperature,
            name=voice.name, weights=voice.identity, tokenizer=bench.tokenizer_identity,
        )  # fmt: skip
        write_cache(
            place, teacher, rows, manifest,
            batch_size=size, tick=progress_counter(bench.run, stage), share=share, chunk=bench.spec.chunk,
            compile_mode=bench.spec.training.compile, asked=asked,
        )  # fmt: skip

    def join(sources: Sequence[Path], folder: Path) -> None:
        merge_caches([source for source in sources if (source / MANIFEST).exists()], folder)  # a share may be empty
        if bench.share is None:
            require_whole(folder, rows)

    inputs = {
        "voice": voice.identity,
        "tokenizer": bench.tokenizer_identity,
        "codec": distill.codec,
        "temperature": distill.kept_temperature,
        "precision": str(bench.teacher_precision),
        "row_length": bench.spec.data.row_length,
    }
    return ShardedWork(
        "logits", "logit-cache", STAGE, inputs, [voice.bill, data.bill], size, rows.__len__, begin, join,
        opens=LogitCache.open, accepts_damaged_shards=True,
    )  # fmt: skip


def kd_lesson(bench: Bench, rows: PackedRows, cache: Artifact | None, voice: Voice) -> Callable[[Desk], Lesson]:
    """From the cache, or where there is none from the teacher itself, in every step."""
    distill = bench.spec.distill

    def lesson(desk: Desk) -> Lesson:
        plain = training_batches(rows, desk.config.batch_size, bench.spec.seed)
        loss = KdLoss(distill.alpha, distill.temperature, distill.divergence, bench.spec.chunk, desk.config.compile)
        bench.run.result("data.padded_share", Result(value=rows.padded_share))
        if cache is None:
            live = _speaking(bench, voice, desk.config.compile)
            return Lesson(plain, TokenObjective(desk.model, desk.attention, loss, live.targets), distill.loss_name)
        kept = LogitCache.open(cache.folder)
        kept.manifest.require(
            temperature=distill.temperature, divergence=distill.divergence, tokenizer_sha256=bench.tokenizer_identity
        )
        objective = TokenObjective(desk.model, desk.attention, loss, _kept)
        return Lesson(TaughtBatches(plain, kept), objective, distill.loss_name)

    return lesson


def _speaking(bench: Bench, voice: Voice, compiled: str = "off") -> LiveTeacher:
    model = voice.load()
    return LiveTeacher(model, min(bench.words, len(head_of(model))), compiled)


def _kept(batch: CausalBatch) -> Targets:
    """The loader has brought them along."""
    targets: Targets = batch.targets  # type: ignore[attr-defined]
    return targets
