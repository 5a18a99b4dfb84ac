"""One rule for energy counters that wrap, are set back or jump: in a trace, while it is written, and in a log."""

from __future__ import annotations

import numpy as np
import pytest

from joulelab.meter.importers.log_energy import total_rise
from joulelab.meter.importers.power_log import Source
from joulelab.meter.monitor.tally import Tally
from joulelab.meter.sensors import Device, counter_rise
from joulelab.meter.series import unwrap

NS = 1_000_000_000
WRAP_J, MAX_GAP_S = 262_143.0, 131.0


def live_energy(readings, wrap_j=WRAP_J, **facts):
    tally = Tally([Device("rapl:package-0", "cpu", "package-0", wrap_j=wrap_j, facts=facts)])
    for second, joules in enumerate(readings, 1):
        tally.take([{"kind": "rapl", "device": "host", "mono_ns": second * NS, "rapl": {"package-0": joules}}], second)
    return tally.devices["rapl:package-0"].energy_j


def test_a_decrease_is_a_wrap_if_the_device_can_have_drawn_it():
    assert counter_rise(WRAP_J - 10, 20.0, 1.0, WRAP_J, MAX_GAP_S) == pytest.approx(30)
    assert counter_rise(5000.0, 7.0, 0.5, WRAP_J, MAX_GAP_S) is None  # half a megawatt
    assert counter_rise(5000.0, 7.0, 1.0, None, None) is None
    assert counter_rise(5.0, 7.0, 1.0, None, None) == 2


@pytest.mark.parametrize(
    ("readings", "expected_j"),
    [
        ([WRAP_J - 50, WRAP_J - 10, 30.0, 70.0], 120.0),  # wrapped: 40 J a second
        ([5000.0, 5040.0, 7.0, 47.0], 40 + 7 + 40.0),  # set back to 0; what was used before that is unknown
    ],
)
def test_a_trace_a_live_reading_and_a_log_agree(readings, expected_j):
    joules, seconds = np.array(readings), np.arange(1.0, 5.0)
    source = Source("rapl:package-0", component="cpu", wrap_j=WRAP_J, max_gap_s=MAX_GAP_S)
    assert live_energy(readings, max_gap_s=MAX_GAP_S) == pytest.approx(expected_j)
    assert total_rise(seconds, joules, source)[0] == pytest.approx(expected_j)
    steps = np.diff(unwrap((seconds * NS).astype(np.int64), joules, WRAP_J, MAX_GAP_S))
    assert steps[steps > 0].sum() + (7.0 if (steps < 0).any() else 0.0) == pytest.approx(expected_j)


def test_a_log_reports_that_its_wrapping_counter_was_set_back():
    source = Source("rapl:package-0", component="cpu", wrap_j=WRAP_J, max_gap_s=MAX_GAP_S)
    assert total_rise(np.arange(3.0), np.array([5000.0, 7.0, 9.0]), source) == (pytest.approx(9.0), 1)


def test_a_jump_of_the_counter_ends_no_energy_budget():
    """5,000 J within a second on a device that draws 40 W."""
    assert live_energy([100.0, 140.0, 5140.0, 5180.0], wrap_j=None, power_limit_w=200.0) == pytest.approx(120)
