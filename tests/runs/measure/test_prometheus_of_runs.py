"""The endpoint of `monitor`, served by the recorder while a program is measured."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
JOULELAB = Path(sys.executable).with_name("joulelab")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def measure(folder, *words):
    command = [sys.executable, "-m", "joulelab", "measure", "--runs-dir", "runs", *map(str, words)]
    command = [str(JOULELAB), *command[3:]] if JOULELAB.exists() else command
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.mark.slow
def test_a_measured_program_can_be_watched_and_the_endpoint_ends_with_it(tmp_path):
    port = free_port()
    program = measure(tmp_path, "--prometheus", port, "--interval", 0.1, "--", "sleep", 10)
    text, deadline_s = "", time.monotonic() + 30
    while "energy_joules_total" not in text and time.monotonic() < deadline_s:  # needs two readings
        time.sleep(0.2)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            continue
    _, error = program.communicate(timeout=60)
    assert program.returncode == 0, error
    (run,) = (tmp_path / "runs").glob("sleep-*")
    assert f'joulelab_run_info{{run_id="{run.name}"}} 1.0' in text
    assert "joulelab_cpu_estimated_energy_joules_total" in text or "joulelab_cpu_energy_joules_total" in text
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)


@pytest.mark.parametrize(
    ("address", "message"), [("127.0.0.1:taken", "cannot serve Prometheus"), ("somewhere", "not an address")]
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_runs(tmp_path, address, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        program = measure(tmp_path, "--prometheus", address.replace("taken", str(taken.getsockname()[1])), "--", "true")
        _, error = program.communicate(timeout=60)
    assert program.returncode == 2
    assert message in error
    assert not (tmp_path / "runs").exists()
