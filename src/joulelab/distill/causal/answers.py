"""Stage teacher.generate: prompts out of the data, and a teacher's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from joulelab.data.chat.conversations import ASSISTANT, Row, prompt_of
from joulelab.distill.causal.bench import TRAIN, Bench
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.data import rows
from joulelab.distill.causal.distributions import Voice
from joulelab.distill.causal.generators import by_server, make_generator, unseen
from joulelab.distill.causal.split_work import worked
from joulelab.distill.preferences.candidates import Candidates
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec
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
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.record import Result
from joulelab.runs.sharding import ALL, PART, Shard
from joulelab.runs.storage import read_json, write_json

ANSWERS, REPORT = "answers.jsonl", "report.json"


def asked_prompts(bench: Bench) -> list[tuple[Prompt, str | None]]:
    """Prompts of the training documents, each once, and what the data itself answers."""
    if not bench.prompts:
        bench.prompts.extend(_found_prompts(bench))
    return bench.prompts


def _found_prompts(bench: Bench) -> list[tuple[Prompt, str | None]]:
    wanted = bench.spec.generation
    found: dict[str, tuple[Prompt, str | None]] = {}
    for row in rows(bench, TRAIN):
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


def _prompt_of(bench: Bench, row: Row) -> tuple[Prompt | None, str | None]:
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


def generated(bench: Bench, data: Artifact, voice: Voice, role: str = "teacher") -> Artifact:
    """All answers, before anything is dropped: several pipelines share them. They can be made in shares."""
    made = worked(bench, _Answering(bench, voice, role).work(data))
    _require_no_count(bench.spec, energy_gap(made))
    tokens = int(read_json(made.folder / REPORT)["generated_tokens"])
    bench.run.result(f"{role}.generate.generated_tokens", Result(value=float(tokens)))
    return made


@dataclass(frozen=True)
class _Answering:
    """The work of one voice, in whatever shares it is done."""

    bench: Bench
    voice: Voice
    role: str

    @property
    def stage_name(self) -> str:
        return f"{self.role}.generate"

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """Looked for only where they are asked: all texts go through the tokenizer for it."""
        return [prompt for prompt, _ in asked_prompts(self.bench)]

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
        own, there = read_completions(place / _log(share)), read_completions(*_logs([place, *others]))
        served, reports = by_server(self.bench, self.voice), _reports([place, *others])
        if not reports and not served:
            reports = [{"generator": self.voice.identity, "energy_gap": None}]
        if reports and all(key in there for key in self._own_keys(str(reports[0]["generator"]), share)):
            if own:
                self._note_gap(reports[0])
            write_json(place / REPORT, reports[0])
            return RemainingWork(None, _counts(GenerationProgress.of(own.values())) if own else {})
        generator = make_generator(self.bench, self.voice, self.prompts)
        gap = generator.energy_gap or (unseen(self.bench) if served else None)
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
            _require_no_count(self.bench.spec, gap)

    def _ask(self, place: Path, share: Shard, others: Sequence[Path], generator: Generator, stage: Stage) -> None:
        run = self.bench.run

        def tick(so_far: GenerationProgress) -> None:
            stage.count(**_counts(so_far))
            run.progress.advance(so_far.prompts, f"{so_far.generated_tokens:,} tokens")
            run.stop.check()

        own, size = place / _log(share), self.bench.spec.teacher.batch_size
        told = [path for path in _logs([place, *others]) if path != own]
        generate_into(own, generator, self.prompts, tick, share=share, at_once=size, others=told)

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        reports, found = _reports(sources), read_completions(*_logs(sources))
        generator = str(reports[0]["generator"])
        keyed = {self._key(generator, prompt): prompt for prompt in self.prompts}
        if self.bench.share is not None:  # its own prompts alone
            keyed = {key: prompt for key, prompt in keyed.items() if key in found}
        write_completions(folder / ANSWERS, list(keyed), list(keyed.values()), found)
        gap = next((report["energy_gap"] for report in reports if report["energy_gap"]), None)
        counted = vars(GenerationProgress.of(found[key] for key in keyed))
        write_json(folder / REPORT, {**counted, "generator": generator, "energy_gap": gap})


def _log(share: Shard) -> str:
    return f"answers-{share.name}.jsonl"


def _reports(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [read_json(folder / REPORT) for folder in folders if (folder / REPORT).exists()]


def _logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("answers*.jsonl"))]


def _counts(so_far: GenerationProgress) -> dict[str, int]:
    """Tokens that were written; reading the prompts is what they took, and J per token is told of them alone."""
    return {"samples": so_far.answers, "tokens": so_far.generated_tokens}


def _require_no_count(spec: CausalSpec, gap: str | None) -> None:
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


def candidates(bench: Bench, answers: Artifact) -> list[Candidates]:
    """The answers of an artefact beside the prompts they were given to."""
    return [one for _, one in _keyed_candidates(bench, answers)]


def candidate_batches(bench: Bench, answers: Artifact) -> list[list[Candidates]]:
    """The same as they were answered together; of a share, those that it has answered: it need not wait for others."""
    found = _keyed_candidates(bench, answers)
    keys, prompts = [key for key, _ in found], [one.prompt for _, one in found]
    share = ALL if bench.share is None or PART in answers.bill.artefact.kind else bench.share
    batches = shard_batches(keys, prompts, bench.spec.teacher.batch_size, share)
    return [[found[at][1] for at in batch] for batch in batches]


def _keyed_candidates(bench: Bench, answers: Artifact) -> list[tuple[str, Candidates]]:
    written = read_completions(answers.folder / ANSWERS)
    generator = str(read_json(answers.folder / REPORT)["generator"])
    asked = {completion_key(generator, bench.spec.generation.answer, one[0]): one for one in asked_prompts(bench)}
    return [(key, Candidates(one[0], written[key], one[1])) for key, one in asked.items() if key in written]
