"""The web view in a real browser, on runs that are running: what it shows, that it follows, and that it stays local."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from browser import PATIENCE_MS
from commands import shown

from joulelab.meter.figures import amount_text
from joulelab.report.opening import run_tiles
from joulelab.runs.store import load_record

EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


@dataclass
class Visit:
    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser, server):
    """A page that is logged in; afterwards, that nothing was complained about and that no request left the machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    seen = Visit(context.new_page())
    seen.page.on("console", lambda message: seen.problems.append(f"{message.type}: {message.text}"))
    seen.page.on("pageerror", lambda error: seen.problems.append(str(error)))
    context.on("request", lambda sent: seen.requests.append(sent.url))
    seen.page.goto(server.url)
    seen.page.wait_for_selector("html[data-ready]")
    assert seen.page.url == server.address + "/", "the token is not left in the address"
    yield seen
    context.close()
    assert seen.problems == []
    assert len(seen.requests) > 5
    assert [url for url in seen.requests if not url.startswith((server.address + "/", "data:", "blob:"))] == []
    assert [url for url in seen.requests[2:] if server.token in url] == [], "only the first address has the token"


def tiles(page):
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.tile')].map(tile =>"
        " [tile.querySelector('dt').textContent, tile.querySelector('strong').textContent.replaceAll('\\u00a0', ' ')]))"
    )


def test_a_running_experiment_is_followed_to_its_end_and_shows_what_show_prints(visit, server, store, experiment):
    page, run_id = visit.page, experiment(12).run_id
    page.wait_for_selector(f"tr[data-id='{run_id}'] .status.running")  # the table finds it without being loaded again
    finished, running = page.query_selector("tr[data-id^='made-']"), page.query_selector(f"tr[data-id='{run_id}']")
    page.wait_for_function("row => !row.isConnected", arg=running)
    assert finished.evaluate("row => row.isConnected"), "an update of one row replaces no other, so no click is lost"
    page.click(f"tr[data-id='{run_id}'] a")
    page.wait_for_selector("#live-power svg .mark-line path")
    page.wait_for_selector("#live-loss svg")
    early = tiles(page)
    assert {"Energy", "Time", "Stage", "Power now", "Tokens per second", "Loss", "Left in this stage"} <= set(early)
    assert early["Stage"] == "student.train"
    # a grid is set, so what is left is also in CO2e; an estimate of 0 W on a busy machine leaves it out
    page.wait_for_function("document.querySelector('#part-now').innerText.includes('gCO2e')")
    assert "student.train" in page.text_content("#live-power svg"), "stages are bands of the power chart"
    assert "estimate:cpu" in page.inner_text("#part-devices")
    page.wait_for_function(f"document.querySelector('#part-now').innerText.includes({early['Loss']!r}) === false")
    page.wait_for_selector("#live", state="detached")  # the run has ended: its report replaces the live page
    page.wait_for_selector("#verdict")
    assert shown(store, run_id)["status"] == "done"
    record = load_record(store / run_id)
    assert tiles(page) == {tile.title: tile.value for tile in run_tiles(record)}
    assert tiles(page)["Energy"] == amount_text(record.best_energy)


def test_a_killed_run_is_truncated_within_five_seconds_on_both_pages(visit, server, experiment):
    page, started = visit.page, experiment(600, "killed")
    page.wait_for_selector(f"tr[data-id='{started.run_id}'] .status.running")
    other = page.context.new_page()
    other.goto(f"{server.address}/runs/{started.run_id}")
    other.wait_for_selector("#live[data-updates]")
    started.process.send_signal(signal.SIGKILL)
    began_s = time.monotonic()
    page.wait_for_selector(f"tr[data-id='{started.run_id}'] .status.truncated")
    other.wait_for_selector("#verdict")
    assert time.monotonic() - began_s < 5
    assert "killed: truncated" in other.inner_text("#verdict")
    heights = page.evaluate("[...document.querySelectorAll('#store-table tr[data-id]')].map(row => row.offsetHeight)")
    assert max(heights) <= 37, "a lower bound fits its row: scrolling counts on equal heights"


@pytest.mark.slow
def test_stop_asks_first_and_then_ends_the_run_with_its_energy(visit, server, store, experiment):
    page, started = visit.page, experiment(600, "stopped")
    page.goto(f"{server.address}/runs/{started.run_id}")
    page.click("#stop")
    assert "SIGTERM" in page.inner_text("#confirm")
    page.click("#confirm-cancel")
    time.sleep(0.3)
    assert started.process.poll() is None
    page.click("#stop")
    page.click("#confirm-stop")
    started.process.wait(60)
    page.wait_for_selector("#verdict")
    record = load_record(store / started.run_id)
    assert record.status == "truncated" and record.best_energy.energy_j is not None
    assert "SIGTERM" in page.inner_text("main")


@pytest.mark.slow
def test_hostile_names_are_shown_as_text(visit, server, experiment):
    page, started = visit.page, experiment(600, EVIL)
    page.wait_for_selector(f"tr[data-id='{started.run_id}']")
    assert EVIL in page.inner_text(f"tr[data-id='{started.run_id}']")
    page.goto(f"{server.address}/runs/{started.run_id}")
    page.wait_for_selector("#live-power svg")
    assert EVIL in page.inner_text("h1")
    started.process.kill()
    page.wait_for_selector("#verdict")
    assert EVIL in page.inner_text("h1")
    page.goto(f"{server.address}/compare?run={started.run_id}")
    page.wait_for_selector("#verdict")
    assert page.title().startswith(EVIL) and page.evaluate("document.querySelectorAll('img').length") == 0


def test_the_table_filters_sorts_selects_and_compares_by_keyboard(visit, server, store):
    page = visit.page
    page.click("#trend summary")
    page.wait_for_function("document.querySelector('#trend-caption').textContent.includes('trend')")
    assert page.inner_text("#figure-trend") == ""
    page.keyboard.press("/")
    page.keyboard.type("the label")
    page.wait_for_function("document.querySelectorAll('#store-table tbody tr[data-id]').length === 1")
    assert "1 of " in page.inner_text("#store-found") and "find=the+label" in page.url
    page.focus("#store-scroll")
    page.keyboard.press("ArrowDown")
    page.keyboard.press(" ")
    assert page.inner_text("#chosen") == "1 selected"
    page.focus("#compare")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict")
    (made,) = [folder for folder in store.iterdir() if folder.name.startswith("made-")]
    assert tiles(page)["Energy"] == amount_text(load_record(made).best_energy)
    page.go_back()
    page.wait_for_function("document.querySelectorAll('#store-table tbody tr[data-id]').length === 1")
    page.focus("#store-scroll")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict")
    with page.expect_download() as saved:
        page.click("text=Save as one HTML file")
    assert "the label" in saved.value.path().read_text()


@pytest.mark.slow
def test_pages_fit_a_phone_and_are_readable_in_the_dark(browser, server, store, experiment):
    started = experiment(600, "phone")
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("html[data-ready]")
    for path in ("/", f"/runs/{started.run_id}"):
        page.goto(server.address + path)
        page.wait_for_selector("#live-power svg" if "runs" in path else "#store-table tbody tr[data-id]")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"
    page.goto(server.address + "/")
    page.wait_for_selector("#store-table tbody tr[data-id]")
    energy = "[...document.querySelectorAll('#store-table thead th')].find(th => th.innerText.startsWith('Own energy'))"
    assert page.evaluate(f"{energy}.getBoundingClientRect().right <= window.innerWidth"), "joules are in sight"
    context.close()
