"""Energy above idle and per inference: 87 W busy, 61 W idle, 4.37 ms are 26 W and 113.62 mJ."""

import json

import numpy as np
import pytest
from made_logs import dmon

from joulelab.meter.importers.log_energy import find_levels

WORK = [61] * 30 + [74] + [87] * 60 + [70] + [61] * 30


@pytest.fixture
def deit(tmp_path):
    return dmon(tmp_path / "power_usage.csv", [WORK])


def test_the_example_comes_out_with_busy_and_idle_found_in_the_log(deit, joulelab_here):
    code, out, _ = joulelab_here("import", deit, "--latency-ms", 4.37)
    assert code == 0
    assert "87.00 W busy - 61.00 W idle = 26.00 W above idle; x 4.37 ms = 113.62 mJ per inference" in " ".join(
        out.split()
    )
    assert "idle 61.00 W" in out
    assert "0 to 29 s" in out
    assert "92 to 121 s" not in out, "power after the load is not idle power"


@pytest.mark.parametrize("words", [["--idle", "0..25"], ["--idle-watts", "61"]])
def test_the_same_with_idle_given(deit, joulelab_here, words):
    code, out, _ = joulelab_here("import", deit, "--latency-ms", 4.37, "--json", *words)
    (gpu,) = json.loads(out)["devices"]
    assert code == 0
    assert gpu["inference"]["power_above_idle_w"] == pytest.approx(26)
    assert gpu["inference"]["energy_above_idle_j"] == pytest.approx(0.11362)
    assert gpu["inference"]["energy_gross_j"] == pytest.approx(0.38019)


def test_energy_above_idle_is_gross_less_idle_power_over_the_time_seen(deit, joulelab_here):
    _, out, _ = joulelab_here("import", deit, "--idle-watts", 61, "--json")
    (gpu,) = json.loads(out)["devices"]
    assert gpu["above_idle_j"] == pytest.approx(gpu["trapezoid"]["energy_j"] - 61 * 121)


def test_a_log_of_work_alone_needs_idle_stated(tmp_path, joulelab_here):
    busy = dmon(tmp_path / "busy", [[87] * 40])
    code, _, err = joulelab_here("import", busy, "--latency-ms", 4.37)
    assert code == 2
    assert "--idle-watts" in err
    code, out, _ = joulelab_here("import", busy, "--latency-ms", 4.37, "--idle-watts", 61, "--json")
    assert json.loads(out)["devices"][0]["inference"]["energy_above_idle_j"] == pytest.approx(0.11362)


def test_levels_are_found_in_noise_and_not_in_noise_alone():
    random = np.random.default_rng(1)
    seconds = np.arange(200.0)
    steady = random.normal(100, 3, 200)
    assert find_levels(seconds, steady, 0.0) is None
    idle, busy = find_levels(seconds, np.where((seconds > 50) & (seconds < 150), steady, steady - 40), 0.0)
    assert idle.power_w == pytest.approx(60, abs=1.5)
    assert busy.power_w == pytest.approx(100, abs=1.5)
    assert len(idle.segments) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--idle", "5"], "is not a segment of the log"),
        (["--idle", "9..2"], "is not a segment of the log"),
        (["--idle", "a..b"], "is not a segment of the log"),
        (["--idle", "2026-01-01T00:00:00+00:00..2026-01-02T00:00:00+00:00"], "is not a segment of the log"),
        (["--idle", "500..600"], "there is no reading in --idle 500..600 s"),
        (["--idle", "0..5", "--idle-watts", "3"], "give one of them"),
        (["--idle-watts", "-3"], "is not a power"),
        (["--latency-ms", "0"], "--latency-ms 0 is not a number above 0"),
        (["--period", "nan"], "--period nan is not a number above 0"),
    ],
)
def test_mistakes_are_answered_with_2(deit, joulelab_here, words, message):
    code, out, err = joulelab_here("import", deit, *words)
    assert code == 2
    assert message in err + " " + out
    assert "Traceback" not in err


@pytest.fixture
def estimated_run(tmp_path):
    """The folder of a run in which nothing was measured: CPU time, and watts out of a table."""
    cpu = {"device": "estimate:cpu", "component": "cpu_estimate", "name": "a CPU", "facts": {"w_per_thread": 2.5}}
    header = {"kind": "header", "mono_ns": 10**9, "wall_minus_mono_s": 0.0, "interval_s": 1.0, "devices": [cpu]}
    lines = [
        {"kind": "estimate", "device": "estimate:cpu", "mono_ns": tick * 10**9, "busy_thread_s": 2.0 * tick}
        for tick in range(1, 12)
    ]
    (tmp_path / "run" / "trace").mkdir(parents=True)
    (tmp_path / "run" / "trace" / "here.1.jsonl").write_text("\n".join(map(json.dumps, [header, *lines])))
    return tmp_path / "run"


def test_the_estimate_of_a_runs_folder_is_called_estimated(estimated_run, joulelab_here):
    code, out, _ = joulelab_here("import", estimated_run)
    assert code == 0
    assert "estimate:cpu: 50.0 J ±70 %, estimated, 1.39e-05 kWh, 10.0 s" in out
    (estimated_run / "trace" / "there.1.jsonl").write_text("{}")
    code, _, err = joulelab_here("import", estimated_run)
    assert code == 2
    assert "name one of them" in err and "there.1.jsonl" in err


@pytest.mark.parametrize("verb", [["import"], ["infer", "--from-log"]])
def test_joules_per_inference_are_refused_where_nothing_was_measured(estimated_run, joulelab_here, verb):
    code, out, err = joulelab_here(*verb, estimated_run, "--latency-ms", 40)
    assert (code, out) == (2, "")
    assert "nothing in it was measured" in err
