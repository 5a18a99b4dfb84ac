"""Progress lines of a run."""

import sys

import pytest

from joulelab.cli.console import BarProgress, PlainProgress, wrapped
from joulelab.cli.main import exit_with
from joulelab.errors import UsageError


def test_a_stage_with_an_early_message_prints_its_duration_at_its_end(capsys):
    with PlainProgress() as watching:
        watching.stage("model.train.phases", None)
        watching.write("taking the step apart")
        assert capsys.readouterr().err == "taking the step apart\n"
        watching.finish()
    name, *duration = capsys.readouterr().err.split()
    assert name == "model.train.phases" and duration[-1] == "ms"


def test_setup_inside_a_stage_is_stated_separately_as_in_the_record(capsys, monkeypatch):
    at_s = iter((100, 130))
    monkeypatch.setattr("time.monotonic_ns", lambda: next(at_s) * 10**9)
    with PlainProgress() as watching:
        watching.stage("model.train", 20)
        watching.setup(99 * 10**9, 110 * 10**9)
        watching.setup(105 * 10**9, 112 * 10**9)  # a compilation inside the warm-up counts once
        watching.advance(20, "loss 6.2 by step 20")
        watching.finish()
    assert capsys.readouterr().err.split("  ")[-2:] == ["18.0 s", "+ 12.0 s setup; loss 6.2 by step 20\n"]


def test_stages_that_alternate_have_few_lines(capsys):
    with PlainProgress() as watching:
        for _ in range(40):
            for name in ("student.generate", "student.train"):
                watching.stage(name, None)
                watching.advance(1, "some text")
                watching.finish()
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert names.count("student.generate") == names.count("student.train") == 7  # 1 to 4, 8, 16, 32


def test_a_stage_that_is_interrupted_at_once_has_no_line_for_it(capsys):
    """On-policy training begins with the student's completions."""
    with PlainProgress() as watching:
        watching.stage("student.train", None)
        watching.stage("student.generate", None)
        watching.advance(1, "20 tokens so far")
        watching.stage("student.train", None)
        watching.advance(1, "loss 1 by step 1")
        watching.stage("teacher.evaluate", None)  # short as well, but the only one
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert names == ["student.generate", "student.train", "teacher.evaluate"]


def test_a_reader_that_leaves_does_not_end_the_run(monkeypatch):
    def closed(*words, **settings):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", closed)
    with PlainProgress() as watching:
        watching.stage("student.train", None)
        watching.advance(1, "loss 1 by step 1")
        watching.write("warning: something")


def test_brackets_in_names_of_stages_are_shown_as_they_are(monkeypatch, capsys):
    """A bar's text was read as rich's markup: `[/b]` ended the run with a traceback."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with BarProgress() as progress:
        progress.stage("evaluate.mine[/b]", 3)
        progress.advance(1, "[red]half[/blue]")
        progress._bars.refresh()
    assert "evaluate.mine[/b]" in capsys.readouterr().err


def test_lines_on_stderr_are_wrapped_between_words_on_a_terminal_only(monkeypatch, capsys):
    """A log keeps one line, which grep finds whole; a terminal broke words at its edge."""
    monkeypatch.setenv("COLUMNS", "30")
    text = "joulelab: warning: CPU contention: other processes used 1.5 of 2 cores"
    assert wrapped(text, indent=10) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert (
        wrapped("run /runs/smi: 49.0 kJ ±10 %, gain ±5 %", 4, sys.stdout)
        == "run /runs/smi: 49.0 kJ ±10 %,\n    gain ±5 %"
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert wrapped(text, indent=10).splitlines() == [
        "joulelab: warning: CPU",
        "          contention: other",
        "          processes used 1.5",
        "          of 2 cores",
    ]
    with pytest.raises(SystemExit):
        exit_with(UsageError("2 problems were found:\n  - the first of them is long enough", "fix both"))
    assert capsys.readouterr().err.splitlines() == [
        "error: 2 problems were found:",
        "  - the first of them is long",
        "    enough",
        "hint: fix both",
    ]
