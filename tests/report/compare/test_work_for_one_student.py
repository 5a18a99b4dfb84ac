"""On-policy distillation: the student writes during its training, and the teacher's scores of that text serve no other
student. So they are charged to every student, in bills, comparisons and break-even alike.

SFT trains with 120 J. On-policy trains with 80 J, writes with 30 J and is scored with 50 J.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from joulelab.report.compare.break_even_report import at_equal_energy, break_even_rows
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.scopes import datasets, method_energies, shares_teacher
from joulelab.report.tables.bill_tables import run_bill
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Result

CURVES = {"SFT": {50: 8.0, 100: 7.0}, "on-policy": {50: 7.6, 100: 7.2}}


@pytest.fixture
def records(made):
    found = []
    for seed in range(3):
        for label in CURVES:
            parts = [made.Part("student.train", 10.0, 120.0 + seed)]
            if label == "on-policy":
                parts = [
                    made.Part("student.train", 10.0, 80.0 + seed),
                    made.Part("student.generate", 2.0, 30.0),
                    made.Part("teacher.score", 2.0, 50.0),
                ]
            record = made.make_record(label, seed, [*parts, made.Part("student.validate", 1.0, 1.0)], measured=True)
            results = {
                "student.clm_loss": Result(value=CURVES[label][100], lower_is_better=True),
                "student.train.steps": Result(value=100),
            }
            if label == "on-policy":
                results["student.start.clm_loss"] = Result(value=8.4, lower_is_better=True)
            found.append(record.model_copy(update={"results": results}))
    return found


@pytest.fixture
def comparison(made, records, tmp_path: Path):
    made.write_group(tmp_path, records, True)
    for record in records:
        lines = [
            f'{{"stage": "student.validate", "step": {step}, "held_out_loss": {loss}}}\n'
            for step, loss in CURVES[record.label].items()
        ]
        RunPaths(tmp_path / record.run_id).metrics.write_text("".join(lines))
    group = made.group_of(records).model_copy(update={"baseline": "SFT"})
    return compare(group, records, tmp_path)


def test_more_students_do_not_share_the_scores(comparison, records) -> None:
    one, many = (method_energies(comparison, students=n)["on-policy"].mean.energy_j for n in (1, 1000))
    assert one == pytest.approx(162.0) and many == pytest.approx(one)
    scores = [part for part in datasets(comparison)["parts"] if part["stage"] == "teacher.score"]
    assert all(part["teachers"] and not part["shared"] for part in scores) and len(scores) == 3
    run = next(record for record in records if record.label == "on-policy")
    assert not shares_teacher(comparison) and not run_bill(run).has_teacher
    assert run_bill(run, students=10).whole.energy_j == pytest.approx(161.0)


def test_the_teachers_share_and_the_energy_without_it_are_those_of_its_role(comparison) -> None:
    row = comparison.row("on-policy")
    assert row.teacher_share == pytest.approx(50 / 162) and row.without_teacher.energy_j == pytest.approx(112.0)


def test_break_even_charges_text_and_scores_to_every_student(comparison) -> None:
    (found,) = [one for one in break_even_rows(comparison) if one.each == "student"]
    assert found.label == "on-policy" and found.found.spent.value == 0 and not found.found.breaks_even
    # at 7.2 nats, with 1 J of validation: SFT after 90 % of its training, on-policy after all of its 162 J
    assert found.found.saved.value == pytest.approx(0.9 * 122 - 162.0)


def test_the_loss_at_equal_energy_begins_at_the_start_of_the_method(comparison) -> None:
    found = at_equal_energy(comparison.row("on-policy"), comparison.row("SFT"), comparison)
    assert found.energies_j == pytest.approx((121.0, 122.0, 123.0)) and found.baseline_losses == (7.0, 7.0, 7.0)
    assert found.losses[0] == pytest.approx(7.6 - 0.4 * (121 / 161 - 0.5) / 0.5)
    for run in comparison.row("on-policy").runs:
        RunPaths(run.folder).metrics.write_text('{"stage": "student.validate", "step": 100, "held_out_loss": 7.2}\n')
    found = at_equal_energy(comparison.row("on-policy"), comparison.row("SFT"), comparison)
    assert found.losses[0] == pytest.approx(8.4 - 1.2 * 121 / 161)
