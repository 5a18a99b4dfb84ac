"""Stage data.preprocess: a source of conversations or texts becomes two stores of token ids, for training and test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from joulelab.data.chat.conversations import Row
from joulelab.data.chat.datasets import ChatDataSettings, settings_rows, write_rows
from joulelab.data.chat.encoding import encoding_identity
from joulelab.data.chat.templates import template_of
from joulelab.distill.causal.context import TEST, TRAIN, CausalContext, Split
from joulelab.distill.runner import PREPROCESS
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage


def prepare_data(context: CausalContext) -> Artifact:
    """Both stores in one artifact: they come from one source, by one tokenizer."""
    data, runner = context.spec.data, context.runner
    raw = runner.input_bill("texts", data.source, "text", role="data")
    inputs = {
        **data.model_dump(mode="json", exclude={"tokenizer", "template", "row_length"}),
        # two models of one family often share a tokenizer, but not the chat template
        **encoding_identity(context.tokenizer, template_of(context.tokenizer, last_answer_only=data.last_answer_only)),
    }
    return runner.make(
        "data",
        PREPROCESS,
        lambda folder, stage: _write_stores(context, folder, stage),
        kind="documents",
        inputs=inputs,
        parents=[raw],
    )


def _write_stores(context: CausalContext, folder: Path, stage: Stage) -> None:
    data, rows, tokens = context.spec.data, 0, 0

    def counted(source: Iterator[Row]) -> Iterator[Row]:
        nonlocal rows
        for row in source:
            rows += 1
            stage.count(samples=rows)
            context.run.stop.check()
            yield row

    splits: tuple[Split, ...] = (TRAIN, TEST)
    for split in splits:
        dropped: Counter[str] = Counter()
        store = write_rows(
            folder / split,
            context.tokenizer,
            counted(split_rows(context, split, dropped)),
            tokenizer_name=context.spec.tokenizer,
            max_tokens=data.max_tokens,
            last_answer_only=data.last_answer_only,
            dropped=dropped,
        )
        tokens += store.tokens_total
        stage.count(samples=rows, tokens=tokens)


def split_rows(context: CausalContext, split: Split, dropped: Counter[str] | None = None) -> Iterator[Row]:
    """The cleaned conversations or texts of a split."""
    data = context.spec.data
    return settings_rows(
        ChatDataSettings(
            source=data.source,
            subset=data.subset,
            split=split,
            form=data.form,
            limit=data.documents if split == TRAIN else data.held_out,
            strip_think_blocks=data.strip_think_blocks,
            code_only=data.code_only,
            only_correct=data.only_correct,
            max_tokens=data.max_tokens,
        ),
        dropped,
    )
