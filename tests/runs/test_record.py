"""Stages declare whose work they are and what is done; records of the first release are read by their names."""

import re

import pytest

from joulelab.errors import CorruptedFile, JoulelabError
from joulelab.runs.artifacts import read_bill
from joulelab.runs.attempt_data import read_events
from joulelab.runs.paths import RunPaths, read_json, write_json
from joulelab.runs.record import Check, PhaseRecord, RunRecord, Validity, current_phase, kind_by_name
from joulelab.runs.store import load_record, read_record


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


# Names that the first version spelled in British English or in words of its own -> their current spelling.
EARLIER_NAMES = {
    "cpu_contention": "crowded",
    "optimizer_step": "optimiser_step",
    "sm_utilization_percent": "sm_utilisation_percent",
    "other processes": "neighbours",
    "artifact": "artefact",
}


def in_earlier_names(text):
    for current, earlier in EARLIER_NAMES.items():
        text = re.sub(f'"{current}":', f'"{earlier}":', text)
        text = re.sub(f'("(?:kind|phase|name)": ?)"{current}"', rf'\1"{earlier}"', text)
    return text


def test_a_record_in_earlier_names_is_read_under_the_current_ones(folder):
    record = load_record(folder)
    stage = record.stages[-1]
    times = dict.fromkeys(("sum_s", "mean_s", "p50_s", "p95_s", "max_s"), 0.5)
    stage = stage.model_copy(
        update={
            "name": "student.train",
            "phases": {"optimizer_step": PhaseRecord(count=1, **times)},
            "best": stage.best.model_copy(update={"cpu_contention": True}),
            "validity": Validity(grade="A", checks=(Check(name="other processes", ok=True, grade="A", text="none"),)),
        }
    )
    findings = {
        "student.train": {"simple": {"phases": [{"phase": "optimizer_step"}]}},
        "infer": {"row": {"state": {"sm_utilization_percent": {"median": 97.0}}}},
    }
    expected = record.model_copy(update={"stages": (stage,), "findings": findings})
    written = in_earlier_names(expected.model_dump_json())
    assert all(f'"{name}"' in written for name in EARLIER_NAMES.values() if name != "artefact")
    assert RunRecord.model_validate_json(written) == expected


def test_a_record_with_a_result_that_was_no_number_is_read_without_it(folder):
    record = read_json(folder / "run.json")
    write_json(folder / "run.json", {**record, "results": {"loss": {"value": None}, "accuracy": {"value": 0.5}}})
    assert set(load_record(folder).results) == {"accuracy"}


def test_windows_of_measured_programs_keep_the_names_that_users_gave_them():
    assert current_phase("program.run", "optimiser_step") == "optimiser_step"
    assert current_phase("student.train", "optimiser_step") == "optimizer_step"


def test_events_and_bills_in_earlier_names_are_read(folder):
    (path,) = (folder / "events").glob("*.jsonl")
    expected = read_events(path)
    assert expected.bills
    path.write_text(in_earlier_names(path.read_text()))
    assert '"kind":"artefact"' in path.read_text().replace(": ", ":")
    assert read_events(path).bills == expected.bills
    (bill_path, *_) = (folder / "artifacts").glob("*/bill.json")
    bill = read_bill(bill_path.parent)
    bill_path.write_text(in_earlier_names(bill_path.read_text()))
    assert '"artefact"' in bill_path.read_text()
    assert bill is not None and read_bill(bill_path.parent) == bill


@pytest.mark.parametrize("wrong", [{"seed": "{0}"}, {"energy": []}, {"label": 3}])
def test_a_record_whose_settings_have_other_types_is_corrupted(folder, wrong):
    record = read_json(folder / "run.json")
    write_json(folder / "run.json", {**record, "spec": {**record["spec"], **wrong}})
    with pytest.raises(CorruptedFile):
        read_record(RunPaths(folder))
