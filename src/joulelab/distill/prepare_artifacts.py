"""The steps before a distillation: each a metered stage that leaves an artefact, in a run of its own or within one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from joulelab.data.masking import count_tokens, write_counts
from joulelab.data.splits import parse_split
from joulelab.data.text import DumpCounts, dump, open_documents, read_dump
from joulelab.data.token_store import TokenStore
from joulelab.data.tokenize import binarize, describe, usual_workers
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import RunContext
from joulelab.runs.storage import write_json
from joulelab.zoo.pretrained import (
    explained_load,
    import_transformers,
    load_tokenizer,
    save_hf,
    seeded_init,
    weights_identity,
)
from joulelab.zoo.students import TEACHER_CLASSES, default_layers, extract_student, layers_of

DUMP, DUMP_COUNTS, STORE, COUNTS = "dump.txt", "counts.json", "tokens", "token_counts.npy"


def dumped_text(
    run: RunContext, source: str, split: str, texts: Bill, *, min_chars: int, max_chars: int | None
) -> Artifact:
    """One document per line in `dump.txt`, and how many were kept in `counts.json`."""

    def make(folder: Path) -> None:
        with run.stage("data.dump", role="data", activity="preprocess") as stage:

            def tick(counts: DumpCounts) -> None:
                stage.count(samples=counts.kept)
                run.progress.advance(counts.read, f"{counts.kept:,} kept")
                run.stop.check()

            documents = open_documents(source).read(parse_split(split))
            counts = dump(documents, folder / DUMP, min_chars=min_chars, max_chars=max_chars, tick=tick)
            tick(counts)
            write_json(folder / DUMP_COUNTS, asdict(counts))

    inputs = {"source": source, "split": split, "min_chars": min_chars, "max_chars": max_chars}
    return run.artifact("dump", kind="text-dump", inputs=inputs, parents=[texts], make=make)


def binarized_text(
    run: RunContext,
    file: Path,
    text: Bill,
    *,
    tokenizer_name: str,
    tokenizer_type: str | None = None,
    workers: int | None = None,
    name: str = "binarized",
) -> Artifact:
    """A token store in the artefact's folder `tokens`."""

    def make(folder: Path) -> None:
        size_bytes = file.stat().st_size
        tokenizer = describe(load_tokenizer(tokenizer_name), tokenizer_name, tokenizer_type)
        with run.stage("data.binarize", role="data", activity="preprocess") as stage:

            def tick(documents: int, tokens: int) -> None:
                stage.count(samples=documents, tokens=tokens)
                run.progress.advance(documents, f"{tokens:,} tokens")
                run.stop.check()

            many = workers or usual_workers(size_bytes)
            binarize(read_dump(file), folder / STORE, tokenizer, workers=many, tick=tick)

    inputs = {"tokenizer": weights_identity(tokenizer_name), "type": tokenizer_type, "written": tokenizer_name}
    return run.artifact(name, kind="token-store", inputs=inputs, parents=[text], make=make)


def counted_tokens(run: RunContext, store: TokenStore, data: Bill, *, vocab_size: int | None = None) -> Artifact:
    """`token_counts.npy`: occurrences by id."""

    def make(folder: Path) -> None:
        with run.stage("data.token_counts", store.tokens_total, role="data", activity="count") as stage:

            def tick(tokens: int) -> None:
                stage.count(tokens=tokens)
                run.progress.advance(tokens)
                run.stop.check()

            write_counts(count_tokens(store, vocab_size, tick), folder / COUNTS)

    inputs = {"vocab_size": vocab_size, "tokens": store.sha256}
    return run.artifact("token-counts", kind="token-counts", inputs=inputs, parents=[data], make=make)


def extracted_student(
    run: RunContext,
    teacher_name: str,
    teacher: Bill,
    *,
    model_type: str | None = None,
    layers: tuple[int, ...] | None = None,
    vocab_transform: bool = True,
) -> Artifact:
    """A model in Hugging Face format, with the teacher's tokenizer."""

    def make(folder: Path) -> None:
        with run.stage("student.extract", role="student", activity="extract"):
            model = _load_teacher(run, teacher_name, model_type)
            chosen = layers if layers is not None else default_layers(layers_of(model))
            student = extract_student(model, chosen, vocab_transform, run.spec.seed)
            save_hf(student, load_tokenizer(teacher_name), folder)

    inputs = {"layers": layers, "vocab_transform": vocab_transform, "seed": run.spec.seed, "type": model_type}
    return run.artifact("student", kind="initial-student", inputs=inputs, parents=[teacher], make=make)


def _load_teacher(run: RunContext, name: str, model_type: str | None) -> Any:
    transformers = import_transformers()
    config: Any = explained_load(transformers.AutoConfig, name)
    kind = config.model_type
    if kind not in TEACHER_CLASSES or model_type not in (None, kind):
        expected = model_type or ", ".join(TEACHER_CLASSES)
        raise ConfigError(f"{name} is a model of the type '{kind}', not {expected}", "check --model_type")
    if not any(name.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel")) for name in config.architectures or ()):
        run.warn(f"{name} brings no head that predicts words: the student's is drawn at random and has to be trained")
    with seeded_init(run.spec.seed):
        return explained_load(getattr(transformers, TEACHER_CLASSES[kind]), name)
