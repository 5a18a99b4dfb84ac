"""The web view on a login node: it follows a job of a real Slurm over two nodes and cancels it."""

import pytest
from browser import PATIENCE_MS
from slurm_cluster import why_not_here
from ui_server import Server

from joulelab.runs.store import load_record

STEPS = 2000
pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or "")]


def test_a_job_on_two_nodes_is_followed_from_the_queue_stopped_from_its_page_and_resumed(lab, browser):
    four = ("--nodes", "2", "--gpus", "2", "--time", "10", "--no-check")
    (job,) = lab.submit(lab.slow("paged", steps=STEPS), *four).values()
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
    record = load_record(lab.store / run_id)
    assert record.status == "truncated"
    assert record.error.message.startswith("ended by SIG"), lab.log(job)
    assert [attempt.closed for attempt in record.attempts] == [True, True]  # one per host
    assert record.totals.gpu.energy_j == pytest.approx(sum(one.energy.gpu.energy_j for one in record.attempts))
    (checkpoint,) = (lab.store / run_id / "checkpoints" / "model.train").iterdir()
    saved = int(checkpoint.name.removeprefix("step-"))
    assert 0 < saved < STEPS
    page.goto(server.address)
    page.wait_for_selector(f"tr[data-id='{run_id}'] .status.truncated")

    (again,) = lab.submit("--resume", lab.store / run_id, *four, env={"SLOW_MODEL_STEP_S": "0"}).values()
    assert lab.wait(again, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") == "COMPLETED", lab.log(again)
    record = load_record(lab.store / run_id)
    assert record.status == "done"
    train, setup = record.stage("model.train"), record.stage("model.train.setup")  # the first step of each attempt
    assert train.samples + setup.samples == STEPS * 4 * 4  # no step twice: 4 ranks, 4 rows each
    page.wait_for_selector(f"tr[data-id='{run_id}'] .status.done")
    context.close()
    server.end()
