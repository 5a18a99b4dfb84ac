"""Archives that the first release (0.1.0, records of schema version 1) packed: every later version opens them.

`repeat` is `measure --repeat 2 --warmup 1` with the CPU estimate, `demo-kd` a distillation with its own teacher and
cache, `two-cards` a program next to two simulated GPUs (0.4 s waves between 80 and 600 W, in step), and `resumed` a
student that was killed in step 5 and resumed, with the run `demo-kd` whose teacher and cache it reused. In
`samples-failed` the 20 ms samples of a card at 250 W stopped after 1.4 of 4.3 s: 347.6 J were recorded of 1,093. They
were packed without their report pages, to be small.
"""

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
