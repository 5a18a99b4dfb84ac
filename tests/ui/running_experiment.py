"""A small experiment for the tests of the web view: stages, losses and counts as a training writes them, without torch.

python running_experiment.py STORE SECONDS [LABEL] [RAPL_ROOT]

With a RAPL root, GPUs and packages are measured instead of estimating the CPU.
"""

import sys
import time
from pathlib import Path

from joulelab.meter.config import EnergyConfig
from joulelab.runs.context import StopRequest
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec, how_it_ended


def main(store, seconds, label="live", rapl_root=""):
    sensors = (
        {"rapl_root": rapl_root, "counter_interval_s": 0.2} if rapl_root else {"gpus": "none", "estimate_cpu": True}
    )
    energy = EnergyConfig(**sensors, sample_interval_s=0.2, grid="FR")
    spec = MeasureSpec(name="live", label=label, energy=energy, tags=("test",))
    failure = None
    with StopRequest() as stop:
        measured = MeasuredRun(Path(store), spec, stop)
        run = measured.begin()
        print(measured.paths.run_id, flush=True)
        try:
            train(run, float(seconds))
        except BaseException as error:
            failure = error
        measured.end(*how_it_ended(failure))


def train(run, seconds):
    with run.stage("data.prepare"):
        time.sleep(0.5)
    step, begin_s = 0, time.monotonic()
    with run.stage("student.train") as stage:
        while (spent_s := time.monotonic() - begin_s) < seconds:
            run.stop.check()
            step += 1
            while time.monotonic() - begin_s < spent_s + 0.03:
                sum(range(5_000))
            time.sleep(0.07)
            counts = {"samples": 8 * step, "tokens": 1000 * step}
            stage.count(**counts)
            run.log(step, stage="student.train", loss=2.0 / step**0.5, fraction=spent_s / seconds, **counts)


if __name__ == "__main__":
    main(*sys.argv[1:])
