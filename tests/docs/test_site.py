"""`make docs`: the site builds without a warning, contains every page, and requests nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import ROOT, document

PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
# Elements that make a browser fetch something; a plain link is only followed by a click.
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=["']?(https?:)?//""", re.IGNORECASE)


def navigation() -> list[str]:
    found = re.findall(r"^\s+- .+: ([\w-]+\.md)$", document("mkdocs.yml"), re.MULTILINE)
    return [str(name) for name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_navigation_and_on_the_index_once() -> None:
    assert sorted(navigation()) == PAGES
    linked = re.findall(r"\]\(([\w-]+\.md)\)", document("docs/index.md"))
    assert sorted(linked) == [page for page in PAGES if page != "index.md"]


def test_the_task_pages_are_in_task_order() -> None:
    tasks = ["quickstart", "install", "measure", "compare", "distill", "infer", "slurm", "concepts", "troubleshooting"]
    order = [name.removesuffix(".md") for name in navigation()]
    assert [name for name in order if name in tasks] == tasks
    assert order.index("troubleshooting") < order.index("commands") < order.index("api")


@pytest.mark.slow
def test_every_page_is_built(site: Path) -> None:
    assert not [page for page in PAGES if not (site / page).with_suffix(".html").exists()]


@pytest.mark.slow
def test_the_site_requests_nothing_from_other_hosts(site: Path) -> None:
    pages = [*site.glob("*.html")]
    assert pages
    assert not [page.name for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]
    styles = [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text())]
    assert not styles


@pytest.mark.slow
def test_the_api_page_documents_the_public_names(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in (
        "measure",
        "measured",
        "Measurement",
        "telemetry",
        "load",
        "load_runs",
        "LoadedRuns",
        "JoulelabCallback",
        "EnergyFigure",
        "RunRecord",
    ):
        assert re.search(rf'id="joulelab\.[\w.]*\.{name}"', page), name


def test_the_configuration_is_strict() -> None:
    assert yaml.safe_load(document("mkdocs.yml"))["strict"] is True


def test_the_search_for_requests_finds_one() -> None:
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert FETCHED.search('<script src="//cdn.example/x.js"></script>')
    assert not FETCHED.search('<a href="https://example.org">')
