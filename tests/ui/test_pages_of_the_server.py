"""Comparisons and trends of the web view are those of the report: same code, same numbers."""

import importlib.util
import json
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest

from joulelab.report.compare.method_rows import select
from joulelab.report.page import page_data, render, selection_page
from joulelab.runs.store import group_folders, run_folders
from joulelab.ui.run_view import report_in_child, report_so_far
from joulelab.ui.store_view import StoreView

MADE = Path(__file__).parents[1] / "report" / "made_records.py"


@pytest.fixture(scope="module")
def made_store(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("made_records", MADE)
    made = importlib.util.module_from_spec(spec)
    sys.modules["made_records"] = made
    spec.loader.exec_module(made)
    store = tmp_path_factory.mktemp("store")
    made.write_group(store, made.demo_records())
    return store


@pytest.fixture(scope="module")
def pages(made_store, start_server):
    running = start_server(made_store)
    yield running
    running.end()


def embedded(html):
    return json.loads(re.search(r'id="report-data">(.*?)</script>', html).group(1))


def test_a_comparison_has_the_numbers_of_the_report_with_the_slider_and_all_exports(pages, made_store):
    (group,) = group_folders(made_store)
    expected = selection_page(select(made_store, [str(group)]), made_store)
    status, _, html = pages.get(f"/groups/{group.name}")
    assert status == 200
    assert embedded(html) == json.loads(json.dumps(page_data(expected)))
    assert 'id="students"' in html, "the slider for students that share the teacher"
    for what in ("md", "tex", "csv", "json"):
        assert f'data-download="{what}"' in html
    runs = "&".join(f"run={folder.name}" for folder in run_folders(made_store))
    status, _, chosen = pages.get(f"/compare?{runs}")
    expected = selection_page(select(made_store, [str(folder) for folder in run_folders(made_store)]), made_store)
    assert (status, embedded(chosen)) == (200, json.loads(json.dumps(page_data(expected))))
    status, headers, offline = pages.get(f"/report.html?group={group.name}")
    assert status == 200 and headers["content-disposition"].startswith("attachment")
    assert embedded(offline) == embedded(html) and "<script src=" not in offline
    assert len(offline) == len(render(selection_page(select(made_store, [str(group)]), made_store)))


def test_the_table_has_teacher_share_quality_and_groups_and_the_trend_is_that_of_the_store_page(pages, made_store):
    data = json.loads(pages.get("/api/runs")[2])
    assert len(data["rows"]) == len(run_folders(made_store)) and [one["name"] for one in data["groups"]]
    (facts,) = json.loads(pages.get("/api/groups")[2]).values()
    (group,) = group_folders(made_store)
    assert [facts["energy"], facts["time"], facts["grade"]] == ["1.76 kJ ±70 %, estimated", "5 min 08 s", "C"]
    tiles = re.sub(r"&nbsp;|\u00a0", " ", pages.get(f"/groups/{group.name}")[2])
    tile = '<dt>Energy</dt><dd><strong class="whole">1.76 kJ ±70 %</strong>'
    assert tile in tiles, "the group's page has the same sum"
    assert sorted(facts["runs"]) == sorted(row["id"] for row in data["rows"])
    shares = [row["cells"][5] for row in data["rows"]]
    assert any(share.endswith("%") for share in shares)
    trend = json.loads(pages.get("/api/trend")[2])
    assert trend["spec"]["datasets"]["trend"]


def test_a_copied_folder_is_a_row_of_its_own_with_its_own_page(made_store, tmp_path):
    source = run_folders(made_store)[0]
    for name in (source.name, "copy-20260101T000000Z-0000"):
        shutil.copytree(source, tmp_path / name)
    rows = json.loads(StoreView(tmp_path).changes(0))["rows"]
    assert {row["id"] for row in rows} == {source.name, "copy-20260101T000000Z-0000"}
    assert {row["cells"][0] for row in rows} == {source.name}  # what the record states


def test_a_run_that_was_away_for_a_moment_is_in_the_table_again(made_store, tmp_path, monkeypatch):
    monkeypatch.setattr("joulelab.ui.store_view.REFRESH_S", 0.0)
    monkeypatch.setattr("joulelab.ui.store_view._LOAD", 1e9)
    source = run_folders(made_store)[0]
    here, away = tmp_path / "store" / source.name, tmp_path / "away"
    shutil.copytree(source, here)
    view = StoreView(here.parent)
    seen = json.loads(view.changes(0))["version"]
    shutil.move(here, away)
    assert json.loads(view.changes(seen))["gone"] == [source.name]
    shutil.move(away, here)
    for since in (0, seen):
        found = json.loads(view.changes(since))
        assert ([row["id"] for row in found["rows"]], found["gone"]) == ([source.name], [])


def test_a_removed_run_leaves_the_table_and_its_page_says_so(pages, made_store):
    version = json.loads(pages.get("/api/runs")[2])["version"]
    assert version >= 1
    status, _, html = pages.get("/runs/gone-20260101T000000Z-0000")
    assert status == 404 and "unknown run" in html and "<script" not in html.replace('<script type="application', "")


def test_the_updates_of_a_running_run_end_when_its_folder_is_removed(server, store, experiment, tmp_path):
    started = experiment(600, "removed")
    threading.Timer(3, shutil.move, (store / started.run_id, tmp_path / "elsewhere")).start()
    status, _, text = server.get(f"/api/runs/{started.run_id}/events")
    assert status == 200 and text.rstrip().endswith('event: ended\ndata: {"status": "unreadable"}')
    assert server.get(f"/runs/{started.run_id}")[0] == 404
    assert not any("Traceback" in line for line in server.errors)


def test_a_long_run_is_read_by_a_process_that_ends_with_the_same_result(store):
    (run,) = run_folders(store)
    here, there = report_so_far(run), report_in_child(run)
    assert (there.tiles, there.grids, there.specs()) == (here.tiles, here.grids, here.specs())
