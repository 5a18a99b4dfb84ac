"""Runs for the web view, and a server for them."""

import subprocess
import sys
from pathlib import Path

import pytest
from finished_run import make_finished_run
from nvml_sim.fixtures import nvml_library, nvml_sim  # noqa: F401
from ui_server import Server

EXPERIMENT = Path(__file__).with_name("running_experiment.py")


class Experiment:
    """A run in a separate process."""

    def __init__(self, store, seconds, label="live", *more):
        words = [sys.executable, str(EXPERIMENT), str(store), str(seconds), label, *map(str, more)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.run_id = self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_finished_run(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def start_server():
    return Server


@pytest.fixture(scope="module")
def server(store):
    running = Server(store)
    yield running
    running.end()


@pytest.fixture
def experiment(store):
    started = []

    def start(seconds, label="live", *more):
        started.append(Experiment(store, seconds, label, *more))
        return started[-1]

    yield start
    for one in started:
        one.end()
