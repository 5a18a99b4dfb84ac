"""The page in a real browser, at desk and phone width: it draws, stays offline, and can be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]
WIDTHS = (1280, 390)
EVIL = "</script><script>document.title='owned'</script>"


@dataclass
class Visit:
    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to look at the page with: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(made, tmp_path_factory) -> Path:
    from joulelab.report.page import write_report

    records = [*made.demo_records(), made.distilled(EVIL, 0, 810, 140.0)]
    return write_report(made.write_group(tmp_path_factory.mktemp("store"), records))


@pytest.fixture(scope="module", params=WIDTHS, ids=["desk", "phone"])
def visit(request, browser, report: Path) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    seen = Visit(context.new_page())
    seen.page.on("console", lambda message: seen.problems.append(f"{message.type}: {message.text}"))
    seen.page.on("pageerror", lambda error: seen.problems.append(str(error)))
    seen.page.on("request", lambda sent: seen.requests.append(sent.url))
    seen.page.goto(report.as_uri())
    seen.page.wait_for_function("[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))")
    yield seen
    context.close()


def test_nothing_is_complained_about_and_nothing_is_fetched(visit: Visit, report: Path) -> None:
    assert visit.problems == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [report.as_uri()]


def test_every_figure_is_drawn_at_a_size_one_can_see(visit: Visit) -> None:
    sizes = visit.page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelectorAll('path').length])"
    )
    assert len(sizes) == 3
    for width, height, paths in sizes:
        assert width > 250 and height > 150 and paths > 5


def test_the_page_does_not_scroll_sideways(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    inside = "[...document.querySelectorAll('.chart svg')].every(s => s.getBoundingClientRect().right <= innerWidth)"
    assert visit.page.evaluate(inside)


def test_no_text_is_smaller_than_12_pixels(visit: Visit) -> None:
    visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    small = visit.page.evaluate(
        """[...document.querySelectorAll('body *')]
        .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
        .filter(e => !['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName))
        .filter(e => parseFloat(getComputedStyle(e).fontSize) < 12)
        .map(e => e.tagName + ': ' + e.textContent.slice(0, 40))"""
    )
    assert small == []


def test_a_script_in_a_run_name_does_not_run(visit: Visit) -> None:
    assert visit.page.title() == "Distilling a film critic - joulelab report"
    assert visit.page.get_by_text(EVIL).first.is_visible()


def test_another_run_can_be_chosen_for_the_power_figure(visit: Visit) -> None:
    shape = "document.querySelector('#power .mark-line path').getAttribute('d')"
    before = visit.page.evaluate(shape)
    visit.page.select_option("#power-run", label="response KD, seed 1")
    visit.page.wait_for_function(f"document.querySelector('#power svg') && {shape} !== {before!r}")
    visit.page.wait_for_function("document.querySelector('#power').ariaLabel.includes('response KD')")
    assert visit.problems == []


def test_every_figure_says_in_words_what_it_shows(visit: Visit) -> None:
    labels = visit.page.evaluate("[...document.querySelectorAll('.chart')].map(c => c.ariaLabel)")
    assert [label.split()[0] for label in labels] == ["Test", "Joules", "Power"]


def test_dark_and_print_keep_text_readable(browser, report: Path) -> None:
    """Contrast of body text and of chart text against the page, by the WCAG formula; 4.5 is its bar for text."""
    contrast = """() => {
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
          .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = light(getComputedStyle(document.body).backgroundColor);
      const inks = [getComputedStyle(document.body).color,
        getComputedStyle(document.querySelector('.chart svg text')).fill,
        getComputedStyle(document.querySelector('.note')).color].map(light);
      return inks.map(i => (Math.max(i, ground) + 0.05) / (Math.min(i, ground) + 0.05));
    }"""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector(".chart svg text")
    assert min(page.evaluate(contrast)) >= 4.5
    page.emulate_media(media="print")
    assert min(page.evaluate(contrast)) >= 4.5
    context.close()
