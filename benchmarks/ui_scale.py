"""The local web view: the list of a large store, and its memory while a run of a day is followed.

    python benchmarks/ui_scale.py --runs 10000 --hours 24

The store is the one of `store_scale.py`; the list is timed after its index exists, as a page requests it: first in a
new server, then again, and from the address to the drawn table in Chromium if playwright and a browser are installed.
For the second part, a day of readings of one GPU is written in a few minutes into a run that this process holds, while
the live page and the table are polled as an open page polls them; resident memory is read at each tenth. The last line
is the same as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from store_scale import make

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import BROWSERS, FLAGS  # type: ignore[import-not-found]
from ui_server import Server  # type: ignore[import-not-found]

from joulelab.clock import NS
from joulelab.runs.index import LISTING, IndexReporter, listed
from joulelab.runs.lock import holding
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import RunRecord
from joulelab.ui.run_view import RunFeed
from joulelab.ui.store_view import StoreView

INTERVAL_S = 0.5
POLLS = 400


def list_times(store: Path, count: int) -> dict[str, float]:
    for number in range(count):
        make(store, number)
    listed(store, IndexReporter(print), [LISTING])
    view = StoreView(store)
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    first = view.changes(0)
    first_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    begin_s = time.perf_counter()
    view.changes(0)
    again_s = time.perf_counter() - begin_s
    assert len(json.loads(first)["rows"]) == count
    times = {"runs": count, "list_s": first_s, "list_cpu_s": cpu_s, "list_again_s": again_s, "list_bytes": len(first)}
    return {**times, **page_times(store, count)}


def page_times(store: Path, count: int) -> dict[str, float]:
    """Seconds from opening the page to its drawn table: in a new server, and once more."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None or importlib.util.find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    server, times = Server(store), []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=FLAGS)
        page = browser.new_page()
        page.goto(server.address)  # refused without the token, and the browser is warm
        for _ in range(2):
            begin_s = time.perf_counter()
            page.goto(server.url)
            page.wait_for_function(f"document.querySelector('#store-found').textContent.startsWith('{count} of')")
            times.append(time.perf_counter() - begin_s)
        browser.close()
    server.end()
    return {"page_s": times[0], "page_again_s": times[1]}


def open_run(store: Path) -> RunPaths:
    paths = RunPaths(store / "day-20260101T000000Z-0000")
    device = {"device": "gpu:0", "component": "gpu", "name": "made", "counted": True, "wrap_j": None}
    header = {
        "kind": "header",
        "timestamp": "2026-01-01T00:00:00+00:00",
        "mono_ns": NS,
        "host": "node",
        "boot_id": "made",
        "interval_s": INTERVAL_S,
        "wall_minus_mono_s": 1.7e9,
        "devices": [{**device, "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {}}],
        "missing": [],
    }
    paths.folder.mkdir(parents=True)
    append(paths.trace("node", 1), [header])
    begin = {"kind": "stage", "edge": "begin", "stage": "student.train", "role": "student", "activity": "train"}
    append(paths.events("node", 0, 1), [{"kind": "run", "edge": "begin", "mono_ns": NS}, {**begin, "mono_ns": NS}])
    write_json(
        paths.record,
        RunRecord(
            run_id=paths.run_id,
            name="day",
            label="day",
            status="running",
            created_at="2026-01-01T00:00:00+00:00",
            spec={"energy": {}},
        ),
    )
    return paths


def append(path: Path, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def follow_day(store: Path, hours: float) -> dict[str, object]:
    """Resident memory in MB at each tenth of the day."""
    paths, process, memory = open_run(store), psutil.Process(), []
    ticks = int(hours * 3600 / INTERVAL_S)
    view, written, polls_s = StoreView(store), 0, 0.0
    with holding(paths.folder), ThreadPoolExecutor(1) as workers:
        feed = RunFeed(paths.folder, workers)
        for poll in range(1, POLLS + 1):
            until = ticks * poll // POLLS
            moments = [(tick, NS + int(tick * INTERVAL_S * NS)) for tick in range(written, until)]
            written = until
            append(
                paths.trace("node", 1),
                [
                    {
                        "kind": "gpu",
                        "mono_ns": at_ns,
                        "device": "gpu:0",
                        "power_watts": 300.0 + tick % 50,
                        "energy_counter_j": 324.5 * tick * INTERVAL_S,
                        "gpu_utilization_percent": 97,
                        "temperature_C": 61,
                    }
                    for tick, at_ns in moments
                ],
            )
            line = {"step": poll, "attempt": 1, "stage": "student.train", "loss": 1 / poll, "fraction": poll / POLLS}
            append(paths.metrics, [{**line, "mono_ns": NS + int(written * INTERVAL_S * NS), "tokens": 1000 * poll}])
            begin_s = time.perf_counter()
            feed._live_due_s = 0.0  # every poll reads
            feed.poll()
            view.changes(0)
            polls_s += time.perf_counter() - begin_s
            time.sleep(0.05)
            if poll % (POLLS // 10) == 0:
                before, feed._report_due_s = feed.poll()[1], 0.0  # the report so far, once per tenth
                while feed.poll()[1] == before:
                    time.sleep(0.1)
                memory.append(round(process.memory_info().rss / 1e6, 1))
        reports = feed.poll()[1]
    return {"hours": hours, "memory_mb": memory, "reports": reports, "poll_s": polls_s / POLLS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=24.0)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="joulelab-ui-"))
    try:
        found: dict[str, object] = {**follow_day(place / "day", given.hours), **list_times(place / "store", given.runs)}
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for name, value in found.items():
        print(f"{name:<16} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
