"""Break-even of language models: table, figure, caption, verdict and JSON say the same, at equal held-out loss.

KD trains with more energy than SFT (140 J against 120 J) and reaches SFT's final loss halfway: 70 J against 120 J.
Synthetic SFT trains with less (110 J) and ends at a loss that SFT reaches with 30 J. Energy of the whole student stages
says the opposite of both.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from joulelab.report.compare.break_even_report import break_even_rows
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.verdict import break_even_grid, short_verdict, verdict
from joulelab.report.export import comparison_data
from joulelab.report.figures.comparison_figures import break_even_curve
from joulelab.report.tables.comparison_tables import equal_energy_grid, language_grid
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Result

STEPS = 100
COURSES = {
    "labels only": (120.0, {25: 8.0, 50: 7.5, 75: 7.2, 100: 7.0}),
    "KD": (140.0, {25: 7.4, 50: 7.0, 75: 6.9, 100: 6.8}),
    "synthetic SFT": (110.0, {25: 9.0, 50: 8.5, 75: 8.2, 100: 8.0}),
}


@pytest.fixture
def comparison(made, tmp_path: Path):
    records = []
    for label, (joules, curve) in COURSES.items():
        for seed in range(3):
            used = joules + 0.1 * seed
            run = made.labels_only(seed, 0, used, True) if label == "labels only" else None
            record = run or made.distilled(label, seed, 0, used, True)
            results = {
                "student.clm_loss": Result(value=curve[STEPS], lower_is_better=True),
                "student.train.steps": Result(value=STEPS),
            }
            (validation,) = made.stages_of([made.Part("student.validate", 1.0, 0.0)], measured=True)
            later = validation.model_copy(update={"number": len(record.stages) + 1})
            records.append(record.model_copy(update={"results": results, "stages": (*record.stages, later)}))
    made.write_group(tmp_path, records, True)
    for record in records:
        lines = [
            f'{{"stage": "student.validate", "step": {step}, "held_out_loss": {loss}}}\n'
            for step, loss in COURSES[record.label][1].items()
        ]
        RunPaths(tmp_path / record.run_id).metrics.write_text("".join(lines))
    return compare(made.group_of(records), records, tmp_path)


def test_the_count_is_at_equal_loss(comparison) -> None:
    found = {one.label: one for one in break_even_rows(comparison) if one.each == "student"}
    kd, synthetic = found["KD"].found, found["synthetic SFT"].found
    assert kd and kd.saved.value == pytest.approx(120.1 - 70.05) and kd.count == pytest.approx(770 / 50.05)
    assert synthetic and not synthetic.breaks_even and synthetic.saved.value == pytest.approx(30.025 - 110.1)


def test_every_view_gives_the_same_answer(comparison) -> None:
    grid = break_even_grid(comparison)
    cells = {row[0]: row[4] for row in grid.rows}
    assert cells == {"KD": "15.4 students", "synthetic SFT": "does not break even"}
    language = {row[0]: row[-1] for row in language_grid(comparison).rows}
    assert language["KD"] == "15.4 students"
    assert language["synthetic SFT"].startswith("does not break even: a student uses more energy with it")
    sentences = " ".join(verdict(comparison).sentences)
    assert "The teacher of KD breaks even after 15.4 students" in sentences
    assert "at equal held-out loss, 7.000 nats" in sentences
    assert "The teacher of synthetic SFT does not break even" in sentences
    data = {one["method"]: one["breaks_even"] for one in comparison_data(comparison)["break_even"]}
    assert data == {"KD": True, "synthetic SFT": False}


def test_the_figure_crosses_zero_at_the_tables_count(comparison) -> None:
    figure = break_even_curve(comparison)
    curves = [one for one in figure.spec["datasets"]["curves"] if one["method"]]
    below = {label: [c["n"] for c in curves if c["method"] == label and c["net"] < 0] for label in COURSES}
    assert below["synthetic SFT"] == [] and below["labels only"] == []
    assert min(below["KD"]) == min(n for n in {c["n"] for c in curves} if n > 15.4)
    assert [mark["n"] for mark in figure.spec["datasets"]["marks"] if mark["method"]] == [pytest.approx(770 / 50.05)]
    assert {c["method"]: c["breaks_even"] for c in curves} == {"KD": True, "synthetic SFT": False}
    assert "marked by a point: KD (15.4 students). Dashed, does not break even: synthetic SFT." in figure.caption
    assert "breaks even after 15.4 students" in figure.description


def test_losses_at_equal_energy(comparison) -> None:
    """KD is stopped at 120 of its 140 J, between its evaluations at 75 and 100 steps; SFT at synthetic SFT's 110 J."""
    rows = {row[0]: row[1:] for row in equal_energy_grid(comparison).rows}
    assert rows["KD"][:3] == ("120 J", "6.857", "7.000") and rows["KD"][3].startswith("-0.143 [")
    assert rows["synthetic SFT"][:3] == ("110 J", "8.000", "7.067")
    kd = comparison_data(comparison)["equal_energy"][0]
    assert (kd["method"], kd["against"]) == ("KD", "labels only") and len(kd["losses"]) == len(kd["energies_j"]) == 3
    assert kd["losses"][0] == pytest.approx(6.9 - 0.1 * (120 - 105) / 35)


def test_a_student_that_spent_the_energy_before_its_first_evaluation_has_no_loss_there(comparison) -> None:
    costly = comparison.row("KD").runs
    for run in costly:
        RunPaths(run.folder).metrics.write_text('{"stage": "student.validate", "step": 100, "held_out_loss": 6.8}\n')
    rows = {row[0]: row[1:] for row in equal_energy_grid(comparison).rows}
    assert rows["KD"] == ("not trained by then", "-", "-", "-")


def test_the_short_verdict_names_the_break_even_before_the_pareto_front(comparison) -> None:
    assert "The teacher of KD breaks even after 15.4 students" in short_verdict(comparison)[-1]
