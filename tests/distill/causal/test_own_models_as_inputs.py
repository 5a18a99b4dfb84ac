"""A model that an earlier run trained has its energy bill as a teacher or as initial weights."""

import shutil

import pytest

from joulelab.report.energy_sums import parts_of
from joulelab.report.tables.bill_tables import run_bill


@pytest.fixture(scope="module")
def trained(lab, tmp_path_factory):
    return lab.run(tmp_path_factory.mktemp("first"), "sft")


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_a_final_model_keeps_its_bill_as_teacher_and_as_student(lab, trained, tmp_path, role):
    first, paths = trained
    ours = shutil.copytree(paths.artifacts / "final_model", tmp_path / "copied")
    given = {"teacher": {"teacher": {"model": str(ours)}}, "student": {"student": {"model": str(ours), "size": None}}}
    second, _ = lab.run(tmp_path / "runs", "kd", **given[role])
    inherited = {ancestor.name: ancestor for ancestor in second.inherited}
    used = sum(first.stage(name).energy.cpu_estimate.energy_j for name in ("student.train", "student.train.setup"))
    assert inherited["final_model"].made_by == first.run_id
    assert inherited["final_model"].energy["cpu_estimate"].energy_j == pytest.approx(used)
    assert len({ancestor.key for ancestor in second.lineage}) == len(second.lineage)  # each once
    assert str(ours) not in inherited
    (part,) = [part for part in parts_of(second) if part.key == inherited["final_model"].key]
    assert (part.shared, part.is_students) == (role == "teacher", role == "student")
    (line,) = [line for line in run_bill(second, students=10).inherited if line.name == "final_model"]
    assert line.shared is (role == "teacher"), "ten students share the training of their teacher, not of their start"
