"""A forged figure is found in whatever field it is; an honest record of the first release is never called forged."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from joulelab.cli.archive import unpack as unpack_verb
from joulelab.errors import InvalidMeasurement
from joulelab.runs import attempt_data, first_release
from joulelab.runs.pack import pack, unpack
from joulelab.runs.paths import RunPaths, read_json, write_json
from joulelab.runs.store import read_record
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


def test_a_note_that_this_version_says_in_two_is_not_missing_from_an_earlier_record(judged):
    """The warning about an estimate contained the source of its constants, which is a separate note now."""

    def say_it_in_one(record):
        notes = record["validity"]["notes"]
        (warning,) = [note for note in notes if "ESTIMATED" in note["text"]]
        (source,) = [note for note in notes if " W per hardware thread: " in note["text"]]
        warning["text"] += f" ({source['text']})"
        notes.remove(source)

    edit(judged / "run.json", say_it_in_one)
    assert not [name for name in wrong(judged) if name.startswith("validity.notes")]


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
    with pytest.raises(InvalidMeasurement, match="do not match the traces and marks") as error:
        unpack_verb(tmp_path / "x.zip", tmp_path / "out", verify=True)
    assert error.value.exit_code == 4


def reword(record):
    """As another version of joulelab states the same."""
    for check in record["validity"]["checks"]:
        check["text"] = "In other words: " + check["text"].replace("the ", "")
    for note in record["validity"]["notes"]:
        note["text"] = "Note: " + note["text"]


def test_other_words_for_the_same_numbers_are_no_forgery(judged):
    edit(judged / "run.json", reword)
    assert wrong(judged) == {}


def test_another_number_in_a_text_is_a_forgery(judged):
    edit(judged / "run.json", lambda record: record["validity"]["checks"][0].update(text="all of 97531 readings"))
    assert [figure.rpartition(".")[2] for figure in wrong(judged)] == ["text"]


def test_one_unreadable_record_does_not_end_the_verification_of_the_others(judged, tmp_path, capsys):
    other = judged.parent / "other-20260101T000000Z-aaaa"
    shutil.copytree(judged, other)
    (other / "run.json").write_text('{"run_id": ')
    pack([judged], [], tmp_path / "x.zip")
    found = verify_runs([other, judged])
    (unread,) = [check for check in found if check.run_id == other.name]
    assert (unread.figure, unread.verdict, unread.good) == ("run.json", "cannot be recomputed", False)
    assert "is not valid JSON" in unread.reason
    assert {check.verdict for check in found if check.run_id == judged.name} == {"matches"}


@pytest.mark.parametrize("key", ["packages", "python", "cpu", "gpus", "command", "host", "variables"])
def test_a_forged_environment_is_found_by_the_digest_in_the_marks(judged, key):
    edit(judged / "environment.json", lambda facts: facts.update({key: "another"}))
    (found,) = wrong(judged).values()
    assert found.figure == f"environment.{key}"
    assert "another" in found.recorded


def test_a_forged_cpu_is_listed_once_with_both_names(judged):
    true = read_json(judged / "environment.json")["cpu"]["model"]
    edit(judged / "environment.json", lambda facts: facts["cpu"].update(model="EPYC 9999"))
    (found,) = wrong(judged).values()
    assert (found.figure, found.recorded, found.recomputed) == ("environment.cpu.model", "EPYC 9999", true)


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


JOULES = ("energy_j", "half_width_j", "above_idle_j", "_power_w", "power_w", "j_per_token", "j_per_sample", "_kwh")


def scale(value, factor, fields):
    """These fields of a record times a factor, so that it agrees with itself."""
    if isinstance(value, list):
        return [scale(inner, factor, fields) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner * factor if isinstance(inner, float) and key.endswith(fields) else scale(inner, factor, fields)
        for key, inner in value.items()
    }


def scale_everywhere(folder, factor, fields):
    files = ("run.json", "experiment_summary.json", "stages/*.json", "artifacts/*/bill.json")
    for path in (path for pattern in files for path in folder.glob(pattern)):
        write_json(path, scale(read_json(path), factor, fields))


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


@pytest.fixture(params=sorted(FIRST.glob("*.tar.gz")), ids=lambda path: path.name.split(".")[0])
def any_old(request, tmp_path):
    """The newest run in each archive of the first release."""
    return max((unpack(request.param, tmp_path / "old") / "runs").iterdir(), key=lambda folder: folder.name[-20:])


def test_a_record_of_the_first_release_follows_from_its_rules_to_the_last_digit(any_old):
    record = read_record(RunPaths(any_old))
    inherited = {ancestor.key: ancestor for ancestor in record.inherited}
    again = first_release.recompute(RunPaths(any_old), record, lambda one: inherited.get(one.key, one))
    for stated, expected in zip(record.stages, again.stages, strict=True):
        for field in ("energy_j", "half_width_j", "coverage", "gain_error_rel"):
            one, other = getattr(stated.best, field), getattr(expected.best, field)
            assert one == other or math.isclose(one, other, rel_tol=1e-12), field
        for field in ("mean_power_w", "peak_power_w", "j_per_token", "j_per_sample", "above_idle_j", "tokens_per_s"):
            one, other = getattr(stated, field), getattr(expected, field)
            assert one == other or math.isclose(one, other, rel_tol=1e-12), field
    assert [again.validity.grade, again.totals.best.method] == [record.validity.grade, record.totals.best.method]


@pytest.mark.parametrize(
    ("factor", "fields", "figures"),
    [
        (0.5, JOULES, {"best.energy_j", "best.half_width_j", "mean_power_w"}),
        (1.02, JOULES, {"best.energy_j", "best.half_width_j", "mean_power_w"}),
        (0.1, ("half_width_j",), {"best.half_width_j"}),
    ],
    ids=["joules halved", "joules + 2 %", "narrower intervals"],
)
def test_a_record_of_the_first_release_that_was_scaled_everywhere_is_found(any_old, factor, fields, figures):
    record = read_record(RunPaths(any_old))
    longest = max(record.stages, key=lambda stage: stage.duration_s if stage.best.energy_j else 0.0)
    scale_everywhere(any_old, factor, fields)
    found = wrong(any_old)
    assert "totals.best.half_width_j" in found
    for figure in figures:
        check = found[f"stages.{longest.name}.{figure}"]
        assert check.verdict == "differs"
        assert check.recorded == pytest.approx(factor * check.recomputed)
        assert check.reason == "by the rules of the first release"


def test_the_totals_are_named_first_among_many_forged_figures(old, tmp_path, capsys):
    scale_everywhere(old, 0.5, JOULES)
    pack([old], [], tmp_path / "x.zip")
    with pytest.raises(InvalidMeasurement, match=r"\(\S+: totals\.best\.energy_j, \S+: totals\.best\.half_width_j"):
        unpack_verb(tmp_path / "x.zip", tmp_path / "out", verify=True)
    listed = capsys.readouterr().out.partition("Figures that do not match the traces and marks")[2]
    before, found, _ = listed.partition("totals.best.energy_j")
    assert found and "stages." not in before


def test_a_figure_of_the_first_release_that_was_taken_out_is_found(old):
    edit(old / "run.json", lambda record: stage(record, "student.train")["best"].update(half_width_j=None))
    assert list(wrong(old)) == ["stages.student.train.best.half_width_j"]


@pytest.mark.parametrize("run", ["judged", "old"])
def test_a_forged_figure_is_listed_once_and_its_true_value_is_called_recomputed(run, request):
    folder = request.getfixturevalue(run)
    true = read_json(folder / "run.json")["results"]["student.accuracy"]["value"]
    edit(folder / "run.json", lambda record: record["results"]["student.accuracy"].update(value=0.99))
    checks = verify_runs([folder])
    assert len({check.figure for check in checks}) == len(checks)
    (found,) = [check for check in checks if not check.good]
    assert (found.figure, found.recorded, found.recomputed) == ("results.student.accuracy.value", 0.99, true)


def test_a_summary_is_compared_with_the_evidence_and_not_with_a_forged_record(old):
    true = read_json(old / "experiment_summary.json")["duration_s"]
    edit(old / "run.json", lambda record: record["totals"].update(duration_s=0.1))
    assert list(wrong(old)) == ["totals.duration_s"]
    edit(old / "experiment_summary.json", lambda flat: flat.update(duration_s=0.1))
    assert wrong(old)["experiment_summary.json.duration_s"].recomputed == true


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
    reported = capsys.readouterr().out
    assert "newer method: " in reported
    assert " to " in reported


def test_over_a_trace_with_faults_the_first_release_may_have_been_far_off(tmp_path):
    """Its samples failed midway: 347.6 J were recorded of 1,093 J by the counter."""
    folder = next((unpack(FIRST / "samples-failed.tar.gz", tmp_path / "old") / "runs").iterdir())
    (total,) = [check for check in verify_runs([folder]) if check.figure == "totals.best.energy_j"]
    assert total.verdict == "newer method"
    assert (total.recorded, total.recomputed) == (pytest.approx(347.6, abs=0.1), pytest.approx(1093, abs=1))


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
