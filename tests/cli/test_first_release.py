"""Archives that the first release (0.1.0, records of schema version 1) packed: every later version opens them.

`repeat` is `measure --repeat 2 --warmup 1` with the CPU estimate, `demo-kd` a distillation with its own teacher and
cache, `two-cards` a program next to two simulated GPUs (0.4 s waves between 80 and 600 W, in step), and `resumed` a
student that was killed in step 5 and resumed, with the run `demo-kd` whose teacher and cache it reused. In
`samples-failed` the 20 ms samples of a card at 250 W stopped after 1.4 of 4.3 s: 347.6 J were recorded of 1,093. They
were packed without their report pages, to be small.
"""

import json
import re
from pathlib import Path

import pytest
from commands import joulelab_here

ARCHIVES = sorted((Path(__file__).parents[1] / "runs" / "first_release").glob("*.tar.gz"))
NAMES = [path.name.removesuffix(".tar.gz") for path in ARCHIVES]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One store with all of their runs."""
    place = tmp_path_factory.mktemp("first")
    for archive in ARCHIVES:
        done = joulelab_here("unpack", archive, "-o", place / archive.name)
        assert done.returncode == 0, done.stderr
    store = place / "runs"
    store.mkdir()
    for folder in place.glob("*/runs/*"):
        if not (store / folder.name).exists():
            folder.rename(store / folder.name)
    return store


def test_the_recorded_archives_are_small():
    assert len(ARCHIVES) == 5
    assert sum(path.stat().st_size for path in ARCHIVES) < 150_000


@pytest.mark.parametrize("archive", ARCHIVES, ids=NAMES)
def test_an_archive_of_the_first_release_verifies(archive, tmp_path):
    done = joulelab_here("unpack", "--verify", archive, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_the_first_release_is_shown(store, name):
    (folder,) = store.glob(f"{name}-*")
    done = joulelab_here("show", folder.name, "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    assert folder.name in done.stdout


def shown(store, name):
    (folder,) = store.glob(f"{name}-*")
    return json.loads(joulelab_here("show", folder.name, "--json", "--runs-dir", store).stdout)


def test_mean_power_of_the_first_release_is_that_of_covered_time(store):
    """The card drew 250 W; 337.9 J of 31.7 % of the time were shown as 79.3 W."""
    record = shown(store, "samples-failed")
    program = next(stage for stage in record["stages"] if stage["name"] == "program.run")
    assert program["mean_power_w"] == pytest.approx(250, rel=0.02)
    assert program["best"]["energy_j"] == pytest.approx(337.87, abs=0.01), "the stated energy stays"


def test_a_lower_bound_of_the_first_release_has_no_grade_for_its_interval_and_is_one_in_its_total(store):
    record = shown(store, "samples-failed")
    for place in (record, *record["stages"]):
        (interval,) = [check for check in place["validity"]["checks"] if check["name"] == "interval"]
        assert (interval["grade"], interval["ok"]) == ("C", False)
        assert "lower bound" in interval["text"]
    assert record["totals"]["best"]["lower_bound"] and record["totals"]["gpu"]["lower_bound"]
    rows = joulelab_here(
        "query", "SELECT lower_bound, grade FROM runs WHERE name = 'samples-failed'", "--json", "--runs-dir", store
    )
    assert json.loads(rows.stdout) == [{"lower_bound": True, "grade": "C"}]


def test_energy_above_idle_of_the_first_release_has_an_interval(store):
    """The idle stretch of 681 W was not steady, so 68.6 J above it are not known to a joule."""
    record = shown(store, "two-cards")
    found = record["totals"]["above_idle"]
    assert found["energy_j"] == pytest.approx(68.63, abs=0.01)
    assert {error["name"] for error in found["errors"]} >= {"idle"}
    assert found["half_width_j"] > record["totals"]["best"]["half_width_j"]
    text = joulelab_here("show", record["run_id"], "--runs-dir", store, "-v").stdout
    assert re.search(r"above idle +68\.6 J ±", text)


@pytest.mark.parametrize("pair", [("demo-kd", "resumed"), ("repeat", "two-cards")], ids="-".join)
def test_runs_of_the_first_release_are_compared(store, pair):
    folders = [next(store.glob(f"{name}-*")) for name in pair]
    done = joulelab_here("compare", *folders, "--runs-dir", store)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_the_first_release_has_a_report_page(store, name, tmp_path):
    (folder,) = store.glob(f"{name}-*")
    done = joulelab_here("report", folder, "--out", tmp_path / "page.html", "--runs-dir", store)
    assert done.returncode == 0, done.stderr
    assert folder.name in (tmp_path / "page.html").read_text(encoding="utf-8")
