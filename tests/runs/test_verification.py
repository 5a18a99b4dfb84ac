"""A forged figure is found in whatever field it is; an honest record of the first release is never called forged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from joulelab.cli.unpack import unpack as unpack_verb
from joulelab.errors import InvalidMeasurement
from joulelab.runs import attempt_data
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.packing import pack
from joulelab.runs.unpacking import unpack
from joulelab.runs.verification import verify_runs

FIRST = Path(__file__).parent / "first_release"


@pytest.fixture
def judged(play):
    """A run of this version with an accuracy and the predictions that it comes from."""
    from joulelab.runs.record import Result

    def story(run):
        def make(folder):
            with run.stage("student.evaluate", role="student", activity="evaluate") as stage:
                sum(range(10_000_000))
                stage.count(samples=10, tokens=500)
            np.savez(folder / "predictions.npz", labels=np.ones(10), predicted=np.arange(10) < 7)

        run.artifact("student-predictions", kind="predictions", inputs={}, parents=[], make=make)
        run.result("student.accuracy", Result(value=0.7, trials=10, successes=7))

    play(story)
    return play.paths.folder


@pytest.fixture
def old(tmp_path):
    """A distillation that the first release recorded and packed."""
    return next((unpack(FIRST / "demo-kd.tar.gz", tmp_path / "old") / "runs").iterdir())


def wrong(folder):
    return {check.figure: check for check in verify_runs([folder]) if not check.good}


def edit(path, change):
    content = read_json(path)
    change(content)
    write_json(path, content)


def edit_marks(folder, kind, change):
    for path in (folder / "events").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == kind:
                change(line)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def stage(record, name="student.evaluate"):
    return next(stage for stage in record["stages"] if stage["name"] == name)


def made(record, name):
    return next(ancestor for ancestor in record["lineage"] if ancestor["name"] == name)


def forge_accuracy(folder, *, marks=False, predictions=False):
    """In the record and its summary; also in the result's mark; also in the predictions and their list."""
    better = {"value": 0.9, "trials": 10, "successes": 9}
    edit(folder / "run.json", lambda record: record["results"]["student.accuracy"].update(better))
    edit(folder / "experiment_summary.json", lambda flat: flat.update({"student.accuracy": 0.9}))
    if marks:
        edit_marks(folder, "result", lambda line: line["result"].update(better))
    if predictions:
        file = folder / "artifacts" / "student-predictions" / "predictions.npz"
        np.savez(file, labels=np.ones(10), predicted=np.arange(10) < 9)


def test_an_honest_run_is_right_in_every_field(judged):
    checks = verify_runs([judged])
    assert {check.verdict for check in checks} == {"matches"}
    assert {"results", "rates and J per item", "times", "counts", "environment", "energy and intervals"} <= {
        check.subject for check in checks
    }


def test_a_forged_accuracy_is_found_by_marks_by_predictions_and_by_their_sum(judged):
    forge_accuracy(judged)
    assert wrong(judged)["results.student.accuracy.value"].recomputed == 0.7
    forge_accuracy(judged, marks=True)
    found = wrong(judged)["results.student.accuracy.value"]
    assert (found.recorded, found.recomputed, found.reason) == (0.9, 0.7, "from student-predictions")
    forge_accuracy(judged, marks=True, predictions=True)
    assert list(wrong(judged)) == ["files.student-predictions/predictions.npz.crc32"]


FORGERIES = {
    "duration": lambda record: stage(record).update(duration_s=0.01),
    "tokens": lambda record: stage(record).update(tokens=5000),
    "J per token": lambda record: stage(record).update(j_per_token=1e-9),
    "stage's grade": lambda record: stage(record)["validity"].update(grade="A"),
    "run's grade": lambda record: record["validity"].update(grade="A"),
    "check": lambda record: record["validity"]["checks"][0].update(ok=True, grade="A"),
    "interval": lambda record: record["totals"]["best"].update(half_width_j=1e-6),
    "device": lambda record: record["attempts"][0]["devices"][0].update(name="NVIDIA B200"),
    "coverage": lambda record: record["totals"]["best"].update(coverage=0.5),
    "method": lambda record: record["totals"]["best"].update(method="counter"),
    "setting": lambda record: record["spec"].update(seed=99),
    "label": lambda record: record.update(label="better method"),
    "older method": lambda record: record.update(method_version=1),
    "note left out": lambda record: record["validity"].update(notes=[]),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_field_of_the_record_is_found(judged, tmp_path, forgery):
    edit(judged / "run.json", forgery)
    pack([judged], [], tmp_path / "x.zip")
    with pytest.raises(InvalidMeasurement, match="do not follow from traces and marks") as error:
        unpack_verb(tmp_path / "x.zip", tmp_path / "out", verify=True)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("key", ["packages", "python", "cpu", "gpus", "command", "host", "variables"])
def test_a_forged_environment_is_found_by_the_digest_in_the_marks(judged, key):
    edit(judged / "environment.json", lambda facts: facts.update({key: "another"}))
    assert f"environment.{key}" in wrong(judged)


def test_an_environment_whose_digest_was_taken_out_is_found(judged):
    edit_marks(judged, "run", lambda line: line.pop("environment", None))
    assert list(wrong(judged)) == ["environment"]


def test_a_secret_that_was_redacted_is_no_forgery_and_named(judged):
    edit(judged / "environment.json", lambda facts: facts.update(command=["run", "--token", "<redacted>"]))
    assert wrong(judged) == {}
    assert [check.figure for check in verify_runs([judged]) if check.verdict == "redacted"] == ["environment.command"]


def test_a_run_that_never_ended_cannot_call_itself_done(judged):
    edit_marks(judged, "run", lambda line: line.pop("status", None))
    assert list(wrong(judged)) == ["status"]


def test_a_record_of_a_later_method_is_not_judged(judged):
    edit(judged / "run.json", lambda record: record.update(method_version=99))
    reasons = {check.reason for check in wrong(judged).values()}
    assert len(reasons) == 1
    assert "method version 99" in reasons.pop()


def halve(value):
    """Every joule, watt and rate of a record, so that it agrees with itself."""
    if isinstance(value, list):
        return [halve(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    scaled = ("energy_j", "half_width_j", "above_idle_j", "_power_w", "power_w", "j_per_token", "j_per_sample", "_kwh")
    return {
        key: inner / 2 if isinstance(inner, float) and key.endswith(scaled) else halve(inner)
        for key, inner in value.items()
    }


OLD_FORGERIES = {
    "accuracy": lambda record: record["results"]["student.accuracy"].update(value=0.99),
    "duration": lambda record: stage(record, "student.train").update(duration_s=0.5),
    "tokens": lambda record: stage(record, "student.train").update(tokens=10**6),
    "J per token": lambda record: stage(record, "student.train").update(j_per_token=1e-9),
    "energy of a stage": lambda record: stage(record, "teacher.train")["best"].update(energy_j=1.0),
    "estimate of a stage": lambda record: stage(record, "teacher.train")["energy"]["cpu_estimate"].update(energy_j=1.0),
    "total": lambda record: record["totals"]["cpu_estimate"].update(energy_j=30.0),
    "grade": lambda record: record["validity"].update(grade="A"),
    "segment": lambda record: stage(record, "student.train")["segments"][0].update(end_ns=1),
    "artifact": lambda record: made(record, "teacher")["energy"]["cpu_estimate"].update(energy_j=1e-3),
    "setting": lambda record: record["spec"]["training"].update(epochs=30),
}


@pytest.mark.parametrize("newer", [False, True], ids=["same method", "newer method"])
@pytest.mark.parametrize("forgery", OLD_FORGERIES.values(), ids=OLD_FORGERIES)
def test_a_forged_field_in_an_archive_of_the_first_release_is_found(old, monkeypatch, forgery, newer):
    if newer:
        compute_differently(monkeypatch, 1.01)
    assert wrong(old) == {}
    edit(old / "run.json", forgery)
    assert wrong(old)


def test_joules_halved_everywhere_in_an_archive_of_the_first_release_are_found(old):
    for path in (old / "run.json", old / "experiment_summary.json", *(old / "stages").glob("*.json")):
        write_json(path, halve(read_json(path)))
    for path in old.glob("artifacts/*/bill.json"):
        write_json(path, halve(read_json(path)))
    found = wrong(old)["totals.best.energy_j"]
    assert found.recorded == pytest.approx(found.recomputed / 2)
    assert "far outside both intervals" in found.reason


@pytest.mark.parametrize("key", ["host", "joulelab"])
def test_an_environment_of_the_first_release_is_compared_with_the_trace(old, key):
    edit(old / "environment.json", lambda facts: facts.update({key: "another"}))
    assert list(wrong(old)) == [f"environment.{key}"]
    edit(old / "environment.json", lambda facts: facts["cpu"].update(model="another"))
    assert "environment.cpu.model" in wrong(old)


def compute_differently(monkeypatch, factor):
    """As a later version of the meter: other joules from the same trace."""
    before = attempt_data.component_energy

    def component_energy(*given):
        return before(*given).scaled(factor)

    monkeypatch.setattr(attempt_data, "component_energy", component_energy)


@pytest.mark.parametrize("archive", sorted(FIRST.glob("*.tar.gz")), ids=lambda path: path.name.split(".")[0])
def test_another_method_is_shown_as_newer_and_never_as_forged(archive, tmp_path, monkeypatch, capsys):
    compute_differently(monkeypatch, 1.01)
    unpack_verb(archive, tmp_path / "out", verify=True)
    said = capsys.readouterr().out
    assert "newer method: " in said
    assert " to " in said


def test_over_a_trace_with_faults_the_first_release_may_have_been_far_off(tmp_path, monkeypatch):
    """Its samples failed midway: 347.6 J were recorded of 1,093 J by the counter."""
    folder = next((unpack(FIRST / "samples-failed.tar.gz", tmp_path / "old") / "runs").iterdir())
    compute_differently(monkeypatch, 3.145)
    assert wrong(folder) == {}
    (total,) = [check for check in verify_runs([folder]) if check.figure == "totals.best.energy_j"][:1]
    assert total.verdict == "newer method"
    assert total.reason.startswith("far apart: ")


def test_the_same_difference_inside_one_version_is_wrong(judged, monkeypatch):
    compute_differently(monkeypatch, 1.01)
    assert "totals.best.energy_j" in wrong(judged)


def test_a_file_next_to_the_record_that_states_something_else_is_found(judged, tmp_path):
    for name in ("experiment_summary.json", "stages/01-student.evaluate.json"):
        copied = shutil.copytree(judged, tmp_path / name.replace("/", "-") / judged.name)
        edit(copied / name, lambda content: content.update(duration_s=0.001))
        assert list(wrong(copied)) == [f"{name}.duration_s"]


@pytest.mark.parametrize("name", ["environment.json", "experiment_summary.json", "config.yaml"])
def test_a_file_that_makes_no_sense_is_not_verified_and_ends_nothing(judged, name):
    (judged / name).write_text("[1, 2")
    assert any(check.verdict == "cannot be recomputed" for check in wrong(judged).values())
