"""The web view on a login node: it follows a job of a real Slurm over two nodes and cancels it."""

import pytest
from browser import PATIENCE_MS
from slurm_cluster import why_not_here
from ui_server import Server

from joulelab.runs.store import load_record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or "")]


def test_a_job_on_two_nodes_is_followed_from_the_queue_and_stopped_from_its_page(lab, browser):
    four = ("--nodes", "2", "--gpus", "2", "--time", "10", "--no-check")
    (job,) = lab.submit(lab.slow("paged", steps=4000), *four).values()
    (run_id,) = job["runs"]
    server = Server(lab.store, env=lab.env)
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(server.url)
    page.goto(f"{server.address}/runs/{run_id}")  # queued or running, whichever is first
    page.wait_for_selector("#live-power svg .mark-line path", state="attached")
    page.wait_for_function("document.querySelector('#part-now').innerText.includes('model.train')")
    page.wait_for_function("document.querySelector('#part-now').innerText.includes('620')")  # 100 + 110 + 200 + 210 W
    devices = page.inner_text("#part-devices")
    for text in ("Hosts now", "node1 GPU 0", "node2 GPU 1"):
        assert text in devices
    page.wait_for_function("document.querySelector('#part-now').innerText.includes('Left in this stage')")
    page.click("#stop")
    assert "Cancels the Slurm jobs" in page.inner_text("#confirm")
    page.click("#confirm-stop")
    assert lab.wait(job, "CANCELLED", "COMPLETED") == "CANCELLED", lab.log(job)
    page.wait_for_selector("#verdict")
    assert "truncated" in page.inner_text("#verdict")
    record = load_record(lab.store / run_id)  # a busy node may be killed before it closes its record
    assert (record.status, len(record.attempts)) == ("truncated", 2), lab.log(job)
    assert record.totals.gpu.energy_j == pytest.approx(sum(one.energy.gpu.energy_j for one in record.attempts))
    context.close()
    server.end()
