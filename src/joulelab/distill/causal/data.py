"""Stage data.preprocess: rows of a source become stores of token ids, one to train on and one that nobody trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from joulelab.data.chat.conversations import Row
from joulelab.data.chat.datasets import ChatDataSettings, settings_rows, write_rows
from joulelab.data.chat.encoding import encoding_identity
from joulelab.data.chat.templates import template_of
from joulelab.data.inputs import input_bill
from joulelab.distill.causal.context import TEST, TRAIN, CausalContext, Split
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage


def prepare_data(bench: CausalContext) -> Artifact:
    """Both stores in one artefact: they come from one source, by one tokenizer."""
    data = bench.spec.data
    raw = input_bill(bench.run, "texts", data.source, "text", role="data")

    def make(folder: Path) -> None:
        with bench.run.stage("data.preprocess", role="data", activity="preprocess") as stage:
            counted = _RowCounter(bench, stage)
            splits: tuple[Split, ...] = (TRAIN, TEST)
            for split in splits:
                dropped: Counter[str] = Counter()
                store = write_rows(
                    folder / split,
                    bench.tokenizer,
                    counted.follow(split_rows(bench, split, dropped)),
                    tokenizer_name=bench.spec.tokenizer,
                    max_tokens=data.max_tokens,
                    last_answer_only=data.last_answer_only,
                    dropped=dropped,
                )
                counted.tokens += store.tokens_total
                stage.count(samples=counted.rows, tokens=counted.tokens)

    inputs = {
        **data.model_dump(mode="json", exclude={"tokenizer", "template", "row_length"}),
        # two models of one family often share a tokenizer, and not the chat template
        **encoding_identity(bench.tokenizer, template_of(bench.tokenizer, last_answer_only=data.last_answer_only)),
    }
    return bench.run.artifact("data", kind="documents", inputs=inputs, parents=[raw], make=make)


def split_rows(bench: CausalContext, split: Split, dropped: Counter[str] | None = None) -> Iterator[Row]:
    """The cleaned conversations or texts of a split."""
    data = bench.spec.data
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


class _RowCounter:
    def __init__(self, bench: CausalContext, stage: Stage) -> None:
        self._bench, self._stage = bench, stage
        self.rows = self.tokens = 0

    def follow(self, found: Iterator[Row]) -> Iterator[Row]:
        for row in found:
            self.rows += 1
            self._stage.count(samples=self.rows)
            self._bench.run.stop.check()
            yield row
