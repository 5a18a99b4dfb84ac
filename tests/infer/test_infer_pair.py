"""A student beside its teacher: paid back after how many, or that it is not, or that nothing can be said."""

import pytest
from inference_records import generated, record, row, stage

from joulelab.errors import ConfigError
from joulelab.meter.figures import EnergyFigure
from joulelab.report.tables.grid import render_text, to_rich
from joulelab.report.tables.inference_pair import maker_remark, pair_data, pair_grid, pairs
from joulelab.runs.artifacts import Ancestor


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
    assert pair_data([found])[0]["breaks_even_after"] == pytest.approx(50_000)
    text = render_text(to_rich(pair_grid(student(gross_j=0.1), TEACHER, [found])), 160)
    assert "after 50.0 k images" in text


def test_a_saving_that_is_not_resolved_does_not_break_even():
    (found,) = pairs(student(gross_j=0.199, half_j=0.01), TEACHER, None)
    assert found.found.count is None
    assert found.answer == "does not break even: the saving for an image is not significantly above 0"


def test_a_student_that_takes_more_never_breaks_even():
    (found,) = pairs(student(gross_j=0.4), TEACHER, None)
    assert "uses more energy with it" in found.answer


def test_without_joules_of_distillation_the_way_to_name_them_is_reported():
    (found,) = pairs(record([row(gross_j=0.1)]), TEACHER, None)
    assert found.found is None
    assert "--distilled-by" in found.answer


def test_rows_that_were_not_run_alike_are_not_compared():
    with pytest.raises(ConfigError, match="no row in common"):
        pairs(student(batch=8), TEACHER, None)
    with pytest.raises(ConfigError, match="no finished inference rows"):
        pairs(record([]), TEACHER, None)


def test_generated_text_and_forward_passes_are_distinguished():
    texts = record([generated("prefill"), generated("infer")], name="texts", tracker="generation")
    for ours, theirs in ((texts, TEACHER), (TEACHER, texts)):
        with pytest.raises(ConfigError, match=r"texts-1 has generated responses"):
            pairs(ours, theirs, None)


def test_time_and_joules_of_a_response_are_both_reported_per_token():
    small, large = (
        record([generated("infer", gross_j=joules, ms=1280.0)], name="texts", tracker="generation")
        for joules in (12.8, 25.6)
    )
    grid = pair_grid(small, large, pairs(small, large, None))
    assert [column.title for column in grid.columns][2:5] == ["Median ms\nper token", "Mean W", "Energy\nper token"]
    assert grid.rows[0][2] == "10"
    assert grid.rows[0][4].startswith("100.0")


def test_a_run_that_did_not_make_the_student_is_not_billed_for_it():
    ours = record([row(gross_j=0.1)], name="student", lineage=lineage(5000.0)[:1])
    with pytest.raises(ConfigError, match="other-1 did not make the student of student-1, which comes from kd-1"):
        pairs(ours, TEACHER, record([], name="other"))
    (found,) = pairs(ours, TEACHER, record([], name="kd"))
    assert "that run has no energy" in found.answer  # it made the student, and was asked
    assert "not verified that it made this student" in maker_remark(record([row()]), record([], name="kd"))


def test_what_the_distillation_reused_is_part_of_making_the_student():
    """An SFT student that dpo starts from, trained by an earlier run; the teacher existed already."""
    sft = lineage(3000.0)[0].model_copy(update={"key": "sft", "made_by": "sft-1", "stages": ("student.sft",)})
    made_by = record([], name="kd", lineage=[sft, lineage(5000.0)[1]])
    (found,) = pairs(record([row(gross_j=0.1)], name="student", lineage=lineage(5000.0)[:1]), TEACHER, made_by)
    assert found.found.spent.value == pytest.approx(3000)
    assert "all of kd-1 and of what it reused" in found.reason


def test_the_run_that_trained_the_teacher_did_not_make_the_student():
    own, teacher = lineage(5000.0)
    ours = record([row()], name="student", lineage=[own.model_copy(update={"parents": ("t",)}), teacher])
    with pytest.raises(ConfigError, match="t-1 did not make the student"):
        maker_remark(ours, record([], name="t"))
    assert maker_remark(ours, record([], name="kd")) == ""


def test_estimates_answer_only_where_all_are_of_one_kind_and_no_one_else_used_the_cores():
    def estimated(joules, cores=None, **more):
        one = row(gross_j=joules)
        one["energy"]["method"] = "estimated"
        return record([one], stages=[stage(0, cores)] if cores else (), **more)

    def as_estimate(one):
        return one.model_copy(update={"energy": {"all": one.energy["all"].model_copy(update={"method": "estimated"})}})

    spent, teacher = [as_estimate(one) for one in lineage(5000.0)], estimated(0.2, name="teacher")
    (found,) = pairs(estimated(0.1, lineage=spent), teacher, None)
    assert found.found.breaks_even
    (found,) = pairs(estimated(0.1, lineage=lineage(5000.0)), teacher, None)
    assert found.answer.startswith("unknown: either the distillation or the inference energy is measured")
    (found,) = pairs(estimated(0.1, cores=1.3, lineage=spent), teacher, None)
    assert found.answer == "unknown: CPU contention"


def test_rows_are_compared_with_those_of_equal_length_and_norm():
    norms = ("pre-ln", "none")
    both = [record([row(norm=norm, tokens=128) for norm in norms], name=name) for name in ("student", "teacher")]
    found = pairs(*both, None)
    assert [(one.student.values["norm"], one.teacher.values["norm"]) for one in found] == [(n, n) for n in norms]
    assert pair_grid(*both, found).rows[0][0] == "batch 1, 128 tokens, pre-ln, eager, bf16"
    (one,) = pairs(record([row(norm="none")], name="student"), record([row(norm="pre-ln")], name="teacher"), None)
    assert pair_grid(*both, [one]).rows[1][0] == "pre-ln, eager, bf16"
