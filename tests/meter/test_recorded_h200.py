"""A trace recorded on a real H200 under square waves, with the counter's own truth for each of them."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from joulelab.meter.integrate import both_paths, component_energy
from joulelab.meter.series import load_trace

RECORDED = Path(__file__).parent / "recorded"
TRUTH = json.loads((RECORDED / "h200-square-waves.truth.json").read_text())["waves"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("h200") / "trace.jsonl"
    path.write_bytes(gzip.decompress((RECORDED / "h200-square-waves.jsonl.gz").read_bytes()))
    return load_trace(path)


@pytest.mark.parametrize("wave", TRUTH, ids=lambda wave: wave["wave"])
def test_the_recorded_joules_are_the_counter_s_within_half_a_percent_and_the_interval_covers_the_rest(trace, wave):
    figure = component_energy(trace, "gpu", [tuple(wave["window_ns"])])
    assert figure.method == "counter"
    assert figure.coverage == pytest.approx(1.0)
    assert figure.energy_j == pytest.approx(wave["true_j"], rel=0.005)
    assert abs(figure.energy_j - wave["true_j"]) <= 1.25 * figure.half_width_j  # the truth has a tick of its own


def test_the_two_paths_agree_within_3_percent(trace):
    for wave in TRUTH:
        paths = both_paths(trace, "gpu", [tuple(wave["window_ns"])])
        assert abs(paths.disagreement_rel) < 0.03


def test_a_poller_of_the_same_card_was_off_by_more_than_half():
    """Why this product exists: the instant power field read once a second, 500 ms square wave."""
    (wave,) = [wave for wave in TRUTH if wave["wave"].startswith("500 ms")]
    assert wave["polled_j"]["instant @1 s"] / wave["true_j"] - 1 < -0.5


REPEATS = json.loads((RECORDED / "h200-three-repeats.truth.json").read_text())["waves"]


def test_six_loads_three_times_are_within_half_a_percent_and_nearly_all_inside_their_intervals(tmp_path):
    """Read out of step with the counter's refresh, which also shows the lag of the samples."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.decompress((RECORDED / "h200-three-repeats.jsonl.gz").read_bytes()))
    trace = load_trace(path)
    loads, seconds = [], []
    for wave in REPEATS:
        ticks = wave["ticks"]
        for (begin, begin_j), (end, end_j), found in [
            (ticks[0], ticks[-1], loads),
            *((a, b, seconds) for a, b in pairwise(ticks) if b[0] - a[0] > 0.95e9),
        ]:
            figure = component_energy(trace, "gpu", [(begin, end)])
            error_j = figure.energy_j - (end_j - begin_j)
            found.append((abs(error_j) / (end_j - begin_j), abs(error_j) <= figure.half_width_j))
    assert max(error for error, _ in loads) < 0.005
    assert sum(inside for _, inside in loads) >= 16
    assert np.mean([inside for _, inside in seconds]) > 0.9
    assert np.quantile([error for error, _ in seconds], 0.95) < 0.02
    assert trace.devices[0].lag.half_width_s < 0.006
