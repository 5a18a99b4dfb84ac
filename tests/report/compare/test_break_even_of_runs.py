"""Payback from runs: whose joules count, at which quality, and when there is no answer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from joulelab.meter.figures import EnergyFigure, ErrorComponent
from joulelab.report.compare.break_even_report import _once, break_even_rows
from joulelab.report.compare.differences import CPU_CONTENTION
from joulelab.report.compare.method_rows import _mean, compare
from joulelab.report.compare.pareto import pareto_rows
from joulelab.report.compare.verdict import break_even_sentence, verdict
from joulelab.report.energy_sums import NOT_METERED
from joulelab.report.figures.comparison_figures import break_even_curve
from joulelab.report.tables.comparison_tables import comparison_markdown
from joulelab.runs.artifacts import unmetered


def saving(made, joules=(60.0, 61.0, 59.5), correct=790):
    """A teacher that halves what its students take."""
    base = [made.labels_only(seed, 790, value, True) for seed, value in enumerate((120.0, 121.5, 119.0))]
    taught = [made.distilled("KD", seed, correct, value, True) for seed, value in enumerate(joules)]
    return [made.teacher_run(True), *base, *taught]


def output_text(made, records, tmp_path: Path):
    made.write_group(tmp_path, records, True)
    return {one.each: one for one in break_even_rows(compare(made.group_of(records), records, tmp_path))}


def test_the_teachers_joules_over_what_it_saves_on_the_student_stages(made, tmp_path: Path) -> None:
    one = output_text(made, saving(made), tmp_path)["student"]
    assert one.found and one.found.spent.value == pytest.approx(640 + 130)  # not the data, which both need
    assert one.found.saved.value == pytest.approx(60.0)
    assert one.found.count == pytest.approx(770 / 60)
    assert one.found.low < 770 / 60 < one.found.high < 15
    assert break_even_sentence(one).startswith("The teacher of KD breaks even after 12.8 students [12.")
    assert "no significant difference" in break_even_sentence(one)


def test_the_teachers_evaluation_is_in_the_bills_and_in_no_break_even(made, tmp_path: Path) -> None:
    plain, examined = saving(made), saving(made)
    evaluation = made.ancestor("exam", 82.0, ("teacher.evaluate", "teacher.tasks-evaluate"), True)
    for place in (4, 5, 6):
        examined[place] = examined[place].model_copy(update={"lineage": (*examined[place].lineage, evaluation)})
    before, after = output_text(made, plain, tmp_path / "plain"), output_text(made, examined, tmp_path / "examined")
    for each in ("student", "sample"):
        assert after[each].found.spent.value == pytest.approx(before[each].found.spent.value)
    texts = [comparison_markdown(compare(made.group_of(one), one, tmp_path)) for one in (plain, examined)]
    assert "Teacher evaluation (82.0 J ±" in texts[1]
    assert "Teacher evaluation is not counted" in texts[1] and "Teacher evaluation" not in texts[0]
    # a baseline beside which the teacher was only examined had no teacher
    for place in (1, 2, 3):
        examined[place] = examined[place].model_copy(update={"lineage": (*examined[place].lineage, evaluation)})
    adjacent = output_text(made, examined, tmp_path / "beside")["student"]
    assert not adjacent.beyond and adjacent.found.spent.value == pytest.approx(before["student"].found.spent.value)
    records = [made.labels_only(seed, 790, 120.0 + seed, True) for seed in range(3)] + examined[1:4]
    other = [one.model_copy(update={"label": "again"}) for one in examined[1:4]]
    assert break_even_rows(compare(made.group_of(records[:3]), [*records[:3], *other], tmp_path)) == ()


def test_a_baseline_with_a_teacher_of_its_own_has_spent_that_already(made, tmp_path: Path) -> None:
    comparison = two_teachers(made, tmp_path, "exact KD")
    one = next(one for one in break_even_rows(comparison) if one.each == "student" and one.label == "KD")
    assert one.found and one.found.spent.value == pytest.approx(130 - 50)
    doubt_j = [made.energy(value, True).gpu.half_width_j for value in (130.0, 50.0)]
    # one teacher was trained for both, and what it took may be off for both alike
    assert one.found.spent.standard_error == pytest.approx(math.hypot(*doubt_j) / 1.96, rel=1e-3)
    assert one.found.count == pytest.approx(80 / (121 - 60.1667), rel=1e-3)
    assert break_even_sentence(one).startswith(
        "The additional energy of the teacher of KD over that of exact KD breaks even after 1.3 stu"
    )
    assert "the teacher's energy beyond that of exact KD's" in comparison_markdown(comparison)


def two_teachers(made, folder: Path, baseline: str):
    """KD, and exact KD with less of the teacher's work and dearer students, from one trained teacher."""
    dearer = [made.distilled("exact KD", seed, 790, 120.0 + seed, True) for seed in range(3)]
    exact = made.ancestor("exact", 50.0, ("teacher.logits",), True)
    exact_kd = [record.model_copy(update={"lineage": (*record.lineage[:-1], exact)}) for record in dearer]
    records = [*saving(made)[4:], *exact_kd]
    made.write_group(folder, records, True)
    return compare(made.group_of(records, baseline), records, folder)


def test_a_teacher_with_less_energy_is_not_reported_as_additional_energy(made, tmp_path: Path) -> None:
    one = next(one for one in break_even_rows(two_teachers(made, tmp_path, "KD")) if one.label == "exact KD")
    assert break_even_sentence(one).startswith(
        "The teacher of exact KD, which used less energy than that of KD, does not break even: a student uses more"
    )


def test_with_the_very_same_teacher_nothing_has_to_come_back(made, tmp_path: Path) -> None:
    records = [*saving(made)[4:], *(made.distilled("cheap KD", seed, 790, 50.0 + seed, True) for seed in range(3))]
    made.write_group(tmp_path, records, True)
    (one,) = break_even_rows(compare(made.group_of(records, "KD"), records, tmp_path))
    assert one.answer == "immediately" and one.found.spent.standard_error == 0


def test_a_student_breaks_even_by_the_energy_it_saves_in_use(made, tmp_path: Path) -> None:
    one = output_text(made, saving(made), tmp_path)["sample"]
    # own 60 + 9 J, the overhead of the run left out, and the teacher's logits; 82 mJ against 9 mJ for a sample
    assert one.found and one.found.count == pytest.approx((60.1667 + 9 + 130) / 0.073, rel=1e-3)
    assert "teacher.evaluate and student.evaluate" in one.measured_in


def test_a_teacher_that_was_validated_while_it_trained_is_not_paid_for_by_its_student(made, tmp_path: Path) -> None:
    """Training and validations are one artifact with one line in the bill."""
    plain = saving(made)
    validated = []
    for record in plain:
        teacher = {"stages": ("teacher.train", "teacher.validate")}
        lineage = tuple(one.model_copy(update=teacher) if one.name == "teacher" else one for one in record.lineage)
        validated.append(record.model_copy(update={"lineage": lineage}))
    before, after = output_text(made, plain, tmp_path / "plain"), output_text(made, validated, tmp_path / "validated")
    spent = [answers["sample"].found.spent.value for answers in (before, after)]
    assert spent[0] == pytest.approx(spent[1])


def test_teaching_that_no_meter_saw_makes_lower_bounds_and_no_answers(made, tmp_path: Path) -> None:
    records = saving(made)
    unseen = unmetered("teacher.generate on http://far:8000/v1#llama", "key", "far is no address of this machine")
    for place in (4, 5, 6):
        records[place] = records[place].model_copy(update={"lineage": (*records[place].lineage, unseen.artifact)})
    made.write_group(tmp_path, records, True)
    comparison = compare(made.group_of(records), records, tmp_path)
    assert {one.answer for one in break_even_rows(comparison)} == {"unknown"}
    assert {one.reason for one in break_even_rows(comparison)} == {NOT_METERED}
    row = comparison.row("KD")
    assert row and row.full_ratio and row.full_ratio.ratio is None
    assert row.teacher_share_text.startswith("≥ ")
    assert row not in pareto_rows(comparison)
    assert break_even_curve(comparison) is None
    text = comparison_markdown(comparison)
    assert re.search(r"\| KD +\| [^|]+\| ≥ ", text)
    assert "not metered: teacher.generate on http://far:8000/v1#llama" in text
    assert "Not included (energy unknown): sample:minilm" in text


def test_a_student_that_continues_from_an_earlier_one_took_that_ones_training_too(made, tmp_path: Path) -> None:
    records = saving(made)
    earlier = made.ancestor("final_model", 30.0, ("student.sft", "student.sft-validate"), True)
    for place in (4, 5, 6):
        records[place] = records[place].model_copy(update={"lineage": (*records[place].lineage, earlier)})
    one = output_text(made, records, tmp_path)["student"]
    assert one.found and one.found.saved.value == pytest.approx(60.0 - 30.0)


def with_use(made, of_student, of_teacher):
    """The saving runs, and one inference run of a student and one of its teacher."""
    records = saving(made)
    _, _, teacher, _ = made.teacher_lineage(True)
    student = made.ancestor("final_model", 60.0, ("student.train",), True)
    student = student.model_copy(update={"made_by": records[4].run_id, "parents": (teacher.key,)})
    teacher = teacher.model_copy(update={"made_by": records[0].run_id})
    uses = (("use of KD", (teacher, student), of_student), ("use of teacher", (teacher,), of_teacher))
    made_of = [made.make_record(label, 0, (part,), measured=True, lineage=lineage) for label, lineage, part in uses]
    return [*records, *made_of]


def test_inference_runs_of_the_two_models_are_taken_before_their_evaluations(made, tmp_path: Path) -> None:
    records = with_use(made, made.Part("infer.b1", 10.0, 30.0, 1_000), made.Part("infer.b1", 10.0, 80.0, 1_000))
    one = output_text(made, records, tmp_path)["sample"]
    assert one.found and one.found.saved.value == pytest.approx(0.080 - 0.030)
    assert "measured in infer.b1" in one.measured_in
    comparison = compare(made.group_of(records), records, tmp_path)
    assert [row.role for row in comparison.rows][-2:] == ["inference"] * 2  # they are in use, and no rivals
    assert not any("use of" in text for text in verdict(comparison).sentences)
    without_teachers = output_text(made, records[:-1], tmp_path / "fewer")["sample"]
    assert "student.evaluate" in without_teachers.measured_in  # both sides alike, or neither


def test_models_that_were_not_run_alike_answer_nothing_about_use(made, tmp_path: Path) -> None:
    records = with_use(made, made.Part("infer.b8", 10.0, 30.0, 1_000), made.Part("infer.b1", 10.0, 30.0, 1_000))
    assert "student.evaluate" in output_text(made, records, tmp_path)["sample"].measured_in


def test_joules_that_are_partly_estimated_or_made_by_others_on_the_cores_pay_nothing_back(made, tmp_path: Path) -> None:
    records = saving(made)
    guess = {"all": made.energy(130.0, False).cpu_estimate}
    for place in (4, 5, 6):
        lineage = [
            one.model_copy(update={"energy": guess}) if one.stages == ("teacher.logits",) else one
            for one in records[place].lineage
        ]
        records[place] = records[place].model_copy(update={"lineage": tuple(lineage)})
    answers = output_text(made, records, tmp_path)
    assert [one.found for one in answers.values()] == [None, None]
    assert {one.reason[:40] for one in answers.values()} == {"either the energy spent once or the ener"}
    contended = [made.with_contention(one) if one.label == "KD" else one for one in saving(made)]
    assert {one.reason for one in output_text(made, contended, tmp_path / "contended").values()} == {CPU_CONTENTION}


def test_a_saving_within_the_spread_does_not_break_even(made, tmp_path: Path) -> None:
    one = output_text(made, saving(made, (90.0, 150.0, 110.0)), tmp_path)["student"]
    assert one.answer == "does not break even" and "not significantly above 0" in break_even_sentence(one)
    assert "or more" in break_even_sentence(one)


def test_students_that_are_worse_never_break_even(made, tmp_path: Path) -> None:
    """They save 60 J each and are 10 points less accurate: 12.8 students was printed."""
    records = saving(made, correct=690)
    one = output_text(made, records, tmp_path)["student"]
    assert one.answer == "does not break even"
    assert "significantly worse than the baseline's (at lower quality, -10.0 points)" in break_even_sentence(one)
    assert break_even_curve(compare(made.group_of(records), records, tmp_path)) is None


def test_measured_and_estimated_joules_give_no_answer(made, tmp_path: Path) -> None:
    records = [made.labels_only(0, 790), made.distilled("KD", 0, 790, 60.0, measured=True)]
    one = output_text(made, records, tmp_path)["student"]
    assert one.found is None and "one side is measured" in break_even_sentence(one)


def test_the_curve_falls_to_the_student_alone(made, tmp_path: Path) -> None:
    records = saving(made)
    figure = break_even_curve(compare(made.group_of(records), records, tmp_path))
    assert figure and "breaks even after 12.8 students" in figure.description
    values = [one for one in figure.spec["datasets"]["curves"] if one["method"]]
    first, last = values[0], values[-1]
    assert (first["n"], last["n"]) == (1, 1000)
    assert (first["net"], last["net"]) == pytest.approx((770 - 60, 0.77 - 60))
    assert figure.spec["datasets"]["marks"][-1]["n"] == pytest.approx(770 / 60)


def test_errors_that_stages_share_add_up_in_sums_and_means() -> None:
    """The lag of the samples moves all figures of a driver together; it was added in quadrature."""
    lag = ErrorComponent(name="sample lag", joules=(-3.0, 3.0), shared=True)
    figure = EnergyFigure(energy_j=100.0, method="counter").with_errors(
        lag, ErrorComponent(name="counter latch", joules=(4.0,))
    )
    part = SimpleNamespace(figure=figure, key=None, kind="own", inherited=False)
    spent = _once([SimpleNamespace()], lambda run: [part, part])
    assert (spent.value, 1.96 * spent.standard_error) == pytest.approx(
        (200.0, math.hypot(6.0, 4.0 * math.sqrt(2))), rel=1e-3
    )
    mean = _mean({0: [part], 1: [part]}, billed=[0, 1])
    assert (mean.energy_j, mean.half_width_j) == pytest.approx((100.0, math.hypot(3.0, 4.0 / math.sqrt(2))))
