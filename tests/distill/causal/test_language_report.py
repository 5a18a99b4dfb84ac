"""The comparison of language models at equal held-out loss: by hand, and over the five runs."""

import pytest

from joulelab.report.compare import compare
from joulelab.report.language_table import _Course, equal_loss, language_grid
from joulelab.report.tables import comparison_grids
from joulelab.runs.groups import GroupRecord


def test_joules_are_counted_up_to_where_the_other_ones_loss_is_reached():
    course = _Course(shares=(0.25, 0.5, 1.0), losses=(8.0, 7.0, 6.0), before_j=10.0, train_j=100.0)
    assert course.joules_to(6.0) == 110.0
    assert course.joules_to(6.5) == 85.0
    assert course.joules_to(9.0) is None  # before the first look nothing is known
    worse_later = _Course((0.5, 0.75, 1.0), (7.0, 6.0, 6.4), 0.0, 100.0)
    assert worse_later.joules_to(6.4) == pytest.approx(65.0)  # it was as good before


def test_the_five_runs_are_set_side_by_side_with_their_payback(finished):
    records = [record for record, _ in finished.values()]
    group = GroupRecord(
        group_id="g", name="g", about="", baseline="sft", created_at="", members=(), varying={}
    )  # fmt: skip
    comparison = compare(group, records, finished["sft"][1].folder.parent)
    assert comparison.measure.name == "clm_loss"
    grid = language_grid(comparison)
    assert grid in comparison_grids(comparison)
    cells = {row[0]: row for row in grid.rows}
    assert list(cells) == ["sft", "kd", "synthetic", "dpo", "self"]
    assert cells["sft"][-1] == "baseline"
    assert "does not pay back: one repeat tells no spread" in cells["kd"][-1]
    found = equal_loss(comparison.row("kd"), comparison.row("sft"))
    losses = {name: _Course.of(comparison.row(name).runs[0]).final for name in ("sft", "kd")}
    worse = max(losses, key=losses.get)
    charged = {"sft": found.base_j, "kd": found.own_j}
    whole = {name: finished[name][0].stage("student.train").best.energy_j for name in charged}
    assert found.loss == losses[worse]
    assert charged[worse] == pytest.approx(whole[worse])  # the worse one needed all of it, the other one less
    better = min(losses, key=losses.get)
    assert charged[better] < whole[better]
    start = _Course.of(comparison.row("self").runs[0])
    paid = {ancestor.name: ancestor for ancestor in finished["self"][0].inherited}["sft-student"]
    assert start.before_j == pytest.approx(paid.energy["cpu_estimate"].energy_j)  # whoever paid for it
