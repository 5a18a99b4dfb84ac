"""A store with one finished run that has a stage, metrics, an artifact and energy by the CPU estimate."""

import time

from joulelab.meter.config import EnergyConfig
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec


def make_finished_run(store):
    spec = MeasureSpec(name="made", label="the label", energy=EnergyConfig(estimate_cpu=True, gpus="none"))
    measured = MeasuredRun(store, spec)
    run = measured.begin()

    def train(folder):
        with run.stage("model.train") as stage:
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                sum(range(10_000))
            stage.count(samples=10, tokens=1000)
            run.log(1, stage="model.train", loss=3.0)
            run.log(2, stage="model.train", loss=2.0)

    run.artifact("weights", kind="model", inputs={"a": 1}, parents=[], make=train)
    measured.end("done")
    return store
