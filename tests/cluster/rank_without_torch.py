"""One rank of a run without a framework: `RANK=... python rank_without_torch.py STORE`."""

import sys
import time
from pathlib import Path

from joulelab import lookup
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import current_rank, execute, execute_worker
from joulelab.runs.spec import RunSpec


def pipeline(run):
    with run.stage("student.train"):
        for _ in range(20):
            with run.meter.phase("step"):
                time.sleep(0.1)


if __name__ == "__main__":
    sys.modules["rank_without_torch"] = sys.modules["__main__"]
    for table, what in ((lookup.PIPELINES, "pipeline"), (lookup.PIPELINE_SPECS, "RunSpec")):
        table._entries["ranks"] = f"rank_without_torch:{what}"
    store, place = Path(sys.argv[1]), current_rank()
    if place.is_worker:
        execute_worker(place, store, "ranks")
    else:
        energy = {"counter_interval_s": 0.2, "sample_interval_s": 0.2, "idle_before_s": 1.0}
        execute(create_run(store, RunSpec(name="ranks", pipeline="ranks", energy=energy)), SilentProgress())
