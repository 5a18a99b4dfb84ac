"""What docs/tour.md and CONTRIBUTING.md promise a contributor, done in a copy of the source tree.

A pipeline is one folder and one line, a sensor one file and one line, an evaluator one file and one line, or
a file by path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import PACKAGE, ROOT, document

PIPELINE_LINE = '    "line": ("joulelab.distill.line", "config:LineSpec", "recipe:run_line"),\n'
SENSOR_LINE = '        "lamp": "joulelab.meter.sensors.lamp:LampSensor",\n'
LAMP_W = 5.0
SENSOR = f'''"""A lamp that draws {LAMP_W} W, with an energy counter."""

import time

from joulelab.meter.sensors import Device


class LampSensor:
    def __init__(self, config, pid):
        self.interval_s = config.sample_interval_s

    def open(self):
        return [Device(device="lamp:0", component="cpu", name="desk lamp", refresh_s=0.001, gain_error_rel=0.01)]

    def read(self):
        return [{{"kind": "counters", "device": "host", "counters_j": {{"lamp:0": {LAMP_W} * time.monotonic()}}}}]

    def close(self):
        pass
'''
EVALUATOR = '''"""The largest error of a line on its points."""

import torch

from joulelab.distill.line.data import points
from joulelab.runs.record import Result


def evaluate(student, stage):
    x_N1, y_N1 = points(student.data)
    stage.count(samples=len(x_N1))
    with torch.no_grad():
        error = float((student.model(x_N1) - y_N1).abs().max())
    return {"largest": Result(value=error, lower_is_better=True)}
'''
EVALUATOR_LINE = '        "line-error": "joulelab.evaluate.line_error:evaluate",\n'
OWN_EVALUATOR = """def evaluate(student, stage):
    return {"slope": float(student.model.weight)}
"""
EXPERIMENT = """
about: A teacher fits a line to points, a student fits the teacher.
label: line
pipeline: line
device: cpu
evaluators: [line-error, ./mine.py, size]
energy: {gpus: none, sample_interval_s: 0.1, idle_before_s: 0, idle_after_s: 0}
"""


def add_line(file: Path, after: str, line: str) -> None:
    text = file.read_text()
    assert text.count(after) == 1, f"{file.name} has no single {after!r}"
    file.write_text(text.replace(after, after + line))


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `src` with the three additions."""
    source = tmp_path_factory.mktemp("contributor") / "src"
    package = source / "joulelab"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    lookup = package / "lookup.py"

    pipeline = package / "distill" / "line"
    shutil.copytree(ROOT / "tests/distill/line_pipeline", pipeline, ignore=shutil.ignore_patterns("__pycache__"))
    for file in pipeline.glob("*.py"):
        file.write_text(file.read_text().replace("line_pipeline.", "joulelab.distill.line."))
    add_line(lookup, "_PIPELINES = {\n", PIPELINE_LINE)

    (package / "meter" / "sensors" / "lamp.py").write_text(SENSOR)
    add_line(lookup, '        "host": "joulelab.meter.sensors.cpu:HostSensor",\n', SENSOR_LINE)

    (package / "evaluate" / "line_error.py").write_text(EVALUATOR)
    add_line(lookup, '        "size": "joulelab.evaluate.evaluators:model_size",\n', EVALUATOR_LINE)
    return source


@pytest.fixture(scope="module")
def record(source_tree: Path) -> dict[str, Any]:
    folder = source_tree.parent
    (folder / "line.yaml").write_text(EXPERIMENT)
    (folder / "mine.py").write_text(OWN_EVALUATOR)
    environment = {**os.environ, "PYTHONPATH": str(source_tree), "JOULELAB_RUNS": str(folder / "runs")}
    done = subprocess.run(
        [sys.executable, "-m", "joulelab", "run", "line.yaml"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "runs").glob("*/run.json")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.slow
def test_a_pipeline_is_one_folder_and_one_line(record: dict[str, Any]) -> None:
    stages = {stage["name"]: (stage["role"], stage["activity"]) for stage in record["stages"]}
    assert stages.items() >= {
        ("data.preprocess", ("data", "preprocess")),
        ("teacher.train", ("teacher", "train")),
        ("student.train", ("student", "train")),
        ("student.evaluate", ("student", "evaluate")),
    }
    assert record["results"]["student.distance"]["value"] < 0.2


@pytest.mark.slow
def test_a_sensor_is_one_file_and_one_line(record: dict[str, Any]) -> None:
    (attempt,) = record["attempts"]
    (lamp,) = [device for device in attempt["devices"] if device["device"] == "lamp:0"]
    assert lamp["figure"]["method"] == "counter"
    assert lamp["figure"]["energy_j"] == pytest.approx(LAMP_W * record["totals"]["duration_s"], rel=0.05)
    assert "lamp:0" in record["totals"]["cpu"]["sources"]


@pytest.mark.slow
def test_an_evaluator_is_one_file_and_one_line(record: dict[str, Any]) -> None:
    error = record["results"]["student.line-error.largest"]
    assert error["lower_is_better"] and error["value"] >= record["results"]["student.distance"]["value"]
    assert "student-line-error" in {ancestor["name"] for ancestor in record["lineage"]}


@pytest.mark.slow
def test_an_evaluator_of_your_own_is_a_file_by_path(record: dict[str, Any]) -> None:
    assert record["results"]["student.mine.slope"]["value"] == pytest.approx(3, abs=0.5)
    assert record["results"]["student.size.parameters"]["value"] == 2


def test_the_documents_promise_it() -> None:
    assert "A new pipeline is one folder and one line in `lookup.py`." in document("CONTRIBUTING.md")
    extend = document("docs/tour.md").split("## How to extend it")[1]
    assert "One folder in `src/joulelab/distill/` and one line in `lookup`" in extend
    assert "One file in `src/joulelab/meter/sensors/` and one line in `lookup:SENSORS`" in extend
    assert "One file in `src/joulelab/evaluate/` and one line in `lookup:EVALUATORS`" in extend
