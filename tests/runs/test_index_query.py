"""SQL over a store: right answers, read-only, and mistakes answered with the way out."""

import csv
import io
import json
import shutil
import sys
import time

import pytest

from joulelab.cli.browse import query
from joulelab.errors import DependencyMissing, UsageError
from joulelab.meter.trace import read_lines
from joulelab.runs.index import IndexReporter, run_query, schema
from joulelab.runs.paths import RunPaths
from joulelab.runs.store import read_record

pytest.importorskip("duckdb", reason="duckdb is not installed: pip install 'joulelab[query]'")
TOLD = IndexReporter(print)


def test_runs_and_stages_state_what_the_record_states(folder, store):
    record = read_record(RunPaths(folder))
    answer = run_query(store, "select run_id, status, cpu_estimate_j, settings->>'$.name', energy_j from runs", TOLD)
    assert answer.rows == [(record.run_id, "done", record.totals.cpu_estimate.energy_j, "made", None)]
    requested = (
        "select s.stage, s.shown_energy_j, tokens, r.label from stages s join runs r using (run_id) order by number"
    )
    stages = [(stage.name, stage.best.energy_j, stage.tokens, "the label") for stage in record.stages]
    assert run_query(store, requested, TOLD).rows == stages


def test_results_are_a_map_by_name_in_a_fresh_and_in_a_stored_index(folder, store):
    record = json.loads((folder / "run.json").read_text())
    results = {"student.accuracy": {"value": 0.75}, "student.loss": {"value": 1.5}}
    (folder / "run.json").write_text(json.dumps({**record, "results": results}))
    for _ in range(2):
        answer = run_query(store, "select results['student.accuracy'], results['student.loss'] from runs", TOLD)
        assert answer.rows == [(0.75, 1.5)]


def test_samples_are_the_lines_of_the_trace_closed_or_not(folder, store):
    ((_, _, path),) = RunPaths(folder).traces()
    lines = list(read_lines(path))
    requested = "select run_id, kind, count(*) from samples where attempt = 1 group by all order by kind"
    closed = run_query(store, requested, TOLD).rows
    assert sum(count for *_, count in closed) == len(lines)
    assert {row[0] for row in closed} == {folder.name}
    path.unlink()
    path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_query(store, requested, TOLD).rows == closed
    busy = run_query(store, "select max(busy_thread_s) from samples where kind = 'estimate'", TOLD).rows[0][0]
    assert busy == max(line["busy_thread_s"] for line in lines if line["kind"] == "estimate")


def test_every_column_of_the_schema_can_be_requested(store):
    for table, columns in schema().items():
        names = ", ".join(name for name, *_ in columns)
        assert len(run_query(store, f"select {names} from {table}", TOLD).columns) == len(columns)


@pytest.mark.parametrize(
    ("sql", "reported"),
    [
        ("select x from runs", "x"),
        ("selec 1", "syntax error"),
        ("drop table runs", "a single SELECT"),
        ("select 1; select 2", "a single SELECT"),
        ("copy (select 1) to '{outside}'", "a single SELECT"),
        ("set enable_external_access = true", "a single SELECT"),
        ("select * from read_csv('{outside}')", "[Pp]ermission"),
        ("select * from '{outside}'", "outside|does not exist|[Pp]ermission"),
    ],
)
def test_anything_but_a_question_to_this_store_is_refused(store, tmp_path, sql, reported):
    outside = tmp_path / "outside.csv"
    outside.write_text("secret\n1\n")
    with pytest.raises(UsageError, match=reported):
        run_query(store, sql.format(outside=outside), TOLD)
    assert outside.read_text() == "secret\n1\n"


def test_the_answer_as_table_csv_and_json(store, capsys):
    requested = "select label, round(duration_s) as s, created_at, error from runs"
    query(requested, runs_dir=store)
    assert "the label" in capsys.readouterr().out
    query(requested, as_csv=True, runs_dir=store)
    ((header), (row)) = csv.reader(io.StringIO(capsys.readouterr().out))
    assert (header, row[0], row[3]) == (["label", "s", "created_at", "error"], "the label", "")
    query(requested, as_json=True, runs_dir=store)
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["label"], found["error"], found["created_at"]) == ("the label", None, row[2])
    query(schema=True)
    assert "cpu_estimate_j" in capsys.readouterr().out


def test_an_answer_too_wide_for_a_table_is_printed_as_records(store, capsys):
    query("select * from runs", runs_dir=store)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 row" and "row 1" in lines
    named = [line.split() for line in lines if line.startswith("  run_id")]
    assert len(named) == 1 and len(named[0]) == 2  # the id on its column's line, whole
    assert max(map(len, lines)) <= 140


def test_without_duckdb_the_way_out_is_reported(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(DependencyMissing) as error:
        run_query(store, "select 1", TOLD)
    assert error.value.hint == 'pip install "joulelab[query]"'


def test_a_trace_that_was_interrupted_does_not_hide_the_others(store, folder):
    shutil.copytree(folder, folder.with_name("cut"))
    trace = next((store / "cut" / "trace").glob("*.parquet"))
    trace.write_bytes(trace.read_bytes()[:-100])
    unreadable = []
    found = run_query(store, "select distinct run_id from samples", IndexReporter(unreadable.append))
    assert found.rows == [(folder.name,)]
    assert len(unreadable) == 1 and "cut" in unreadable[0]


def test_an_endless_query_is_stopped(store):
    endless = "with recursive n(x) as (select 1 union all select x + 1 from n) select count(*) from n"
    begin = time.monotonic()
    with pytest.raises(UsageError, match=r"stopped after 0\.5 s"):
        run_query(store, endless, TOLD, limit_s=0.5)
    assert time.monotonic() - begin < 20


def test_samples_of_a_run_outside_the_store_are_read_too(folder, store, tmp_path):
    """`--run-dir` makes a link in the store."""
    outside = tmp_path / "elsewhere" / folder.name
    outside.parent.mkdir()
    folder.rename(outside)
    folder.symlink_to(outside, target_is_directory=True)
    assert run_query(store, "select distinct run_id from samples", TOLD).rows == [(folder.name,)]
    with pytest.raises(UsageError):
        run_query(store, f"select * from read_csv('{tmp_path}/elsewhere/*')", TOLD)
