"""The pipelines `prepare-*`: one step each, and what it made under the name the user gave."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from joulelab.data.inputs import input_bill
from joulelab.data.masking import read_counts, write_counts
from joulelab.data.text import DumpCounts
from joulelab.data.token_store import open_store
from joulelab.distill.prepare_artifacts import (
    COUNTS,
    DUMP,
    DUMP_COUNTS,
    STORE,
    binarized_text,
    counted_tokens,
    dumped_text,
    extracted_student,
)
from joulelab.distill.prepare_config import BinarizeSpec, DumpSpec, ExtractStudentSpec, TokenCountsSpec
from joulelab.distill.prepare_delivery import deliver
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.runs.storage import read_json


def run_dump(run: RunContext) -> None:
    spec = cast(DumpSpec, run.spec)
    texts = input_bill(run, "texts", spec.source, "text", role="data")
    made = dumped_text(run, spec.source, spec.split, texts, min_chars=spec.min_chars, max_chars=spec.max_chars)
    _hand_over(run, made, made.folder / DUMP, spec.target)
    counts = DumpCounts(**read_json(made.folder / DUMP_COUNTS))
    _tell(run, {"documents.kept": counts.kept, "documents.dropped": counts.too_short + counts.too_long})
    run.progress.say(f"{counts.summary()}: {spec.target}")


def run_binarize(run: RunContext) -> None:
    spec = cast(BinarizeSpec, run.spec)
    file = Path(spec.file_path)
    made = binarized_text(
        run,
        file,
        input_bill(run, "text", spec.file_path, "text", role="data"),
        tokenizer_name=spec.tokenizer_name,
        tokenizer_type=spec.tokenizer_type,
        workers=spec.workers,
    )
    _hand_over(run, made, made.folder / STORE, spec.target)
    store = open_store(spec.target)
    _tell(run, {"documents": len(store), "tokens": store.tokens_total})
    run.progress.say(f"{len(store):,} documents, {store.tokens_total:,} tokens: {spec.target}")


def run_token_counts(run: RunContext) -> None:
    spec = cast(TokenCountsSpec, run.spec)
    store = open_store(spec.store)
    data = input_bill(run, "tokens", str(store.folder), "token-store", role="data")
    made = counted_tokens(run, store, data, vocab_size=spec.vocab_size)
    counts = read_counts(made.folder / COUNTS)
    file = made.folder / COUNTS
    if spec.target.suffix == ".json":
        file = file.with_suffix(".json")
        write_counts(counts, file)
    _hand_over(run, made, file, spec.target)
    used = int(np.count_nonzero(counts))
    _tell(run, {"tokens": int(counts.sum()), "ids_used": used})
    run.progress.say(f"{used:,} of {len(counts):,} ids occur: {spec.target}")


def run_extract_student(run: RunContext) -> None:
    spec = cast(ExtractStudentSpec, run.spec)
    made = extracted_student(
        run,
        spec.model_name,
        input_bill(run, "teacher", spec.model_name, "model", role="teacher"),
        model_type=spec.model_type,
        layers=spec.layers,
        vocab_transform=spec.vocab_transform,
    )
    _hand_over(run, made, made.folder, spec.target)
    run.progress.say(f"the student: {spec.target}")


def _hand_over(run: RunContext, artifact: Artifact, made: Path, target: Path) -> None:
    """Billed apart: copying is no part of what the artefact took, and an artefact that was reused is copied too."""
    with run.stage("data.copy", role="data", activity="copy"):
        deliver(artifact, made, target)


def _tell(run: RunContext, values: dict[str, int]) -> None:
    for name, value in values.items():
        run.result(name, Result(value=float(value)))
