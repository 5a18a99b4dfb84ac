"""The live page of runs with GPUs, on one host and on two, through a tunnel: readings by device, sums by component."""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from browser import PATIENCE_MS
from nvml_sim.driver import SimGpu, constant
from rapl_tree import domain

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
from made_hosts import made_run

from joulelab.runs.lock import holding

pytestmark = pytest.mark.slow  # a server, a browser and runs in processes of their own
HOT = 0x40
"""NVML's bit of a thermal slowdown by the hardware."""


@pytest.fixture
def open_page(browser):
    contexts = []

    def go(url):
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        page.goto(url)
        return page

    yield go
    for context in contexts:
        context.close()


@pytest.fixture
def packages(tmp_path):
    """Two packages at 50 W each, until the test ends."""
    files, ended, begin_s = [domain(tmp_path / "rapl", f"intel-rapl:{n}", f"package-{n}") for n in (0, 1)], [], None
    begin_s = time.monotonic()

    def count():
        while not ended:
            for file in files:
                text = f"{int(50e6 * (time.monotonic() - begin_s)):015d}\n".encode()
                descriptor = os.open(file, os.O_WRONLY)
                os.pwrite(descriptor, text, 0)  # in place: a reader never finds an empty file
                os.close(descriptor)
            time.sleep(0.02)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    yield tmp_path / "rapl"
    ended.append(True)
    thread.join()


def tile(page, title):
    found = f"[...document.querySelectorAll('.tile')].find(tile => tile.querySelector('dt').textContent === '{title}')"
    return page.evaluate(f"{found}.querySelector('dd').innerText").replace("\u00a0", " ")


def test_gpus_have_utilization_temperature_clock_and_throttling_and_power_is_summed_by_component(
    open_page,
    server,
    experiment,
    nvml_sim,
    packages,
):
    cold = {"utilization": "91 40", "temperature_c": 61, "clocks": "1965 3201"}
    hot = {"utilization": "73 40", "temperature_c": 84, "clocks": "1605 3201", "throttle": HOT}
    nvml_sim.gpus = [
        SimGpu(uuid="GPU-aaaaaaaa-0000", wave=constant(300.0), settings=cold),
        SimGpu(uuid="GPU-bbbbbbbb-0000", wave=constant(500.0), settings=hot),
    ]
    nvml_sim.write()
    run_id = experiment(600, "gpus", packages).run_id
    page = open_page(server.url)
    page.goto(f"{server.address}/runs/{run_id}")
    page.wait_for_selector("#live-power svg .mark-line path", state="attached")  # a constant line has no height
    page.wait_for_function("document.querySelector('#part-devices').innerText.includes('GPU 1')")
    rows = page.evaluate("[...document.querySelectorAll('#part-devices tbody tr')].map(row => row.innerText)")
    first, second = (row.replace("\u00a0", " ") for row in rows[:2])
    for text in ("GPU 0", "300 W", "91 %", "61 °C", "1965 MHz", "NVIDIA H200 (GPU-aaaaaaaa)"):
        assert text in first
    for text in ("GPU 1", "500 W", "73 %", "84 °C", "1605 MHz", "hardware thermal slowdown"):
        assert text in second
    assert [row.split()[0] for row in rows[2:]] == ["rapl:package-0", "rapl:package-1"]
    assert "Throttling of GPU 1: hardware thermal slowdown." in page.inner_text("#part-flags")
    assert "GPU 800 W, CPU " in tile(page, "Power now")
    chart = page.text_content("#live-power svg")
    assert "GPU, 2 devices" in chart and "CPU, 2 devices" in chart and "student.train" in chart
    assert "GPU throttling (hardware thermal slowdown)" in page.inner_text("#live-power figcaption")
    page.wait_for_function("document.querySelector('#part-tiles').innerText.includes('±')")
    assert "energy counter, gain ±5 %" in tile(page, "Energy")


def test_a_run_on_two_nodes_of_a_shared_folder_is_followed_as_one(open_page, server, store):
    paths = made_run(store / "nodes-20260101T000000Z-0000", (100.0, 300.0))
    for host in ("node0001", "node0002"):  # still open, as on a shared file system in the middle of a run
        for path in (paths.trace(host, 1), paths.events(host, int(host[-1]) - 1, 1)):
            path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with holding(paths.folder):
        page = open_page(server.url)
        page.goto(f"{server.address}/runs/{paths.run_id}")
        page.wait_for_selector("#live-power svg .mark-line path", state="attached")  # a constant line has no height
        devices = page.inner_text("#part-devices").replace("\u00a0", " ")
        assert "Hosts now" in devices and "node0002 gpu:GPU-node0002" in devices
        assert tile(page, "Power now").startswith("400 W")
        described = page.get_attribute("#live-power .chart", "aria-label")
        assert "(GPU, 2 devices), with a peak of 400 W" in described
        before = page.evaluate("document.getElementById('live').dataset.updates || 0")
        with paths.trace("node0002", 1).open("a") as trace:
            last = json.loads(paths.trace("node0002", 1).read_text().splitlines()[-1])
            trace.write(json.dumps({**last, "mono_ns": last["mono_ns"] + 10**9, "power_watts": 500.0}) + "\n")
        page.wait_for_function(f"Number(document.getElementById('live').dataset.updates) > {before}")
        page.wait_for_function("document.querySelector('#part-now').innerText.includes('600')")


@pytest.fixture
def tunnel(server):
    """Another port that leads to the server, as `ssh -L` makes it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def copy(source, target):
        try:
            while data := source.recv(65_536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()

    def accept():
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://localhost:{listening.getsockname()[1]}"
    listening.close()


def test_through_a_tunnel_on_another_port_a_run_is_followed_and_stopped(open_page, server, experiment, tunnel):
    started = experiment(600, "far")
    page = open_page(f"{tunnel}/?token={server.token}")
    page.wait_for_selector("html[data-ready]")
    page.goto(f"{tunnel}/runs/{started.run_id}")
    page.wait_for_selector("#live[data-updates]")
    page.click("#stop")
    page.click("#confirm-stop")
    started.process.wait(60)
    page.wait_for_selector("#verdict")
