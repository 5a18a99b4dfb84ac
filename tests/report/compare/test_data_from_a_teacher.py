"""Data made from a teacher's outputs, as a filtered synthetic set, is made once for all students like the outputs
themselves; data made from what a student wrote serves that student alone.

SFT trains with 120 J. The teacher writes with 100 J, its text is filtered with 20 J, and students train with 80 J.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from joulelab.report.compare.break_even_report import break_even_rows
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.scopes import method_energies
from joulelab.report.energy_sums import all_parts, run_energy, shared_keys
from joulelab.report.tables.bill_tables import artifact_bill, run_bill
from joulelab.runs.artifacts import Bill


@pytest.fixture
def lineage(made):
    """Tokenized texts, completions, and the filtered set made from both."""
    data = made.ancestor("data", 10.0, ("data.preprocess",), True)
    answers = made.ancestor("answers", 100.0, ("teacher.generate",), True)
    synthetic = made.ancestor("synthetic", 20.0, ("data.synthetic",), True)
    answers = answers.model_copy(update={"parents": (data.key,)})
    return data, answers, synthetic.model_copy(update={"parents": (answers.key, data.key)})


@pytest.fixture
def records(made, lineage):
    found = []
    stages = [made.Part(one.stages[0], 1.0, one.energy["gpu"].energy_j) for one in lineage]
    for seed in range(3):
        for label, train_j, used in (("SFT", 120.0, lineage[:1]), ("synthetic SFT", 80.0, lineage)):
            parts = [made.Part("student.train", 10.0, train_j + seed)]
            makes_all = (label, seed) == ("synthetic SFT", 0)
            own = tuple(one.key for one in lineage) if makes_all else ()
            parts = [*(stages if makes_all else ()), *parts]
            found.append(made.make_record(label, seed, parts, measured=True, lineage=used, made=own, correct=800))
    return found


def test_students_share_the_filtered_set_whichever_of_them_made_it(made, records, tmp_path: Path) -> None:
    made.write_group(tmp_path, records, True)
    comparison = compare(made.group_of(records, "SFT"), records, tmp_path)
    one, many = (method_energies(comparison, students=n)["synthetic SFT"] for n in (1, 1000))
    assert [figure.energy_j for figure in one.by_run] == pytest.approx([210.0, 211.0, 212.0])
    assert [figure.energy_j for figure in many.by_run] == pytest.approx([90.12, 91.12, 92.12])
    (found,) = [row for row in break_even_rows(comparison) if row.each == "student"]
    assert found.found.spent.value == pytest.approx(120.0) and found.found.saved.value == pytest.approx(40.0)


def test_a_bill_shares_it_too_and_the_energy_without_the_teacher_goes_by_the_role(records, lineage, tmp_path) -> None:
    maker, heir = (record for record in records if record.label == "synthetic SFT" and record.spec["seed"] < 2)
    assert run_bill(maker, students=10).whole.energy_j == pytest.approx(10 + 80 + 12)
    assert run_bill(heir, students=10).whole.energy_j == pytest.approx(10 + 81 + 12)
    bill = Bill(artifact=lineage[2], ancestry=lineage[:2], made_at="", code_version="", inputs={})
    assert artifact_bill(bill, tmp_path, students=10).whole.energy_j == pytest.approx(10 + 12)
    assert [run_energy(record).without_teacher.energy_j for record in (maker, heir)] == pytest.approx([110.0, 111.0])


def test_data_that_owes_nothing_to_a_teacher_is_not_shared(made, lineage) -> None:
    pairs = made.ancestor("pairs", 5.0, ("data.preferences",), True).model_copy(update={"parents": (lineage[0].key,)})
    assert shared_keys((*lineage, pairs)) == {"key-answers", "key-synthetic"}


def written_by_a_student(made):
    """Candidates of DPO that the SFT student wrote, the teacher's judgments of them, and the pairs."""
    written = made.ancestor("answers", 30.0, ("student.generate",), True)
    judged = made.ancestor("scores", 40.0, ("teacher.judge",), True)
    judged = judged.model_copy(update={"parents": (written.key,)})
    pairs = made.ancestor("pairs", 5.0, ("data.preferences",), True)
    return written, judged, pairs.model_copy(update={"parents": (written.key, judged.key)})


def test_judgments_of_what_one_student_wrote_are_for_that_student(made) -> None:
    lineage = written_by_a_student(made)
    record = made.make_record("DPO", 0, [made.Part("student.train", 9.0, 80.0)], measured=True, lineage=lineage)
    parts = {part.stage: part for part in all_parts(record)}
    assert not any(part.shared for part in parts.values())
    assert parts["teacher.judge"].is_teachers and parts["teacher.judge"].is_for_one_student
    assert run_bill(record, students=10).whole.energy_j == pytest.approx(155.0)


def test_a_teacher_that_once_wrote_as_a_student_is_shared(made) -> None:
    """Its training, its completions and their scores made the teacher, which serves all of its students."""
    stages = ("student.train", "student.generate", "teacher.score")
    teacher = made.ancestor("final_model", 90.0, stages, True).model_copy(update={"used_as": "teacher"})
    cache = made.ancestor("cache", 30.0, ("teacher.logits",), True).model_copy(update={"parents": (teacher.key,)})
    assert shared_keys((teacher, cache)) == {"key-final_model", "key-cache"}
    as_student = teacher.model_copy(update={"used_as": None})
    bill = Bill(artifact=as_student, made_at="", code_version="", inputs={})
    assert artifact_bill(bill, Path(), students=10).whole.energy_j == pytest.approx(90.0), "an on-policy student"
