"""Students' figures over seeds: a mean with its interval, and nothing where there is nothing."""

import json
from pathlib import Path

from joulelab.report.compare.method_rows import compare
from joulelab.report.export import comparison_data
from joulelab.report.tables.comparison_tables import has_student_quality, quality_grid, student_quality_grid
from joulelab.report.tables.grid import to_latex, to_markdown
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


def language_records(made):
    """The demo's runs as language models: the teacher and the students with a teacher were compared token by token."""
    for record in made.demo_records():
        whose = "teacher" if record.label == "teacher" else "student"
        results = {f"{whose}.clm_loss": Result(value=5.0 + 0.1 * record.spec["seed"], lower_is_better=True)}
        if record.label == "response KD":
            results["student.agreement"] = Result(value=0.30 + 0.01 * record.spec["seed"], trials=9_000)
        yield record.model_copy(update={"results": results})


def test_agreement_with_the_teacher_is_a_column_where_a_run_has_it(made, tmp_path: Path) -> None:
    records = list(language_records(made))
    comparison = compare(made.group_of(records), records, tmp_path)
    grid = quality_grid(comparison)
    assert grid.columns[-1].title.split() == ["Agrees", "with", "teacher,", "%"]
    cells = {row[0]: row[-1] for row in grid.rows}
    assert cells["teacher"] == "-" and cells["labels only"] == cells["response + feature KD"] == "not evaluated"
    assert cells["response KD"] == "30.5 ± 6.4"
    assert all("30.5 ± 6.4" in text.replace("$\\pm$", "±") for text in (to_markdown(grid), to_latex(grid)))
    methods = {row["label"]: row["agreement_with_teacher"] for row in comparison_data(comparison)["methods"]}
    assert methods["labels only"] is None and round(methods["response KD"]["value"], 3) == 0.305
    json.dumps(methods, allow_nan=False)
    alone = [record for record in records if record.label != "response KD"]
    assert "teacher" not in quality_grid(compare(made.group_of(alone), alone, tmp_path)).columns[-1].title


def test_equal_agreement_of_all_seeds_has_no_interval(made, tmp_path: Path) -> None:
    share = {"student.agreement": Result(value=0.3, trials=9_000)}
    records = [
        record.model_copy(update={"results": record.results | share}) if record.label == "response KD" else record
        for record in language_records(made)
    ]
    rows = comparison_data(compare(made.group_of(records), records, tmp_path))["methods"]
    found = next(row["agreement_with_teacher"] for row in rows if row["label"] == "response KD")
    assert found == {"value": 0.3, "low": None, "high": None}


def test_agreement_is_in_one_table_only(made, tmp_path: Path) -> None:
    records = [with_f1(record, 0.7) if record.label == "response KD" else record for record in language_records(made)]
    comparison = compare(made.group_of(records), records, tmp_path)
    assert quality_grid(comparison).columns[-1].title == "Significant"
    assert student_quality_grid(comparison).rows[0][4] == "30.5 ± 6.4"
    by_agreement = compare(made.group_of(records), list(language_records(made)), tmp_path, wanted="agreement")
    assert quality_grid(by_agreement).columns[-1].title == "Significant"
