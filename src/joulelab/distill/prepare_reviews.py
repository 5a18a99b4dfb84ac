"""The pipeline `prepare-reviews`: title and content tokenised, labels checked, parts saved, with the bill beside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

from joulelab.data.inputs import input_bill, origin_note
from joulelab.data.labeled_text import limited_parts, load_reviews, save_parts
from joulelab.distill.prepare_delivery import deliver
from joulelab.distill.prepare_reviews_config import PrepareReviewsSpec
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.runs.storage import read_json, write_json
from joulelab.zoo.pretrained import load_tokenizer, weights_identity

ROWS = "rows.json"
SET = "reviews"


def run_prepare_reviews(run: RunContext) -> None:
    spec = cast(PrepareReviewsSpec, run.spec)
    made = prepared_reviews(run, spec)
    with run.stage("data.copy", role="data", activity="copy"):
        if spec.force and is_ours(spec.target):
            shutil.rmtree(spec.target)
        deliver(made, made.folder / SET, spec.target)
    rows = read_json(made.folder / ROWS)
    for name, count in rows.items():
        run.result(f"{name}.rows", Result(value=float(count)))
    told = ", ".join(f"{count:,} {name}" for name, count in rows.items())
    run.progress.say(f"{told}: {spec.target}")


def is_ours(folder: Path) -> bool:
    """--force is for what an earlier run wrote here, not for a folder of the user's that happens to have the name."""
    return folder.is_dir() and origin_note(folder).is_file()


def prepared_reviews(run: RunContext, spec: PrepareReviewsSpec) -> Artifact:
    raw = input_bill(run, "reviews", spec.source, "text", role="data")

    def make(folder: Path) -> None:
        with run.stage("data.preprocess", role="data", activity="preprocess") as stage:
            reviews = load_reviews(spec.source, spec.subset, spec.class_names)
            tokenizer = load_tokenizer(spec.tokenizer)
            parts = limited_parts(reviews, spec.limit_train, spec.limit_eval)
            (folder / SET).mkdir()
            rows = save_parts(
                folder / SET,
                parts,
                lambda texts: tokenizer(texts, truncation=True, max_length=spec.max_length)["input_ids"],
                spec.save_format,
                lambda samples, tokens: stage.count(samples=samples, tokens=tokens),
            )
        write_json(folder / ROWS, rows)

    chosen = {"source", "subset", "max_length", "limit_train", "limit_eval", "class_names", "save_format"}
    inputs = {**spec.model_dump(mode="json", include=chosen), "tokenizer": weights_identity(spec.tokenizer)}
    return run.artifact("reviews", kind="prepared-reviews", inputs=inputs, parents=[raw], make=make)
