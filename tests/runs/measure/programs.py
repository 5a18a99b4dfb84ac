"""`joulelab measure` as a user runs it, around small programs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

BUSY = "import time; e = time.process_time() + {s}\nwhile time.process_time() < e: sum(range(500))"


def measure_words(store, *words):
    return [sys.executable, "-m", "joulelab", "measure", "--runs-dir", str(store), *map(str, words)]


def measure(store, *words, **options):
    given = {"capture_output": True, "text": True, "timeout": 60, "check": False, **options}
    return subprocess.run(measure_words(store, *words), **given)


def started(store, *words, **options):
    """Start `measure` and wait until its program has said `started` into its file."""
    sign = Path(store).parent / f"started-{time.monotonic_ns()}"
    env = {**os.environ, "SIGN": str(sign)}
    process = subprocess.Popen(measure_words(store, *words), env=env, stderr=subprocess.PIPE, text=True, **options)
    wait_for(lambda: sign.exists() and sign.read_text())
    return process, int(sign.read_text())


# writes its pid into $SIGN, then sleeps
SLEEPER = "import os, pathlib, time; pathlib.Path(os.environ['SIGN']).write_text(str(os.getpid())); time.sleep(60)"


def wait_for(happened, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happened():
            return
        time.sleep(0.02)
    raise AssertionError("it never happened")


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def only_folder(store):
    (folder,) = [path for path in Path(store).iterdir() if (path / "run.json").exists()]
    return folder


def record(store):
    return json.loads((only_folder(store) / "run.json").read_text())


def stages(store):
    return [stage["name"] for stage in record(store)["stages"] if stage["name"] != "run.overhead"]
