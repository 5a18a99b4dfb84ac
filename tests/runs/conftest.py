"""A store with one finished run, as a program leaves it: stages, metrics, an artifact, joules by the CPU model.

And runs whose pipeline is a function of the test.
"""

import shutil

import pytest
from finished_run import make_finished_run

from joulelab.lookup import PIPELINES
from joulelab.runs.attempt import create_run
from joulelab.runs.context import SilentProgress
from joulelab.runs.execute import execute
from joulelab.runs.spec import load_spec

FAST = {"energy": {"sample_interval_s": 0.05, "estimate_cpu": True, "gpus": "none"}}


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory):
    store = tmp_path_factory.mktemp("finished") / "runs"
    return make_finished_run(store)


@pytest.fixture
def store(finished_once, tmp_path):
    """A copy of that store, to be changed as a test likes."""
    return shutil.copytree(finished_once, tmp_path / "runs")


@pytest.fixture
def folder(store):
    return next(store.glob("made-*"))


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run a function as the pipeline of a fresh run in a store, and give back its paths."""

    def start(story, store=tmp_path / "runs", **overrides):
        monkeypatch.setattr(PIPELINES, "resolve", lambda name: story)
        paths = create_run(store, load_spec("demo-kd", {**FAST, **overrides}))
        start.paths = paths
        return execute(paths, SilentProgress())

    start.energy = FAST["energy"]
    start.again = lambda story: (
        monkeypatch.setattr(PIPELINES, "resolve", lambda name: story),
        execute(start.paths, SilentProgress()),
    )[1]
    return start
