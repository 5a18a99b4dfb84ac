"""What a run of a program is named after, and programs that cannot be started."""

import json
import os
import subprocess
import sys

import pytest
from programs import measure, measure_words

from joulelab.runs.measure.program import CannotStart, default_name, find_program


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python3", "-u", "src/train.py", "x"], "train"),
        (["/usr/bin/python3.11", "train.py"], "train"),
        (["./simulate", "input.py"], "simulate"),
        (["python", "-c", "pass"], "python"),
    ],
)
def test_a_run_is_named_after_the_script_or_the_program(command, name):
    assert default_name(command) == name


def test_a_misspelled_program_is_answered_with_the_nearest_one():
    with pytest.raises(CannotStart, match="pythonn3: command not found") as caught:
        find_program("pythonn3")
    assert "did you mean 'python" in caught.value.hint


def test_any_energy_setting_can_be_given(tmp_path):
    words = ["--set", "energy.grid=FR", "--set", "energy.idle_after_s=0.5", "--gpus", "none", "--estimate-cpu"]
    done = measure(tmp_path, *words, "--", "true")
    assert done.returncode == 0, done.stderr
    wrong = measure(tmp_path, "--set", "energy.gird=FR", "--", "true")
    assert wrong.returncode == 2
    assert "did you mean energy.grid?" in wrong.stderr


def test_arguments_paths_and_environment_that_are_not_utf8_work(tmp_path):
    store = tmp_path / "runs"
    program = b"import os, sys; sys.exit(sys.argv[1].encode('utf-8', 'surrogateescape') != b'\\xff\\x1b')"
    environment = {**os.environb, b"SLURM_JOB_NAME": b"name-\xff", b"LC_ALL": b"C"}
    words = [os.fsencode(word) for word in measure_words(store, "--", sys.executable, "-c")]
    done = subprocess.run([*words, program, b"\xff\x1b"], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stderr
    (folder,) = store.iterdir()
    assert json.loads((folder / "run.json").read_text())["spec"]["command"][-1] == "\\xff\ufffd"
