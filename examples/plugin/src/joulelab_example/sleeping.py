"""A pipeline with one stage and one artifact. Settings and stages are named as text: settings are checked on machines
without a framework."""

import time
from typing import Literal

from pydantic import Field

from joulelab.lookup import Pipeline
from joulelab.runs.record import Result
from joulelab.runs.spec import RunSpec


class SleepSpec(RunSpec):
    """Settings of the pipeline example-sleep."""

    pipeline: Literal["example-sleep"] = "example-sleep"
    """Always `example-sleep`."""
    seconds: float = Field(0.5, ge=0, le=60)
    """How long the stage lasts."""


def run_sleep(run):
    def make(folder):
        with run.stage("program.sleep", role="data", activity="preprocess"):
            time.sleep(run.spec.seconds)
        (folder / "slept.txt").write_text(f"{run.spec.seconds} s\n")

    run.artifact("sleep", kind="sleep", inputs={"seconds": run.spec.seconds}, parents=[], make=make)
    run.result("sleep.seconds", Result(value=run.spec.seconds))


PIPELINE = Pipeline(settings="joulelab_example.sleeping:SleepSpec", run="joulelab_example.sleeping:run_sleep")
