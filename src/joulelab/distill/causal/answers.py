"""Stage teacher.generate: prompts out of the data, a teacher's answers to them, and the documents made of those."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.data.chat.documents import EncodedDocument
from joulelab.data.chat.encoding import pad_id_of
from joulelab.data.chat.messages import ASSISTANT, Row, prompt_of
from joulelab.data.chat.store import write_documents
from joulelab.distill.causal import judging
from joulelab.distill.causal.bench import TRAIN, Bench
from joulelab.distill.causal.budgets import energy_j_of
from joulelab.distill.causal.data import rows
from joulelab.distill.causal.distributions import Voice
from joulelab.distill.preferences.candidates import Candidates
from joulelab.distill.synthetic.filters import Filters, Kept, SyntheticReport, keep, require_some
from joulelab.distill.synthetic.rows import write_rows
from joulelab.errors import ConfigError
from joulelab.infer.generation.answer_log import Progress, generate_into, read_answers
from joulelab.infer.generation.answers import Generator, Prompt, answer_key
from joulelab.infer.generation.prompts import answer_ids, encode_prompt, with_chain_of_thought
from joulelab.infer.generation.transformers_generator import TransformersGenerator
from joulelab.runs.artifacts import Artifact
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.record import Result

ANSWERS, REPORT, READABLE = "answers.jsonl", "report.json", "kept.jsonl"
REASONS = ("truncated", "too_short", "too_long", "duplicates", "unjudged", "low_score")


def asked_prompts(bench: Bench) -> list[tuple[Prompt, str | None]]:
    """Prompts of the training documents, each once, and what the data itself answers."""
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
        ids = list(islice(bench.tokenizer(row)["input_ids"], wanted.prompt_tokens))
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


def generated(bench: Bench, data: Artifact, voice: Voice, stage_name: str = "teacher.generate") -> Artifact:
    """All answers, before anything is dropped: several pipelines share them."""

    def make(folder: Path) -> None:
        bench.require_alone(stage_name)
        work = bench.kept_work(stage_name)
        prompts = [prompt for prompt, _ in asked_prompts(bench)]
        generator = _generator(bench, voice)
        if generator.energy_gap:
            bench.run.warn(f"{stage_name}: {generator.energy_gap}")
        with bench.run.stage(stage_name, total=len(prompts)) as stage:

            def tick(so_far: Progress) -> None:
                stage.count(samples=so_far.answers, tokens=so_far.prompt_tokens + so_far.generated_tokens)
                bench.run.progress.advance(so_far.prompts, f"{so_far.generated_tokens:,} tokens")
                bench.run.stop.check()

            answers = generate_into(work / ANSWERS, generator, prompts, tick)
        write_json(
            folder / REPORT,
            {**vars(Progress.of(answers)), "generator": generator.identity, "energy_gap": generator.energy_gap},
        )
        shutil.move(work / ANSWERS, folder / ANSWERS)

    wanted = bench.spec.generation.model_dump(
        mode="json", include={"prompts", "prompt_tokens", "answer", "chain_of_thought"}
    )
    inputs = {
        **wanted,
        "voice": voice.identity,
        "server": bench.spec.teacher.server,
        "precision": str(bench.teacher_precision),
    }
    made = bench.run.artifact("answers", kind="answers", inputs=inputs, parents=[voice.bill, data.bill], make=make)
    tokens = int(read_json(made.folder / REPORT)["generated_tokens"])
    bench.run.result(f"{stage_name}.generated_tokens", Result(value=float(tokens)))
    return made


def _generator(bench: Bench, voice: Voice) -> Generator:
    spec = bench.spec
    if spec.teacher.server is not None and voice.name == spec.teacher.model:
        from joulelab.infer.generation.server_generator import ServerGenerator

        return ServerGenerator(
            spec.teacher.server, spec.teacher.model, spec.generation.answer, metered_gpus=spec.energy.gpus
        )
    return TransformersGenerator(
        voice.load(), bench.tokenizer, spec.generation.answer,
        identity=voice.identity, batch_size=spec.teacher.batch_size,
    )  # fmt: skip


def candidates(bench: Bench, answers: Artifact) -> list[Candidates]:
    """The answers of an artefact beside the prompts they were given to."""
    written = read_answers(answers.folder / ANSWERS)
    generator = str(read_json(answers.folder / REPORT)["generator"])
    asked = asked_prompts(bench)
    return [
        Candidates(prompt, written[answer_key(generator, bench.spec.generation.answer, prompt)], expected)
        for prompt, expected in asked
    ]


def synthetic_documents(bench: Bench, data: Artifact, answers: Artifact) -> Artifact:
    """What is kept of the answers, as documents to train on; the counts of what was dropped lie beside them."""
    wanted = bench.spec.generation
    filters = Filters(
        min_tokens=wanted.min_tokens,
        max_tokens=wanted.max_tokens,
        keep_truncated=wanted.keep_truncated,
        keep_duplicates=wanted.keep_duplicates,
        min_score=wanted.min_score,
    )

    def make(folder: Path) -> None:
        asked = candidates(bench, answers)
        scores = judging.scores(bench, asked, answers) if wanted.min_score is not None else None
        with bench.run.stage("data.synthetic") as stage:
            kept, report = keep([one.prompt for one in asked], [one.answers for one in asked], filters, scores)
            require_some(kept, report)
            write_rows(folder / READABLE, kept)
            store = write_documents(
                folder / TRAIN, _documents(bench, kept),
                vocab_size=bench.words, pad_id=pad_id_of(bench.tokenizer), tokenizer=bench.spec.tokenizer,
            )  # fmt: skip
            stage.count(samples=report.kept, tokens=store.token_count)
        write_json(folder / REPORT, report)

    inputs: dict[str, Any] = {
        **vars(filters),
        "max_tokens_of_document": bench.spec.data.max_tokens,
        "judge": judging.inputs(bench) if wanted.min_score is not None else None,
        "tokenizer": bench.tokenizer_identity,
    }
    made = bench.run.artifact(
        "synthetic", kind="synthetic-documents", inputs=inputs, parents=[answers.bill, data.bill], make=make
    )
    _tell(bench, made, answers)
    return made


def _documents(bench: Bench, kept: list[Kept]) -> Iterator[EncodedDocument]:
    """The prompt is read, the answer is learnt, its closing token included where it came to its end."""
    for one in kept:
        asked = encode_prompt(bench.tokenizer, one.prompt)
        said = answer_ids(bench.tokenizer, one.prompt, one.answer.text, one.answer.finish_reason == "stop")
        ids = np.array([*asked, *said], dtype=np.int64)[: bench.spec.data.max_tokens]
        yield EncodedDocument(ids, np.arange(len(ids)) >= len(asked))


def _tell(bench: Bench, made: Artifact, answers: Artifact) -> None:
    report = SyntheticReport.model_validate(read_json(made.folder / REPORT))
    gap = read_json(answers.folder / REPORT)["energy_gap"]
    own = energy_j_of(bench.spec, answers.bill.artefact, made.bill.artefact)
    report = report.with_energy(None if gap else own, gap)
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            bench.run.result(f"synthetic.{name}", Result(value=float(value)))
    dropped = {name: getattr(report, name) for name in REASONS}
    told = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in dropped.items() if count)
    why = f" ({told})" if told else ""
    bench.run.progress.say(f"synthetic: {report.kept} of {report.answers} answers kept{why}")
