"""What people read, compared with recorded text. Record anew with JOULELAB_GOLDEN=1 pytest tests/report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from joulelab.report.compare.method_rows import compare
from joulelab.report.energy_sums import brief_missing_text
from joulelab.report.tables.comparison_tables import comparison_markdown, comparison_view, run_view, runs_grid
from joulelab.report.tables.grid import make_grid, render_text, to_markdown, to_rich, without_empty_columns
from joulelab.report.tables.run_tables import run_result, summary_grids
from joulelab.report.wording import ratio
from joulelab.runs.record import ErrorRecord, Note
from joulelab.stats import Interval

WIDTH = 100


def cut_short(made):
    error = ErrorRecord(kind="NonFiniteLoss", message="the loss became NaN at step 40", hint="lower the learning rate")
    return made.distilled("response KD", 1, None, 55.0, status="failed", error=error)


@pytest.mark.parametrize("measured", [False, True], ids=["estimated", "measured"])
def test_the_comparison_reads_as_recorded(made, golden, tmp_path: Path, measured: bool) -> None:
    records = made.demo_records(measured)
    made.write_group(tmp_path, records, measured)
    text = render_text(comparison_view(compare(made.group_of(records), records, tmp_path)), WIDTH)
    golden(f"comparison-{'measured' if measured else 'estimated'}.txt", text)
    assert ("estimated" in text) is not measured


def test_an_unfinished_run_has_its_place_in_the_comparison(made, golden, tmp_path: Path) -> None:
    records = [*made.demo_records()[:4], cut_short(made)]
    made.write_group(tmp_path, records)
    golden("comparison-unfinished.md", comparison_markdown(compare(made.group_of(records), records, tmp_path)))


@pytest.mark.parametrize("measured", [False, True], ids=["estimated", "measured"])
def test_a_run_reads_as_recorded(made, golden, measured: bool) -> None:
    record = made.distilled("response KD", 0, 826, 131.0, measured)
    golden(f"run-{'measured' if measured else 'estimated'}.txt", render_text(run_view(record), WIDTH))


def test_a_failed_run_shows_its_error_and_its_joules(made, golden) -> None:
    golden("run-failed.txt", render_text(run_view(cut_short(made)), WIDTH))


def test_the_list_of_runs_reads_as_recorded(made, golden) -> None:
    golden("runs.txt", render_text(to_rich(runs_grid([*made.demo_records()[:4], cut_short(made)])), WIDTH))


def test_why_nothing_was_measured_is_reported_once(made) -> None:
    record = made.demo_records()[1]
    reason = record.totals.figure.reason
    notes = [Note(level="info", text=part.replace(": ", " not measured: ", 1)) for part in reason.split("; ")]
    output_text = record.model_copy(update={"validity": record.validity.model_copy(update={"notes": tuple(notes)})})
    assert brief_missing_text(output_text, output_text.totals.figure)
    assert render_text(run_view(output_text), WIDTH).count("no NVIDIA driver was found") == 1
    assert not brief_missing_text(record, record.totals.figure)  # the notes do not say all of it


def test_a_run_without_a_single_reading_is_shown_all_the_same(made) -> None:
    record = made.make_record("response KD", 0, (), status="truncated")
    text = render_text(run_view(record), WIDTH)
    assert "missing: nothing was recorded" in text
    assert record.run_id in render_text(to_rich(runs_grid([record])), WIDTH)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_no_cell_is_cut_at_any_width(made, width: int) -> None:
    """Whatever folds, every character of a very wide table is still there."""

    def characters(at: int) -> Counter[str]:
        counts = Counter(render_text(to_rich(runs_grid(made.demo_records())), at))
        return Counter({mark: count for mark, count in counts.items() if mark not in " \n─"})

    assert characters(width) == characters(300)


def test_a_ratio_keeps_the_digits_of_its_value() -> None:
    assert ratio(Interval(0.994, 0.759, 1.302)) == "0.99x [0.76, 1.30]"
    assert ratio(Interval(12.34, 11.0, 13.0)) == "12.3x [11.0, 13.0]"
    assert ratio(Interval(0.0413, 0.0391, 0.0442)) == "0.041x [0.039, 0.044]"


def test_square_brackets_in_a_label_are_text_and_not_markup() -> None:
    assert "[bold]x[/bold]" in render_text(to_rich(make_grid("t", "Label", [["[bold]x[/bold]"]])), 60)


def test_markdown_keeps_pipes_and_tags_inside_their_cell() -> None:
    text = to_markdown(make_grid("t", "Label", [["a|b <script>"]]))
    assert "| a\\|b &lt;script> |" in text


def test_a_table_in_a_narrow_terminal_folds_between_words() -> None:
    """At 80 columns the comparison printed `inconclus` and `ive` on two lines."""
    row = ("response + feature KD", "216 J ±70 %", "3.09x [2.33, 4.10]", "inconclusive (CPU contention)", "74.1 %", "C")
    grid = make_grid("", "Method|Energy>|x baseline>|Difference|Accuracy (%) [95 %]>|Grade!", [row])
    for width in (60, 80, 100):
        lines = render_text(to_rich(grid), width).splitlines()
        words = {word for line in lines for word in line.split()}
        assert {"Difference", "inconclusive", "contention)", "baseline", "response"} <= words
        assert max(map(len, lines)) <= width


def test_columns_without_content_are_left_out_of_a_screen(made) -> None:
    grid = make_grid("", "Run|Loss>|Energy>", [("a", "-", "1 J"), ("b", "", "2 J")])
    assert [column.title for column in without_empty_columns(grid).columns] == ["Run", "Energy"]
    record = made.demo_records()[1]
    stages = summary_grids(record)[-1]
    assert stages.caption == "Stages (energy: estimated)"
    assert "Method" not in [column.title for column in stages.columns]


def test_a_small_screen_cuts_idle_baselines_first(made) -> None:
    parts = (made.Part("idle.before", 3.0, 10.0), *made.student_parts(120.0))
    names = [row[0] for row in summary_grids(made.make_record("labels only", 0, parts, correct=790))[-1].rows]
    assert names.index("student.train") < names.index("idle.before")


def test_the_list_of_runs_names_a_method_that_all_share_once(made) -> None:
    text = render_text(to_rich(runs_grid(made.demo_records()[:4], brief=True)), 90)
    assert text.count("estimated") == 1 and "133 J ±70 %, C" in text


def test_a_line_of_a_group_has_energy_time_quality_and_grade_only(made) -> None:
    record = made.demo_records()[1]
    line = run_result(record, "[1/4] labels only, seed 0", member=True)
    assert "kWh" in run_result(record) and "kWh" not in line and "mean" not in line
    assert line.startswith("[1/4] labels only, seed 0: 133 J ±70 %, estimated; 29.0 s; accuracy 79.0 %")
    assert line.endswith("grade C")
