"""The page over a whole store: trend, list, links."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.figures import MACHINE_BASE
from joulelab.report.page import write_report
from joulelab.report.store_page import store_page, store_tiles, stored_runs, trend_figure
from joulelab.report.tables.run_list import LIST_TITLES
from joulelab.runs.index import LIST_ROW, VERSION, IndexReporter, per_item, row_of

QUIET = IndexReporter(lambda text: None, lambda count: None)


@pytest.fixture
def store(made, tmp_path: Path) -> Path:
    records = made.demo_records(True)
    group = made.group_of(records).group_id
    write_report(made.write_group(tmp_path, [one.model_copy(update={"group": group}) for one in records], True))
    made.write_run(tmp_path, made.distilled("alone", 7, 826, 131.0, True), True)
    return tmp_path


def test_every_run_is_listed_with_its_energy_and_a_link_to_its_page(made, store: Path) -> None:
    page = store_page(store, QUIET)
    assert page.listing is not None
    grid, lines = page.listing
    assert len(lines) == len(grid.rows) == 8
    links = {str(line.cells[0]): line.link for line in lines}
    alone = next(name for name in links if "alone" in name)
    assert links[alone] == "" and sum(link.startswith("groups/") for link in links.values()) == 7
    for link in filter(None, links.values()):
        assert (store / link).exists()
    energies = {str(line.cells[0]): line.cells[1] for line in lines}
    record = made.distilled("alone", 7, 826, 131.0, True)
    assert energies[alone].value == record.totals.best.energy_j


def test_rows_of_the_index_change_only_with_its_version(made) -> None:
    """They are computed when a run is read: after a change of their texts, increase VERSION, then change this."""
    row = json.loads(row_of(made.demo_records()[0])[LIST_ROW])
    texts = ("870 J ±70 %, estimated", "teacher", "done", "87.4 %", "99 %", "142 mJ/sample", "2 min 14 s", "C")
    assert (VERSION, *row["cells"][1:9]) == (12, *texts)
    assert dict(zip(LIST_TITLES.split("|"), row["values"], strict=False))["Own energy>"] == 870.0


def test_a_student_that_is_trained_twice_counts_by_its_last_training(made) -> None:
    """A later run finds the first training in the store and has only the second; both are of one kind."""
    record = made.distilled("alone", 7, 826, 131.0, True)
    train = record.stage("student.train")
    before = train.model_copy(update={"name": "student.sft", "j_per_sample": 1.0})
    twice = record.model_copy(update={"stages": [before, *record.stages]})
    assert per_item(twice) == per_item(record)
    assert per_item(record)[0] == "J per sample, student.train"


def test_a_value_that_json_does_not_have_is_shown_and_sorted_as_missing(made) -> None:
    record = made.demo_records()[0]
    results = {name: one.model_copy(update={"value": math.nan}) for name, one in record.results.items()}
    row = row_of(record.model_copy(update={"results": results}))[LIST_ROW]
    assert "NaN" not in row.partition('"values"')[2] and json.loads(row)["values"][4] is None


def test_runs_of_one_kind_have_a_trend_of_energy_per_item_as_recorded(made, store: Path) -> None:
    runs = stored_runs(store, QUIET)
    figure = trend_figure(runs)
    assert figure is not None
    rows = figure.spec["datasets"]["trend"]
    kinds = {row["kind"] for row in rows}
    assert kinds == {kind for kind in kinds if "J per sample, student.train" in kind} and len(kinds) == 3
    records = {record.run_id: record for record in made.demo_records(True)}
    for row in rows:
        assert row["joules"] == pytest.approx(records[row["run"]].stage("student.train").j_per_sample)
    assert not any("alone" in kind for kind in kinds), "one run has no trend"
    assert '"minutes": "%H:%M"' in json.dumps(figure.spec), "13:10 is not shown as 01:10"


def test_the_command_writes_the_page_into_the_store(store: Path) -> None:
    done = CliRunner().invoke(app, ["report", "--store", "--runs-dir", str(store)])
    assert done.exit_code == 0, done.output
    text = (store / "report.html").read_text(encoding="utf-8")
    assert 'id="list-table"' in text and "Energy per item over time" in text and 'href="groups/' in text
    mixed = CliRunner().invoke(app, ["report", "last", "--store", "--runs-dir", str(store)])
    assert isinstance(mixed.exception, UsageError)
    assert isinstance(CliRunner().invoke(app, ["report"]).exception, UsageError)


def test_an_empty_store_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no runs under"):
        store_page(tmp_path, QUIET)


def test_whole_machine_estimates_are_neither_added_to_programs_nor_in_their_trend(made, store: Path) -> None:
    """One trend mixed 289 J of a machine with 18 J of a program, and the sum was labeled `whole machine`."""
    before = store_tiles(stored_runs(store, QUIET))[1]
    record = made.distilled("alone", 8, 826, 131.0, True)
    best = record.totals.best.model_copy(update={"sources": (MACHINE_BASE,), "method": "estimated"})
    totals = record.totals.model_copy(update={"best": best})
    made.write_run(store, record.model_copy(update={"totals": totals}), True)
    runs = stored_runs(store, QUIET)
    tile = store_tiles(runs)[1]
    assert tile.value == before.value and "without 1 whole-machine estimate" in tile.remark
    (kind,) = [one.kind for one in runs if one.whole_machine]
    assert kind == "made-alone, alone, whole machine: J per sample, student.train"
