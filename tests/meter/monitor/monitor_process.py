"""The real `joulelab monitor` in a separate process, and its log as it grows."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

OPERATORS_FIELDS = [
    "timestamp", "gpu_index", "gpu_name", "power_watts", "memory_used_MB", "gpu_utilization_percent",
    "memory_utilization_percent", "temperature_C", "cpu_utilization_percent",
]  # fmt: skip


def monitor(*words, cwd, env=None, timeout=30):
    return subprocess.run(
        [sys.executable, "-m", "joulelab", "monitor", *map(str, words)],
        capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False, env={**os.environ, **(env or {})},
    )  # fmt: skip


def monitor_here(monkeypatch, *words):
    """The same in this process, for what ends before anything is recorded: the exit code."""
    from joulelab.cli.main import main

    monkeypatch.setattr(sys, "argv", ["joulelab", "monitor", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def records(path, kind):
    return [line for line in read_log(path) if line["kind"] == kind]


class Running:
    """A monitor that goes on until told to end; `with` makes sure that it ends."""

    def __init__(self, *words, cwd, env=None):
        self.log = cwd / "log.jsonl"
        command = [sys.executable, "-m", "joulelab", "monitor", "--out", str(self.log), *map(str, words)]
        whole = {**os.environ, **(env or {})}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd, env=whole)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()

    def until(self, condition, timeout_s=15):
        """Wait for the log to fulfill something."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if condition(read_log_so_far(self.log)):
                return
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.02)
        kinds = [line["kind"] for line in read_log_so_far(self.log)]
        raise AssertionError(f"never seen; the log ends with {kinds[-10:]}")

    def end(self, signum=signal.SIGTERM):
        self.process.send_signal(signum)
        self.process.wait(timeout=5)
        return self.process.returncode, self.process.stderr.read()


def read_log_so_far(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def count(kind, at_least):
    return lambda log: sum(line["kind"] == kind for line in log) >= at_least
