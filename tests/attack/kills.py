"""`joulelab measure` killed at a random moment, by a random signal, program and recorder included or not.

A kill is survived if all processes end, `show` derives a record with a final status, and a program that ran for
more than 2 s has an energy above 0. Whether that energy is complete is not compared with another meter.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Half of its time it waits, so that many kills fit on a busy machine.
PROGRAM = "import time; e = time.time() + 30\nwhile time.time() < e: sum(range(100_000)); time.sleep(0.003)"


def kill_try(seed, folder):
    """What was lost, or None."""
    drawn = random.Random(f"kill-{seed}")
    folder.mkdir(parents=True)
    store = folder / "runs"
    command = [
        sys.executable,
        "-m",
        "joulelab",
        "measure",
        "--runs-dir",
        str(store),
        "--estimate-cpu",
        "--name",
        "killed",
    ]
    environment = {**os.environ, "JOULELAB_CONFIG": os.devnull}
    process = subprocess.Popen(
        [*command, "--", sys.executable, "-c", PROGRAM], env=environment, start_new_session=True,
        preexec_fn=_hear_all_signals,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    time.sleep(drawn.uniform(0.2, 4.0))
    family = _family(process.pid)
    signum = drawn.choice(SIGNALS)
    victims = drawn.choice([[process.pid], [process.pid], family])
    for pid in victims:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        for pid in _family(process.pid):
            os.kill(pid, signal.SIGKILL)
        return f"measure did not end within 30 s after {signum.name}"
    end = time.monotonic() + 20
    while (alive := [pid for pid in family if _is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    if alive:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        return f"{len(alive)} processes are still alive 20 s after {signum.name}"
    return _lost(store, environment)


def _hear_all_signals():
    """A shell starts its background jobs with these ignored, and children inherit that."""
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def _family(pid):
    try:
        parent = psutil.Process(pid)
        return [pid, *(child.pid for child in parent.children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def _is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _lost(store, environment):
    folders = sorted(store.glob("killed-*")) if store.is_dir() else []
    if not folders:
        return None  # killed before the run began: nothing was measured
    (folder,) = folders
    if not (folder / "run.json").exists():
        return None  # killed between the folder and its record
    show = [sys.executable, "-m", "joulelab", "show", folder.name, "--json", "--runs-dir", str(store)]
    done = subprocess.run(show, capture_output=True, text=True, timeout=60, env=environment)
    if done.returncode != 0:
        return f"show: {done.stderr[-500:]}"
    record = json.loads(done.stdout)
    if record["status"] not in ("truncated", "failed", "done", "queued"):
        return f"status is {record['status']}"
    readings = [path for path in (folder / "trace").glob("*") if path.stat().st_size > 0]
    program = next((stage for stage in record["stages"] if stage["name"] == "program.run"), None)
    if readings and program is not None and program["duration_s"] > 2:
        energies = [figure["energy_j"] for figure in program["energy"].values() if figure["energy_j"]]
        if not energies:
            return f"the {program['duration_s']:.1f} s of the program have no energy"
    return None
