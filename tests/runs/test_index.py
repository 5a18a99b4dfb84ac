"""The list of a large store comes from one file, which is never wrong for long and never in the way."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from joulelab.cli.browse import list_runs
from joulelab.cli.console import print_grid
from joulelab.meter.trace import read_lines
from joulelab.report.tables.comparison_tables import runs_grid
from joulelab.report.tables.grid import make_grid
from joulelab.runs import index
from joulelab.runs.attempt import create_run
from joulelab.runs.index import INDEX, LISTING, SUMMARY, IndexReporter, listed, listed_run
from joulelab.runs.lock import holding
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import flat_summary
from joulelab.runs.spec import load_spec
from joulelab.runs.store import load_record, read_record


@pytest.fixture
def read(monkeypatch):
    """The names of the runs whose records are opened."""
    names = []
    monkeypatch.setattr(index, "read_record", lambda paths: (names.append(paths.run_id), read_record(paths))[1])
    return names


def output_text(unreadable=None):
    return IndexReporter((unreadable if unreadable is not None else []).append)


def ids(store):
    return [name for (name,) in listed(store, output_text(), ["run_id"])]


def another(folder, name):
    """The same run once more, under another name."""
    made = shutil.copytree(folder, folder.with_name(name))
    record = read_record(RunPaths(made)).model_copy(update={"run_id": name})
    write_json(made / "run.json", record)
    return made


def test_what_is_listed_is_what_the_records_state(folder, store):
    record = load_record(folder)
    ((listing, summary),) = listed(store, output_text(), [LISTING, SUMMARY])
    assert runs_grid([listed_run(listing)]) == runs_grid([record])
    assert json.loads(summary) == flat_summary(record)


def test_a_record_is_read_again_only_when_it_changed(folder, store, read):
    second = another(folder, "made-20260101T000000Z-0001").name
    assert ids(store) == [second, folder.name]
    read.clear()
    assert ids(store) == [second, folder.name]
    assert read == []
    record = read_record(RunPaths(folder))
    write_json(folder / "run.json", record.model_copy(update={"label": "another label"}))
    assert listed(store, output_text(), ["label"]) == [("the label",), ("another label",)]
    assert read == [folder.name]
    shutil.rmtree(store / second)
    assert ids(store) == [folder.name]


def test_a_killed_run_is_read_again_when_its_trace_changes_and_a_living_one_always(folder, store, read):
    paths = RunPaths(folder)
    record = read_record(paths)
    write_json(paths.record, record.model_copy(update={"status": "running"}))
    with holding(folder):
        assert listed(store, output_text(), ["status"]) == [("running",)]
        read.clear()
        ids(store)
        assert len(read) == 1
    trace = paths.traces()[0][2]
    moved = trace.with_name("elsewhere.1.parquet")
    trace.rename(moved)
    lines = [{**line, "host": "elsewhere"} for line in read_lines(moved)]
    moved.unlink()
    dead = moved.with_suffix(".jsonl")
    dead.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(dead, (1e9, 1e9))
    assert listed(store, output_text(), ["status"]) == [("truncated",)]
    read.clear()
    ids(store)
    assert read == []
    os.utime(dead, (1e9, 1.1e9))
    ids(store)
    assert len(read) == 1


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: b"x" * len(raw)])
def test_a_damaged_index_is_made_anew(store, damage):
    before = ids(store)
    (store / INDEX).write_bytes(damage((store / INDEX).read_bytes()))
    assert ids(store) == before
    assert (store / INDEX).stat().st_size > 1000


def test_an_index_of_another_version_is_made_anew(store, read, monkeypatch):
    ids(store)
    monkeypatch.setattr(index, "VERSION", 10**6)
    read.clear()
    ids(store)
    assert len(read) == 1


def test_a_record_that_cannot_be_read_is_reported_and_does_not_hide_the_others(folder, store):
    bad = another(folder, "bad-20260101T000000Z-0001")
    (bad / "run.json").write_text("{")
    unreadable = []
    assert [name for (name,) in listed(store, output_text(unreadable), ["run_id"])] == [folder.name]
    assert "not valid JSON" in unreadable[0]


def test_only_the_groups_of_the_listed_runs_are_listed_and_a_broken_one_is_reported(folder, store, capsys):
    for name, run_id in (("of-it", folder.name), ("of-another", "gone")):
        member = {"label": "x", "seed": 0, "experiment": "demo-kd", "spec": {}, "run_id": run_id}
        output_text = {
            "group_id": name,
            "name": name,
            "about": "",
            "created_at": "",
            "members": [member],
            "varying": {},
        }
        (store / "groups" / name).mkdir(parents=True)
        (store / "groups" / name / "group.json").write_text(json.dumps(output_text))
    (store / "groups" / "broken").mkdir()
    (store / "groups" / "broken" / "group.json").write_text("{")
    list_runs(store, last=1)
    printed = capsys.readouterr()
    assert "of-it" in printed.out and "of-another" not in printed.out and "unreadable" in printed.err


def test_a_store_that_cannot_be_written_is_read_all_the_same(store, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(index, "_write", refuse)
    assert len(ids(store)) == 1
    assert not (store / INDEX).exists()


def test_many_at_once_never_meet_half_an_index_and_none_hides_a_run(folder, store):
    wrong = []

    def look():
        for _ in range(6):
            before = {path.parent.name for path in store.glob("*/run.json")}
            try:
                found = set(ids(store))
            except Exception as error:  # whatever it is, it is told below
                wrong.append(error)
                return
            if not before <= found:
                wrong.append(before - found)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(6):
        made = store.parent / f"made-{number}"
        shutil.copytree(folder, made)
        name = f"made-20260101T00000{number}Z-0001"
        write_json(made / "run.json", read_record(RunPaths(made)).model_copy(update={"run_id": name}))
        made.rename(store / name)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(ids(store)) == 7


def test_a_folder_that_has_only_begun_is_listed(store):
    name = create_run(store, load_spec("demo-kd")).run_id
    assert name in ids(store)


def test_very_many_rows_go_out_in_plain_columns(capsys):
    rows = [(f"run {number}", f"{number} J") for number in range(600)]
    print_grid(make_grid("Runs", "Run|Energy>", rows))
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 602
    assert out[-1] == "run 599   599 J"
    assert out[2] == "run 0       0 J"


def test_listing_imports_neither_torch_nor_pandas(store):
    ids(store)
    program = (
        "import sys; from joulelab.cli.browse import runs; from pathlib import Path; "
        "runs(Path(sys.argv[1]), last=None, compact=False); "
        "print([name for name in ('torch', 'pandas', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "made-" in done.stdout


def odd(folder, name, **changes):
    made = another(folder, name)
    record = json.loads((made / "run.json").read_text())
    (made / "run.json").write_text(json.dumps({**record, **changes}))
    return made


def test_what_a_column_cannot_hold_is_left_out_and_what_cannot_be_read_is_reported(folder, store):
    odd(folder, "huge", spec={"seed": 10**20, "pipeline": ["a", "list"], "energy": {}})
    odd(folder, "undated", created_at="yesterday")
    odd(folder, "unnamed", label="half a pair \ud800")
    headless = odd(folder, "headless", status="running")
    next((headless / "trace").iterdir()).unlink()
    (headless / "trace" / "here.one.jsonl").write_text("{}\n")
    unreadable = []
    found = {
        name: (seed, pipeline)
        for name, seed, pipeline in listed(store, output_text(unreadable), ["run_id", "seed", "pipeline"])
    }
    assert found == {folder.name: (0, "measure"), "unnamed": (0, "measure")}
    named = [next(name for name in ("headless", "huge", "undated") if name in text) for text in unreadable]
    assert sorted(named) == ["headless", "huge", "undated"]
    list_runs(store, None)


def test_a_listed_lower_bound_prints_like_its_record(folder, store):
    """The index skips validation; the parts of a figure must still be what the printing functions read."""
    made = another(folder, "bound")
    record = json.loads((made / "run.json").read_text())
    errors = [{"name": "idle", "joules": [1.0]}, {"name": "missing time", "joules": [2.0]}]
    record["totals"]["best"].update(energy_j=3.0, method="counter", coverage=0.5, lower_bound=True, errors=errors)
    write_json(made / "run.json", record)
    listings = [listed_run(listing) for (listing,) in listed(store, output_text(), [LISTING])]
    (bound,) = [run for run in listings if run.run_id == "bound"]
    assert runs_grid([bound]) == runs_grid([load_record(made)])
    assert any("≥ 3.00 J (50 % covered)" in cell for cell in runs_grid([bound]).rows[0])
