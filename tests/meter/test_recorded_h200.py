"""A trace recorded on a real H200 under square waves, with the counter's own truth for each of them."""

import gzip
import json
from pathlib import Path

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
