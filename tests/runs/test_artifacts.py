"""An artifact is checked before it is reused, and only a corrupted one is made again."""

import errno
import json
import os
import zlib

import pytest

from joulelab.errors import DependencyMissing, JoulelabError
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.runs import artifacts
from joulelab.runs.artifacts import (
    BILL,
    CONTENTS,
    SET_ASIDE,
    Ancestor,
    Bill,
    ancestry_of,
    artifact_key,
    crc32,
    error_text,
    find_damage,
    find_shards,
    list_contents,
    read_bill,
    spent_between,
    unmetered,
    with_use,
    write_bill,
)
from joulelab.runs.context import WorkerContext
from joulelab.runs.pack import STORE, pack, unpack
from joulelab.runs.paths import read_json, write_json

WEIGHTS, WORDS = "weights.bin", "tokenizer/words.txt"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    written = bytearray(path.read_bytes())
    written[len(written) // 2] ^= 1
    path.write_bytes(written)


def lose(path):
    path.unlink()


DAMAGES = pytest.mark.parametrize(
    ("damage", "output_text"),
    [
        (lose, f"{WORDS} is missing"),
        (cut, f"{WORDS} has 14 bytes instead of 15"),
        (flip, f"the checksum of {WORDS} does not match"),
    ],
)


def write_files(folder):
    (folder / WEIGHTS).write_bytes(bytes(range(100)))
    (folder / WORDS).parent.mkdir()
    (folder / WORDS).write_bytes(b"one\r\ntwo\r\nthree")


def pipeline(run, opens=None):
    """As users write theirs: nothing but `run.artifact`."""

    def make(folder):
        with run.stage("model.train"):
            write_files(folder)

    return run.artifact("final_model", kind="model", inputs={}, parents=[], make=make, opens=opens)


def warnings(record):
    return " ".join(note.text for note in record.validity.notes)


@pytest.fixture
def made(tmp_path):
    write_files(tmp_path)
    list_contents(tmp_path)
    return tmp_path


@DAMAGES
def test_what_a_disk_does_to_a_file_is_seen_and_reported(made, damage, output_text):
    assert find_damage(made) is None
    damage(made / WORDS)
    assert find_damage(made) == output_text


def test_another_runs_damaged_artifact_is_set_aside_and_made_again_with_a_warning(play):
    first = play(pipeline)
    folder = play.paths.artifacts / "final_model"
    flip(folder / WEIGHTS)
    made = play(pipeline)
    assert made.stage("model.train") is not None
    output_text = f"Ignoring final_model from {first.run_id}: it is corrupted (the checksum of {WEIGHTS} does not match"
    assert output_text in warnings(made)
    assert sorted(path.name for path in folder.glob("bill*")) == [SET_ASIDE]
    found = play(pipeline)
    assert (found.stage("model.train"), found.inherited[0].made_by) == (None, made.run_id)


def test_what_an_earlier_attempt_of_the_same_run_made_is_looked_at_too(play):
    def broken(run):
        pipeline(run)
        raise JoulelabError("later")

    with pytest.raises(JoulelabError, match="later"):
        play(broken)
    cut(play.paths.artifacts / "final_model" / WORDS)
    record = play.again(pipeline)
    assert {segment.attempt for segment in record.stage("model.train").segments} == {1, 2}
    assert "14 bytes instead of 15" in warnings(record)


def test_a_resumed_run_reports_why_something_is_made_again(play):
    def made_from(version):
        def pipeline(run):
            run.progress.write = messages.append
            run.artifact("data", kind="data", inputs={"version": version}, parents=[], make=lambda folder: None)
            if version == 1:
                raise JoulelabError("later")

        return pipeline

    messages = []
    with pytest.raises(JoulelabError, match="later"):
        play(made_from(1))
    assert messages == []
    play.again(made_from(2))
    assert messages == ["Recreating data: the code or its inputs have changed"]


def test_an_older_one_that_is_whole_is_taken_instead_of_a_damaged_one(play):
    first = play(pipeline)
    play(pipeline, reuse_artifacts=False)
    lose(play.paths.artifacts / "final_model" / WEIGHTS)
    record = play(pipeline)
    assert (record.stage("model.train"), record.inherited[0].made_by) == (None, first.run_id)


def test_a_following_rank_leaves_it_to_the_first_to_report_it_and_to_set_it_aside(play, tmp_path):
    play(pipeline)
    bill = play.paths.artifacts / "final_model" / BILL
    lose(bill.with_name(WEIGHTS))

    def story(run):
        adjacent = WorkerContext(run.paths, run.spec, run.meter, run.stop, run.attempt, tmp_path / "scratch")
        assert pipeline(adjacent).folder == tmp_path / "scratch" / "final_model"
        assert bill.exists()

    assert "damaged" not in warnings(play(story))


@pytest.mark.parametrize("with_artifacts", [True, False])
def test_an_unpacked_artifact_is_taken_where_its_files_came_along(play, tmp_path, with_artifacts):
    play(pipeline)
    pack([play.paths.folder], [], tmp_path / "x.zip", artifacts=with_artifacts)
    store = unpack(tmp_path / "x.zip", tmp_path / "out") / STORE
    record = play(pipeline, store=store)
    assert (record.stage("model.train") is None) == with_artifacts
    assert (f"{WORDS} is missing" in warnings(record)) != with_artifacts


def test_a_damaged_share_is_not_joined_unless_somebody_sorts_it_out(play):
    whole = "0123456789abcdef"

    def split(run):
        for share in ("0/2", "1/2"):
            inputs = {"whole": whole, "share": share, "at_once": 1}
            name = f"answers-{share[0]}"
            run.artifact(name, kind="answers-part", inputs=inputs, parents=[], make=write_files)

    play(split)
    flip(play.paths.artifacts / "answers-1" / WEIGHTS)
    seen = []

    def join(run):
        def make(folder):
            seen.append([part.bill.artifact.name for part in run.find_shards(whole, include_damaged=True)])
            seen.append([part.bill.artifact.name for part in run.find_shards(whole)])

        run.artifact("answers", kind="answers", inputs={}, parents=[], make=make)

    assert "answers-1" in warnings(play(join))
    assert seen == [["answers-0", "answers-1"], ["answers-0"]]


def test_one_of_an_older_version_has_no_list_and_is_accepted(play):
    play(pipeline)
    folder = play.paths.artifacts / "final_model"
    flip(folder / WEIGHTS)
    (folder / CONTENTS).unlink()
    assert play(pipeline).stage("model.train") is None
    assert play(lambda run: pipeline(run, opens=lambda place: int("three"))).stage("model.train") is not None


def test_sizes_without_sums_are_compared_as_they_were(made):
    write_json(made / CONTENTS, {"bytes": read_json(made / CONTENTS)["bytes"]})
    flip(made / WEIGHTS)
    assert find_damage(made) is None
    cut(made / WEIGHTS)
    assert find_damage(made) == f"{WEIGHTS} has 99 bytes instead of 100"


def test_large_files_are_reported_by_their_size_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "SUMMED_BYTES", 15)
    write_files(tmp_path)
    list_contents(tmp_path)
    assert list(read_json(tmp_path / CONTENTS)["crc32"]) == [WORDS]
    flip(tmp_path / WEIGHTS)
    assert find_damage(tmp_path) is None
    flip(tmp_path / WORDS)
    assert find_damage(tmp_path) == f"the checksum of {WORDS} does not match"


def test_files_that_come_later_a_settled_bill_and_links_are_no_harm(tmp_path):
    folder, elsewhere = tmp_path / "made", tmp_path / "large.bin"
    folder.mkdir()
    elsewhere.write_bytes(b"x" * 10)
    (folder / "linked.bin").symlink_to(elsewhere)
    (folder / BILL).write_text("of what was copied here")
    list_contents(folder)
    (folder / BILL).write_text("of this run")
    (folder / "notes.txt").write_text("mine")
    assert find_damage(folder) is None
    elsewhere.unlink()
    assert find_damage(folder) == "linked.bin is missing"


def test_a_reader_states_what_only_it_can_see_and_what_it_lacks_itself_is_no_damage(made):
    def fails(folder):
        raise EOFError

    def lacks(folder):
        raise DependencyMissing("no reader")

    def has_no_file_left(folder):
        raise OSError(errno.EMFILE, "too many open files")

    assert find_damage(made, fails) == "EOFError"
    for reader, error in ((lacks, DependencyMissing), (has_no_file_left, OSError)):
        with pytest.raises(error):
            find_damage(made, reader)


def test_a_truncated_list_is_damage_and_a_file_of_the_maker_is_not_replaced(made):
    cut(made / CONTENTS)
    cut(made / CONTENTS)
    assert "is not valid JSON" in find_damage(made)
    (made / CONTENTS).write_text('["mine"]')
    with pytest.raises(JoulelabError, match="reserved for the list") as output_text:
        list_contents(made)
    assert (made / CONTENTS).read_text() == '["mine"]'
    assert output_text.value.hint == "rename the file"


@pytest.mark.parametrize("joules", ["-1.0", "Infinity", "1e400", "NaN"])
def test_a_bill_with_impossible_energy_is_refused(folder, joules):
    artifact = folder / "artifacts" / "weights"
    bill = json.loads((artifact / "bill.json").read_text())
    assert read_bill(artifact) is not None
    next(iter(bill["artifact"]["energy"].values()))["energy_j"] = "here"
    (artifact / "bill.json").write_text(json.dumps(bill).replace('"here"', joules))
    assert read_bill(artifact) is None


def ancestor(key, kind="model", **fields):
    return Ancestor(key=key, name=key, kind=kind, made_by="run", energy={}, **fields)


def bill_of(artifact, *ancestry, **inputs):
    return Bill(artifact=artifact, ancestry=ancestry, made_at="", code_version="", inputs=inputs)


def test_a_teacher_counts_with_its_whole_bill_and_data_alone():
    bill = bill_of(ancestor("model"), ancestor("older"))
    for role, older in (("teacher", "teacher"), ("data", None), ("student", None)):
        used = with_use(bill, role)
        assert (used.artifact.used_as, used.ancestry[0].used_as) == (role, older)
    assert with_use(bill, None) is bill


def test_an_ancestor_that_is_reached_twice_counts_once_in_its_main_role():
    shared = ancestor("shared")
    teacher = with_use(bill_of(ancestor("t"), shared), "teacher")
    student = bill_of(ancestor("s"), shared.model_copy(update={"used_as": "student"}))
    found = {one.key: one.used_as for one in ancestry_of([teacher, student])}
    assert found == {"shared": "student", "t": "teacher", "s": None}
    assert {one.key: one.used_as for one in ancestry_of([teacher])} == {"shared": "teacher", "t": "teacher"}
    plain = bill_of(ancestor("s"), shared)
    assert {one.key: one.used_as for one in ancestry_of([teacher, plain])}["shared"] is None


def test_energy_of_a_bill_so_far_is_a_difference_and_never_negative():
    def figure(energy_j):
        return EnergyFigure(energy_j=energy_j, method="counter")

    before = {"gpu": figure(10.0), "cpu": figure(5.0), "dram": missing("none"), "node": figure(1.0)}
    after = {"gpu": figure(16.0), "cpu": figure(4.0), "dram": figure(3.0), "node": missing("gone")}
    found = {name: one.energy_j for name, one in spent_between(before, after).items()}
    assert found == {"gpu": 6.0, "cpu": 0.0, "dram": 3.0, "node": None}


def test_the_split_with_the_largest_finished_part_is_joined_with_the_newest_of_each_shard(tmp_path):
    def write(run, number, of, at_once, seconds):
        folder = tmp_path / run / "artifacts" / "logits"
        folder.mkdir(parents=True)
        part = ancestor(f"{run}-key", "logits" + artifacts.PART)
        write_bill(folder, bill_of(part, whole="key", share=f"{number}/{of}", at_once=at_once))
        os.utime(folder / BILL, (seconds, seconds))

    write("a", 1, 2, 8, 100)
    write("b", 1, 2, 8, 200)
    write("c", 2, 4, 8, 300)
    write("d", 1, 4, 8, 400)
    assert [part.key for part in find_shards(tmp_path, "key", lambda part: True)] in (["b-key"], ["d-key", "c-key"])
    write("e", 3, 4, 8, 500)
    assert [part.key for part in find_shards(tmp_path, "key", lambda part: True)] == ["d-key", "c-key", "e-key"]
    found = find_shards(tmp_path, "key", lambda part: part.key in ("a-key", "d-key"))
    assert [part.key for part in found] == ["a-key"]
    assert found[0].reused and found[0].bill.schema_version == 1
    assert find_shards(tmp_path, "other", lambda part: True) == []


def test_small_files_have_checksums_until_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "SUMMED_BYTES", 10)
    for name, size in (("a", 6), ("b", 4), ("c", 1)):
        (tmp_path / name).write_bytes(b"x" * size)
    list_contents(tmp_path)
    listed = read_json(tmp_path / CONTENTS)
    assert listed["bytes"] == {"a": 6, "b": 4, "c": 1}
    assert listed["crc32"] == {"c": zlib.crc32(b"x"), "b": zlib.crc32(b"xxxx")}
    (tmp_path / "a").write_bytes(b"x" * 5)
    list_contents(tmp_path)
    assert read_json(tmp_path / CONTENTS)["crc32"].keys() == {"a", "b", "c"}


def test_a_checksum_is_of_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "_BLOCK_BYTES", 4)
    (tmp_path / "a").write_bytes(b"123456789")
    assert crc32(tmp_path / "a") == zlib.crc32(b"123456789") == 0xCBF43926


def test_errors_keys_and_unmetered_work():
    assert (error_text(KeyError("x")), error_text(KeyError()), error_text(ValueError("no"))) == (
        "missing key x", "KeyError", "no",
    )  # fmt: skip
    assert artifact_key("m", {"a": 1, "b": 2}, ["x", "y"], "c") == artifact_key("m", {"b": 2, "a": 1}, ["y", "x"], "c")
    assert len(artifact_key("m", {}, [], "c")) == 24
    assert unmetered("serving", "key", "no meter").artifact.energy["all"].lower_bound
