"""Stage teacher.logits: what a teacher says about every trained token, once for all students; and learning from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from joulelab.data.chat.batches import CausalBatch, training_batches
from joulelab.data.chat.packing import PackedRows
from joulelab.distill.causal.bench import TRAIN, Bench
from joulelab.distill.causal.heads import head_of
from joulelab.distill.causal.objectives import Targets, TokenObjective
from joulelab.distill.causal.students import Desk, Lesson
from joulelab.distill.logit_cache.batches import TaughtBatches
from joulelab.distill.logit_cache.loss import KdLoss
from joulelab.distill.logit_cache.reader import LogitCache
from joulelab.distill.logit_cache.teaching import LiveTeacher, require_whole, write_cache
from joulelab.distill.logit_cache.writer import deliver
from joulelab.runs.artifacts import Artifact
from joulelab.runs.bills import Bill
from joulelab.runs.record import Result

STAGE = "teacher.logits"


@dataclass(frozen=True)
class Voice:
    """Whose distributions are learnt: how to load it, what it is, and its bill."""

    name: str
    identity: str
    load: Callable[[], nn.Module]
    bill: Bill


def logit_cache(bench: Bench, data: Artifact, voice: Voice) -> Artifact:
    """Found again by its content, or made; work that was cut off goes on where it stopped."""
    distill, rows = bench.spec.distill, bench.rows(data, TRAIN)

    def make(folder: Path) -> None:
        bench.require_alone(STAGE)
        work = bench.kept_work(STAGE)
        teacher = _speaking(bench, voice)
        manifest = teacher.manifest(
            distill.codec, distill.temperature,
            name=voice.name, weights=voice.identity, tokenizer=bench.tokenizer_identity,
        )  # fmt: skip
        with bench.run.stage(STAGE, total=len(rows)) as stage:
            write_cache(
                work, teacher, rows, manifest,
                batch_size=bench.spec.teacher.batch_size, tick=bench.ticks(stage), chunk=bench.spec.chunk,
                compile_mode=bench.spec.training.compile,
            )  # fmt: skip
            require_whole(work, rows)
        deliver(work, folder)

    inputs = {
        "voice": voice.identity,
        "tokenizer": bench.tokenizer_identity,
        "codec": distill.codec,
        "temperature": distill.temperature,
        "precision": str(bench.teacher_precision),
        "row_length": bench.spec.data.row_length,
    }
    parents = [voice.bill, data.bill]
    made = bench.run.artifact("logits", kind="logit-cache", inputs=inputs, parents=parents, make=make)
    cache = LogitCache.open(made.folder)
    bench.run.result("logits.bytes_per_token", Result(value=cache.bytes_per_token))
    bench.run.progress.say(
        f"logits: {cache.positions:,} tokens in {distill.codec}, {cache.bytes_per_token:.1f} bytes a token"
    )
    return made


def kd_lesson(bench: Bench, rows: PackedRows, cache: Artifact | None, voice: Voice) -> Callable[[Desk], Lesson]:
    """From the cache, or where there is none from the teacher itself, in every step."""
    distill = bench.spec.distill

    def lesson(desk: Desk) -> Lesson:
        plain = training_batches(rows, desk.config.batch_size, bench.spec.seed)
        loss = KdLoss(distill.alpha, distill.temperature, distill.divergence, bench.spec.chunk, desk.config.compile)
        bench.run.result("data.padded_share", Result(value=rows.padded_share))
        if cache is None:
            live = _speaking(bench, voice, desk.config.compile)
            return Lesson(plain, TokenObjective(desk.model, desk.attention, loss, live.targets))
        kept = LogitCache.open(cache.folder)
        kept.manifest.require(
            temperature=distill.temperature, divergence=distill.divergence, tokenizer_sha256=bench.tokenizer_identity
        )
        return Lesson(TaughtBatches(plain, kept), TokenObjective(desk.model, desk.attention, loss, _kept))

    return lesson


def _speaking(bench: Bench, voice: Voice, compiled: str = "off") -> LiveTeacher:
    model = voice.load()
    return LiveTeacher(model, min(bench.words, len(head_of(model))), compiled)


def _kept(batch: CausalBatch) -> Targets:
    """The loader has brought them along."""
    targets: Targets = batch.targets  # type: ignore[attr-defined]
    return targets
