"""What did this input cost? A model or data set that joulelab made brings its bill, wherever a user puts it."""

import shutil

import pytest

from joulelab.data.inputs import find_bill, input_bill
from joulelab.data.sources import content_hash
from joulelab.distill.prepare.recipe import deliver
from joulelab.report.energy_sums import is_teacher_work, parts_of, run_energy
from joulelab.report.tables.bill_tables import artifact_bill, run_bill
from joulelab.runs.artifacts import Artifact, read_bill
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import RunRecord, kinds_of
from joulelab.runs.store import load_record


@pytest.fixture
def model(play):
    """The folder of a model that a run made: weights, a tokenizer, and a folder with its samples."""

    def story(run):
        def make(folder):
            with run.stage("student.train") as stage:
                sum(range(3_000_000))
                stage.count(tokens=100)
            (folder / "weights.bin").write_bytes(b"w" * 5000)
            (folder / "tokenizer.json").write_text("{}")
            (folder / "samples").mkdir()
            (folder / "samples" / "text.txt").write_text("a sample\n")

        run.artifact("final_model", kind="student", inputs={"a": 1}, parents=[], make=make)

    play(story)
    return play.paths.artifacts / "final_model"


def heir(play, path, role="teacher", **overrides):
    """The record of a run that is given `path` as an input."""
    return play(lambda run: input_bill(run, "an input", str(path), "model", role=role) and None, **overrides)


def energy_of(ancestor):
    return ancestor.energy["cpu_estimate"].energy_j


def settled_j(model):
    record = load_record(model.parent.parent)
    return record.stage("student.train").energy.cpu_estimate.energy_j


@pytest.mark.parametrize("inside", ["", "weights.bin", "samples"])
def test_a_folder_of_a_run_and_what_is_in_it_have_the_bill_of_the_artifact(play, model, inside):
    (teacher,) = heir(play, model / inside).inherited
    assert (teacher.name, teacher.made_by) == ("final_model", model.parent.parent.name)
    assert energy_of(teacher) == settled_j(model) > 0


@pytest.mark.parametrize("with_bill", [True, False])
def test_a_copy_has_the_same_bill_with_and_without_its_bill_file(play, model, tmp_path, with_bill):
    copied = shutil.copytree(model, tmp_path / "elsewhere" / "copied")
    if not with_bill:
        (copied / "bill.json").unlink()
        (copied / "contents.json").unlink()
    (teacher,) = heir(play, copied).inherited
    assert energy_of(teacher) == settled_j(model)
    assert content_hash(copied) == content_hash(model)


def test_a_file_copied_under_another_name_has_the_bill(play, model, tmp_path):
    shutil.copy(model / "weights.bin", tmp_path / "teacher.bin")
    (teacher,) = heir(play, tmp_path / "teacher.bin").inherited
    assert energy_of(teacher) == settled_j(model)
    shutil.copy(model / "tokenizer.json", tmp_path / "any.json")  # not what the artifact consists of
    (other,) = heir(play, tmp_path / "any.json").inherited
    assert other.made_by == "elsewhere"


def test_a_model_of_another_store_has_its_bill(play, model, tmp_path):
    (teacher,) = heir(play, model, store=tmp_path / "other" / "runs").inherited
    assert energy_of(teacher) == settled_j(model)


def test_a_folder_that_changed_since_is_unknown_and_the_run_reports_it(play, model, tmp_path):
    copied = shutil.copytree(model, tmp_path / "tuned")
    (copied / "weights.bin").write_bytes(b"v" * 5000)
    record = heir(play, copied)
    (teacher,) = record.inherited
    assert (teacher.made_by, teacher.energy["all"].method) == ("elsewhere", "missing")
    assert f"changed since {model.parent.parent.name} made it" in teacher.energy["all"].reason
    assert any("changed since" in note.text for note in record.validity.notes)


def test_a_model_that_a_user_saved_inside_one_of_ours_is_not_ours(play, model):
    (model / "tuned").mkdir()
    (model / "tuned" / "weights.bin").write_bytes(b"v" * 4000)
    (teacher,) = heir(play, model / "tuned").inherited
    assert teacher.made_by == "elsewhere"


def test_a_delivered_copy_is_found_by_its_note_after_the_store_was_moved(play, model, tmp_path):
    target = tmp_path / "out" / "model"
    deliver(Artifact(model, read_bill(model), reused=False), model, target)
    runs = model.parents[2]
    (model / "contents.json").unlink()  # so that only the note can lead to it
    assert find_bill(target, (runs,)).key == read_bill(model).key
    moved = runs.rename(tmp_path / "moved")
    assert find_bill(target, (moved,)).key == read_bill(moved / model.relative_to(runs)).key
    (target / "weights.bin").write_bytes(b"x")
    assert find_bill(target, (moved,)) is None


def test_what_an_artifact_was_made_from_is_not_a_copy_of_it(play, tmp_path):
    raw = tmp_path / "raw.txt"
    raw.write_text("text " * 100)

    def story(run):
        bill = input_bill(run, "texts", str(raw), "text", role="data")
        run.artifact("data", kind="d", inputs={}, parents=[bill], make=lambda folder: shutil.copy(raw, folder / "rows"))

    first, second = play(story), play(story)
    assert first.lineage[0].made_by == second.lineage[0].made_by == "elsewhere"
    assert [ancestor.name for ancestor in second.inherited] == [str(raw), "data"]


def test_two_inputs_of_one_name_are_both_in_the_lineage(play, tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(file.name)
    record = play(lambda run: [input_bill(run, "questions", str(file), "text", role="data") for file in files] and None)
    assert [ancestor.name for ancestor in record.inherited] == [str(file) for file in files]


def provisional(model):
    """As the killed run leaves it: a bill with the energy so far, and a record that nobody closed."""
    bill = read_json(model / "bill.json")
    bill["provisional"] = True
    bill["artifact"]["energy"]["cpu_estimate"]["energy_j"] = 0.001
    write_json(model / "bill.json", bill)
    paths = model.parent.parent
    record = read_json(paths / "run.json")
    opened = {**record, "status": "running", "stages": [], "lineage": [], "made": [], "totals": None}
    write_json(paths / "run.json", opened | {"process": None})


def test_the_bill_of_a_killed_run_is_what_its_record_states(play, model, tmp_path):
    price_j = settled_j(model)
    copied = shutil.copytree(model, tmp_path / "copied")
    provisional(model)
    shutil.copy(model / "bill.json", copied / "bill.json")
    for path in (model, copied):
        (teacher,) = heir(play, path).inherited
        assert energy_of(teacher) == pytest.approx(price_j)


def test_an_heir_that_ended_first_shows_the_price_that_the_maker_settled_later(play, model):
    record = heir(play, model)
    written = read_json(play.paths.record)
    written["lineage"][0]["energy"]["cpu_estimate"]["energy_j"] = 0.001  # of the bill while its maker still worked
    write_json(play.paths.record, written)
    assert energy_of(RunRecord.model_validate(written).inherited[0]) == 0.001
    assert energy_of(load_record(play.paths.folder).inherited[0]) == energy_of(record.inherited[0]) == settled_j(model)


def test_a_run_without_a_record_states_no_price(play, model):
    bill = read_bill(model)
    (model.parent.parent / "run.json").write_text("{")
    assert find_bill(model, ()).artifact.energy == bill.artifact.energy


@pytest.fixture
def distilled_model(play):
    """The folder of a student that one run distilled: data, a cache of its teacher's logits, its own training."""

    def make_in(run, stage):
        def make(folder):
            with run.stage(stage):
                sum(range(3_000_000))
            (folder / "weights.bin").write_bytes(stage.encode() * 500)

        return make

    def story(run):
        data = run.artifact("data", kind="d", inputs={}, parents=[], make=make_in(run, "data.preprocess")).bill
        cache = run.artifact("cache", kind="c", inputs={}, parents=[data], make=make_in(run, "teacher.logits")).bill
        parents = [data, cache]
        run.artifact("final_model", kind="s", inputs={}, parents=parents, make=make_in(run, "student.train"))

    play(story)
    return play.paths.artifacts / "final_model"


def roles(record):
    """Of the inherited artifacts: the roles in which they count, and whether N students share them."""
    return {one.name: ("+".join(kind.role for kind in kinds_of(one)), is_teacher_work(one)) for one in record.inherited}


def test_a_model_used_as_teacher_counts_as_teacher_with_its_whole_bill(play, distilled_model):
    """It was made in student.train: its training was in the sum without teacher, and N students did not share it."""
    record = heir(play, distilled_model, role="teacher")
    assert roles(record) == dict.fromkeys(["data", "cache", "final_model"], ("teacher", True))
    assert all(part.shared for part in parts_of(record) if part.inherited)
    train = next(part for part in parts_of(record) if part.key == read_bill(distilled_model).key)
    assert (train.stage, train.makes_the_teacher, train.is_students) == ("student.train, of the teacher", True, False)
    found = run_energy(record)
    assert found.inherited_unshared is None and found.teacher_j == pytest.approx(found.inherited.energy_j)
    bill = run_bill(record, students=10)
    assert bill.inherited_figure.energy_j == pytest.approx(found.inherited.energy_j / 10)


def test_a_model_used_as_the_student_s_start_is_the_student_s_and_its_teacher_s_work_stays_the_teacher_s(
    play, distilled_model
):
    record = heir(play, distilled_model, role="student")
    assert roles(record) == {"data": ("data", False), "cache": ("teacher", True), "final_model": ("student", False)}
    assert [part.stage for part in parts_of(record) if part.is_students] == ["student.train"]
    fine_tuned = heir(
        play, distilled_model.with_name("cache"), role="student"
    )  # a teacher's model as a student's start
    assert roles(fine_tuned) == {"data": ("data", False), "cache": ("student", False)}


def test_data_that_a_teacher_generated_is_teacher_s_work_and_other_data_is_data(play, distilled_model):
    assert roles(heir(play, distilled_model.with_name("cache"), role="data"))["cache"] == ("teacher", True)
    assert roles(heir(play, distilled_model, role="data"))["final_model"] == ("data", False)


@pytest.mark.parametrize("order", [("teacher", "student"), ("student", "teacher")])
def test_of_two_uses_in_one_run_the_one_without_a_teacher_counts(play, distilled_model, order):
    def story(run):
        bills = [input_bill(run, role, str(distilled_model), "model", role=role) for role in order]
        run.artifact("next", kind="n", inputs={}, parents=bills, make=lambda folder: None)

    expected = {"data": ("data", False), "cache": ("teacher", True), "final_model": ("student", False)}
    assert roles(play(story)) == expected
    bill = read_bill(play.paths.artifacts / "next")
    assert {one.name: one.used_as for one in bill.ancestry}["final_model"] == "student"


def test_data_of_the_student_that_its_teacher_was_trained_on_too_is_no_teacher_s_work(play, distilled_model):
    """Only what is there for the teacher alone is left out without a teacher."""

    def story(run):
        input_bill(run, "teacher", str(distilled_model), "model", role="teacher")
        run.artifact("data", kind="d", inputs={}, parents=[], make=lambda folder: pytest.fail("it is reused"))

    expected = {"data": ("data", False), "cache": ("teacher", True), "final_model": ("teacher", True)}
    assert roles(play(story)) == expected


def test_the_use_stays_in_the_bill_of_what_is_made_with_it(play, distilled_model):
    def story(run):
        teacher = input_bill(run, "teacher", str(distilled_model), "model", role="teacher")
        run.artifact("final_model", kind="next", inputs={}, parents=[teacher], make=lambda folder: None)

    play(story)
    bill = find_bill(play.paths.artifacts / "final_model", ())
    assert {one.used_as for one in bill.ancestry} == {"teacher"}
    assert artifact_bill(bill, play.paths.folder.parent, students=4).inherited[-1].shared


def test_an_inference_run_and_a_record_older_than_uses_keep_the_roles_of_the_stages(play, distilled_model):
    expected = {"data": ("data", False), "cache": ("teacher", True), "final_model": ("student", False)}
    assert roles(heir(play, distilled_model, role=None)) == expected
    written = read_json(play.paths.record)
    for one in written["lineage"]:
        del one["used_as"]
    assert roles(RunRecord.model_validate(written)) == expected
