"""A student beside its teacher: paid back after how many, or that it is not, or that nothing can be said."""

import pytest
from inference_records import record, row

from joulelab.errors import ConfigError
from joulelab.meter.figures import EnergyFigure
from joulelab.report.grid import to_rich
from joulelab.report.inference_pair import pair_data, pair_grid, pairs
from joulelab.report.tables import render_text
from joulelab.runs.bills import Ancestor


def lineage(energy_j):
    spent = EnergyFigure(energy_j=energy_j, method="counter", half_width_j=0.01 * energy_j)
    return [
        Ancestor(
            key="s", name="student", kind="model", made_by="kd-1", stages=("student.train",), energy={"all": spent}
        ),
        Ancestor(
            key="t", name="teacher", kind="model", made_by="t-1", stages=("teacher.train",), energy={"all": spent}
        ),
    ]


def student(**of_row):
    return record([row(**of_row)], name="student", lineage=lineage(5000.0))


TEACHER = record([row(gross_j=0.2)], name="teacher")


def test_t_star_is_the_joules_of_making_it_over_the_joules_it_saves():
    (found,) = pairs(student(gross_j=0.1), TEACHER, None)
    assert found.found.count == pytest.approx(5000 / 0.1)  # the teacher existed already
    assert found.found.low < 50_000 < found.found.high
    assert pair_data([found])[0]["pays_back_after"] == pytest.approx(50_000)
    text = render_text(to_rich(pair_grid(student(gross_j=0.1), TEACHER, [found])), 160)
    assert "after 50.0 k images" in text


def test_a_saving_that_is_not_resolved_does_not_pay_back():
    (found,) = pairs(student(gross_j=0.199, half_j=0.01), TEACHER, None)
    assert found.found.count is None
    assert found.answer == "does not pay back: the saving for an image is not resolved from 0"


def test_a_student_that_takes_more_never_pays_back():
    (found,) = pairs(student(gross_j=0.4), TEACHER, None)
    assert "costs more with it" in found.answer


def test_without_joules_of_distillation_the_way_to_name_them_is_told():
    (found,) = pairs(record([row(gross_j=0.1)]), TEACHER, None)
    assert found.found is None
    assert "--distilled-by" in found.answer


def test_rows_that_were_not_run_alike_are_not_compared():
    with pytest.raises(ConfigError, match="no row that was run alike"):
        pairs(student(batch=8), TEACHER, None)
    with pytest.raises(ConfigError, match="no finished rows"):
        pairs(record([]), TEACHER, None)
