"""Students' figures over seeds: a mean with its interval, and nothing where there is nothing."""

from pathlib import Path

from joulelab.report.compare.method_rows import compare
from joulelab.report.tables.comparison_tables import has_student_quality, student_quality_grid
from joulelab.runs.record import Result


def with_f1(record, value):
    results = {**record.results, "student.macro_f1": Result(value=value)}
    return record.model_copy(update={"results": results})


def test_runs_without_these_figures_get_no_such_table(made, tmp_path: Path) -> None:
    records = made.demo_records()
    assert not has_student_quality(compare(made.group_of(records), records, tmp_path))


def test_a_mean_over_seeds_comes_with_students_interval(made, tmp_path: Path) -> None:
    records = made.demo_records()
    labels = [record for record in records if record.label == "labels only"]
    output_text = [with_f1(record, 0.70 + 0.02 * number) for number, record in enumerate(labels)]
    others = [record for record in records if record.label != "labels only"]
    grid = student_quality_grid(compare(made.group_of(records), [*others, *output_text], tmp_path))
    (row,) = grid.rows
    assert row[0] == "labels only"
    assert row[2] == "71.0 ± 12.7"  # 12.706 x 1.414 / sqrt 2: two seeds tell little
    assert row[4] == "-"


def test_equal_seeds_are_marked_in_place_of_an_interval(made, tmp_path: Path) -> None:
    records = made.demo_records()
    output_text = [with_f1(record, 0.759) for record in records if record.label == "labels only"]
    (row,) = student_quality_grid(compare(made.group_of(records), output_text, tmp_path)).rows
    assert row[2] == "75.9 (n=2, equal)"
