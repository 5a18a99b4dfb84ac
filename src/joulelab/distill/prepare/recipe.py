"""The pipelines `prepare-*`: one metered stage each, and a copy of its artifact under the name the user gave.

A note next to the copy (`dump.txt.origin.json`) leads back to the artifact. A later step that is given the copy finds
the bill through the note (`data.inputs`), so a student's lineage has the energy of its data even where every step was a
separate command.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.data import sources
from joulelab.data.inputs import origin_note
from joulelab.data.labeled_rows import WantedTokens
from joulelab.data.masking import count_tokens, read_counts, write_counts
from joulelab.data.splits import parse_split
from joulelab.data.text import DumpCounts, dump, open_documents, read_dump
from joulelab.data.token_store import is_pickle, is_store, open_store
from joulelab.data.tokenize import TruncatingEncoder, binarize, convert_token_pickle, describe, usual_workers
from joulelab.data.tokenized_text import limited_parts, load_reviews, save_parts, write_tokenization
from joulelab.distill.prepare.config import (
    BinarizeSpec,
    DumpSpec,
    ExtractStudentSpec,
    PrepareReviewsSpec,
    PrepareSpec,
    TokenCountsSpec,
)
from joulelab.distill.runner import PREPROCESS, Runner, StageSpec
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import BILL, CONTENTS, Artifact
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.zoo.pretrained import (
    import_transformers,
    load_pretrained,
    load_tokenizer,
    save_hf,
    seeded_init,
    weights_identity,
)
from joulelab.zoo.registry import default_layers
from joulelab.zoo.students import TEACHER_CLASSES, extract_student, layer_count

_DUMP, _DUMP_COUNTS, _STORE, _COUNTS = "dump.txt", "counts.json", "tokens", "token_counts.npy"
_REVIEWS, _REVIEW_ROWS = "reviews", "rows.json"
_COPY = StageSpec("data.copy", "data", "copy")
_EXTRACT = StageSpec("student.extract", "student", "extract")


def run_dump(run: RunContext) -> None:
    """A corpus to a file with one document per line."""
    runner: Runner[DumpSpec] = Runner(run)
    spec = runner.spec

    def write(folder: Path, stage: Stage) -> None:
        def count(counts: DumpCounts) -> None:
            stage.count(samples=counts.kept)
            run.progress.advance(counts.read, f"{counts.kept:,} kept")
            run.stop.check()

        documents = open_documents(spec.source).read(parse_split(spec.split))
        counts = dump(documents, folder / _DUMP, min_chars=spec.min_chars, max_chars=spec.max_chars, tick=count)
        count(counts)
        write_json(folder / _DUMP_COUNTS, asdict(counts))

    made = runner.make(
        "dump", StageSpec("data.dump", "data", "preprocess"), write,
        kind="text-dump",
        inputs=spec.model_dump(include={"source", "split", "min_chars", "max_chars"}),
        parents=[runner.input_bill("texts", spec.source, "text", role="data")],
    )  # fmt: skip
    _deliver(runner, made, made.folder / _DUMP)
    counts = DumpCounts(**read_json(made.folder / _DUMP_COUNTS))
    _report(runner, {"documents.kept": counts.kept, "documents.dropped": counts.too_short + counts.too_long})
    run.progress.write(f"{counts.summary()}: {spec.target}")


def run_binarize(run: RunContext) -> None:
    """A dump to a store of token ids."""
    runner: Runner[BinarizeSpec] = Runner(run)
    spec, file = runner.spec, Path(runner.spec.file_path)

    def write(folder: Path, stage: Stage) -> None:
        def count(documents: int, tokens: int) -> None:
            stage.count(samples=documents, tokens=tokens)
            run.progress.advance(documents, f"{tokens:,} tokens")
            run.stop.check()

        tokenizer = describe(load_tokenizer(spec.tokenizer_name), spec.tokenizer_name, spec.tokenizer_type)
        if is_pickle(file):
            convert_token_pickle(file, folder / _STORE, tokenizer, count)
            return
        workers = spec.workers or usual_workers(file.stat().st_size)
        binarize(read_dump(file), folder / _STORE, tokenizer, workers=workers, tick=count)

    made = runner.make(
        "binarized", StageSpec("data.binarize", "data", "preprocess"), write,
        kind="token-store",
        inputs={
            "tokenizer": weights_identity(spec.tokenizer_name),
            "type": spec.tokenizer_type,
            "written": spec.tokenizer_name,
        },
        parents=[runner.input_bill("text", spec.file_path, "text", role="data")],
    )  # fmt: skip
    _deliver(runner, made, made.folder / _STORE)
    store = open_store(spec.target)
    _report(runner, {"documents": len(store), "tokens": store.tokens_total})
    run.progress.write(f"{len(store):,} documents, {store.tokens_total:,} tokens: {spec.target}")


def run_token_counts(run: RunContext) -> None:
    """Occurrences of each id in a store."""
    runner: Runner[TokenCountsSpec] = Runner(run)
    spec, store = runner.spec, open_store(runner.spec.store)

    def write(folder: Path, stage: Stage) -> None:
        def count(tokens: int) -> None:
            stage.count(tokens=tokens)
            run.progress.advance(tokens)
            run.stop.check()

        write_counts(count_tokens(store, spec.vocab_size, count), folder / _COUNTS)

    made = runner.make(
        "token-counts", StageSpec("data.token_counts", "data", "count"), write,
        kind="token-counts",
        inputs={"vocab_size": spec.vocab_size, "tokens": store.sha256},
        parents=[runner.input_bill("tokens", str(store.folder), "token-store", role="data")],
        total=lambda: store.tokens_total,
    )  # fmt: skip
    counts, file = read_counts(made.folder / _COUNTS), made.folder / _COUNTS
    if spec.target.suffix == ".json":
        file = file.with_suffix(".json")
        write_counts(counts, file)
    _deliver(runner, made, file)
    used = int(np.count_nonzero(counts))
    _report(runner, {"tokens": int(counts.sum()), "ids_used": used})
    run.progress.write(f"{used:,} of {len(counts):,} ids occur: {spec.target}")


def run_extract_student(run: RunContext) -> None:
    """A student from a teacher's layers, in Hugging Face format with the teacher's tokenizer."""
    runner: Runner[ExtractStudentSpec] = Runner(run)
    spec = runner.spec

    def write(folder: Path, stage: Stage) -> None:
        model = _load_teacher(runner)
        layers = spec.layers if spec.layers is not None else default_layers(layer_count(model))
        student = extract_student(model, layers, spec.vocab_transform, spec.seed)
        save_hf(student, load_tokenizer(spec.model_name), folder)

    made = runner.make(
        "student", _EXTRACT, write,
        kind="initial-student",
        inputs={**spec.model_dump(include={"layers", "vocab_transform", "seed"}), "type": spec.model_type},
        parents=[runner.input_bill("teacher", spec.model_name, "model", role="teacher")],
    )  # fmt: skip
    _deliver(runner, made, made.folder)
    run.progress.write(f"student: {spec.target}")


def _load_teacher(runner: Runner[ExtractStudentSpec]) -> Any:
    spec, transformers = runner.spec, import_transformers()
    name = spec.model_name
    config: Any = load_pretrained(transformers.AutoConfig, name)
    kind = config.model_type
    if kind not in TEACHER_CLASSES or spec.model_type not in (None, kind):
        expected = spec.model_type or ", ".join(TEACHER_CLASSES)
        raise ConfigError(f"{name} is a model of type '{kind}'; expected {expected}", "check --model_type")
    if not any(name.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel")) for name in config.architectures or ()):
        runner.run.warn(f"{name} has no language head: the student's head is randomly initialized and must be trained")
    with seeded_init(spec.seed):
        return load_pretrained(getattr(transformers, TEACHER_CLASSES[kind]), name)


def run_prepare_reviews(run: RunContext) -> None:
    """Labeled reviews: title and content tokenized, labels checked, splits saved for any framework."""
    runner: Runner[PrepareReviewsSpec] = Runner(run)
    spec = runner.spec

    def write(folder: Path, stage: Stage) -> None:
        encode = TruncatingEncoder(load_tokenizer(spec.tokenizer), spec.max_length)
        reviews = load_reviews(spec.source, spec.subset, spec.class_names, runner.reading)
        for note in reviews.notes:
            run.progress.write(note)
        for warning in reviews.warnings:
            run.warn(warning)
        parts = limited_parts(reviews, spec.limit_train, spec.limit_eval)
        total = len(parts.train) + len(parts.validation) + len(parts.test)

        def count(samples: int, tokens: int) -> None:
            stage.count(samples=samples, tokens=tokens)
            run.progress.advance(samples, f"{samples:,} of {total:,} reviews, {tokens:,} tokens")
            run.stop.check()

        made = folder / _REVIEWS
        made.mkdir()
        rows = save_parts(made, parts, encode, spec.save_format, spec.batch_size, count)
        write_tokenization(made, spec.tokenizer, WantedTokens(encode.sha256, spec.max_length))
        write_json(folder / _REVIEW_ROWS, rows)

    chosen = {"source", "subset", "max_length", "limit_train", "limit_eval", "class_names", "save_format"}
    inputs = {**spec.model_dump(mode="json", include=chosen), "tokenizer": weights_identity(spec.tokenizer)}
    inputs["format"] = 2  # folders of earlier releases do not state their tokenizer
    made = runner.make(
        "reviews", PREPROCESS, write,
        kind="prepared-reviews",
        inputs=inputs,
        parents=[runner.input_bill("reviews", spec.source, "text", role="data")],
    )  # fmt: skip
    if spec.force and spec.target.is_dir() and origin_note(spec.target).is_file():  # written by an earlier run
        shutil.rmtree(spec.target)
    _deliver(runner, made, made.folder / _REVIEWS)
    rows = read_json(made.folder / _REVIEW_ROWS)
    _report(runner, {f"{name}.rows": count for name, count in rows.items()})
    run.progress.write(f"{', '.join(f'{count:,} {name}' for name, count in rows.items())}: {spec.target}")


def _report(runner: Runner[Any], values: Mapping[str, int]) -> None:
    for name, value in values.items():
        runner.report(name, float(value))


def _deliver(runner: Runner[Any], artifact: Artifact, made: Path) -> None:
    """In a separate stage: copying is not part of the artifact's energy, and a reused artifact is copied too."""
    spec: PrepareSpec = runner.spec
    with runner.stage(_COPY):
        deliver(artifact, made, spec.target)


def deliver(artifact: Artifact, made: Path, target: Path) -> None:
    """A copy with an origin note: the user may move or change it, and the artifact keeps what its bill is for."""
    _refuse_to_replace(made, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    if made.is_dir():
        shutil.copytree(made, fresh, ignore=shutil.ignore_patterns(BILL, CONTENTS))
    else:
        shutil.copyfile(made, fresh)
    if target.is_dir():
        shutil.rmtree(target)
    fresh.replace(target)
    note = {"key": artifact.key, "folder": str(artifact.folder.absolute()), "sha256": sources.content_hash(target)}
    write_json(origin_note(target), note)


def _refuse_to_replace(made: Path, target: Path) -> None:
    """--force replaces what joulelab wrote, not a user's folder with the same name."""
    ours = is_store(target) or (target / "config.json").is_file()
    if target.exists() and target.is_dir() and not (made.is_dir() and ours):
        raise ConfigError(f"{target} is a folder with other content", "name another target")
