"""`%%joulelab` in a real IPython shell: the cell runs as without it, and its energy is displayed."""

import re

import pytest

pytest.importorskip("IPython")
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.utils.capture import capture_output

import joulelab

BUSY = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: sum(range(500))\n"


@pytest.fixture(scope="module")
def shell():
    found = TerminalInteractiveShell.instance()
    found.display_formatter.active_types = found.display_formatter.format_types  # HTML too, as in a notebook
    found.run_line_magic("load_ext", "joulelab")
    yield found
    TerminalInteractiveShell.clear_instance()


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("JOULELAB_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def run(shell, line, cell):
    with capture_output() as captured:
        shell.run_cell(f"%%joulelab {line}\n{cell}")
    return captured


def test_a_cell_runs_as_usual_and_shows_a_table_with_a_sparkline(shell, store):
    line = "training --grid FR --price 0.30EUR --interval 0.1 -o m"
    captured = run(shell, line, BUSY.format(s=0.6) + "answer = 6 * 7\nprint('done')\nanswer")
    assert shell.user_ns["answer"] == 42
    assert captured.stdout.startswith("done\n") and "Out[" in captured.stdout
    (shown,) = captured.outputs
    html, measurement = shown.data["text/html"], shell.user_ns["m"]
    for title in ("energy", "mean power", "CO2e", "cost", "duration", "grade", "run directory"):
        assert f">{title}</th>" in html
    assert re.search(r"<td[^>]*>[\d.]+ m?J ±[\d.]+ %, estimated</td>", html)
    assert str(measurement.folder) in html and "ESTIMATED, not measured" in html
    assert re.search(r'<svg .*<polyline points="0\.0,[\d.]+ .*highest [\d.]+ W', html)
    assert shown.data["text/plain"] == str(measurement)
    assert joulelab.load("last").energy == measurement.figure


def test_an_exception_of_the_cell_is_its_own_and_the_run_is_failed(shell, store):
    captured = run(shell, "broken", "1 / 0")
    assert "ZeroDivisionError" in captured.stdout and "joulelab" not in captured.stdout.partition("Zero")[0].lower()
    assert joulelab.load("last").record.status == "failed"
    assert ">status</th>" in captured.outputs[-1].data["text/html"]


def test_a_wrong_option_is_one_line_and_the_cell_does_not_run(shell, store):
    captured = run(shell, "x --grid Narnia", "ran = True")
    assert "no grid 'Narnia'" in captured.stderr and "Traceback" not in captured.stderr + captured.stdout
    assert "ran" not in shell.user_ns and not store.exists()


def test_help_prints_the_options_and_the_cell_does_not_run(shell, store):
    captured = run(shell, "--help", "ran_with_help = True")
    assert "--grid" in captured.stdout and "Measure the energy of this cell." in captured.stdout
    assert "UsageError" not in captured.stdout + captured.stderr
    assert "ran_with_help" not in shell.user_ns and not store.exists()
