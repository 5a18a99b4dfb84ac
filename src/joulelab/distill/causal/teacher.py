"""What is computed with a teacher before the student's training: cached logits, and answers to prompts.

Both are sharded work of the runner: an interrupted run resumes it, and several tasks or ranks can divide it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from joulelab.data import sources
from joulelab.data.chat.conversations import ASSISTANT, Row, prompt_of, prompts_of, row_id, uses_tools
from joulelab.data.chat.encoding import vocab_size_of
from joulelab.data.chat.templates import ConversationRefused
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.cross_tokenizer import teacher_data, teacher_rows, teacher_tokenizer_identity
from joulelab.distill.causal.data import split_rows
from joulelab.distill.causal.generators import (
    ChosenEngine,
    TeacherSource,
    choose_engine,
    make_generator,
)
from joulelab.distill.causal.models import TEST, TRAIN, CausalContext, lm_head_weight
from joulelab.distill.logit_cache.cache_store import (
    LogitCache,
    PendingRows,
    merge_caches,
    pending_rows,
    quarantine_damaged,
)
from joulelab.distill.logit_cache.codecs import MANIFEST
from joulelab.distill.logit_cache.teacher_outputs import LiveTeacher, require_complete, write_cache
from joulelab.distill.preferences.pairs import Candidates
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import (
    TEXT_PROMPTS,
    GenerationProgress,
    Generator,
    Prompt,
    close_generator,
    closing_generator,
    completion_key,
    encode_prompts,
    generate_into,
    read_completions,
    shard_batches,
    with_chain_of_thought,
    write_completions,
)
from joulelab.infer.generation.sampler import SAMPLING
from joulelab.infer.generation.server import SAMPLING as REQUEST_SAMPLING
from joulelab.infer.generation.server import server_energy_gap
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.phases import ALL, PART, Shard

LOGITS_STAGE = StageSpec("teacher.logits", "teacher", "cache")
# The teacher of self-distillation is the student's own start, so its logits serve no other student.
SELF_LOGITS_STAGE = StageSpec("teacher.logits", "teacher", "score")
ANSWERS, REPORT = "answers.jsonl", "report.json"
# Texts in one call of the tokenizer.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class StartingStudent:
    """The SFT student that dpo and self start from: trained by this run or another one, or named by the user."""

    source: str
    """Folder, or the name as in `student.model`."""
    key: str
    """Identity of the weights."""
    bill: Bill
    tokens: int
    """Tokens of its training that count toward the budget; 0 if the user named it."""
    made_by: str
    """For people: where it comes from."""
    budget_energy_j: float | None = None
    """What its training used of an energy budget: neither setup nor evaluations, the same for every run that starts
    from it. None without such a budget, and for students of earlier versions."""


def pretrained_teacher(context: CausalContext) -> TeacherSource:
    """The model that `teacher.model` names."""
    spec = context.spec
    name, server = spec.teacher.model, spec.teacher.server if spec.teacher_is_elsewhere else None
    bill = context.runner.input_bill("teacher", name, "model", role="teacher", server=server)
    is_here = server is None or sources.is_on_this_machine(name)
    identity = context.teacher_identity if is_here else bill.key
    return TeacherSource(name, identity, context.load_teacher, bill, context.teacher_tokenizer, weights=name)


def live_teacher(context: CausalContext, teacher: TeacherSource, compile_mode: str = "off") -> LiveTeacher:
    model = teacher.load()
    is_same = context.teacher_tokenizer is context.tokenizer
    words = context.compared_words if is_same else vocab_size_of(context.teacher_tokenizer)
    return LiveTeacher(model, min(words, len(lm_head_weight(model))), compile_mode)


# logits


def cache_logits(context: CausalContext, data: Artifact, teacher: TeacherSource) -> Artifact:
    """The teacher's distributions at all trained tokens, in the codec of the settings."""
    made = context.runner.make_sharded(_cache_work(context, data, teacher))
    if context.runner.shard is None:
        cache = LogitCache.open(made.folder)
        context.runner.report("logits.bytes_per_token", cache.bytes_per_token)
        context.run.progress.write(
            f"logits: {cache.positions:,} tokens in {cache.manifest.codec}, {cache.bytes_per_token:.1f} bytes per token"
        )
    return made


def _cache_work(context: CausalContext, data: Artifact, teacher: TeacherSource) -> ShardedWork:
    spec, rows = context.spec, teacher_rows(context, data, TRAIN)
    distill, batch_size = spec.distill, spec.teacher.batch_size

    def begin(folder: Path, shard: Shard, others: Sequence[Path]) -> RemainingWork:
        for damage in [message for place in (folder, *others) for message in quarantine_damaged(place)]:
            context.run.warn(f"{damage}; its rows are computed again")
        pending = pending_rows(folder, rows, batch_size, shard, others)
        if not pending.batches:
            counts = {"samples": pending.samples, "tokens": pending.tokens} if pending.samples else {}
            return RemainingWork(None, counts)
        live = live_teacher(context, teacher)
        return RemainingWork(lambda stage: work(folder, shard, live, pending, stage), {})

    def work(folder: Path, shard: Shard, live: LiveTeacher, pending: PendingRows, stage: Stage) -> None:
        manifest = live.manifest(
            distill.codec, distill.cached_temperature,
            name=teacher.name, weights=teacher.identity, tokenizer=teacher_tokenizer_identity(context),
        )  # fmt: skip
        write_cache(
            folder, live, rows, manifest,
            batch_size=batch_size, tick=context.runner.counter(stage), shard=shard, chunk=spec.chunk,
            compile_mode=spec.training.compile, pending=pending,
        )  # fmt: skip

    def join(sources: Sequence[Path], folder: Path) -> None:
        merge_caches([source for source in sources if (source / MANIFEST).exists()], folder)  # a shard may be empty
        if context.runner.shard is None:
            require_complete(folder, rows)

    inputs = {
        "voice": teacher.identity,  # the key's spelling: caches of earlier versions are found by it
        "tokenizer": teacher_tokenizer_identity(context),
        "codec": distill.codec,
        "temperature": distill.cached_temperature,
        "precision": context.teacher_precision_key,
        "row_length": rows.row_length,
    }
    if context.compared_words < context.vocabulary:  # otherwise left out, so that the key is that of earlier versions
        inputs["words"] = context.compared_words
    parents = [teacher.bill, teacher_data(context, data).bill]
    stage = SELF_LOGITS_STAGE if spec.pipeline == "self" else LOGITS_STAGE
    return ShardedWork(
        "logits", "logit-cache", stage, inputs, parents, batch_size, rows.__len__, begin, join,
        opens=LogitCache.open, accepts_damaged_shards=True,
    )  # fmt: skip


# prompts


def training_prompts(context: CausalContext) -> list[tuple[Prompt, str | None]]:
    """Prompts of the training documents, or of `generation.prompts_from`, without duplicates, each with the data's own
    answer."""
    if not context.prompts:
        context.prompts.extend(_find_prompts(context))
        spec, count = context.spec, len(context.prompts)
        if count < spec.generation.prompts:
            context.run.note(
                f"prompts: {count:,}, not {spec.generation.prompts:,} (generation.prompts), because "
                f"{prompt_source(spec)} has no more different ones of up to {spec.generation.longest_prompt} tokens"
            )
    return context.prompts


def _find_prompts(context: CausalContext) -> list[tuple[Prompt, str | None]]:
    generation = context.spec.generation
    prompts: dict[str, tuple[Prompt, str | None]] = {}
    left_out: Counter[str] = Counter()
    refused: list[ConversationRefused] = []
    rows, shortest = _rows_with_prompts(context, left_out), math.inf
    # As many rows as prompts are missing, so that no row is read after the one that completes them.
    while some := list(itertools.islice(rows, min(_ROWS_AT_ONCE, generation.prompts - len(prompts)))):
        for prompt, expected, length in _prompts_of(context, some, refused):
            shortest = min(shortest, length)
            if length <= generation.longest_prompt:
                prompts.setdefault(str(prompt), (prompt, expected))
    if not prompts and refused:
        raise refused[0]
    if not prompts:
        found = f"; the shortest has {shortest:,}, its chat template included" if shortest < math.inf else ""
        raise ConfigError(
            f"no prompt of {prompt_source(context.spec)} has {generation.longest_prompt} tokens or fewer{found}",
            "raise generation.prompt_tokens",
        )
    if refused:
        left_out[f"refused by the chat template: {refused[0].message}"] = len(refused)
    for why, count in left_out.items():
        context.run.note(f"prompts: not used of {prompt_source(context.spec)}: {count:,} ({why})")
    return list(prompts.values())


def prompt_source(spec: CausalSpec) -> str:
    return spec.generation.prompts_from or spec.data.source


def prompt_bills(context: CausalContext) -> list[Bill]:
    """The bill of `generation.prompts_from`, by which artifacts depend on its content."""
    source = context.spec.generation.prompts_from
    return [] if source is None else [context.runner.input_bill("prompts", source, "text", role="data")]


def _rows_with_prompts(context: CausalContext, left_out: Counter[str]) -> Iterator[Row]:
    source = context.spec.generation.prompts_from
    if source is None:
        yield from split_rows(context, TRAIN)
        return
    # a teacher's answer to a held-out question would be trained on
    held_out = {row_id(row) for row in split_rows(context, TEST)}
    for row in prompts_of(source, left_out):
        if row_id(row) in held_out:
            left_out["a held-out question"] += 1
        else:
            yield row


def _prompts_of(
    context: CausalContext, rows: Sequence[Row], refused: list[ConversationRefused]
) -> list[tuple[Prompt, str | None, int]]:
    """The prompts of these rows, in order, each with the data's own answer and its length in tokens. Those that the
    chat template does not accept are left out and added to `refused`."""
    generation, tokenizer = context.spec.generation, context.prompt_tokenizer
    first = _first_ids(tokenizer, [row for row in rows if isinstance(row, str)], generation.prompt_tokens)
    # the last token may be a part of a character
    starts = (text.rstrip("\ufffd") for text in tokenizer.batch_decode(first, skip_special_tokens=True))
    found: list[tuple[Prompt, str | None]] = []
    for row in rows:
        if isinstance(row, str):
            found.append((next(starts), None))
            continue
        if uses_tools(row):
            raise ConfigError(f"a conversation of {prompt_source(context.spec)} has tools or tool calls", TEXT_PROMPTS)
        prompt = prompt_of(row)
        if prompt and prompt[-1]["role"] != ASSISTANT:
            found.append((prompt, row[-1]["content"] if row[-1]["role"] == ASSISTANT else None))
    if generation.chain_of_thought:
        found = [(with_chain_of_thought(prompt), expected) for prompt, expected in found]
    encoded = _accepted(tokenizer, [prompt for prompt, _ in found], refused)
    return [(*one, len(ids)) for one, ids in zip(found, encoded, strict=True) if ids]


def _accepted(tokenizer: Any, prompts: Sequence[Prompt], refused: list[ConversationRefused]) -> list[list[int]]:
    """Token ids of each; none of one that the chat template refuses, as a teacher's may refuse a system message."""
    try:
        return encode_prompts(tokenizer, prompts)
    except ConversationRefused as error:
        if len(prompts) == 1:
            refused.append(error)
            return [[]]
        return [_accepted(tokenizer, [prompt], refused)[0] for prompt in prompts]


def _first_ids(tokenizer: Any, texts: Sequence[str], count: int) -> list[list[int]]:
    """The first tokens of each text, without tokenizing all of it: later characters do not change tokens well before
    them."""
    found: list[list[int]] = [[] for _ in texts]
    # English has 4 to 5 characters per token, so that most texts need one attempt.
    length, pending = 10 * count, list(range(len(texts)))
    while pending:
        some = tokenizer([texts[at][:length] for at in pending])["input_ids"]
        open_ended = []
        for at, ids in zip(pending, some, strict=True):
            if length >= len(texts[at]) or len(ids) >= 2 * count:
                found[at] = list(ids[:count])
            else:
                open_ended.append(at)
        length, pending = 4 * length, open_ended
    return found


# answers


def generate_answers(context: CausalContext, data: Artifact, teacher: TeacherSource, role: str = "teacher") -> Artifact:
    """Answers to all prompts, before any is dropped: several pipelines share them. `role` is who generates."""
    made = context.runner.make_sharded(_GenerationWork(context, teacher, role).work(data))
    refuse_unknown_energy(context.spec, energy_gap(made))
    if teacher.tokenizer is not context.tokenizer:
        context.run.note(
            f"teacher and student have different tokenizers ({vocab_size_of(teacher.tokenizer):,} and "
            f"{context.vocabulary:,} tokens): the teacher's completions are encoded in the student's tokens as text"
        )
    tokens = int(read_json(made.folder / REPORT)["generated_tokens"])
    context.runner.report(f"{role}.generate.generated_tokens", float(tokens))
    return made


@dataclass(frozen=True)
class _GenerationWork:
    """Generation as sharded work."""

    context: CausalContext
    teacher: TeacherSource
    role: str

    @property
    def stage_name(self) -> str:
        return f"{self.role}.generate"

    @cached_property
    def chosen(self) -> ChosenEngine:
        return choose_engine(self.context, self.teacher)

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """Found only if there is work: it takes a pass of the tokenizer over all texts."""
        return [prompt for prompt, _ in training_prompts(self.context)]

    def work(self, data: Artifact) -> ShardedWork:
        spec = self.context.spec
        generation = spec.generation.model_dump(
            mode="json", include={"prompts", "prompt_tokens", "answer", "cache", "chain_of_thought"}
        )
        inputs = {
            **generation,
            "voice": self.teacher.identity,  # the key's spelling: answers of earlier versions are found by it
            "server": spec.teacher.server,
            "precision": self.context.teacher_precision_key,
        }
        if spec.generation.answer.do_sample:
            inputs["sampling"] = REQUEST_SAMPLING if self.chosen.sends_requests else SAMPLING
        if self.chosen.key is not None:
            inputs["engine"] = self.chosen.key
        parents = [self.teacher.bill, data.bill, *prompt_bills(self.context)]
        return ShardedWork(
            "answers", "answers", StageSpec(self.stage_name, self.role, "generate"), inputs, parents,
            spec.generation.prompts_per_unit, total=lambda: len(self.prompts), begin=self._begin, join=self._join,
        )  # fmt: skip

    def _begin(self, folder: Path, shard: Shard, others: Sequence[Path]) -> RemainingWork:
        if shard.number >= -(-len(self.prompts) // self.context.spec.generation.prompts_per_unit):
            return RemainingWork(None, {})  # there are more shards than units: no engine is started for this one
        own, known = read_completions(folder / _answers_log(shard)), read_completions(*_answers_logs([folder, *others]))
        reports = _reports([folder, *others])
        if not reports and self.chosen.name == "builtin":
            reports = [{"generator": self.teacher.identity, "energy_gap": None}]
        if reports and all(key in known for key in self._own_keys(str(reports[0]["generator"]), shard)):
            if own:
                self._record_gap(reports[0])
            write_json(folder / REPORT, reports[0])
            return RemainingWork(None, _counts(GenerationProgress.of(own.values())) if own else {})
        generator = make_generator(self.context, self.teacher, self.chosen, self.prompts, self.stage_name)
        with ExitStack() as undo:
            undo.callback(close_generator, generator)
            gap = generator.energy_gap or (
                server_energy_gap(self.context.run.meter) if self.chosen.name == "server" else None
            )
            report = {"generator": generator.identity, "energy_gap": gap}
            self._record_gap(report)
            write_json(folder / REPORT, report)
            undo.pop_all()  # the work closes it
        return RemainingWork(lambda stage: self._generate(folder, shard, others, generator, stage), {})

    def _own_keys(self, generator: str, shard: Shard) -> list[str]:
        keys = [self._key(generator, prompt) for prompt in self.prompts]
        batches = shard_batches(keys, self.prompts, self.context.spec.generation.prompts_per_unit, shard)
        return [keys[at] for batch in batches for at in batch]

    def _key(self, generator: str, prompt: Prompt) -> str:
        return completion_key(generator, self.context.spec.generation.answer, prompt)

    def _record_gap(self, report: dict[str, Any]) -> None:
        gap = report["energy_gap"]
        if gap:
            self.context.run.warn(f"{self.stage_name}: {gap}")
            self.context.run.unmetered_work(self.stage_name, str(report["generator"]), gap)
            refuse_unknown_energy(self.context.spec, gap)

    def _generate(self, folder: Path, shard: Shard, others: Sequence[Path], generator: Generator, stage: Stage) -> None:
        run = self.context.run

        def tick(progress: GenerationProgress) -> None:
            stage.count(**_counts(progress))
            run.progress.advance(progress.prompts, f"{progress.generated_tokens:,} tokens")
            run.stop.check()

        own, unit = folder / _answers_log(shard), self.context.spec.generation.prompts_per_unit
        elsewhere = [path for path in _answers_logs([folder, *others]) if path != own]
        with closing_generator(generator):
            generate_into(own, generator, self.prompts, tick, share=shard, at_once=unit, others=elsewhere)

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        reports, completions = _reports(sources), read_completions(*_answers_logs(sources))
        generator = str(reports[0]["generator"]) if reports else ""  # none: a shard without prompts
        keyed = {self._key(generator, prompt): prompt for prompt in self.prompts}
        if self.context.runner.shard is not None:  # only its own prompts
            keyed = {key: prompt for key, prompt in keyed.items() if key in completions}
        write_completions(folder / ANSWERS, list(keyed), list(keyed.values()), completions)
        gap = next((report["energy_gap"] for report in reports if report["energy_gap"]), None)
        totals = vars(GenerationProgress.of(completions[key] for key in keyed))
        write_json(folder / REPORT, {**totals, "generator": generator, "energy_gap": gap})


def _answers_log(shard: Shard) -> str:
    return f"answers-{shard.name}.jsonl"


def _answers_logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("answers*.jsonl"))]


def _reports(folders: Sequence[Path]) -> list[dict[str, Any]]:
    reports = [read_json(folder / REPORT) for folder in folders if (folder / REPORT).exists()]
    return [report for report in reports if report["generator"]]


def _counts(progress: GenerationProgress) -> dict[str, int]:
    """Generated tokens only: J per token is per generated token, with the prompts' energy included."""
    return {"samples": progress.answers, "tokens": progress.generated_tokens}


def refuse_unknown_energy(spec: CausalSpec, gap: str | None) -> None:
    """Before any energy is spent; and again if another run has generated the answers."""
    if gap and spec.budget.counts_teacher:
        raise ConfigError(
            f"budget.counts_teacher=true, but the teacher's energy would be unknown: {gap}",
            "run the server on this node with its GPUs metered, or set budget.counts_teacher=false",
        )


def energy_gap(answers: Artifact) -> str | None:
    """Why the energy of the answers is unknown, if they were generated on a machine without our meter."""
    gap: str | None = read_json(answers.folder / REPORT)["energy_gap"]
    return gap


def read_candidates(context: CausalContext, answers: Artifact) -> list[Candidates]:
    """The answers of an artifact with their prompts."""
    return [one for _, one in _keyed_candidates(context, answers)]


def candidate_batches(context: CausalContext, answers: Artifact) -> list[list[Candidates]]:
    """The same in the units they were generated in; only those of this run's shard, which need not wait for
    others."""
    keyed, shard = _keyed_candidates(context, answers), context.runner.shard
    keys, prompts = [key for key, _ in keyed], [one.prompt for _, one in keyed]
    own = ALL if shard is None or PART in answers.bill.artifact.kind else shard
    batches = shard_batches(keys, prompts, context.spec.generation.prompts_per_unit, own)
    return [[keyed[at][1] for at in batch] for batch in batches]


def _keyed_candidates(context: CausalContext, answers: Artifact) -> list[tuple[str, Candidates]]:
    completions = read_completions(answers.folder / ANSWERS)
    generator, settings = str(read_json(answers.folder / REPORT)["generator"]), context.spec.generation.answer
    keyed = {completion_key(generator, settings, one[0]): one for one in training_prompts(context)}
    return [(key, Candidates(one[0], completions[key], one[1])) for key, one in keyed.items() if key in completions]
