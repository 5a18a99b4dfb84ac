"""A server of the web view in a separate process, and runs for it."""

import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from finished_run import make_finished_run

EXPERIMENT = Path(__file__).with_name("running_experiment.py")


class Server:
    def __init__(self, store, *options):
        words = [sys.executable, "-m", "joulelab", "ui", "--port", "0", "--runs-dir", str(store), *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.errors = []
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True).start()
        found = re.fullmatch(r"(http://[^/]+)/\?token=([\w-]{43})", self.url)
        assert found, (self.url, self.errors)
        self.address, self.token = found.groups()

    def get(self, path, method="GET", token=True, **headers):
        """Status, headers and text of an answer."""
        headers = {"Authorization": f"Bearer {self.token}", **headers} if token else headers
        request = urllib.request.Request(self.address + path, headers=headers, method=method)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=60) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def end(self):
        self.process.terminate()
        self.process.wait(20)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


class Experiment:
    """A run in a separate process."""

    def __init__(self, store, seconds, label="live"):
        words = [sys.executable, str(EXPERIMENT), str(store), str(seconds), label]
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

    def start(seconds, label="live"):
        started.append(Experiment(store, seconds, label))
        return started[-1]

    yield start
    for one in started:
        one.end()
