"""The stage `data.preprocess`: texts split for ever, and tokenised once for teacher and students."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from joulelab.data import labeled_text
from joulelab.data.inputs import input_bill
from joulelab.distill.classify_config import ClassifySpec
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.zoo.pretrained import load_tokenizer, weights_identity


def tokenised_data(run: RunContext, spec: ClassifySpec) -> Artifact:
    data, tokenizer_of = spec.data, spec.teacher.source
    raw = input_bill(run, "texts", data.source, "text", role="data")

    def make(folder: Path) -> None:
        with run.stage("data.preprocess", role="data", activity="preprocess") as stage:
            texts = labeled_text.load(data.source, data.subset)
            parts = labeled_text.split(texts, data.train_size, data.validation_size, data.test_size)
            tokenizer = load_tokenizer(tokenizer_of)
            samples, tokens = 0, 0
            for name in ("train", "validation", "test"):
                made = _write(folder / name, getattr(parts, name), tokenizer, data.max_tokens)
                samples, tokens = samples + len(made), tokens + made.tokens_total
                stage.count(samples=samples, tokens=tokens)

    inputs = {**data.model_dump(), "tokenizer": weights_identity(tokenizer_of)}
    return run.artifact("data", kind="tokenised-text", inputs=inputs, parents=[raw], make=make)


def _write(folder: Path, texts: labeled_text.LabeledText, tokenizer: Any, max_tokens: int) -> labeled_text.TokenizedSet:
    return labeled_text.write(
        folder,
        texts,
        lambda batch: tokenizer(batch, truncation=True, max_length=max_tokens)["input_ids"],
        vocab_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
    )
