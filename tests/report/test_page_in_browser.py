"""The page in a real browser, at desk and phone width: it draws, stays offline, and can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser import PATIENCE_MS
from commands import joulelab_here
from ui_server import Server

from joulelab.meter.figures import labeled_text
from joulelab.report.compare.method_rows import compare
from joulelab.report.compare.scopes import STUDENTS, method_energies
from joulelab.report.page import write_page, write_report
from joulelab.report.store_page import store_page
from joulelab.report.wording import ratio_cell
from joulelab.runs.artifacts import unmetered
from joulelab.runs.index import IndexReporter

WIDTHS = (1280, 390)
OPEN_ALL = "document.querySelectorAll('details.part').forEach(d => { d.open = true; })"
EVIL = "</script><script>document.title='owned'</script>"


@dataclass
class Visit:
    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def report(made, tmp_path_factory) -> Path:
    records = [*made.demo_records(), made.distilled(EVIL, 0, 810, 140.0)]
    return write_report(made.write_group(tmp_path_factory.mktemp("store"), records))


@pytest.fixture(scope="module", params=WIDTHS, ids=["desk", "phone"])
def visit(request, browser, report: Path) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    seen = Visit(context.new_page())
    seen.page.on("console", lambda message: seen.problems.append(f"{message.type}: {message.text}"))
    seen.page.on("pageerror", lambda error: seen.problems.append(str(error)))
    seen.page.on("request", lambda sent: seen.requests.append(sent.url))
    seen.page.goto(report.as_uri())
    seen.page.wait_for_function("[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))")
    opening = "[...document.querySelectorAll('.chart')].map(c => c.checkVisibility({ contentVisibilityAuto: true }))"
    first, *others = seen.page.evaluate(opening)
    assert first and others and not any(others), "the first chart is visible, the details are closed"
    seen.page.evaluate(OPEN_ALL)
    seen.page.wait_for_function("[...document.querySelectorAll('.chart')].every(c => c.dataset.width == c.clientWidth)")
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
    assert len(sizes) == 5
    for width, height, paths in sizes:
        assert width > 250 and height > 150 and paths > 5


def test_the_page_does_not_scroll_sideways(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    inside = "[...document.querySelectorAll('.chart svg')].every(s => s.getBoundingClientRect().right <= innerWidth)"
    assert visit.page.evaluate(inside)


def test_the_first_table_is_whole_on_a_desk_and_scrolls_on_a_phone(visit: Visit) -> None:
    place = "document.querySelector('#overview').closest('.scroll')"
    width, seen = visit.page.evaluate(f"[{place}.scrollWidth, {place}.clientWidth]")
    assert (width <= seen) == (visit.page.viewport_size["width"] > 1000)


def test_the_energy_column_of_every_table_is_visible_without_scrolling(visit: Visit) -> None:
    """Also on a phone: a reader looks for joules."""
    beyond = visit.page.evaluate(
        """[...document.querySelectorAll('table')].filter(t => t.getClientRects().length).map(table => {
          const heads = [...table.tHead.rows[0].cells];
          const head = heads.find(th => /^(Own energy|Energy|Teacher\\s+included|Gross)/.test(th.textContent.trim()));
          const right = head && head.getBoundingClientRect().right;
          return head && right > window.innerWidth ? table.caption.textContent + ': ' + right : null;
        }).filter(Boolean)"""
    )
    assert beyond == []


def test_commands_are_whole_and_short_words_unbroken_at_any_width(visit: Visit) -> None:
    beyond = "(box) => box.scrollWidth - box.clientWidth"
    assert visit.page.locator("#reproduce .scroll").evaluate(beyond) <= 1
    sensors = visit.page.locator("#measured .scroll", has_text="estimate:cpu").first
    assert sensors.evaluate(beyond) <= 1
    # a word that was broken has a box on each of its lines
    boxes = """(box) => {
      const cell = [...box.querySelectorAll('td')].find(one => one.textContent.includes('estimate:cpu'));
      const range = document.createRange();
      const start = cell.firstChild.data.indexOf('estimate');
      range.setStart(cell.firstChild, start);
      range.setEnd(cell.firstChild, start + 'estimate'.length);
      return range.getClientRects().length;
    }"""
    assert sensors.evaluate(boxes) == 1


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


def test_every_figure_states_in_words_what_it_shows(visit: Visit) -> None:
    labels = visit.page.evaluate("[...document.querySelectorAll('.chart')].map(c => c.ariaLabel)")
    assert [label.split(":")[0].split(" of ")[0] for label in labels] == [
        "Accuracy (%) against energy, teacher included. teacher",
        "Energy by stage, stacked for each method",
        "Energy per student relative to the baseline against the number",
        "Energy",
        "Power",
    ]


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
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector(".chart svg text")
    page.evaluate(OPEN_ALL)
    assert min(page.evaluate(contrast)) >= 4.5
    page.emulate_media(media="print")
    assert min(page.evaluate(contrast)) >= 4.5
    context.close()


@pytest.fixture(scope="module")
def measured_report(made, tmp_path_factory) -> Path:
    store = tmp_path_factory.mktemp("measured")
    return write_report(made.write_group(store, made.demo_records(True), True))


def test_what_a_reader_chooses_moves_table_and_charts_and_stays_in_the_address(browser, measured_report: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE_MS)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    ready = "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))"
    page.goto(measured_report.as_uri())
    page.wait_for_function(ready)
    page.evaluate(OPEN_ALL)
    kd = page.locator("#overview tr[data-method='response KD']")
    energy, times = kd.locator("[data-selected=energy]"), kd.locator("[data-selected=ratio]")
    first = [energy.inner_text(), times.inner_text()]
    assert first == ["923 J ±0.2 %, energy counter", "6.48x [5.77, 7.28]"]

    def moved_to(**wanted: Any) -> None:
        for name, value in wanted.items():
            output_text = f"JSON.stringify(JSON.parse(document.documentElement.dataset.moved || '{{}}')[{name!r}])"
            page.wait_for_function(f"{output_text} === {json.dumps(json.dumps(value))}")

    # 10 students share the teacher: 12 + 77 + 145.25 J
    marks = "[...document.querySelectorAll('#figure-0 .mark-symbol path')].map(m => m.getAttribute('transform')).join()"
    before = page.evaluate(marks)
    page.locator("#students").focus()
    for _ in range(STUDENTS.index(10)):
        page.keyboard.press("ArrowRight")
    moved_to(students=10)
    assert page.locator("#overview .front:visible").count() == 3  # KD is dearer than labels and better than they are
    assert energy.inner_text() == "230 J ±0.4 %, energy counter"
    assert page.locator("#students-count").inner_text() == "10 students"
    assert page.locator("#overview caption").inner_text().endswith("energy: teacher shared by 10 students")
    # 1.6 times 146 J is resolved; a teacher that a thousand share leaves a ratio near 1, which is not
    assert "inconclusive" not in times.inner_text()
    shared = page.evaluate("window.view.viewOf('response + feature KD', {...window.view.state, n: 1000}).ratio")
    assert shared.startswith("1.2") and "\ninconclusive\n(n=2" in shared
    assert page.evaluate(marks) != before
    page.select_option("#scope", "pue")
    moved_to(scope="pue")
    assert energy.inner_text() == "276 J ±0.4 %, energy counter"  # x 1.2, the PUE of the runs

    order = "[...document.querySelectorAll('#overview tbody tr')].map(r => r.dataset.method)"
    head = page.locator("#overview th[data-key=energy] button")
    head.click()
    rising = page.evaluate(order)
    assert rising[0] == "labels only" and rising[-1] == "teacher"  # which nobody shares with itself
    head.press("Enter")
    assert page.evaluate(order) == rising[::-1]
    kd.locator("input").uncheck()
    moved_to(hidden=["response KD"])
    assert "response KD, seed 0" not in page.inner_html("#figure-0")
    page.locator("[data-axis-of=quality-against-energy]").click()
    page.keyboard.press("/")
    page.keyboard.type("label")
    assert page.locator("#found").inner_text() == "1 of 4 methods"

    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_function(ready)
    page.evaluate(OPEN_ALL)
    assert page.locator("#students-count").inner_text() == "10 students", address
    assert kd.locator("[data-selected=energy]").inner_text() == "276 J ±0.4 %, energy counter"
    assert page.evaluate(order)[0] == "teacher" and page.locator("#found").inner_text() == "1 of 4 methods"
    assert page.locator("[data-axis-of=quality-against-energy]").get_attribute("aria-pressed") == "true"

    text = page.evaluate("window.view.tableText(document.getElementById('overview'), 'markdown')")
    assert text.splitlines()[0].startswith("| Method |") and text.splitlines()[2].startswith("| labels only |")
    latex = page.evaluate("window.view.tableText(document.getElementById('grid-0'), 'latex')")
    assert "\\toprule" in latex and "Accuracy, \\%" in latex
    csv = page.evaluate("window.view.tableText(document.getElementById('grid-0'), 'csv')")
    assert '"87.4 [85.2, 89.3]"' in csv
    with page.expect_download() as download:
        page.locator("[data-download=json]").click()
    assert json.loads(Path(download.value.path()).read_text())["baseline"] == "labels only"
    with page.expect_download() as download:
        page.locator("[data-save=svg][data-of=figure-1]").click()
    assert download.value.suggested_filename == "stages.svg"
    assert problems == []
    context.close()


def test_every_state_of_the_controls_shows_what_the_report_computed(browser, made, tmp_path: Path) -> None:
    records = made.demo_records(True)
    path = write_report(made.write_group(tmp_path, records, True))
    comparison = compare(made.group_of(records), records, tmp_path)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(path.as_uri())
    page.evaluate(OPEN_ALL)
    state = """([scope, n]) => {
      window.view.change({ scope, n });
      return Object.fromEntries([...document.querySelectorAll('#overview tbody tr')].map(row => [row.dataset.method,
        ['energy', 'ratio'].map(name => row.querySelector('[data-selected=' + name + ']').textContent)]));
    }"""
    for scope in ("policy", "gpu"):
        for students in STUDENTS:
            wanted = {
                label: [labeled_text(one.mean, one.mixed), ratio_cell(one.ratio)]
                for label, one in method_energies(comparison, scope, students).items()
            }
            assert page.evaluate(state, [scope, students]) == wanted
    page.close()


@pytest.mark.parametrize("measured", [False, True], ids=["estimated", "measured"])
def test_the_slider_of_the_web_view_shows_what_compare_prints_for_so_many_students(
    browser, made, tmp_path: Path, measured: bool
) -> None:
    """Cell by cell: the served comparison, the file saved from it, the offline report and the command line."""
    pytest.importorskip("starlette", reason="the extra ui is not installed")
    records = made.demo_records(measured)
    group = made.write_group(tmp_path, records, measured)
    offline = write_report(group)
    runs = [record.run_id for record in records]

    def printed(names: list[str], students: int) -> dict[str, list[str]]:
        words = ["compare", *names, "--format", "markdown", "--runs-dir", tmp_path]
        done = joulelab_here(*words, *(["--students", students] if students > 1 else []))
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
        rows = [line.strip("| ").replace("&lt;", "<").split(" | ") for line in lines]
        if students > 1:
            table = rows[max(place for place, row in enumerate(rows) if row == ["Method", "Energy", "x"]) + 1 :]
            return {row[0]: row[1:] for row in table}
        head = next(place for place, row in enumerate(rows) if "Teacher included" in row)
        columns = rows[head].index("Teacher included"), rows[head].index("x teacher included")
        table = rows[head + 1 : head + 1 + len({record.label for record in records})]
        return {row[0]: [row[column] for column in columns] for row in table}

    cells = """() => Object.fromEntries([...document.querySelectorAll('#overview tbody tr')].map(row => [
      row.dataset.method, ['energy', 'ratio'].map(name => row.querySelector('[data-selected=' + name + ']').textContent
        .replaceAll('\\u00a0', ' ').replaceAll(/\\s*\\n\\s*/g, ' ').trim())]))"""
    server = Server(tmp_path)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]")
        page.select_option("#kind", "groups")
        cell = page.locator(f"tr[data-id='{group.name}'] td", has_text="kJ")
        cell.wait_for()
        page.click("#store-table th:has-text('Own energy') button")
        sums = cell.inner_text().replace("\u00a0", " "), page.inner_text(f"tr[data-id='{group.name}']")
        assert sums[0].startswith("1.756 kJ ±0.2 %" if measured else "1.76 kJ ±70 %") and "5 min 08 s" in sums[1]
        chosen = "&".join(f"run={run}" for run in runs)
        for address, names in ((f"/groups/{group.name}", [group.name]), (f"/compare?{chosen}", runs)):
            page.goto(server.address + address)
            with page.expect_download() as saved:
                page.click("text=Save as one HTML file")
            copy = tmp_path / "saved.html"
            saved.value.save_as(copy)
            other = context.new_page()
            for students in (1, 2, 10, 200, 1000):
                wanted = printed(names, students)
                page.bring_to_front()
                page.locator("#students").evaluate(
                    "(slider, place) => { slider.value = place; slider.dispatchEvent(new Event('input')); }",
                    STUDENTS.index(students),
                )
                found = page.evaluate(cells)
                for path in [copy, offline] if names == [group.name] else [copy]:
                    other.goto("about:blank")
                    other.goto(f"{path.as_uri()}#n={students}")
                    other.wait_for_selector("#overview tbody tr", state="attached")
                    assert other.evaluate(cells) == found, (path, students)
                if students == 1:  # the table of `compare` states the method once, in its caption
                    found = {label: [energy.partition(",")[0], ratio] for label, (energy, ratio) in found.items()}
                assert found == wanted, (address, students)
            other.close()
    finally:
        context.close()
        server.end()


def test_a_lower_bound_stays_one_when_the_scope_is_moved_and_is_on_no_front(browser, made, tmp_path: Path) -> None:
    unseen = unmetered("teacher.generate on http://far:8000/v1#llama", "key", "far is no address of this machine")
    records = [
        one.model_copy(update={"lineage": (*one.lineage, unseen.artifact)}) if one.label == "response KD" else one
        for one in made.demo_records(True)
    ]
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(write_report(made.write_group(tmp_path, records, True)).as_uri())
    page.evaluate(OPEN_ALL)
    kd = page.locator("#overview tr[data-method='response KD']")
    first = kd.locator("[data-selected=energy]").inner_text()
    page.select_option("#scope", "pue")
    page.wait_for_function("JSON.parse(document.documentElement.dataset.moved || '{}').scope === 'pue'")
    moved = kd.locator("[data-selected=energy]").inner_text()
    assert moved != first and first.startswith("≥ ") and moved.startswith("≥ ")
    assert kd.locator(".front").is_hidden() and page.locator("#overview .front:visible").count() == 2
    page.close()


def test_no_method_is_marked_where_others_used_the_cores_while_joules_were_estimated(browser, made, tmp_path) -> None:
    records = [made.with_contention(one) if one.label == "response KD" else one for one in made.demo_records()]
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(write_report(made.write_group(tmp_path, records)).as_uri())
    page.evaluate(OPEN_ALL)
    kd = page.locator("#overview tr[data-method='response KD']")
    doubt = "6.48x [5.77, 7.28]\ninconclusive\n(CPU\ncontention)"
    assert page.locator("#overview .front:visible").count() == 0
    assert page.locator("#table").get_by_text("No Pareto front is marked").is_visible()
    assert kd.locator("[data-selected=ratio]").inner_text() == doubt
    page.select_option("#pue", "1.2")
    page.wait_for_function("JSON.parse(document.documentElement.dataset.moved || '{}').scope === 'pue'")
    assert page.locator("#overview .front:visible").count() == 0
    # a factor on all of them changes neither the ratio nor its doubt, nor that joules are estimated
    assert kd.locator("[data-selected=ratio]").inner_text() == doubt
    assert kd.locator("[data-selected=energy]").inner_text() == "1.11 kJ ±70 %, estimated"
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_store_filters_sorts_and_links(browser, made, tmp_path: Path, width: int) -> None:
    for seed in range(3):
        write_report(
            made.write_run(tmp_path, made.distilled("response KD", seed, 826 + seed, 131.0 + seed, True), True)
        )
    made.write_run(tmp_path, made.teacher_run(True), True)
    report = write_page(
        store_page(tmp_path, IndexReporter(lambda text: None, lambda count: None)), tmp_path / "report.html"
    )
    page, problems, requests = browser.new_page(viewport={"width": width, "height": 900}), [], []
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda sent: requests.append(sent.url))
    page.goto(report.as_uri())
    page.wait_for_selector(".chart svg")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.querySelector('.chart svg').getBoundingClientRect().right <= innerWidth")
    energy = page.locator("#list-table th", has_text="Own energy")
    assert energy.evaluate("head => head.getBoundingClientRect().right <= window.innerWidth")
    assert page.locator("#list-found").inner_text() == "4 of 4 runs"
    page.locator("#list-find").fill("response")
    assert page.locator("#list-found").inner_text() == "3 of 4 runs"
    page.locator("#list-find").fill("")
    energy.locator("button").click()
    values = "[...document.querySelectorAll('#list-table tbody tr')].map(r => Number(r.cells[1].dataset.value))"
    assert page.evaluate(values) == sorted(page.evaluate(values))
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()] and problems == []
    page.locator("#list-table a").first.click()
    page.wait_for_selector("h1")
    assert page.locator("h1").inner_text() == "response KD"
    page.close()
