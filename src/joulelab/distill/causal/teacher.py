"""Stage teacher.logits: what a teacher says about every trained token, once for all students; and learning from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from joulelab.data.chat.conversations import ASSISTANT, Row, prompt_of
from joulelab.data.chat.packing import CausalBatch, PackedRows, training_batches
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.context import TRAIN, CausalContext
from joulelab.distill.causal.data import split_rows
from joulelab.distill.causal.models import lm_head_weight
from joulelab.distill.causal.objective import Targets, TokenObjective
from joulelab.distill.causal.students import StudentSetup, TrainingData
from joulelab.distill.logit_cache.cache_store import (
    LogitCache,
    PendingRows,
    merge_caches,
    pending_rows,
    quarantine_damaged,
)
from joulelab.distill.logit_cache.codecs import MANIFEST
from joulelab.distill.logit_cache.kd_loss import KdLoss
from joulelab.distill.logit_cache.teacher_outputs import DistillationBatches, LiveTeacher, require_complete, write_cache
from joulelab.distill.preferences.pairs import Candidates
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec, progress_counter
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import (
    GenerationProgress,
    Generator,
    Prompt,
    completion_key,
    encode_prompt,
    generate_into,
    read_completions,
    shard_batches,
    with_chain_of_thought,
    write_completions,
)
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import Stage
from joulelab.runs.record import Result
from joulelab.runs.sharding import ALL, PART, Shard
from joulelab.runs.storage import read_json, write_json

LOGITS_STAGE = StageSpec("teacher.logits", "teacher", "cache")


@dataclass(frozen=True)
class TeacherSource:
    """Whose distributions are learnt: how to load it, what it is, and its bill."""

    name: str
    identity: str
    load: Callable[[], nn.Module]
    bill: Bill


def cache_logits(bench: CausalContext, data: Artifact, voice: TeacherSource) -> Artifact:
    """Found again by its content, or made; work that was cut off goes on where it stopped, and can be split."""
    made = bench.runner.make_sharded(_cache_work(bench, data, voice))
    if bench.share is None:
        cache = LogitCache.open(made.folder)
        bench.run.result("logits.bytes_per_token", Result(value=cache.bytes_per_token))
        bench.run.progress.say(
            f"logits: {cache.positions:,} tokens in {cache.manifest.codec}, {cache.bytes_per_token:.1f} bytes a token"
        )
    return made


def _cache_work(bench: CausalContext, data: Artifact, voice: TeacherSource) -> ShardedWork:
    distill, rows, size = bench.spec.distill, bench.rows(data, TRAIN), bench.spec.teacher.batch_size

    def begin(place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        for told in [damage for folder in (place, *others) for damage in quarantine_damaged(folder)]:
            bench.run.warn(f"{told}; what it held is asked again")
        asked = pending_rows(place, rows, size, share, others)
        if not asked.batches:
            return RemainingWork(None, {"samples": asked.samples, "tokens": asked.tokens} if asked.samples else {})
        teacher = _live_teacher(bench, voice)
        return RemainingWork(lambda stage: ask(place, share, teacher, asked, stage), {})

    def ask(place: Path, share: Shard, teacher: LiveTeacher, asked: PendingRows, stage: Stage) -> None:
        manifest = teacher.manifest(
            distill.codec, distill.kept_temperature,
            name=voice.name, weights=voice.identity, tokenizer=bench.tokenizer_identity,
        )  # fmt: skip
        write_cache(
            place, teacher, rows, manifest,
            batch_size=size, tick=progress_counter(bench.run, stage), shard=share, chunk=bench.spec.chunk,
            compile_mode=bench.spec.training.compile, pending=asked,
        )  # fmt: skip

    def join(sources: Sequence[Path], folder: Path) -> None:
        merge_caches([source for source in sources if (source / MANIFEST).exists()], folder)  # a share may be empty
        if bench.share is None:
            require_complete(folder, rows)

    inputs = {
        "voice": voice.identity,
        "tokenizer": bench.tokenizer_identity,
        "codec": distill.codec,
        "temperature": distill.kept_temperature,
        "precision": str(bench.teacher_precision),
        "row_length": bench.spec.data.row_length,
    }
    return ShardedWork(
        "logits", "logit-cache", LOGITS_STAGE, inputs, [voice.bill, data.bill], size, rows.__len__, begin, join,
        opens=LogitCache.open, accepts_damaged_shards=True,
    )  # fmt: skip


def distillation_data(
    bench: CausalContext, rows: PackedRows, cache: Artifact | None, voice: TeacherSource
) -> Callable[[StudentSetup], TrainingData]:
    """From the cache, or where there is none from the teacher itself, in every step."""
    distill = bench.spec.distill

    def lesson(desk: StudentSetup) -> TrainingData:
        plain = training_batches(rows, desk.config.batch_size, bench.spec.seed)
        loss = KdLoss(distill.alpha, distill.temperature, distill.divergence, bench.spec.chunk, desk.config.compile)
        bench.run.result("data.padded_share", Result(value=rows.padded_share))
        if cache is None:
            live = _live_teacher(bench, voice, desk.config.compile)
            return TrainingData(
                plain, TokenObjective(desk.model, desk.attention, loss, live.targets), distill.loss_name
            )
        kept = LogitCache.open(cache.folder)
        kept.manifest.require(
            temperature=distill.temperature, divergence=distill.divergence, tokenizer_sha256=bench.tokenizer_identity
        )
        objective = TokenObjective(desk.model, desk.attention, loss, _cached_targets)
        return TrainingData(DistillationBatches(plain, kept), objective, distill.loss_name)

    return lesson


def _live_teacher(bench: CausalContext, voice: TeacherSource, compiled: str = "off") -> LiveTeacher:
    model = voice.load()
    return LiveTeacher(model, min(bench.words, len(lm_head_weight(model))), compiled)


def _cached_targets(batch: CausalBatch) -> Targets:
    """The loader has brought them along."""
    targets: Targets = batch.targets  # type: ignore[attr-defined]
    return targets


# Who answers prompts: a model in this process, or a server in its place.


SERVER_KEY = "JOULELAB_SERVER_KEY"
"""Of the environment, not of the settings: these are saved and shown."""


def make_generator(bench: CausalContext, voice: TeacherSource, prompts: Sequence[Prompt]) -> Generator:
    spec = bench.spec
    if uses_server(bench, voice):
        from joulelab.infer.generation.server import ServerGenerator

        return ServerGenerator(
            str(spec.teacher.server), spec.teacher.model, spec.generation.answer,
            api_key=os.environ.get(SERVER_KEY), metered_gpus=spec.energy.gpus,
        )  # fmt: skip
    return TransformersGenerator(
        voice.load(), bench.tokenizer, spec.generation.answer,
        identity=voice.identity, batch_size=spec.teacher.batch_size, cache=spec.generation.cache, whole=prompts,
    )  # fmt: skip


def uses_server(bench: CausalContext, voice: TeacherSource) -> bool:
    return bench.spec.teacher.server is not None and voice.name == bench.spec.teacher.model


def server_energy_gap(bench: CausalContext) -> str | None:
    """A server on this very machine is in its sensors' joules, and in no estimate from the CPU time of this program."""
    if any(figure.measured for figure in bench.run.meter.so_far().values()):
        return None
    return "no sensor measures here, and an estimate from this program's CPU time has nothing of the server's"


# Stage teacher.generate: prompts out of the data, and a teacher's answers to them.


ANSWERS, REPORT = "answers.jsonl", "report.json"


def training_prompts(bench: CausalContext) -> list[tuple[Prompt, str | None]]:
    """Prompts of the training documents, each once, and what the data itself answers."""
    if not bench.prompts:
        bench.prompts.extend(_find_prompts(bench))
    return bench.prompts


def _find_prompts(bench: CausalContext) -> list[tuple[Prompt, str | None]]:
    wanted = bench.spec.generation
    found: dict[str, tuple[Prompt, str | None]] = {}
    for row in split_rows(bench, TRAIN):
        prompt, expected = _prompt_of(bench, row)
        if prompt is not None:
            found.setdefault(str(prompt), (prompt, expected))
        if len(found) == wanted.prompts:
            break
    if not found:
        raise ConfigError(
            f"no prompt of {bench.spec.data.source} has {wanted.prompt_tokens} tokens or fewer",
            "raise generation.prompt_tokens",
        )
    return list(found.values())


def _prompt_of(bench: CausalContext, row: Row) -> tuple[Prompt | None, str | None]:
    wanted = bench.spec.generation
    if isinstance(row, str):
        ids = _first_ids(bench.tokenizer, row, wanted.prompt_tokens)
        prompt: Prompt = bench.tokenizer.decode(ids, skip_special_tokens=True)
        expected = None
    else:
        prompt = prompt_of(row)
        expected = row[-1]["content"] if row[-1]["role"] == ASSISTANT else None
        if not prompt or prompt[-1]["role"] == ASSISTANT:
            return None, None
    if wanted.chain_of_thought:
        prompt = with_chain_of_thought(prompt)
    fits = 0 < len(encode_prompt(bench.tokenizer, prompt)) <= wanted.prompt_tokens + 64 * wanted.chain_of_thought
    return (prompt, expected) if fits else (None, None)


def _first_ids(tokenizer: Any, text: str, count: int) -> list[int]:
    """Of the whole text, read no further than they need: words do not change those well before them."""
    length = 8 * count
    while True:
        ids = list(tokenizer(text[:length])["input_ids"])
        if length >= len(text) or len(ids) >= 2 * count:
            return ids[:count]
        length *= 4


def generate_answers(bench: CausalContext, data: Artifact, voice: TeacherSource, role: str = "teacher") -> Artifact:
    """All answers, before anything is dropped: several pipelines share them. They can be made in shares."""
    made = bench.runner.make_sharded(_GenerationWork(bench, voice, role).work(data))
    _refuse_unknown_energy(bench.spec, energy_gap(made))
    tokens = int(read_json(made.folder / REPORT)["generated_tokens"])
    bench.run.result(f"{role}.generate.generated_tokens", Result(value=float(tokens)))
    return made


@dataclass(frozen=True)
class _GenerationWork:
    """The work of one voice, in whatever shares it is done."""

    bench: CausalContext
    voice: TeacherSource
    role: str

    @property
    def stage_name(self) -> str:
        return f"{self.role}.generate"

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """Looked for only where they are asked: all texts go through the tokenizer for it."""
        return [prompt for prompt, _ in training_prompts(self.bench)]

    def work(self, data: Artifact) -> ShardedWork:
        spec = self.bench.spec
        wanted = spec.generation.model_dump(
            mode="json", include={"prompts", "prompt_tokens", "answer", "cache", "chain_of_thought"}
        )
        inputs = {
            **wanted,
            "voice": self.voice.identity,
            "server": spec.teacher.server,
            "precision": str(self.bench.teacher_precision),
        }
        parents, size = [self.voice.bill, data.bill], spec.teacher.batch_size
        return ShardedWork(
            "answers", "answers", StageSpec(self.stage_name, self.role, "generate"), inputs, parents, size,
            total=lambda: len(self.prompts), begin=self._begin, join=self._join,
        )  # fmt: skip

    def _begin(self, place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        own, there = read_completions(place / _answers_log(share)), read_completions(*_answers_logs([place, *others]))
        served, reports = uses_server(self.bench, self.voice), _reports([place, *others])
        if not reports and not served:
            reports = [{"generator": self.voice.identity, "energy_gap": None}]
        if reports and all(key in there for key in self._own_keys(str(reports[0]["generator"]), share)):
            if own:
                self._note_gap(reports[0])
            write_json(place / REPORT, reports[0])
            return RemainingWork(None, _counts(GenerationProgress.of(own.values())) if own else {})
        generator = make_generator(self.bench, self.voice, self.prompts)
        gap = generator.energy_gap or (server_energy_gap(self.bench) if served else None)
        report = {"generator": generator.identity, "energy_gap": gap}
        self._note_gap(report)
        write_json(place / REPORT, report)
        return RemainingWork(lambda stage: self._ask(place, share, others, generator, stage), {})

    def _own_keys(self, generator: str, share: Shard) -> list[str]:
        keys = [self._key(generator, prompt) for prompt in self.prompts]
        batches = shard_batches(keys, self.prompts, self.bench.spec.teacher.batch_size, share)
        return [keys[at] for batch in batches for at in batch]

    def _key(self, generator: str, prompt: Prompt) -> str:
        return completion_key(generator, self.bench.spec.generation.answer, prompt)

    def _note_gap(self, report: dict[str, Any]) -> None:
        gap = report["energy_gap"]
        if gap:
            self.bench.run.warn(f"{self.stage_name}: {gap}")
            self.bench.run.unmetered_work(f"{self.stage_name} on {report['generator']}", gap)
            _refuse_unknown_energy(self.bench.spec, gap)

    def _ask(self, place: Path, share: Shard, others: Sequence[Path], generator: Generator, stage: Stage) -> None:
        run = self.bench.run

        def tick(so_far: GenerationProgress) -> None:
            stage.count(**_counts(so_far))
            run.progress.advance(so_far.prompts, f"{so_far.generated_tokens:,} tokens")
            run.stop.check()

        own, size = place / _answers_log(share), self.bench.spec.teacher.batch_size
        told = [path for path in _answers_logs([place, *others]) if path != own]
        generate_into(own, generator, self.prompts, tick, share=share, at_once=size, others=told)

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        reports, found = _reports(sources), read_completions(*_answers_logs(sources))
        generator = str(reports[0]["generator"])
        keyed = {self._key(generator, prompt): prompt for prompt in self.prompts}
        if self.bench.share is not None:  # its own prompts alone
            keyed = {key: prompt for key, prompt in keyed.items() if key in found}
        write_completions(folder / ANSWERS, list(keyed), list(keyed.values()), found)
        gap = next((report["energy_gap"] for report in reports if report["energy_gap"]), None)
        counted = vars(GenerationProgress.of(found[key] for key in keyed))
        write_json(folder / REPORT, {**counted, "generator": generator, "energy_gap": gap})


def _answers_log(share: Shard) -> str:
    return f"answers-{share.name}.jsonl"


def _reports(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [read_json(folder / REPORT) for folder in folders if (folder / REPORT).exists()]


def _answers_logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("answers*.jsonl"))]


def _counts(so_far: GenerationProgress) -> dict[str, int]:
    """Tokens that were written; reading the prompts is what they took, and J per token is told of them alone."""
    return {"samples": so_far.answers, "tokens": so_far.generated_tokens}


def _refuse_unknown_energy(spec: CausalSpec, gap: str | None) -> None:
    """Before anything is spent; and again where answers are found that somebody else has asked for."""
    if gap and spec.budget.counts_teacher:
        raise ConfigError(
            f"the budget counts the teacher's joules, and they would not be known: {gap}",
            "run the server on this node with its GPUs metered, or set budget.counts_teacher=false",
        )


def energy_gap(answers: Artifact) -> str | None:
    """Why the joules of the answers are not known, where they were written on a machine without our meter."""
    gap: str | None = read_json(answers.folder / REPORT)["energy_gap"]
    return gap


def read_candidates(bench: CausalContext, answers: Artifact) -> list[Candidates]:
    """The answers of an artefact beside the prompts they were given to."""
    return [one for _, one in _keyed_candidates(bench, answers)]


def candidate_batches(bench: CausalContext, answers: Artifact) -> list[list[Candidates]]:
    """The same as they were answered together; of a share, those that it has answered: it need not wait for others."""
    found = _keyed_candidates(bench, answers)
    keys, prompts = [key for key, _ in found], [one.prompt for _, one in found]
    share = ALL if bench.share is None or PART in answers.bill.artefact.kind else bench.share
    batches = shard_batches(keys, prompts, bench.spec.teacher.batch_size, share)
    return [[found[at][1] for at in batch] for batch in batches]


def _keyed_candidates(bench: CausalContext, answers: Artifact) -> list[tuple[str, Candidates]]:
    written = read_completions(answers.folder / ANSWERS)
    generator = str(read_json(answers.folder / REPORT)["generator"])
    asked = {completion_key(generator, bench.spec.generation.answer, one[0]): one for one in training_prompts(bench)}
    return [(key, Candidates(one[0], written[key], one[1])) for key, one in asked.items() if key in written]
