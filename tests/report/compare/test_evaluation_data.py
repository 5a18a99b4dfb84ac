"""Losses on different held-out data are not compared, and nothing is derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from joulelab.report.compare.break_even_report import break_even_rows
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.verdict import short_verdict, verdict
from joulelab.report.tables.comparison_tables import comparison_markdown, equal_energy_grid
from joulelab.report.tables.overview_table import overview_grid
from joulelab.runs.artifacts import external
from joulelab.runs.paths import write_json
from joulelab.runs.record import Result

DATA = {"source": "a.jsonl", "documents": 200, "held_out": 20, "row_length": 128}


@pytest.fixture
def comparison(made, tmp_path: Path):
    def build(base=DATA, other=DATA, *, contents=("1", "1"), tokens=(None, None), result="student.clm_loss"):
        records = []
        for label, data, content, count in zip(("labels only", "KD"), (base, other), contents, tokens, strict=True):
            for seed in (0, 1):
                plain = made.distilled(label, seed, 0, 120.0 + seed, True)
                value = (7.0 if label == "KD" else 8.0) + 0.01 * seed
                lineage = [external("a.jsonl", "text", f"a.jsonl@{content}").artifact, *plain.lineage]
                changed = {
                    "spec": {**plain.spec, **({"data": data} if data is not None else {})},
                    "results": {result: Result(value=value, lower_is_better=True)},
                    "lineage": tuple(lineage),
                }
                records.append(plain.model_copy(update=changed))
                if count:
                    write_json(
                        tmp_path / plain.run_id / "artifacts" / "student-quality" / "held_out.json", {"tokens": count}
                    )
        return compare(made.group_of(records), records, tmp_path)

    return build


def test_losses_on_the_same_data_are_compared_whatever_was_trained_on(comparison) -> None:
    found = comparison(other={**DATA, "documents": 1000, "row_length": 256}, tokens=(900, 900))
    assert "KD has a lower held-out loss" in verdict(found).headline
    assert "on the same held-out tokens" in comparison_markdown(found)


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({"other": {**DATA, "held_out": 80}}, "data.held_out: 80 against 20"),
        ({"other": {**DATA, "test": "test.jsonl"}}, "data.test: test.jsonl against null"),
        ({"other": {**DATA, "train": "b.jsonl"}}, "data.train: b.jsonl against null"),
        ({"contents": ("1", "2")}, "data.source: the content differs"),
        (
            {"tokens": (900, 950)},
            "held-out tokens: 950 against 900, of different tokenizers; compare --quality bits_per_byte if all runs "
            "have it",
        ),
        ({"base": "a.jsonl", "other": "a.jsonl", "contents": ("1", "2")}, "data: the content differs"),
    ],
)
def test_losses_on_other_data_are_not_compared_and_the_first_line_says_so(comparison, changes, stated) -> None:
    found = comparison(**changes)
    reason = f"the runs were evaluated on different data ({stated})"
    assert f"the held-out loss of KD cannot be compared, because {reason}" in short_verdict(found)[0]
    text = comparison_markdown(found)
    assert "same held-out tokens" not in text and f"Not comparable: {reason}." in text
    assert "-1.000" not in text and "Pareto" not in text and "At equal" not in text
    one = next(one for one in break_even_rows(found) if one.each == "student")
    assert (one.found, one.reason) == (None, reason)
    assert equal_energy_grid(found) is None


@pytest.mark.parametrize(
    "other",
    [
        {**DATA, "source": "copy.jsonl", "test": "test.jsonl"},  # other data is trained on
        {**DATA, "test": "test.jsonl", "held_out": 80, "train": "b.jsonl"},
    ],
)
def test_with_one_file_of_test_data_the_training_data_may_differ(comparison, other) -> None:
    assert "KD has a lower" in verdict(comparison({**DATA, "test": "test.jsonl"}, other)).headline


def test_a_split_of_the_source_is_no_file_and_an_older_record_lacks_settings(comparison) -> None:
    assert "KD has a lower" in verdict(comparison(other={**DATA, "train": "train[:100]"})).headline
    old = comparison(other=None)
    assert "KD has a lower" in verdict(old).headline and "same held-out tokens" not in comparison_markdown(old)


def test_a_loss_per_byte_does_not_depend_on_the_tokens(comparison) -> None:
    assert "number of bits per byte" in verdict(comparison(tokens=(900, 950), result="student.bits_per_byte")).headline
    found = comparison(tokens=(900, 950), result="student.bits_per_byte")
    assert "Bits per byte [95 %]" in [column.title for column in overview_grid(found).columns]
    assert comparison(tokens=(900, 950), result="student.bits_per_byte").row("KD").same_data
