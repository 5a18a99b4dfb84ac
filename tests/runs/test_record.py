"""Stages declare whose work they are and what is done; records of the first release are read by their names."""

import pytest

from joulelab.errors import JoulelabError
from joulelab.runs.paths import read_json
from joulelab.runs.record import RunRecord, kind_by_name
from joulelab.runs.store import load_record


def test_a_stage_has_the_role_and_activity_it_was_opened_with(play):
    def story(run):
        quiz = run.stage("coach.quiz", role="teacher", activity="evaluate")
        with run.stage("coach.lesson", role="teacher", activity="train"), quiz:
            pass
        with run.stage("coach.quiz", again=True):
            pass

    record = play(story)
    kinds = {stage.name: (stage.role, stage.activity) for stage in record.stages}
    assert kinds["coach.lesson"] == ("teacher", "train")
    assert kinds["coach.quiz"] == ("teacher", "evaluate")
    assert kinds["run.overhead"] == ("setup", "startup")
    assert record.schema_version == 2


def test_an_unknown_role_is_refused(play):
    def story(run):
        with run.stage("coach.lesson", role="coach"):
            pass

    with pytest.raises(JoulelabError, match="unknown stage role 'coach'"):
        play(story)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("teacher.logits", ("teacher", "cache", None)),
        ("teacher.validate", ("teacher", "validate", None)),
        ("student.sft", ("student", "train", None)),
        ("student.tasks-evaluate", ("student", "evaluate", None)),
        ("model.prepare", ("setup", "load", None)),
        ("model.train.phases", ("setup", "profile", None)),
        ("idle.before", ("idle", "before", None)),
        ("infer.b1-eager", ("inference", "infer", None)),
        ("program.run", ("student", "run", 1)),
        ("program.run.3", ("student", "run", 3)),
        ("program.warmup.1", ("setup", "warmup", None)),
        ("my own stage", ("student", "", None)),
    ],
)
def test_records_without_roles_are_read_by_name(name, kind):
    assert kind_by_name(name)[:3] == kind


def test_a_record_of_schema_version_1_is_read_with_roles(store, folder):
    written = read_json(folder / "run.json")
    written["schema_version"] = 1
    for stage in written["stages"]:
        for field in ("role", "activity", "repeat"):
            stage.pop(field, None)
    record = RunRecord.model_validate(written)
    assert [stage.role for stage in record.stages] == [stage.role for stage in load_record(folder).stages]
    assert record.schema_version == 1
