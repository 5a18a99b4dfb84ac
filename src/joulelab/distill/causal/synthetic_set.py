"""What is kept of a teacher's answers, as documents to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.data.chat.encoding import EncodedDocument, pad_id_of, write_documents
from joulelab.distill.causal import judging
from joulelab.distill.causal.answers import REPORT, candidates, energy_gap
from joulelab.distill.causal.bench import TRAIN, Bench
from joulelab.distill.causal.distributions import Voice
from joulelab.distill.synthetic.filters import REASONS, Filters, Kept, SyntheticReport, keep, require_some
from joulelab.distill.synthetic.rows import write_rows
from joulelab.infer.generation.completions import answer_ids, encode_prompt
from joulelab.runs.artifacts import Artifact
from joulelab.runs.record import Result
from joulelab.runs.storage import read_json, write_json

READABLE = "kept.jsonl"


def synthetic_documents(bench: Bench, data: Artifact, answers: Artifact, voice: Voice) -> Artifact:
    """What is kept of the answers, as documents to train on; the counts of what was dropped lie beside them."""
    wanted = bench.spec.generation
    judged = judging.judged(bench, answers, voice) if wanted.min_score is not None else None
    filters = Filters(
        min_tokens=wanted.min_tokens,
        max_tokens=wanted.max_tokens,
        keep_truncated=wanted.keep_truncated,
        keep_duplicates=wanted.keep_duplicates,
        min_score=wanted.min_score,
    )

    def make(folder: Path) -> None:
        with bench.run.stage("data.synthetic", role="data", activity="filter") as stage:
            asked = candidates(bench, answers)
            scores = judging.scores(bench, asked, judged) if judged is not None else None
            kept, report = keep([one.prompt for one in asked], [one.answers for one in asked], filters, scores)
            require_some(kept, report)
            write_rows(folder / READABLE, kept)
            store = write_documents(
                folder / TRAIN, _documents(bench, kept),
                vocab_size=bench.words, pad_id=pad_id_of(bench.tokenizer), tokenizer=bench.spec.tokenizer,
            )  # fmt: skip
            stage.count(samples=report.kept, tokens=store.tokens_total)
        write_json(folder / REPORT, report)

    inputs: dict[str, Any] = {
        **vars(filters),
        "max_tokens_of_document": bench.spec.data.max_tokens,
        "judge": judging.inputs(bench) if wanted.min_score is not None else None,
        "tokenizer": bench.tokenizer_identity,
    }
    used = [answers, *([judged] if judged else [])]
    parents = [*(one.bill for one in used), data.bill]
    made = bench.run.artifact("synthetic", kind="synthetic-documents", inputs=inputs, parents=parents, make=make)
    _tell(bench, made, answers, judged)
    return made


def _documents(bench: Bench, kept: list[Kept]) -> Iterator[EncodedDocument]:
    """The prompt is read, the answer is learnt, its closing token included where it came to its end."""
    for one in kept:
        asked = encode_prompt(bench.tokenizer, one.prompt)
        said = answer_ids(bench.tokenizer, one.prompt, one.answer.text, one.answer.finish_reason == "stop")
        ids = np.array([*asked, *said], dtype=np.int64)[: bench.spec.data.max_tokens]
        yield EncodedDocument(ids, np.arange(len(ids)) >= len(asked))


def _tell(bench: Bench, made: Artifact, answers: Artifact, judged: Artifact | None) -> None:
    report = SyntheticReport.model_validate(read_json(made.folder / REPORT))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            bench.run.result(f"synthetic.{name}", Result(value=float(value)))
    if energy_gap(answers) is None:
        paid = [answers.bill, made.bill, *([judged.bill] if judged else [])]
        bench.run.joules_result("synthetic.energy_j", paid)
        bench.run.joules_result("synthetic.j_per_kept_sample", paid, report.kept)
        bench.run.joules_result("synthetic.j_per_generated_token", paid, report.generated_tokens)
    dropped = {name: getattr(report, name) for name in REASONS}
    told = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in dropped.items() if count)
    why = f" ({told})" if told else ""
    bench.run.progress.say(f"synthetic: {report.kept} of {report.answers} answers kept{why}")
