"""What is recorded of a command line: its name, and nothing that looks like a secret."""

import pytest
from programs import measure

from joulelab.runs.environment import REDACTED
from joulelab.runs.measure.program import CannotStart, default_name, find_program, without_secrets


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "abc"],
        ["--password=abc"],
        ["--hf_token", "abc"],
        ["env", "WANDB_API_KEY=abc", "prog"],
        ["-H", "Authorization: Bearer abc"],
        ["--url", "https://user:abc@example.org/x"],
        ["curl", "https://example.org/?a=1&token=abc"],
        ["--opt", "hf_abc"],
    ],
)
def test_secrets_are_taken_out(words):
    clean = without_secrets(["prog", *words])
    assert "abc" not in " ".join(clean)
    assert any(REDACTED in word for word in clean)


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "bert-base"],
        ["--max-tokens", "128"],
        ["--tokens=5"],
        ["--keys", "a,b"],
        ["--author", "me"],
        ["train.py", "--lr", "3e-4"],
        ["--token"],
        ["--token", "--flag"],
    ],
)
def test_what_is_no_secret_stays(words):
    assert list(without_secrets(words)) == words


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
