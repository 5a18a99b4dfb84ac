"""The real command in a process of its own, as a user runs it."""

import json
import subprocess
import sys


def joulelab(*words, cwd=None, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "joulelab", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


def shown(store, name="last"):
    done = joulelab("show", name, "--runs-dir", store, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
