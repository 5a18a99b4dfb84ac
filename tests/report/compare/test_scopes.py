"""What a reader can select on the page is computed here, by the functions of the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.scopes import (
    STUDENTS,
    all_energies,
    datasets,
    method_energies,
    page_views,
    pue_choices,
    ratio_text,
    scope_choices,
    stated_pue,
)
from joulelab.report.page import TEMPLATES
from joulelab.report.wording import ratio
from joulelab.stats import mean_t, ratio_paired


@pytest.fixture
def comparison(made, tmp_path: Path):
    records = made.demo_records(True)
    return compare(made.group_of(records), records, tmp_path)


def test_one_student_as_the_runs_count_it_is_the_table(comparison) -> None:
    found = method_energies(comparison)
    for row in comparison.rows:
        assert found[row.label].mean == row.with_teacher and found[row.label].ratio == row.full_ratio


def test_ten_students_share_the_teacher_and_the_ratio_has_the_interval_of_the_tables(comparison) -> None:
    found = method_energies(comparison, students=10)
    sums = {
        row.label: [
            sum((part.figure.energy_j or 0.0) / (10 if part.shared else 1) for part in run.parts) for run in row.runs
        ]
        for row in comparison.rows
    }
    kd = found["response KD"]
    assert [one.energy_j for one in kd.by_run] == pytest.approx(sums["response KD"])
    assert kd.mean.energy_j == pytest.approx(sum(sums["response KD"]) / 2)
    wanted = ratio_paired(sums["response KD"], sums["labels only"])
    assert kd.ratio.ratio.value == pytest.approx(wanted.value) and kd.ratio.ratio.high == pytest.approx(wanted.high)
    assert ratio_text(kd.ratio) == ratio(wanted)
    # nobody shares the teacher's own row
    assert found["teacher"].mean.energy_j == method_energies(comparison)["teacher"].mean.energy_j


def test_a_smaller_share_has_a_smaller_interval(comparison) -> None:
    whole, tenth = (method_energies(comparison, students=n)["response KD"].mean for n in (1, 10))
    assert tenth.half_width_j < whole.half_width_j


def test_views_have_every_state_of_the_controls_and_no_other_scope(comparison, made, tmp_path: Path) -> None:
    views = page_views(comparison, all_energies(comparison))
    assert set(views["by_scope"]) == {"policy", "gpu"} and "1.2" in views["by_pue"]
    for by_students in (*views["by_scope"].values(), *views["by_pue"].values()):
        assert list(by_students) == [str(count) for count in STUDENTS]
    policy, building = views["by_scope"]["policy"]["5"]["response KD"], views["by_pue"]["1.5"]["5"]["response KD"]
    assert building["energy_j"] == pytest.approx(1.5 * policy["energy_j"], rel=1e-4)
    estimated = made.demo_records()
    other = compare(made.group_of(estimated), estimated, tmp_path)
    assert [one["scope"] for one in scope_choices(other) if one["why_not"]] == ["gpu", "all"]
    assert set(page_views(other, all_energies(other))["by_scope"]) == {"policy"}


def test_a_pue_of_many_digits_is_a_choice_of_the_page_under_the_name_that_its_script_looks_up(made, tmp_path) -> None:
    records = [
        record.model_copy(update={"totals": record.totals.model_copy(update={"pue": 1.12345678})})
        for record in made.demo_records(True)
    ]
    comparison = compare(made.group_of(records), records, tmp_path)
    names = {json.dumps(pue).removesuffix(".0") for pue in pue_choices(comparison)}
    assert json.dumps(stated_pue(records)) in names
    assert names == set(page_views(comparison, all_energies(comparison))["by_pue"])


def test_all_components_can_be_chosen_only_if_a_cpu_or_memory_was_measured(comparison, made, tmp_path: Path) -> None:
    """Otherwise they would look like the GPU alone, with a missing sensor as 0."""
    (without,) = [one for one in scope_choices(comparison) if one["scope"] == "all"]
    assert without["why_not"] == "neither CPU nor memory was measured in these runs"
    records = []
    for record in made.demo_records(True):
        energies = [stage.energy.model_copy(update={"cpu": stage.energy.gpu}) for stage in record.stages]
        stages = [s.model_copy(update={"energy": energy}) for s, energy in zip(record.stages, energies, strict=True)]
        records.append(record.model_copy(update={"stages": tuple(stages)}))
    other = compare(made.group_of(records), records, tmp_path)
    assert not [one for one in scope_choices(other) if one["scope"] == "all" and one["why_not"]]


def test_figures_read_means_intervals_and_front_from_the_same_numbers(comparison) -> None:
    lines = datasets(comparison)["methods"]
    (kd,) = [one for one in lines if (one["method"], one["scope"], one["students"]) == ("response KD", "policy", 10)]
    sums = [one.energy_j for one in method_energies(comparison, students=10)["response KD"].by_run]
    found = mean_t(sums)
    assert kd["mean"] == pytest.approx(found.value, rel=1e-4) and kd["high"] == pytest.approx(found.high, rel=1e-4)
    views = page_views(comparison, all_energies(comparison))
    for one in lines:
        assert views["by_scope"][one["scope"]][str(one["students"])][one["method"]]["front"] is one["front"]


def test_forty_methods_with_two_repeats_fit_in_half_a_megabyte(made, tmp_path: Path) -> None:
    records = [made.labels_only(0, 790), made.labels_only(1, 792)]
    for number in range(40):
        records += [made.distilled(f"method {number}", seed, 810, 140.0 + number, True) for seed in (0, 1)]
    found = compare(made.group_of(records), records, tmp_path)
    assert len(json.dumps(page_views(found, all_energies(found)))) < 500_000


def test_the_scripts_of_the_page_contain_no_statistics() -> None:
    text = "".join(path.read_text() for path in TEMPLATES.glob("*.js"))
    assert not any(word in text for word in ("Math.log(", "Math.sqrt", "Math.exp", "quantile", "inconclusive"))
