"""The comparison of language models at equal held-out loss: by hand, and over the five runs."""

import re
from types import SimpleNamespace

import pytest

from joulelab.report.compare import break_even_report
from joulelab.report.compare.break_even_report import LossCurve, student_costs
from joulelab.report.compare.method_rows import compare
from joulelab.report.energy_sums import NOT_METERED
from joulelab.report.tables.comparison_tables import comparison_grids, language_grid
from joulelab.runs.groups import GroupRecord
from joulelab.runs.record import RunRecord


def test_energy_is_counted_up_to_the_other_models_loss():
    curve = LossCurve(shares=(0.25, 0.5, 1.0), losses=(8.0, 7.0, 6.0), before_j=10.0, train_j=100.0)
    assert curve.joules_to(6.0) == 110.0
    assert curve.joules_to(6.5) == 85.0
    assert curve.joules_to(9.0) is None  # before the first look nothing is known
    worse_later = LossCurve((0.5, 0.75, 1.0), (7.0, 6.0, 6.4), 0.0, 100.0)
    assert worse_later.joules_to(6.4) == pytest.approx(65.0)  # it was as good before
    worse_from_the_first = LossCurve((0.5, 1.0), (7.0, 7.3), 20.0, 100.0)
    assert worse_from_the_first.charged_to(7.3) == 120.0
    assert worse_from_the_first.charged_to(7.4) is None


def test_a_baseline_as_good_at_its_first_evaluation_decides(monkeypatch):
    """A student that ends at 7.5 with 60 J, beside a baseline that had 7.0 after 25 J: no look in between is needed."""
    curves = {
        "base": LossCurve((0.25, 1.0), (7.0, 6.0), 0.0, 100.0),
        "own": LossCurve((0.5, 1.0), (9.0, 7.5), 10.0, 50.0),
    }
    monkeypatch.setattr(LossCurve, "of", curves.get)
    monkeypatch.setattr(break_even_report, "pairs_of", lambda own, base: list(zip(base, own, strict=True)))
    row = SimpleNamespace(runs=("own",))
    base = SimpleNamespace(runs=("base",), label="SFT")
    found = break_even_report._costs_to_equal_loss(row, base)
    assert (found.loss, found.own_j, found.base_j, found.base_at_most) == (7.5, (60.0,), (25.0,), True)
    assert found.never == "SFT reached that loss at its first evaluation, with less energy"
    curves["own"] = LossCurve((0.5, 1.0), (9.0, 7.5), 0.0, 20.0)  # used less than the bound: nothing can be said
    assert isinstance(break_even_report._costs_to_equal_loss(row, base), str)


def with_contention(record, contended):
    """The record as if other processes had used the cores or not, whatever else runs during the tests."""
    flag = f'"cpu_contention":{str(contended).lower()}'
    return RunRecord.model_validate_json(re.sub('"cpu_contention":(true|false)', flag, record.model_dump_json()))


def test_energy_under_cpu_contention_has_no_break_even(finished):
    records = [with_contention(finished[name][0], contended=name == "kd") for name in ("sft", "kd", "self")]
    group = GroupRecord(group_id="g", name="g", about="", baseline="sft", created_at="", members=(), varying={})
    grid = language_grid(compare(group, records, finished["sft"][1].folder.parent))
    answers = {row[0]: row[-1] for row in grid.rows}
    assert answers["kd"] == "unknown: CPU contention"
    assert "contention" not in answers["self"]


def test_a_measured_teacher_of_an_estimated_student_has_no_break_even(finished):
    records = {name: with_contention(finished[name][0], contended=False) for name in ("sft", "kd")}
    stages = [
        stage.model_copy(update={"best": stage.best.model_copy(update={"method": "counter"})})
        if stage.name == "teacher.logits"
        else stage
        for stage in records["kd"].stages
    ]
    records["kd"] = records["kd"].model_copy(update={"stages": tuple(stages)})
    group = GroupRecord(group_id="g", name="g", about="", baseline="sft", created_at="", members=(), varying={})
    grid = language_grid(compare(group, list(records.values()), finished["sft"][1].folder.parent))
    reason = "unknown: either the energy spent once or the energy saved each time is measured"
    assert grid.rows[1][-1].startswith(reason)


@pytest.mark.parametrize("unseen", ["row", "baseline"])
def test_unmetered_work_on_either_side_leaves_the_break_even_unknown(unseen):
    row, base = (SimpleNamespace(unmetered=(name == unseen) * ("x",)) for name in ("row", "baseline"))
    assert student_costs(row, base, None) == NOT_METERED


def test_the_six_runs_are_compared_with_their_break_even(finished):
    records = [with_contention(record, contended=False) for record, _ in finished.values()]
    group = GroupRecord(
        group_id="g", name="g", about="", baseline="sft", created_at="", members=(), varying={}
    )  # fmt: skip
    comparison = compare(group, records, finished["sft"][1].folder.parent)
    assert comparison.measure.name == "clm_loss"
    grid = language_grid(comparison)
    assert grid in comparison_grids(comparison)
    cells = {row[0]: row for row in grid.rows}
    assert list(cells) == ["sft", "kd", "synthetic", "dpo", "on-policy", "self"]
    assert cells["sft"][-1] == "baseline"
    assert "does not break even: one repeat has no variance" in cells["kd"][-1]
    found = student_costs(comparison.row("kd"), comparison.row("sft"), comparison)
    losses = {name: LossCurve.of(comparison.row(name).runs[0]).final for name in ("sft", "kd")}
    worse = max(losses, key=losses.get)
    charged = {"sft": found.base_j[0], "kd": found.own_j[0]}
    stages = ("student.train", "student.validate")
    whole = {name: sum(finished[name][0].stage(one).best.energy_j for one in stages) for name in charged}
    assert found.loss == losses[worse]
    assert charged[worse] == pytest.approx(whole[worse])  # the worse one needed all of it, the other one less
    better = min(losses, key=losses.get)
    assert charged[better] < whole[better]
    start = LossCurve.of(comparison.row("self").runs[0])
    paid = {ancestor.name: ancestor for ancestor in finished["self"][0].inherited}["sft-student"]
    own_logits_j = finished["self"][0].stage("teacher.logits").best.energy_j
    assert start.before_j == pytest.approx(
        (paid.work or paid.energy)["cpu_estimate"].energy_j + own_logits_j
    )  # setup is in no comparison
    own = [finished["dpo"][0].stage(f"student.{name}").best.energy_j for name in ("sft", "sft-validate", "reference")]
    assert LossCurve.of(comparison.row("dpo").runs[0]).before_j == pytest.approx(sum(own))
    assert start.before_j == pytest.approx(sum(own[:2]) + own_logits_j)
