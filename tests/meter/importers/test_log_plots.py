"""Pictures of logs and runs, and the summary beside them."""

import json

import pytest
from made_logs import dmon, every, old_monitor

PNG = b"\x89PNG"


def test_all_four_figures_and_the_summary_of_an_old_log(tmp_path, joulelab_here):
    rows = [(stamp, gpu, 100.0 * (gpu + 1)) for stamp in every(5, 13) for gpu in (0, 1)]
    log = old_monitor(tmp_path / "power_log.jsonl", rows)
    code, out, _ = joulelab_here("plot", log)
    folder = tmp_path / "power_log-plots"
    assert code == 0
    names = ["power", "gpu_utilization", "gpu_memory", "cpu_utilization"]
    assert {path.name for path in folder.iterdir()} == {
        "summary.json", *(f"{name}.{form}" for name in names for form in ("png", "svg")),
    }  # fmt: skip
    assert (folder / "power.png").read_bytes().startswith(PNG)
    assert "Power (W)" in (folder / "power.svg").read_text()
    assert str(folder / "summary.json") in out
    one, two = json.loads((folder / "summary.json").read_text())["devices"]
    assert (one["mean_power_w"], one["max_power_w"]) == (pytest.approx(100), 100)
    assert (two["energy_j"], two["samples"], two["duration_s"]) == (pytest.approx(12000), 13, 60)
    assert one["gpu_utilization_percent"] == {"mean": 50, "max": 50}


def test_wall_time_states_its_zone_and_day(tmp_path, joulelab_here):
    log = old_monitor(tmp_path / "x", [(stamp, 0, 100.0) for stamp in every(5, 13)])
    words = ["--x", "wall", "--format", "svg", "--out", tmp_path / "p", "--time-zone", "UTC"]
    assert joulelab_here("plot", log, *words)[0] == 0
    assert "Time of day (UTC), 2026-03-02" in (tmp_path / "p" / "power.svg").read_text()
    assert not (tmp_path / "p" / "power.png").exists()


def test_what_the_log_does_not_have_is_not_drawn_and_reported(tmp_path, joulelab_here):
    code, _, err = joulelab_here("plot", dmon(tmp_path / "x", [[50] * 20]), "--format", "svg")
    assert code == 0
    assert "not plotted (not in the log): gpu_memory, cpu_utilization" in err


def test_a_line_is_broken_at_a_hole(tmp_path):
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.power_log import TimeRule
    from joulelab.report.figures.power_figures import PANELS, _points

    stamps = every(1, 11) + every(1, 11, "2026-03-02T13:00:00")
    log = read_power_log(old_monitor(tmp_path / "x", [(s, 0, 1.0) for s in stamps]), TimeRule(), "this test")
    assert len({point["segment"] for point in _points(log, log.devices[0], PANELS[0], "elapsed")}) == 2


def test_a_run_s_trace_is_drawn_into_its_folder(tmp_path, joulelab_here):
    """A run's folder as the recorder leaves it, with 20 ms samples, RAPL and the host's own use."""
    second = 1_000_000_000
    head = {
        "kind": "header", "timestamp": "2026-03-02T12:00:00+00:00", "mono_ns": second, "host": "h", "boot_id": "b",
        "wall_minus_mono_s": 1_772_452_799.0, "missing": [],
        "devices": [
            {"device": "gpu:A", "component": "gpu", "name": "H200", "counted": True, "facts": {"gpu_index": 0}},
            {"device": "rapl:package-0", "component": "cpu", "name": "p", "counted": True, "wrap_j": 100.0},
        ],
    }  # fmt: skip
    lines = [head]
    for tick in range(1, 21):
        stamp = {"mono_ns": tick * second}
        lines.append({"kind": "gpu", **stamp, "device": "gpu:A", "power_watts": 999.0, "gpu_utilization_percent": 9})
        lines.append({"kind": "host", **stamp, "device": "host", "cpu_utilization_percent": 20.0})
        lines.append({"kind": "rapl", **stamp, "device": "host", "rapl": {"package-0": (30.0 * tick) % 100}})
        us = [tick * 1_000_000 - 20_000 * k for k in range(50)]
        lines.append({"kind": "samples", **stamp, "device": "gpu:A", "wall_us": tick * 1_000_000,
                      "wall_us_mono_ns": tick * second, "sample_us": us, "sample_mw": [200_000] * 50})  # fmt: skip
    folder = tmp_path / "runs" / "r-20260302T120000Z-abcd"
    (folder / "trace").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "trace" / "h.1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = joulelab_here("plot", "last", "--runs-dir", tmp_path / "runs", "--format", "svg", "--json")
    assert code == 0, err
    assert (folder / "plots" / "power.svg").exists()
    devices = {device["device"]: device for device in json.loads(out)["devices"]}
    assert devices["gpu:A"]["mean_power_w"] == pytest.approx(200)  # by the samples, not by the polled 999 W
    assert devices["rapl:package-0"]["energy_j"] == pytest.approx(19 * 30)
    assert devices["host"]["cpu_utilization_percent"]["mean"] == 20
    assert devices["host"]["energy_method"] == "missing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "gif"], "unknown --format 'gif'"),
        (["--format", ","], "--format is empty"),
        (["--x", "moon"], "'moon' is not one of 'elapsed', 'wall'"),
        (["--x", "wall"], "--x wall needs times of day"),
        (["--period", "0"], "is not a number above 0"),
        (["--out", "/proc/nowhere"], "cannot write into /proc/nowhere"),
    ],
)
def test_mistakes_are_answered_with_2(tmp_path, joulelab_here, words, message):
    code, _, err = joulelab_here("plot", dmon(tmp_path / "x", [[50] * 20]), *words)
    assert code == 2
    assert message in err


def test_neither_a_file_nor_a_run_is_reported(tmp_path, joulelab_here):
    code, _, err = joulelab_here("plot", "nothing", "--runs-dir", tmp_path)
    assert code == 2
    assert "neither a file nor a run" in err
