"""Finding runs, and telling a dead one from a living one."""

import os
import re

import pytest

from joulelab import clock
from joulelab.errors import JoulelabError, NotFoundError, UsageError
from joulelab.meter.trace import LineFile, header
from joulelab.runs.attempt import create_run, mark_running
from joulelab.runs.groups import create_group, group_records, queue_members, run_folders_of
from joulelab.runs.lock import holding
from joulelab.runs.paths import slug, write_json
from joulelab.runs.spec import load_spec
from joulelab.runs.store import find_folder, load_record, read_record, run_folders


@pytest.fixture
def store(tmp_path):
    return tmp_path / "runs"


def started(store):
    """A run whose trace has a header only, as after the first instant."""
    paths = create_run(store, load_spec("demo-kd"))
    mark_running(paths)
    LineFile(paths.trace("node", 1)).append(header(program_pid=os.getpid(), devices=[], missing=[], interval_s=0.5))
    return paths


def test_runs_are_named_by_patterns_too_and_one_that_fits_nothing_is_reported(store):
    paths = [create_run(store, load_spec(name)) for name in ("demo-kd", "demo-kd", "demo-labels")]
    assert set(run_folders_of(store, ["demo-kd-*", paths[0].run_id])) == {run.folder for run in paths[:2]}
    with pytest.raises(NotFoundError, match="no run matches 'kd-"):
        run_folders_of(store, ["kd-*"])


def test_a_run_whose_process_lives_is_running_and_has_no_grade_yet(store):
    paths = started(store)
    with holding(paths.folder):
        record = load_record(paths.folder)
    assert (record.status, record.validity.grade, record.validity.checks) == ("running", None, ())
    assert {stage.validity.grade for stage in record.stages} <= {None}
    assert not any("was interrupted" in note.text for note in record.validity.notes)


def test_a_run_whose_process_is_gone_is_truncated_though_no_one_closed_it(store):
    paths = started(store)
    record = load_record(paths.folder)
    assert (record.status, record.validity.grade) == ("truncated", "C")
    assert any("was interrupted" in note.text for note in record.validity.notes)


def test_a_run_that_ends_while_it_is_read_is_not_called_truncated(store, monkeypatch):
    """Its process writes the record, then unlocks: both may fall between the reader's two looks."""
    paths = started(store)

    def ends_now(folder):
        written = read_record(paths)
        write_json(paths.record, written.model_copy(update={"status": "done"}))
        return False

    monkeypatch.setattr("joulelab.runs.store.is_held", ends_now)
    assert load_record(paths.folder).status == "done"


def test_runs_are_found_by_id_part_of_it_path_and_last(store):
    first = create_run(store, load_spec("demo-kd")).folder
    second = create_run(store, load_spec("demo-labels")).folder
    assert find_folder(store, first.name) == first
    assert find_folder(store, "demo-labels") == second
    assert find_folder(store, first.name[-4:]) == first
    assert find_folder(store, str(second)) == second
    assert find_folder(store, "last") in (first, second)
    chosen = create_run(store, load_spec("demo-kd"), folder=store / "demo-kd").folder
    assert find_folder(store, "demo-kd") == chosen, "a whole id goes before the name of another run"


def test_a_folder_is_found_from_inside_and_a_group_there_knows_its_members(store, monkeypatch):
    group = create_group(store, [load_spec("demo-kd")], name="pair")
    (member,) = queue_members(group)
    for place, name in [(group.folder.parent, group.group_id), (group.folder, ".")]:
        monkeypatch.chdir(place)
        assert group_records(find_folder(store, name))[1][0].run_id == member.run_id
    monkeypatch.chdir(member.folder)
    assert find_folder(store, ".").name == member.run_id


def test_an_ambiguous_name_asks_for_more(store):
    create_run(store, load_spec("demo-kd"))
    create_run(store, load_spec("demo-kd"))
    with pytest.raises(UsageError, match="2 runs match"):
        find_folder(store, "demo-kd")


def test_a_whole_name_comes_before_names_that_begin_with_it(store):
    named = create_run(store, load_spec("demo-kd", {"name": "demo"})).folder
    create_run(store, load_spec("demo-kd"))
    assert find_folder(store, "demo") == named
    with pytest.raises(NotFoundError, match=f"did you mean '{named.name}'"):
        find_folder(store, "dmo")


def test_a_folder_that_is_no_run_is_reported_as_none(store, tmp_path):
    create_run(store, load_spec("demo-kd"))
    with pytest.raises(NotFoundError, match=r"a directory without run\.json"):
        find_folder(store, str(tmp_path))


def test_an_unknown_run_is_answered_with_the_nearest(store):
    name = create_run(store, load_spec("demo-kd")).run_id
    with pytest.raises(NotFoundError, match=f"did you mean '{name}'"):
        find_folder(store, name.replace("demo", "dmeo"))


def test_an_empty_store_states_where_it_looked(store):
    with pytest.raises(NotFoundError, match="no runs under"):
        find_folder(store, "x")


def test_a_damaged_record_is_an_error_and_not_a_traceback(store):
    paths = create_run(store, load_spec("demo-kd"))
    paths.record.write_text("{not json")
    with pytest.raises(JoulelabError, match="not valid JSON"):
        load_record(paths.folder)
    paths.record.write_text("{}")
    with pytest.raises(JoulelabError, match="does not match this version"):
        load_record(paths.folder)


def test_runs_are_listed_oldest_first_also_within_a_second(store):
    names = [create_run(store, load_spec(name)).run_id for name in ("demo-kd", "demo-features", "demo-labels")]
    assert [folder.name for folder in run_folders(store)] == names


def test_folder_names_carry_utc_time():
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}", clock.folder_stamp())


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Überblick: KD (α=0.3)", "Überblick-KD-α-0.3"),
        ("蒸留 実験", "蒸留-実験"),
        ("e\u0301tude", "étude"),
        ("<script>alert(1)</script>", "script-alert-1-script"),
        ("../../etc", "etc"),
        ("🔥", "run"),
        ("é" * 200, "é" * 60),
    ],
)
def test_a_name_stays_readable_in_its_folder_in_any_script(name, folder):
    assert slug(name) == folder
