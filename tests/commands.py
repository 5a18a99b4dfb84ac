"""The real command: in a separate process, as a user runs it, or in this one, for what starts no program."""

import contextlib
import io
import json
import subprocess
import sys
from unittest import mock


def joulelab(*words, cwd=None, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "joulelab", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


def joulelab_here(*words, cwd="."):
    """The same answer without half a second of importing; an error that would end in a traceback comes out as such."""
    from joulelab.cli.main import main

    argv, out, err, code = ["joulelab", *map(str, words)], io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.chdir(cwd))
        around.enter_context(mock.patch.object(sys, "argv", argv))
        around.enter_context(contextlib.redirect_stdout(out))
        around.enter_context(contextlib.redirect_stderr(err))
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def shown(store, name="last"):
    done = joulelab_here("show", name, "--runs-dir", store, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
