"""Each kind of log is known by its content, and its joules come out as computed by hand."""

import json

import pytest
from made_logs import DMON_NAMES, DMON_UNITS, dmon, every, old_monitor, old_record


@pytest.fixture
def imported(joulelab_here):
    def call(path, *words):
        code, out, err = joulelab_here("import", path, "--json", *words)
        assert code == 0, err
        return json.loads(out)

    return call


def by_device(data):
    return {device["device"]: device for device in data["devices"]}


class TestDmon:
    def test_two_gpus_are_never_mixed(self, tmp_path, imported):
        data = imported(dmon(tmp_path / "log.txt", [[100] * 61, [300] * 61]))
        gpus = by_device(data)
        assert gpus["gpu:0"]["energy_j"] == pytest.approx(6000)
        assert gpus["gpu:1"]["energy_j"] == pytest.approx(18000)
        assert gpus["gpu:1"]["trapezoid"]["energy_wh"] == pytest.approx(5)
        assert gpus["gpu:1"]["trapezoid"]["energy_kj"] == pytest.approx(18)
        assert gpus["gpu:0"]["samples"] == 61
        assert data["format"] == "nvidia-smi dmon"

    def test_without_stamps_the_period_is_stated_as_assumed_or_given(self, tmp_path, imported):
        path = dmon(tmp_path / "log.txt", [[100] * 61])
        assert "every 1 s (dmon's default, assumed" in imported(path)["clock"]
        data = imported(path, "--period", 5)
        assert "every 5 s (given" in data["clock"]
        assert data["devices"][0]["energy_j"] == pytest.approx(30_000)
        assert data["devices"][0]["first"] is None

    def test_stamps_of_o_dt_are_local_times(self, tmp_path, imported):
        names, units = DMON_NAMES.replace("# gpu", "#Date       Time        gpu"), DMON_UNITS.replace(
            "# Idx", "#YYYYMMDD   HH:MM:SS    Idx"
        )  # fmt: skip
        rows = [
            f" 20260302   12:00:{s:02d}      0     80     35      -     0      0      0      0   1   1"
            for s in (0, 2, 4)
        ]
        (tmp_path / "log").write_text("\n".join([names, units, *rows]))
        data = imported(tmp_path / "log", "--time-zone", "Europe/Berlin")
        assert data["devices"][0]["energy_j"] == pytest.approx(320)
        assert data["devices"][0]["first"].startswith("2026-03-02T11:00:00")
        assert "Europe/Berlin" in data["clock"]

    def test_stamps_of_o_t_continue_across_midnight(self, tmp_path, imported):
        names, units = DMON_NAMES.replace("# gpu", "#Time        gpu"), DMON_UNITS.replace("# Idx", "#HH:MM:SS    Idx")
        times = ["23:59:58", "23:59:59", "00:00:00", "00:00:01"]
        rows = [f" {time}      0     80     35      -     0      0      0      0   1   1" for time in times]
        (tmp_path / "log").write_text("\n".join([names, units, *rows]))
        data = imported(tmp_path / "log")
        assert data["devices"][0]["duration_s"] == 3
        assert "without a date" in data["clock"]

    def test_a_dash_is_no_reading_and_a_torn_last_line_is_reported(self, tmp_path, imported):
        path = dmon(tmp_path / "log", [[100, 100, "-", 100, 100]])
        path.write_text(path.read_text() + "    0    1")
        data = imported(path)
        assert data["devices"][0]["samples"] == 4
        assert data["devices"][0]["energy_j"] == pytest.approx(400)
        assert any("1 lines do not match" in note for note in data["notes"])

    def test_without_a_power_column_it_states_what_to_record(self, tmp_path, joulelab_here):
        (tmp_path / "log").write_text("# gpu     sm    mem\n# Idx      %      %\n    0     5      6\n")
        code, _, err = joulelab_here("import", tmp_path / "log")
        assert code == 2
        assert "dmon -s puc" in err


class TestSmiCsv:
    HEADER = "timestamp, index, name, power.draw [W], utilization.gpu [%], memory.used [MiB]"

    def write(self, path, rows, header=None):
        path.write_text("\n".join([header or self.HEADER, *rows]) + "\n")
        return path

    def test_with_units_and_two_gpus(self, tmp_path, imported):
        rows = [
            f"2026/03/02 12:00:{second:02d}.{gpu}00, {gpu}, NVIDIA A100, {100 * (gpu + 1)}.00 W, 17 %, 2048 MiB"
            for second in range(11)
            for gpu in (0, 1)
        ]
        data = imported(self.write(tmp_path / "x.log", rows), "--time-zone", "UTC")
        gpus = by_device(data)
        assert (gpus["gpu:0"]["energy_j"], gpus["gpu:1"]["energy_j"]) == (pytest.approx(1000), pytest.approx(2000))
        assert gpus["gpu:1"]["memory_used_MB"] == {"mean": 2048, "max": 2048}
        assert gpus["gpu:1"]["gpu_utilization_percent"]["mean"] == 17
        assert gpus["gpu:0"]["first"].startswith("2026-03-02T12:00:00")

    def test_without_units_and_with_na(self, tmp_path, imported):
        rows = [
            f"2026/03/02 12:00:{s:02d}.000, 0, T4, {p}, 17, 2048" for s, p in enumerate(["50", "[N/A]", "50", "70"])
        ]
        data = imported(self.write(tmp_path / "x", rows))
        assert data["devices"][0]["energy_j"] == pytest.approx(2 * 50 + 60)
        assert any("1 row without a power value" in note for note in data["notes"])

    def test_a_file_written_by_powershell_is_read(self, tmp_path, imported):
        rows = [f"2026/03/02 12:00:0{s}.000, 0, T4, 50, 17, 2048" for s in range(3)]
        (tmp_path / "x").write_bytes("\r\n".join([self.HEADER, *rows]).encode("utf-16"))
        assert imported(tmp_path / "x")["devices"][0]["energy_j"] == pytest.approx(100)

    def test_without_stamps_the_period_must_be_given(self, tmp_path, joulelab_here, imported):
        path = self.write(tmp_path / "x", ["0, 50.0 W"] * 3, header="index, power.draw [W]")
        code, _, err = joulelab_here("import", path)
        assert code == 2
        assert "--period" in err
        assert imported(path, "--period", 2)["devices"][0]["energy_j"] == pytest.approx(200)


class TestOldMonitorLogs:
    def test_interleaved_gpus_with_naive_stamps(self, tmp_path, imported):
        rows = [(stamp, gpu, 100.0 * (gpu + 1)) for stamp in every(5, 13) for gpu in (0, 1)]
        data = imported(old_monitor(tmp_path / "power_log.jsonl", rows))
        gpus = by_device(data)
        assert gpus["gpu:0"]["energy_j"] == pytest.approx(6000)
        assert gpus["gpu:1"]["energy_j"] == pytest.approx(12000)
        assert "this machine's zone" in data["clock"]
        assert "assumed" in data["clock"]

    def test_missing_fields_bad_lines_and_null_power_do_not_stop_it(self, tmp_path, imported):
        lines = [json.dumps({"timestamp": stamp, "power_watts": 60}) for stamp in every(1, 4)]
        lines.insert(2, '{"timestamp": "2026-03-02T12:0')
        lines.append(json.dumps({"timestamp": "2026-03-02T12:00:04", "power_watts": None}))
        lines.append(json.dumps({"timestamp": "soon", "power_watts": 60}))
        (tmp_path / "x").write_text("\n".join(lines))
        data = imported(tmp_path / "x")
        assert data["devices"][0]["energy_j"] == pytest.approx(180)
        assert any("1 lines could not be read" in note for note in data["notes"])
        assert any("no readable time" in note for note in data["notes"])

    def test_telemetry_csv_with_the_same_names(self, tmp_path, imported):
        rows = [f"{stamp},{second},0,A100,100.0" for second, stamp in enumerate(every(1, 11))]
        (tmp_path / "distill_power.csv").write_text(
            "\n".join(["timestamp,elapsed_sec,gpu_index,gpu_name,power_watts", *rows])
        )
        assert imported(tmp_path / "distill_power.csv")["devices"][0]["energy_j"] == pytest.approx(1000)

    def test_the_counter_s_difference_is_next_to_the_trapezoid(self, tmp_path, imported):
        lines = [
            {**old_record(stamp, 0, 100.0), "energy_counter_j": 5000 + 150.0 * tick}
            for tick, stamp in enumerate(every(1, 11))
        ]
        (tmp_path / "x").write_text("\n".join(map(json.dumps, lines)))
        (gpu,) = imported(tmp_path / "x")["devices"]
        assert gpu["trapezoid"]["energy_j"] == pytest.approx(1000)
        assert gpu["counter"]["energy_j"] == pytest.approx(1500)
        assert (gpu["energy_j"], gpu["energy_method"]) == (pytest.approx(1500), "counter")

    def test_a_counter_that_began_anew_is_reported(self, tmp_path, imported):
        readings = [900.0, 1000.0, 50.0, 150.0]
        lines = [
            {**old_record(stamp, 0, 100.0), "energy_counter_j": joules}
            for joules, stamp in zip(readings, every(1, 4), strict=True)
        ]
        (tmp_path / "x").write_text("\n".join(map(json.dumps, lines)))
        (gpu,) = imported(tmp_path / "x")["devices"]
        assert gpu["counter"]["energy_j"] == pytest.approx(100 + 50 + 100)
        assert gpu["counter_restarts"] == 1


class TestCodeCarbon:
    HEADER = (
        "timestamp,project_name,run_id,duration,emissions,cpu_energy,gpu_energy,ram_energy,energy_consumed,country_name"
    )

    def test_its_kwh_are_its_own_and_the_last_row_of_a_run_counts(self, tmp_path, joulelab_here, imported):
        rows = ["2026-03-02T12:00:00,p,run-a,10,0.1,0.001,0.002,0.0005,0.0035,France",
                "2026-03-02T12:01:00,p,run-a,20,0.2,0.002,0.004,0.001,0.007,France"]  # fmt: skip
        (tmp_path / "x.txt").write_text("\n".join([self.HEADER, *rows]))
        data = imported(tmp_path / "x.txt")
        (run,) = data["runs"]
        assert run["total_j"] == pytest.approx(0.007 * 3.6e6)
        assert run["gpu_j"] == pytest.approx(14400)
        assert any("CodeCarbon's own" in note for note in data["notes"])
        code, out, _ = joulelab_here("import", tmp_path / "x.txt")
        assert code == 0
        assert "CodeCarbon's own figures" in out
        assert "25.2 kJ" in out

    @pytest.mark.parametrize("words", [["--latency-ms", 4], ["--idle-watts", 3], ["--out", "t.jsonl"]])
    def test_what_needs_power_over_time_is_refused(self, tmp_path, joulelab_here, words):
        (tmp_path / "x").write_text(f"{self.HEADER}\n2026-03-02T12:00:00,p,a,10,0.1,1,2,3,6,France\n")
        code, _, err = joulelab_here("import", tmp_path / "x", *words)
        assert code == 2
        assert "power over time" in err

    def test_a_plot_of_it_is_refused(self, tmp_path, joulelab_here):
        (tmp_path / "x").write_text(f"{self.HEADER}\n2026-03-02T12:00:00,p,a,10,0.1,1,2,3,6,France\n")
        code, _, err = joulelab_here("plot", tmp_path / "x")
        assert code == 2
        assert "totals of whole runs" in err


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", "hello\nworld\n", '{"loss": 1.0}\n', "a,b,c\n1,2,3\n", "\x00\x01\x02", "50.0 W\n51.0 W\n", "[1, 2]\n"],
)
def test_any_other_file_is_answered_with_what_was_looked_for(tmp_path, joulelab_here, content):
    (tmp_path / "x.jsonl").write_text(content)
    code, out, err = joulelab_here("import", tmp_path / "x.jsonl")
    assert code == 2
    assert out == ""
    assert "supported: JSONL with power_watts" in err
    assert "dmon" in err


def test_a_log_without_any_reading_is_reported(tmp_path, joulelab_here):
    (tmp_path / "x").write_text(f"{DMON_NAMES}\n{DMON_UNITS}\n")
    code, _, err = joulelab_here("import", tmp_path / "x")
    assert code == 2
    assert "contains no reading" in err


@pytest.mark.parametrize(
    ("header", "scale"),
    [("timestamp,power", 1), ("time,power [W]", 1), ("time, Power (W)", 1), ("time,power (mW)", 1000)],
)
def test_a_column_named_power_is_read_as_watts_with_a_note(tmp_path, imported, header, scale):
    rows = "".join(f"{1772452800 + n},{300 * scale}\n" for n in range(11))
    (tmp_path / "power.csv").write_text(f"{header}\n{rows}1772452811,\n")
    data = imported(tmp_path / "power.csv")
    assert data["devices"][0]["energy_j"] == pytest.approx(3000)
    assert any("is read as the power of one GPU in" in note for note in data["notes"])
    assert "1 cell without a power value" in data["notes"]


def test_no_number_of_the_table_is_split_at_80_columns(tmp_path, joulelab_here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = "".join(f"{1772452800 + 3600 * n},345.6\n" for n in range(25))
    (tmp_path / "power.csv").write_text(f"timestamp,gpu_0_power_w\n{rows}")
    code, out, err = joulelab_here("import", tmp_path / "power.csv", "--no-run", "--idle-watts", 50)
    assert code == 0, err
    (row,) = (line for line in out.splitlines() if line.startswith(" gpu:0 "))
    assert {"trapezoid", "25", "345.6", "29.9", "25.5", "100.0"} <= set(row.split()), "only units may wrap"


@pytest.mark.parametrize(
    ("watts", "complaint"),
    [
        (["-5", "-6", "-7"], "no valid reading of power"),
        (["N/A", "", "abc"], "no valid reading of power"),
        (["300"], "one valid reading per device; energy needs at least two"),
        (["-5", "nan", "300"], "one valid reading per device; energy needs at least two"),
    ],
)
def test_a_log_without_two_valid_readings_is_refused_and_leaves_no_run(tmp_path, joulelab_here, watts, complaint):
    logs, store = tmp_path / "logs", tmp_path / "store"
    logs.mkdir()
    rows = "".join(f"{1772452800 + n},{w}\n" for n, w in enumerate(watts))
    (logs / "power.csv").write_text(f"timestamp,power_w\n{rows}")
    code, out, err = joulelab_here("import", logs / "power.csv", "--runs-dir", store)
    assert (code, out, store.exists()) == (2, "", False)
    assert complaint in " ".join(err.split()) and "record it again" in err
    code, out, err = joulelab_here("import", logs, "--runs-dir", store)
    assert (code, out, store.exists()) == (2, "", False)
    assert "fewer than two valid readings" in " ".join(err.split())


def test_a_folder_is_imported_without_a_log_that_has_one_reading(tmp_path, joulelab_here):
    for name, count in (("a", 1), ("b", 11)):
        (tmp_path / "logs" / name).mkdir(parents=True)
        rows = "".join(f"{1772452800 + n},300\n" for n in range(count))
        (tmp_path / "logs" / name / "power.csv").write_text(f"timestamp,power_w\n{rows}")
    code, out, err = joulelab_here("import", tmp_path / "logs", "--runs-dir", tmp_path / "store")
    assert code == 0, err
    assert len(list((tmp_path / "store").glob("*/run.json"))) == 1 and "3.00 kJ" in out
    assert "fewer than two valid readings" in " ".join((out + err).split())


def test_several_power_logs_of_a_folder_are_runs_with_their_own_names(tmp_path, joulelab_here):
    """Runs of one name would be repeats of each other in comparisons."""
    (tmp_path / "logs").mkdir()
    for name, watts in (("one", 300), ("two", 200)):
        rows = "".join(f"{1772452800 + n},{watts}\n" for n in range(11))
        (tmp_path / "logs" / f"{name}.csv").write_text(f"timestamp,power_w\n{rows}")
    code, out, err = joulelab_here("import", tmp_path / "logs", "--runs-dir", tmp_path / "store")
    assert code == 0, err
    names = sorted(path.parent.name.split("-")[0] for path in (tmp_path / "store").glob("*/run.json"))
    assert names == ["one", "two"]
    table = [line.split() for line in out.splitlines() if line.split()[:1] in (["one"], ["two"])]
    assert [row[0] for row in table] == ["one", "two"] and table[0][4:6] == ["3.00", "kJ"]
    assert "As stated in the files" not in out


def test_a_file_that_is_not_there_is_reported(tmp_path, joulelab_here):
    code, _, err = joulelab_here("import", tmp_path / "nowhere.csv")
    assert code == 2
    assert "no such file" in err
    assert joulelab_here("import", tmp_path)[0] == 2


def test_impossible_readings_are_left_out_with_a_note(tmp_path, joulelab_here):
    path = tmp_path / "power.csv"
    watts = [100, -5000, 100, 1e309, 100, 100, "9" * 400, 100]
    path.write_text("timestamp,gpu_0_power_w\n" + "".join(f"{1772452800 + n},{w}\n" for n, w in enumerate(watts)))
    code, out, _ = joulelab_here("import", path, "--no-run", "--json")
    assert code == 0
    assert json.loads(out)["devices"][0]["energy_j"] <= 700.0 + 1e-6
    code, out, err = joulelab_here("import", path, "--no-run", "-v")
    assert "1 row with a negative or impossible power" in out + err


@pytest.mark.parametrize("field", ["gpu_energy_joules", "duration_seconds"])
@pytest.mark.parametrize("value", [-5.0, 1e300, 10**400, "-inf", "1e309"])
def test_a_stage_record_with_an_impossible_amount_is_no_stage(tmp_path, joulelab_here, field, value):
    stage = {"stage_name": "student", "duration_seconds": 10.0, "gpu_energy_joules": 100.0, field: value}
    (tmp_path / "stage.json").write_text(json.dumps(stage))
    code, out, err = joulelab_here("import", tmp_path / "stage.json")
    assert (code, "Traceback" in err) == (2, False), out + err


def test_lines_of_a_trace_with_wrong_types_are_counted_and_left_out(tmp_path, joulelab_here):
    good = [{"timestamp": f"2026-03-02T12:00:{s:02d}Z", "gpu_index": 0, "power_watts": 100.0} for s in range(5)]
    bad = [{"kind": "header", "mono_ns": "x"}, {"kind": "samples", "device": 3}, {"kind": "header", "devices": 4}]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*good, *bad]))
    code, out, err = joulelab_here("import", path, "--no-run", "-v")
    assert code == 0 and "2 lines with fields of the wrong type" in out + err


def test_control_characters_of_a_log_do_not_reach_the_terminal(tmp_path, joulelab_here):
    path = tmp_path / "emissions.csv"
    path.write_text(
        "timestamp,project_name,run_id,duration,emissions,energy_consumed\n"
        "2026-03-02T12:00:00,\x1b[31mred\x07,1,60.0,0.01,0.004\n"
    )
    code, out, err = joulelab_here("import", path, "--no-run")
    assert code == 0 and "\x1b" not in out + err and "\x07" not in out + err


def test_times_beyond_all_clocks_are_unreadable(tmp_path, joulelab_here):
    good = [{"timestamp": f"2026-03-02T12:00:{s:02d}Z", "gpu_index": 0, "power_watts": 100.0} for s in range(5)]
    odd = [dict(good[0], timestamp=at) for at in ("9999-12-31T23:59:59-23:00", 9e15, "0001-01-01T00:00:00", 1e300)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*good, *odd]))
    code, out, err = joulelab_here("import", path, "--json")
    assert code == 0, err
    assert json.loads(out)["devices"][0]["energy_j"] == pytest.approx(400.0)


def test_a_log_that_is_named_twice_is_refused(tmp_path, joulelab_here):
    """Its energy was in two runs."""
    (tmp_path / "x.csv").write_text("time,power\n0,50\n1,50\n")
    code, out, err = joulelab_here("import", tmp_path / "x.csv", tmp_path / "." / "x.csv", "--runs-dir", tmp_path / "r")
    assert (code, out) == (2, "") and "x.csv was named twice" in err
    assert not (tmp_path / "r").exists()
