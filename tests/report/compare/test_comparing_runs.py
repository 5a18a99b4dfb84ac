"""What a comparison must get right: pairing, who paid for what, and runs that did not finish."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare import verdict
from joulelab.report.compare.comparison import Comparison, Row
from joulelab.report.compare.differences import correct_by_item
from joulelab.report.compare.method_rows import compare
from joulelab.report.energy_sums import why_incomplete
from joulelab.report.export import comparison_data
from joulelab.report.tables.comparison_tables import energy_grid, quality_grid, stage_grid
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord


@pytest.fixture
def comparison_of(made: ModuleType, tmp_path: Path):
    def build(records: list[RunRecord]) -> Comparison:
        made.write_group(tmp_path, records)
        return compare(made.group_of(records), records, tmp_path)

    return build


def row_of(comparison: Comparison, label: str) -> Row:
    row = comparison.row(label)
    assert row is not None
    return row


def test_there_is_one_row_per_label_in_the_order_of_the_group(made, comparison_of) -> None:
    rows = comparison_of(made.demo_records()).rows
    assert [(row.label, row.role, len(row.runs)) for row in rows] == [
        ("teacher", "teacher", 1),
        ("labels only", "baseline", 2),
        ("response KD", "method", 2),
        ("response + feature KD", "method", 2),
    ]


def test_a_teacher_that_computes_during_training_is_named(made, comparison_of) -> None:
    """Its passes are in the energy without the teacher."""
    records = made.demo_records()
    for record in records:
        record.spec["distill"] = {"teacher": "live" if record.label == "response KD" else "cached"}
        if record.label == "response + feature KD":
            record.spec["pipeline"] = "squad"  # its teacher is always live
    text = " ".join(verdict._caveats(comparison_of(records)))
    assert "The teacher of response KD and response + feature KD computes during the student's training: " in text


def test_numbered_variants_say_where_their_settings_are(made, comparison_of) -> None:
    names = {"response KD": "KD, variant 1", "response + feature KD": "KD, variant 2"}
    records = [one.model_copy(update={"label": names.get(one.label, one.label)}) for one in made.demo_records()]
    text = " ".join(verdict._caveats(comparison_of(records)))
    assert "KD, variant 1 and KD, variant 2 differ in several settings, listed in `compare -v` and `report`." in text


def test_accuracy_is_the_mean_over_seeds_with_the_interval_of_the_test_set(made, comparison_of) -> None:
    row = row_of(comparison_of(made.demo_records()), "response KD")
    assert row.quality == pytest.approx(0.83)
    # 830 of 1000, not 1660 of 2000: two seeds do not make the test set larger
    assert row.interval is not None
    assert row.interval.low == pytest.approx(0.8055, abs=5e-4)
    assert row.interval.high == pytest.approx(0.8520, abs=5e-4)


def test_the_difference_is_paired_by_item_and_seed(made, comparison_of) -> None:
    difference = row_of(comparison_of(made.demo_records()), "response KD").difference
    assert difference is not None and difference.paired is not None
    assert difference.paired.difference.value == pytest.approx(0.037)
    assert difference.by_seed == pytest.approx((0.036, 0.038))
    assert difference.paired.items == 1000
    assert difference.significant


def test_seeds_that_disagree_in_sign_resolve_nothing(made, comparison_of) -> None:
    difference = row_of(comparison_of(made.demo_records()), "response + feature KD").difference
    assert difference is not None and not difference.seeds_agree and not difference.significant


def test_each_ancestor_is_counted_once_and_only_the_teachers_part_is_teacher_share(made, comparison_of) -> None:
    comparison = comparison_of(made.demo_records())
    row = row_of(comparison, "response KD")
    own_j = (131.0 + 133.5) / 2 + 9 + 4
    assert row.own.energy_j == pytest.approx(own_j)
    assert row.inherited is not None and row.inherited.energy_j == pytest.approx(12 + 640 + 130)
    assert row.whole.energy_j == pytest.approx(own_j + 782)
    assert row.setup is not None and row.setup.energy_j == pytest.approx(4)
    assert row.with_teacher.energy_j == pytest.approx(own_j - 4 + 782), "setup is no method's energy"
    assert row.teacher_share == pytest.approx(770 / (own_j - 4 + 782))
    assert row_of(comparison, "labels only").teacher_share == 0.0
    assert row.unknown == ("sample:minilm",)


def test_the_sum_mentions_a_teacher_only_where_there_is_one(made, tmp_path) -> None:
    lineage = (made.ancestor("earlier-student", 50.0, ("student.train",), False),)
    later = made.make_record("continued", 0, made.student_parts(120.0), lineage=lineage)
    records = [made.labels_only(0, 790), later]
    titles = [row[0] for row in stage_grid(compare(made.group_of(records), records, tmp_path)).rows]
    assert "sum, inherited energy included" in titles
    assert not any("teacher" in title for title in titles)


def test_a_teacher_that_all_seeds_share_does_not_become_surer_by_repetition(made, comparison_of) -> None:
    row = row_of(comparison_of(made.demo_records()), "response KD")
    teacher = next(stage for stage in row.stages if stage.name == "teacher.train")
    assert teacher.inherited and teacher.figure.half_width_j == pytest.approx(0.6 + 0.002 * 640)
    student = next(stage for stage in row.stages if stage.name == "student.train")
    assert student.figure.half_width_j == pytest.approx((0.6 + 0.002 * 132.25) / 2**0.5, rel=1e-3)


def test_stages_add_up_to_the_sum_where_one_seed_made_what_another_inherits(made, tmp_path) -> None:
    """The maker has two exams, the later seed one joined line; a stage that one run alone has is a mean over both."""
    evaluations = (made.Part("teacher.evaluate", 9.0, 60.0), made.Part("teacher.tasks-evaluate", 4.0, 22.0))
    logits, extra = made.Part("teacher.logits", 22.0, 130.0), made.Part("student.tasks-evaluate", 2.0, 8.0)
    lineage = (*made.teacher_lineage(False)[2:],)
    lineage += (made.ancestor("exam", 82.0, ("teacher.evaluate", "teacher.tasks-evaluate"), False),)
    lineage += (made.ancestor("earlier-student", 50.0, ("student.train",), False),)
    makes = ("key-teacher-cache", "key-exam")
    maker = made.make_record(
        "response KD", 0, (*evaluations, logits, *made.student_parts(130.0), extra), lineage=lineage, made=makes
    )
    later = made.make_record("response KD", 1, made.student_parts(120.0), lineage=lineage)
    records = [made.labels_only(0, 790), maker, later]
    row = row_of(compare(made.group_of(records), records, tmp_path), "response KD")
    found = {(stage.name, stage.inherited): stage.figure for stage in row.stages}
    counted = [stage.figure.energy_j for stage in row.stages if row.counts(stage)]
    assert sum(counted) == pytest.approx(row.with_teacher.energy_j)
    assert sum(figure.energy_j for figure in found.values()) == pytest.approx(row.whole.energy_j)
    assert found["teacher.logits", False].energy_j == pytest.approx(130)
    assert found["teacher.logits", False].half_width_j == pytest.approx(0.6 + 0.002 * 130)
    assert found["teacher.evaluate + teacher.tasks-evaluate", False].energy_j == pytest.approx(82)
    assert found["student.tasks-evaluate", False].energy_j == pytest.approx(4)
    assert found["teacher.train", True].energy_j == pytest.approx(640)
    # the student it goes on from stays apart from its own training
    assert found["student.train", True].energy_j == pytest.approx(50)
    assert found["student.train", False].energy_j == pytest.approx(125)
    assert len(found) == len(row.stages)


def test_energy_ratios_are_paired_by_seed_with_and_without_the_teacher(made, comparison_of) -> None:
    row = row_of(comparison_of(made.demo_records()), "response KD")
    assert row.student_ratio and row.student_ratio.ratio and row.full_ratio
    assert row.student_ratio.ratio.value == pytest.approx(((152 / 141) * (154.5 / 144)) ** 0.5)
    assert row.student_ratio.significant
    assert row.full_ratio.ratio is not None
    assert row.full_ratio.ratio.value == pytest.approx(((922 / 141) * (924.5 / 144)) ** 0.5)


def test_it_decides_nothing_which_of_several_seeds_made_what_all_of_them_use(made, tmp_path) -> None:
    base = [made.labels_only(seed, 790, 120.0 + seed) for seed in (0, 1)]
    later = made.distilled("response KD", 1, 834, 131.0)
    finder = made.distilled("response KD", 0, 826, 130.0)
    own = (made.Part("teacher.logits", 22.0, 130.0, 1_500), *made.student_parts(130.0))
    maker = made.make_record(
        "response KD", 0, own, correct=826, lineage=made.teacher_lineage(False), made=("key-teacher-cache",)
    )
    found, made_it = (
        row_of(compare(made.group_of(records), records, tmp_path), "response KD")
        for records in ([*base, finder, later], [*base, maker, later])
    )
    assert made_it.own.energy_j > found.own.energy_j + 60
    assert made_it.without_teacher.energy_j == pytest.approx(found.without_teacher.energy_j)
    assert made_it.student_ratio.ratio.value == pytest.approx(found.student_ratio.ratio.value)
    assert made_it.with_teacher.energy_j == pytest.approx(found.with_teacher.energy_j)
    assert made_it.with_teacher.half_width_j == pytest.approx(found.with_teacher.half_width_j)


def test_a_run_that_did_not_finish_is_listed_with_its_joules(made, comparison_of) -> None:
    records = made.demo_records()
    records[4] = made.distilled("response KD", 1, None, 55.0, status="truncated")
    comparison = comparison_of(records)
    assert [run.seed for run in row_of(comparison, "response KD").runs] == [0]
    (incomplete,) = comparison.incomplete
    assert (incomplete.label, incomplete.seed, incomplete.why) == ("response KD", 1, "truncated")
    assert incomplete.own.energy_j == pytest.approx(55 + 9 + 4)


def test_a_member_that_never_started_is_listed_too(made, tmp_path: Path) -> None:
    records = made.demo_records()
    group = made.group_of(records)
    comparison = compare(group, records[:-1], tmp_path)
    assert [(run.label, run.why) for run in comparison.incomplete] == [("response + feature KD", "not started")]


def test_a_method_without_the_metric_is_not_called_unpaired(made, tmp_path: Path) -> None:
    records = [
        record.model_copy(update={"results": {}}) if record.label == "response KD" else record
        for record in made.demo_records(True)
    ]
    made.write_group(tmp_path, records)
    comparison = compare(made.group_of(records), records, tmp_path)
    grid = quality_grid(comparison)
    (lacking,) = (row for row in grid.rows if row[0] == "response KD")
    assert lacking[2:] == ("-",) * 5
    sentences = " ".join(verdict.verdict(comparison).sentences)
    assert "the accuracy cannot be compared, because the method has no such figure." in sentences


def test_without_predictions_the_difference_stays_unresolved(made, tmp_path: Path) -> None:
    records = made.demo_records()
    for record in records:
        made.write_run(tmp_path, record, predictions=False)
    difference = row_of(compare(made.group_of(records), records, tmp_path), "response KD").difference
    assert difference is not None and difference.paired is None and not difference.significant
    assert "missing" in difference.reason


def test_a_measured_run_is_not_set_against_an_estimated_one(made, comparison_of) -> None:
    records = [made.labels_only(0, 790), made.distilled("response KD", 0, 826, 131.0, measured=True)]
    row = row_of(comparison_of(records), "response KD")
    assert row.student_ratio is not None and row.student_ratio.ratio is None
    assert "measured" in row.student_ratio.reason and "estimated" in row.student_ratio.reason


def test_a_sum_of_measured_and_estimated_joules_is_called_mixed(made, comparison_of) -> None:
    lineage = made.teacher_lineage(measured=False)
    record = made.make_record("response KD", 0, made.student_parts(131.0), measured=True, correct=826, lineage=lineage)
    assert row_of(comparison_of([made.labels_only(0, 790), record]), "response KD").mixed


def test_data_that_were_estimated_are_not_silently_added_to_a_measured_training(made, comparison_of) -> None:
    """Without a teacher too: there the one column is the sum."""
    data = made.teacher_lineage(measured=False)[1:2]
    parts, seeds = made.student_parts(131.0), (0, 1)
    plain, other = (
        [made.make_record(label, seed, parts, measured=True, correct=800, lineage=data) for seed in seeds]
        for label in ("labels only", "longer")
    )
    comparison = comparison_of([*plain, *other])
    row = row_of(comparison, "longer")
    assert row.student_ratio.ratio is None and row.student_ratio.reason.startswith("the energy is partly measured")
    assert all("measured + estimated" in cells[1] for cells in energy_grid(comparison).rows)


def test_a_teacher_has_no_joules_without_the_teacher(made, comparison_of) -> None:
    comparison = comparison_of(made.demo_records())
    row = row_of(comparison, "teacher")
    assert row.without_teacher.energy_j == row.with_teacher.energy_j
    assert energy_grid(comparison).rows[0][1] == NOTHING


def test_plain_data_is_strict_json_and_states_open_intervals(made, comparison_of) -> None:
    records = [made.labels_only(0, 790), made.distilled("response KD", 0, 826, 131.0)]
    data = comparison_data(comparison_of(records))
    json.dumps(data, allow_nan=False)
    ratio = data["methods"][1]["without_teacher_ratio"]
    assert ratio["interval"] == {"value": pytest.approx(152 / 141), "low": None, "high": None}
    assert ratio["resolved"] is False and data["methods"][1]["own"]["method"] == "estimated"


def test_the_students_predictions_are_used_if_the_teachers_are_there_too(made, tmp_path: Path) -> None:
    folder = made.write_run(tmp_path, made.labels_only(0, 790))
    made.write_predictions(tmp_path / "other", 100, 0)
    (tmp_path / "other" / "artifacts" / "student-predictions").rename(folder / "artifacts" / "a-predictions")
    correct = correct_by_item(folder)
    assert correct is not None and sum(correct.values()) == 790


@pytest.mark.parametrize("edited", ["[]", '{"right": 3}', '{"tasks": ["x"]}', '{"tasks": [{"task": "t"}]}', "{"])
def test_edited_items_are_no_items(made, tmp_path: Path, edited: str) -> None:
    folder = made.write_run(tmp_path, made.labels_only(0, 790))
    for place in ("quality/answers.json", "quality/harness.json", "predictions/predictions.npz"):
        file = folder / "artifacts" / f"student-{place}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(edited)
    assert correct_by_item(folder) is None
    assert correct_by_item(folder, "exact_answers") is None
    assert correct_by_item(folder, "harness.t.acc.value") is None


def test_incomplete_readings_give_a_reason_instead_of_a_ratio() -> None:
    whole = EnergyFigure(energy_j=512.0, method="counter")
    for coverage, reason in ((0.72, "readings are missing (72 % covered)"), (0.985, ""), (1.0, "")):
        assert why_incomplete([whole, whole.model_copy(update={"coverage": coverage})]) == reason
    assert why_incomplete([whole, whole.model_copy(update={"lower_bound": True})]) == ""
    assert why_incomplete([whole], unmetered=True) == "some of the work was not metered"
