"""`joulelab.live()` in an IPython shell that has a kernel, as a notebook does."""

import time

import pytest

pytest.importorskip("IPython")
from IPython.terminal.interactiveshell import TerminalInteractiveShell

import joulelab
from joulelab.errors import UsageError
from joulelab.meter.figures import figure_text
from joulelab.ui import notebook_live
from joulelab.ui.notebook_live import power_svg


@pytest.fixture
def shell():
    yield TerminalInteractiveShell.instance()
    TerminalInteractiveShell.clear_instance()


def test_a_measured_block_is_drawn_while_it_runs_and_ends_with_its_result(shell, tmp_path, monkeypatch):
    shown = []

    class Handle:
        def update(self, html):
            shown.append(html.data)

    shell.kernel = object()
    monkeypatch.setattr("IPython.display.display", lambda html, display_id: shown.append(html.data) or Handle())
    view = joulelab.live(runs_dir=tmp_path, interval_s=0.1)
    assert "waiting for a run" in shown[0]
    energy = {"estimate_cpu": True, "gpus": "none", "sample_interval_s": 0.1}
    with joulelab.measure("<b>block</b>", energy=energy, runs_dir=tmp_path) as m:
        end_s = time.monotonic() + 2.5
        while time.monotonic() < end_s:
            sum(range(5_000))
    view._thread.join(20)
    middle = shown[-2]
    for text in ("running", "Energy so far", "estimated", "program.run", "<polyline", "<rect", "highest"):
        assert text in middle
    assert all("<b>block" not in html for html in shown) and "&lt;b&gt;block" in middle
    assert figure_text(m.record.best_energy) in shown[-1] and "run directory" in shown[-1]
    view.stop()
    assert shell.display_formatter.format(view) == ({}, {}), "as the last line of a cell it is not displayed again"


def test_a_terminal_is_referred_to_watch(shell):
    with pytest.raises(UsageError, match="notebook"):
        joulelab.live()


def test_the_output_stays_small_however_long_the_run_is(tmp_path):
    points = [(float(second), 100.0 + second % 7, "train") for second in range(notebook_live._MOST_POINTS)]
    assert len(power_svg(points)) < 12_000
    assert power_svg(points[:1]) == ""
